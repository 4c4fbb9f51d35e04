"""Names and values that a scrape sees (rows of group 20)."""

from prometheus_client.parser import text_string_to_metric_families

from narthex.apps.metrics import Histogram, Metrics
from narthex.apps.proxy import Proxy
from narthex.apps.schedule import Periods
from narthex.apps.sync import FamilySync
from narthex.backends import BACKENDS
from narthex.model.net import IPFamily
from narthex.plan.planner import Planner
from narthex.testing.build import CONFIG, NODE, endpoint, endpoint_slice, node, plan, service
from narthex.testing.fakes import FakeBackend, FakeClock, FakeInbox, FakeRules, FakeTarget


def scrape(metrics):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.exposition().decode())
        for sample in family.samples
    }


def proxy_of(mode, *objects):
    clock, backend = FakeClock(), FakeBackend()
    target = FakeTarget(backend, FakeRules())
    sync = FamilySync(IPFamily.IPV4, Planner(CONFIG, IPFamily.IPV4), backend, target, clock)
    inbox = FakeInbox(node(), *objects)
    return Proxy(inbox, [sync], clock, Periods(), node_name=NODE, metrics=Metrics(mode)), inbox, target, clock


FOUR = ("ip_family", "IPv4")


def test_a_sync_is_counted():
    proxy, _, _, clock = proxy_of("nftables", service("shop/web", "10.110.0.1"), endpoint_slice("shop/web"))
    proxy.turn()
    seen = scrape(proxy.metrics)
    assert seen["kubeproxy_sync_proxy_rules_duration_seconds_count", FOUR] == 1
    assert seen["kubeproxy_sync_full_proxy_rules_duration_seconds_count", FOUR] == 1
    assert seen["kubeproxy_sync_proxy_rules_last_timestamp_seconds", FOUR] == clock.wall()
    assert seen["kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds", FOUR] == clock.wall()
    assert seen["kubeproxy_sync_proxy_rules_service_changes_total",] == 1
    assert seen["kubeproxy_sync_proxy_rules_service_changes_pending",] == 0
    assert seen["kubeproxy_sync_proxy_rules_endpoint_changes_total",] == 1
    assert "process_resident_memory_bytes" in {key[0] for key in seen}


def test_a_failed_sync_leaves_changes_pending():
    proxy, inbox, target, clock = proxy_of("nftables")
    proxy.turn()
    target.failures = ["no"]
    inbox.put(service("shop/web", "10.110.0.1"))
    proxy.notice()
    proxy.turn()
    seen = scrape(proxy.metrics)
    assert seen["kubeproxy_sync_proxy_rules_nftables_sync_failures_total", FOUR] == 1
    assert seen["kubeproxy_sync_proxy_rules_service_changes_pending",] == 1
    clock.advance(1)
    proxy.turn()
    assert scrape(proxy.metrics)["kubeproxy_sync_proxy_rules_service_changes_pending",] == 0


def test_a_mode_shows_only_its_own_names():
    names = {}
    for mode in ("nftables", "iptables"):
        proxy, _, _, _ = proxy_of(mode)
        proxy.turn()
        names[mode] = {key[0] for key in scrape(proxy.metrics)}
    assert "kubeproxy_sync_proxy_rules_iptables_restore_failures_total" in names["iptables"]
    assert not [name for name in names["nftables"] if "iptables" in name]
    assert not [name for name in names["iptables"] if "nftables" in name]


def test_iptables_rules_are_counted_by_table():
    clock, inbox = FakeClock(), FakeInbox(node(), service("shop/web", "10.110.0.1"))
    backend = BACKENDS["iptables"]
    target = FakeTarget(backend, backend.render(plan()))
    sync = FamilySync(IPFamily.IPV4, Planner(CONFIG, IPFamily.IPV4), backend, target, clock)
    proxy = Proxy(inbox, [sync], clock, Periods(), node_name=NODE, metrics=Metrics("iptables"))
    proxy.turn()
    total, last = (f"kubeproxy_sync_proxy_rules_iptables_{word}" for word in ("total", "last"))
    nat, table_filter = (FOUR, ("table", "nat")), (FOUR, ("table", "filter"))
    seen = scrape(proxy.metrics)
    assert seen[total, *nat] > seen[last, *nat] > 0
    assert seen[total, *table_filter] > 0
    inbox.put(endpoint_slice("shop/web", endpoint("10.64.1.5")))
    proxy.turn()
    changed = scrape(proxy.metrics)
    assert changed[total, *nat] > seen[total, *nat]
    assert 0 < changed[last, *nat] < changed[total, *nat]


def test_local_services_without_local_endpoints_are_counted_once_each():
    lonely = service(
        "shop/web",
        "10.110.0.1",
        node_port=30001,
        type="NodePort",
        external_ips=("203.0.113.5",),
        external_policy_local=True,
    )
    proxy, _, _, _ = proxy_of("nftables", lonely, endpoint_slice("shop/web", endpoint("10.64.2.5", node="worker-b")))
    proxy.turn()
    seen = scrape(proxy.metrics)
    name = "kubeproxy_sync_proxy_rules_no_local_endpoints_total"
    assert seen[name, FOUR, ("traffic_policy", "external")] == 1
    assert seen[name, FOUR, ("traffic_policy", "internal")] == 0


def test_histogram_buckets_add_up():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 5.0):
        histogram.observe(value)
    assert histogram.buckets == [("1", 2.0), ("2", 3.0), ("+Inf", 4.0)]
    assert histogram.sum == 8.0
