"""What the planner adds to decisions: conflicts, configuration, reuse."""

import msgspec
import pytest

from narthex.model.net import IPFamily
from narthex.model.objects import ServiceCIDR
from narthex.model.store import Store, Upsert
from narthex.proxy.plan.ir import Forward, FrontendKind, NodePorts, PodDetector, Reject, Scope, ServiceHealthCheck
from narthex.proxy.plan.planner import NodeConfig, Planner
from narthex.testing.build import CONFIG, NODE, endpoint, endpoint_slice, node, plan, port_name, service, snapshot

WEB = port_name("shop/web:http")


def test_two_services_that_claim_one_address_and_port_are_settled_by_name():
    """Whatever the order of arrival, the first name has it, and the conflict is reported."""
    one, two = service("shop/aaa", "10.110.0.5"), service("shop/bbb", "10.110.0.5")
    for order in ((one, two), (two, one)):
        got = plan(*order)
        assert set(got.services) == {port_name("shop/aaa:http")}
        (conflict,) = got.conflicts
        assert conflict.winner == port_name("shop/aaa:http")
        assert conflict.loser == port_name("shop/bbb:http")


def test_external_ips_cannot_take_a_cluster_ip_of_another_service():
    """CVE-2020-8554: the name `aaa` sorts first, and still its externalIP loses."""
    thief = service("shop/aaa", "10.110.0.9", external_ips=("10.110.0.5",))
    owner = service("shop/zzz", "10.110.0.5")
    got = plan(thief, owner)
    assert [front.kind for front in got.services[port_name("shop/zzz:http")].frontends] == [FrontendKind.CLUSTER_IP]
    assert [front.address for front in got.services[port_name("shop/aaa:http")].frontends] == ["10.110.0.9"]


def test_the_loser_takes_over_when_the_winner_goes():
    from narthex.model.store import Delete

    store, planner = Store(), Planner(CONFIG, IPFamily.IPV4)
    store.apply(Upsert(service("shop/aaa", "10.110.0.5")))
    store.apply(Upsert(service("shop/bbb", "10.110.0.5")))
    assert planner.plan(store.snapshot, store.take_changed()).conflicts
    store.apply(Delete("Service", service("shop/aaa").key))
    after = planner.plan(store.snapshot, store.take_changed())
    assert set(after.services) == {port_name("shop/bbb:http")}
    assert not after.conflicts
    assert after.lineage.changed == {port_name("shop/aaa:http"), port_name("shop/bbb:http")}


@pytest.mark.parametrize(
    "mode, family, expect",
    [
        ("ClusterCIDR", IPFamily.IPV4, PodDetector(cidrs=("10.64.0.0/12",))),
        ("ClusterCIDR", IPFamily.IPV6, PodDetector(cidrs=("fd64::/48",))),
        ("NodeCIDR", IPFamily.IPV4, PodDetector(cidrs=("10.64.1.0/24",))),
        ("BridgeInterface", IPFamily.IPV4, PodDetector(interface="cni0")),
        ("InterfaceNamePrefix", IPFamily.IPV6, PodDetector(interface_prefix="veth")),
        ("", IPFamily.IPV4, PodDetector()),
    ],
)
def test_detect_local_modes(mode, family, expect):
    assert (
        plan(family=family, detect_local_mode=mode, bridge_interface="cni0", interface_name_prefix="veth").pods
        == expect
    )


@pytest.mark.parametrize(
    "words, family, expect",
    [
        (None, IPFamily.IPV4, NodePorts()),
        (("primary",), IPFamily.IPV4, NodePorts(cidrs=("10.20.0.11/32",))),
        (("primary",), IPFamily.IPV6, NodePorts(cidrs=("fd20::11/128",))),
        (("10.20.1.0/24",), IPFamily.IPV4, NodePorts(cidrs=("10.20.1.0/24",))),
        (("10.20.1.0/24", "0.0.0.0/0"), IPFamily.IPV4, NodePorts()),
    ],
)
def test_node_port_addresses(words, family, expect):
    assert plan(family=family, node_port_addresses=words).node_ports == expect


def test_what_is_not_known_opens_nothing():
    """Row 9.5: upstream opens every address."""
    assert plan(node(internal_ips=()), node_port_addresses=("primary",)).node_ports.cidrs == ()


def test_networks_of_one_family_say_nothing_of_the_other():
    """Row 9.4, and row 29.17 on request."""
    one = {"family": IPFamily.IPV6, "node_port_addresses": ("10.20.0.0/16",)}
    assert plan(**one).node_ports.cidrs is None
    assert plan(**one, strict_node_port_addresses=True).node_ports.cidrs == ()


@pytest.mark.parametrize(
    ("words", "four", "six"),
    [
        (("primary", "localhost"), ("10.20.0.11/32", "127.0.0.0/8"), ("fd20::11/128", "::1/128")),
        (("primary", "10.20.1.0/24"), ("10.20.1.0/24", "10.20.0.11/32"), ("fd20::11/128",)),
        (("localhost", "10.20.1.0/24"), ("10.20.1.0/24", "127.0.0.0/8"), ("::1/128",)),
        (("primary", "all"), None, None),
        (("all",), None, None),
        (("localhost", "::/0"), ("127.0.0.0/8",), None),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_words_stand_for_networks_of_both_families(words, four, six, strict):
    config = {"node_port_addresses": words, "strict_node_port_addresses": strict}
    assert plan(**config).node_ports.cidrs == four
    assert plan(family=IPFamily.IPV6, **config).node_ports.cidrs == six


@pytest.mark.parametrize(
    "words, works", [(None, True), (("127.0.0.0/8",), True), (("10.0.0.0/8",), False), (("primary",), False)]
)
def test_localhost_node_ports_need_loopback_in_the_list(words, works):
    assert plan(node_port_addresses=words, localhost_node_ports=True).node_ports.localhost is works
    assert not plan(family=IPFamily.IPV6, node_port_addresses=words, localhost_node_ports=True).node_ports.localhost


def test_a_change_of_the_node_decides_everything_again():
    planner = Planner(CONFIG, IPFamily.IPV4)
    objects = (
        service("shop/web", "10.110.0.5"),
        endpoint_slice(
            "shop/web", endpoint("10.64.1.1", for_zones=("east",)), endpoint("10.64.2.1", for_zones=("west",))
        ),
    )
    assert len(planner.plan(snapshot(*objects)).services[WEB].cluster.endpoints) == 2
    after = planner.plan(snapshot(node(zone="west"), *objects), frozenset())
    assert [each.address for each in after.services[WEB].cluster.endpoints] == ["10.64.2.1"]


def test_service_cidrs_of_the_family():
    cidrs = ServiceCIDR(name="kubernetes", cidrs=("10.110.0.0/16", "fd6e::/108"))
    assert plan(cidrs).service_cidrs == ("10.110.0.0/16",)
    assert plan(cidrs, family=IPFamily.IPV6).service_cidrs == ("fd6e::/108",)


def test_source_ranges_of_one_family_leave_the_other_open():
    dual = service(
        "shop/web",
        "10.110.0.5",
        "fd6e::5",
        balancers=("203.0.113.10", "2001:db8:1b::10"),
        source_ranges=("198.51.100.0/24",),
    )
    four = plan(dual).services[WEB].frontends[1]
    six = plan(dual, family=IPFamily.IPV6).services[WEB].frontends[1]
    assert four.allow_from == ("198.51.100.0/24",)
    assert six.allow_from is None


def test_a_range_that_holds_the_node_lets_the_balancer_address_pass():
    ranged = service("shop/web", "10.110.0.5", balancers=("203.0.113.10",), source_ranges=("10.20.0.0/16",))
    assert plan(ranged).services[WEB].frontends[1].allow_from == ("10.20.0.0/16", "203.0.113.10/32")


def test_rows_of_an_external_local_service_without_local_endpoints():
    svc = service("shop/web", "10.110.0.5", node_port=30080, external_policy_local=True)
    got = plan(svc, endpoint_slice("shop/web", endpoint("10.64.2.1", node="worker-b"))).services[WEB]
    inside, outside = got.frontends
    assert (inside.pod, inside.other) == (Forward(Scope.CLUSTER, False), Forward(Scope.CLUSTER, True))
    assert (outside.pod, outside.node) == (Forward(Scope.CLUSTER, False), Forward(Scope.CLUSTER, True))
    assert type(outside.other).__name__ == "Drop"
    assert got.local is None


def test_nothing_anywhere_rejects_everywhere():
    got = plan(service("shop/web", "10.110.0.5", node_port=30080)).services[WEB]
    assert {type(cell) for front in got.frontends for cell in (front.pod, front.node, front.other)} == {Reject}
    assert got.cluster is None


def test_unused_pools_are_left_out():
    svc = service("shop/web", "10.110.0.5", internal_policy_local=True)
    got = plan(svc, endpoint_slice("shop/web", endpoint("10.64.1.1"))).services[WEB]
    assert got.cluster is None
    assert got.local is not None


def test_gate_for_external_ips_keeps_the_other_effects_of_the_field():
    svc = service("shop/web", "10.110.0.5", external_ips=("203.0.113.9",), internal_policy_local=True)
    got = plan(svc, allow_service_external_ips=False).services[WEB]
    assert [front.kind for front in got.frontends] == [FrontendKind.CLUSTER_IP]


def test_an_unknown_node_is_no_error():
    config = NodeConfig(node_name="elsewhere", node_port_addresses=("primary",))
    got = Planner(config, IPFamily.IPV4).plan(snapshot(service("shop/web", "10.110.0.5")))
    assert got.node_ports.cidrs == ()
    assert msgspec.structs.asdict(got)["node_name"] == "elsewhere"
    assert NODE not in str(got.node_name)


class TestHealthChecks:
    """Rows 16.1, 16.3 and 16.10."""

    BALANCED = service(
        "shop/web", "10.110.0.5", type="LoadBalancer", external_policy_local=True, health_check_node_port=32080
    )

    def checks(self, svc, *slices, **options):
        return dict(plan(svc, *slices, **options).health_checks)

    def test_local_ready_addresses_are_counted_once(self):
        ends = (
            endpoint("10.64.1.1"),
            endpoint("10.64.1.2", ready=False, serving=True, terminating=True),
            endpoint("10.64.2.1", node="worker-b"),
        )
        two = endpoint_slice("shop/web", endpoint("10.64.1.1"), suffix="2", port=81)
        got = self.checks(self.BALANCED, endpoint_slice("shop/web", *ends), two)
        assert got == {self.BALANCED.key: ServiceHealthCheck(32080, 1)}

    def test_none_here(self):
        assert self.checks(self.BALANCED) == {self.BALANCED.key: ServiceHealthCheck(32080, 0)}

    @pytest.mark.parametrize(
        "other", [{"type": "NodePort"}, {"external_policy_local": False}, {"health_check_node_port": 0}]
    )
    def test_only_balancers_with_local_policy_and_a_number(self, other):
        assert self.checks(msgspec.structs.replace(self.BALANCED, **other)) == {}

    def test_the_other_family_has_none(self):
        assert self.checks(self.BALANCED, family=IPFamily.IPV6) == {}

    def test_a_change_of_health_alone_is_a_new_plan(self):
        store, planner = Store(), Planner(CONFIG, IPFamily.IPV4)
        local = msgspec.structs.replace(self.BALANCED, ports=())
        store.apply(Upsert(local))
        before = planner.plan(store.snapshot, store.take_changed())
        store.apply(Upsert(msgspec.structs.replace(local, health_check_node_port=32081)))
        after = planner.plan(store.snapshot, store.take_changed())
        assert before is not after
        assert after.health_checks[local.key].port == 32081


def test_serving_endpoints_are_all_that_may_keep_connections():
    """Rows 18.2 and 18.6: policy and topology do not count."""
    ends = (
        endpoint("10.64.1.1", for_zones=("east",)),
        endpoint("10.64.1.2", for_zones=("west",)),
        endpoint("10.64.1.3", ready=False, serving=True, terminating=True),
        endpoint("10.64.1.4", ready=False, serving=False, terminating=True),
    )
    got = plan(node(zone="east"), service("shop/web", "10.110.0.5"), endpoint_slice("shop/web", *ends)).services[WEB]
    assert [each.address for each in got.serving] == ["10.64.1.1", "10.64.1.2", "10.64.1.3"]
    assert [each.address for each in got.cluster.endpoints] == ["10.64.1.1"]


@pytest.mark.row("6.4", "29.12")
def test_a_node_without_pod_ranges_has_no_pods_until_they_are_known():
    store, planner = Store(), Planner(msgspec.structs.replace(CONFIG, detect_local_mode="NodeCIDR"), IPFamily.IPV4)
    for obj in (service("shop/web", "10.110.0.5"), endpoint_slice("shop/web", endpoint("10.64.1.10"))):
        store.apply(Upsert(obj))
    store.apply(Upsert(node(pod_cidrs=())))
    unknown = planner.plan(store.snapshot, store.take_changed())
    assert not unknown.pods.enabled
    assert unknown.services[WEB].frontends[0].other == Forward(Scope.CLUSTER, masquerade=False)
    for ranges in ("10.64.1.0/24", "10.64.9.0/24"):
        store.apply(Upsert(node(pod_cidrs=(ranges,))))
        known = planner.plan(store.snapshot, store.take_changed())
        assert known.pods == PodDetector(cidrs=(ranges,))
        assert known.services[WEB].frontends[0].other == Forward(Scope.CLUSTER, masquerade=True)


@pytest.mark.parametrize(
    "bound, internal, external, expect",
    [
        ("", ("10.20.0.11", "10.20.1.11"), ("203.0.113.5",), "10.20.0.11"),
        ("", (), ("203.0.113.5",), "203.0.113.5"),
        ("", ("fd20::11",), ("203.0.113.5",), "203.0.113.5"),
        ("10.20.1.11", ("10.20.0.11", "10.20.1.11"), (), "10.20.1.11"),
        ("0.0.0.0", ("10.20.0.11",), (), "10.20.0.11"),
        ("::", ("10.20.0.11",), (), "10.20.0.11"),
        ("fd20::11", ("10.20.0.11",), (), "10.20.0.11"),
    ],
)
@pytest.mark.row("15.6", "9.3")
def test_which_address_is_the_nodes_own(bound, internal, external, expect):
    a_node = node(internal_ips=internal, external_ips=external)
    assert plan(a_node, bind_address=bound).node_ports == NodePorts(cidrs=(f"{expect}/32",))
