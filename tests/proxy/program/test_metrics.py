"""Names and values that a scrape sees (rows of group 20)."""

from datetime import UTC, datetime

import msgspec
import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

import narthex
from narthex.model.net import IPFamily
from narthex.proxy.backends import BACKENDS
from narthex.proxy.plan.planner import Planner
from narthex.proxy.program.loop import Proxy
from narthex.proxy.program.metrics import LatencyHistogram, ProxyMetrics, indicators
from narthex.proxy.program.schedule import SyncPeriods
from narthex.proxy.program.sync import PHASES, FamilySync
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
    return Proxy(inbox, [sync], clock, SyncPeriods(), node_name=NODE, metrics=ProxyMetrics(mode)), inbox, target, clock


FOUR = ("ip_family", "IPv4")


@pytest.mark.row("20.1", "20.2", "20.4", "20.6", "20.7", "20.8")
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


@pytest.mark.row("20.7", "20.8", "20.13")
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


@pytest.mark.row("20.22")
def test_a_mode_shows_only_its_own_names():
    names = {}
    for mode in ("nftables", "iptables"):
        proxy, _, _, _ = proxy_of(mode)
        proxy.turn()
        names[mode] = {key[0] for key in scrape(proxy.metrics)}
    assert "kubeproxy_sync_proxy_rules_iptables_restore_failures_total" in names["iptables"]
    assert not [name for name in names["nftables"] if "iptables" in name]
    assert not [name for name in names["iptables"] if "nftables" in name]


@pytest.mark.row("20.11", "20.12", "21.19")
def test_iptables_rules_are_counted_by_table():
    clock, inbox = FakeClock(), FakeInbox(node(), service("shop/web", "10.110.0.1"))
    backend = BACKENDS["iptables"]
    target = FakeTarget(backend, backend.render(plan()))
    sync = FamilySync(IPFamily.IPV4, Planner(CONFIG, IPFamily.IPV4), backend, target, clock)
    proxy = Proxy(inbox, [sync], clock, SyncPeriods(), node_name=NODE, metrics=ProxyMetrics("iptables"))
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


@pytest.mark.row("20.17")
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
    histogram = LatencyHistogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 5.0):
        histogram.observe(value)
    assert histogram.buckets == [("1", 2.0), ("2", 3.0), ("+Inf", 4.0)]
    assert histogram.sum == 8.0


def families(metrics):
    return {each.name: each for each in text_string_to_metric_families(metrics.exposition().decode())}


COMMON = {
    "kubeproxy_sync_proxy_rules_duration_seconds": ("histogram", {"ip_family"}),
    "kubeproxy_sync_proxy_rules_last_timestamp_seconds": ("gauge", {"ip_family"}),
    "kubeproxy_network_programming_duration_seconds": ("histogram", {"ip_family"}),
    "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds": ("gauge", {"ip_family"}),
    "kubeproxy_sync_proxy_rules_endpoint_changes_pending": ("gauge", set()),
    "kubeproxy_sync_proxy_rules_endpoint_changes": ("counter", set()),
    "kubeproxy_sync_proxy_rules_service_changes_pending": ("gauge", set()),
    "kubeproxy_sync_proxy_rules_service_changes": ("counter", set()),
    "kubeproxy_proxy_healthz": ("counter", {"code"}),
    "kubeproxy_proxy_livez": ("counter", {"code"}),
    "kubeproxy_sync_proxy_rules_no_local_endpoints_total": ("gauge", {"ip_family", "traffic_policy"}),
    "kubeproxy_conntrack_reconciler_sync_duration_seconds": ("histogram", {"ip_family"}),
    "kubeproxy_conntrack_reconciler_deleted_entries": ("counter", {"ip_family"}),
}
FULL = {
    "kubeproxy_sync_full_proxy_rules_duration_seconds": ("histogram", {"ip_family"}),
    "kubeproxy_sync_partial_proxy_rules_duration_seconds": ("histogram", {"ip_family"}),
}
OF_MODE = {
    "nftables": {**FULL, "kubeproxy_sync_proxy_rules_nftables_sync_failures": ("counter", {"ip_family"})},
    "iptables": {
        **FULL,
        "kubeproxy_sync_proxy_rules_iptables_restore_failures": ("counter", {"ip_family"}),
        "kubeproxy_sync_proxy_rules_iptables_partial_restore_failures": ("counter", {"ip_family"}),
        "kubeproxy_sync_proxy_rules_iptables_total": ("gauge", {"ip_family", "table"}),
        "kubeproxy_sync_proxy_rules_iptables_last": ("gauge", {"ip_family", "table"}),
    },
    "ipvs": {"kubeproxy_sync_proxy_rules_iptables_restore_failures": ("counter", {"ip_family"})},
    "userspace": {},
}


@pytest.mark.row(*(f"20.{number}" for number in (*range(1, 14), 15, 16, 17, 20, 21, 22)))
@pytest.mark.parametrize("mode", OF_MODE)
def test_names_types_and_labels_are_kube_proxys(mode):
    proxy, _, _, _ = proxy_of(mode)
    proxy.turn()
    found = families(proxy.metrics)
    expected = {**COMMON, **OF_MODE[mode]}
    assert {name for name in found if name.startswith("kubeproxy_")} == expected.keys()
    for name, (kind, labels) in expected.items():
        # A gauge whose name ends so is read as a counter by nobody but this parser.
        assert found[name].type == kind, name
        seen = {label for sample in found[name].samples for label in sample.labels} - {"le"}
        assert seen == labels, name
        assert found[name].documentation


@pytest.mark.row("20.1", "20.2", "20.3", "20.5", "20.20")
def test_buckets_are_kube_proxys():
    proxy, _, _, _ = proxy_of("nftables")
    proxy.turn()
    found = families(proxy.metrics)

    def bounds(name):
        samples = found[f"kubeproxy_{name}"].samples
        return [sample.labels["le"] for sample in samples if sample.name.endswith("_bucket")]

    doubling = [f"{0.001 * 2**step:g}" for step in range(15)]
    assert doubling[0] == "0.001" and doubling[-1] == "16.384"
    for name in ("sync_proxy_rules", "sync_full_proxy_rules", "sync_partial_proxy_rules", "conntrack_reconciler_sync"):
        assert bounds(f"{name}_duration_seconds") == [*doubling, "+Inf"]
    waited = bounds("network_programming_duration_seconds")
    assert waited[:3] == ["0.25", "0.5", "1"]
    assert waited[3:61] == [str(second) for second in range(2, 60)]
    assert waited[61:] == [*(str(second) for second in range(60, 120, 5)), *map(str, range(120, 301, 30)), "+Inf"]


@pytest.mark.row("2.13", "20.5")
def test_the_time_from_a_change_to_the_kernel():
    proxy, inbox, target, clock = proxy_of("nftables", service("shop/web", "10.110.0.1"))
    proxy.turn()
    moment = datetime.fromtimestamp(clock.wall() + 1, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    changed = endpoint_slice("shop/web", endpoint("10.64.1.5"))
    changed = msgspec.structs.replace(
        changed, annotations=(("endpoints.kubernetes.io/last-change-trigger-time", moment),)
    )
    inbox.put(changed)
    target.failures = ["no"]
    clock.advance(1.5)
    proxy.turn()
    name = "kubeproxy_network_programming_duration_seconds"
    assert scrape(proxy.metrics)[f"{name}_count", FOUR] == 0, "it is not written yet"
    clock.advance(2)
    proxy.turn()
    seen = scrape(proxy.metrics)
    assert seen[f"{name}_count", FOUR] == 1
    assert seen[f"{name}_sum", FOUR] == pytest.approx(2.5, abs=0.01)
    inbox.put(msgspec.structs.replace(changed, endpoints=()))
    proxy.turn()
    assert scrape(proxy.metrics)[f"{name}_count", FOUR] == 1, "the same time is the same change"


def test_phases_are_measured():
    proxy, inbox, _, _ = proxy_of("nftables", service("shop/web", "10.110.0.1"))
    proxy.turn()
    inbox.put(endpoint_slice("shop/web", endpoint("10.64.1.5")))
    proxy.turn()
    seen = scrape(proxy.metrics)
    counts = {phase: seen["narthex_sync_phase_duration_seconds_count", FOUR, ("phase", phase)] for phase in PHASES}
    assert counts == {"read": 1, "plan": 2, "render": 2, "apply": 2}


@pytest.mark.row("20.23")
def test_what_all_kubernetes_programs_say():
    metrics = ProxyMetrics("nftables", gates={"AllowServiceExternalIPs": False, "Other": True})
    seen = scrape(metrics)
    assert seen["kubernetes_feature_enabled", ("name", "AllowServiceExternalIPs"), ("stage", "")] == 0
    assert not [key for key in seen if ("name", "Other") in key]
    (build,) = [dict(key[1:]) for key in seen if key[0] == "kubernetes_build_info"]
    assert build["git_version"] == f"v{narthex.__version__}"
    (own,) = [dict(key[1:]) for key in seen if key[0] == "narthex_build_info"]
    assert own["mode"] == "nftables"
    assert {"process_cpu_seconds_total", "process_open_fds"} <= {key[0] for key in seen}


@pytest.mark.row("20.25")
def test_service_level_indicators():
    for alive in (True, False):
        (family,) = text_string_to_metric_families(indicators(alive).decode())
        assert [(sample.name, sample.value) for sample in family.samples] == [("kubernetes_healthcheck", float(alive))]


def test_others_may_add_numbers_of_their_own():
    class Own:
        def collect(self):
            yield GaugeMetricFamily("narthex_of_others", "x", 5)

    assert scrape(ProxyMetrics("nftables", (Own(),)))["narthex_of_others",] == 5
