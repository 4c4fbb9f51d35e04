"""Mode userspace without a kernel: ports, chains, what the relay is told, and a packet's way through both."""

import msgspec
import pytest

from narthex.model.net import IPFamily, Protocol
from narthex.model.objects import EndpointPort, NamespacedName, ServicePort, ServicePortName
from narthex.model.packet import Disposition, Packet
from narthex.proxy.backends.userspace.backend import FIRST, LAST, UserspaceBackend, assign
from narthex.proxy.backends.userspace.names import USERSPACE_CHAINS
from narthex.proxy.backends.userspace.rules import table_of
from narthex.proxy.plan.ir import Scope
from narthex.testing.build import HOST, NODE, endpoint, endpoint_slice, plan, service

is_ours = USERSPACE_CHAINS.is_ours

BACKEND = UserspaceBackend()
HERE = ("10.64.1.10",)
"""Endpoints of this node."""
OUTSIDE, POD = "198.51.100.7", "10.64.1.200"


def name(text, protocol=Protocol.TCP):
    return ServicePortName(NamespacedName("shop", text), "http", protocol)


def web(*ends, **spec):
    return (
        service("shop/web", "10.110.0.5", node_port=30080, **spec),
        endpoint_slice("shop/web", *(endpoint(end, NODE if end in HERE else "worker-b") for end in ends), port=8080),
    )


def one(rules):
    (listener,) = rules.listeners.values()
    return listener


def packet(destination="10.110.0.5", port=80, source=POD, **more):
    return Packet(source=source, destination=destination, port=port, iif="cni0", **more)


# ---- ports -----------------------------------------------------------------------------------------------------------


def test_ports_come_from_names_alone():
    wanted = [(name(f"s-{number}"), Scope.CLUSTER) for number in range(200)]
    given = assign(wanted, {}, (), FIRST, LAST)
    assert given == assign(reversed(wanted), {}, (), FIRST, LAST)
    assert len(set(given.values())) == 200
    assert all(FIRST <= port <= LAST for port in given.values())


def test_protocols_share_numbers():
    given = assign([(name("a", p), Scope.CLUSTER) for p in (Protocol.TCP, Protocol.UDP)], {}, (), 61000, 61000)
    assert list(given.values()) == [61000, 61000]


@pytest.mark.row("25.9")
def test_what_is_held_stays_and_what_is_taken_is_avoided():
    whose = name("a"), Scope.CLUSTER
    assert assign([whose], {whose: 61007}, (), FIRST, LAST) == {whose: 61007}
    assert assign([whose], {whose: 61007}, {(Protocol.UDP, 61007)}, FIRST, LAST) == {whose: 61007}
    assert assign([whose], {whose: 61007}, {(Protocol.TCP, 61007)}, FIRST, LAST) != {whose: 61007}
    assert assign([whose], {whose: 60000}, (), FIRST, LAST)[whose] >= FIRST


def test_a_released_port_is_not_reused_in_the_next_rendering():
    old, new = (name("old"), Scope.CLUSTER), (name("new"), Scope.CLUSTER)
    assert assign([new], {old: 61000}, (), 61000, 61001) == {new: 61001}
    assert assign([new], {old: 61000}, (), 61000, 61000) == {new: 61000}, "unless there is no other"


def test_who_comes_too_late_has_none():
    given = assign([(name("a"), Scope.CLUSTER), (name("b"), Scope.CLUSTER)], {}, (), 61000, 61000)
    assert given == {(name("a"), Scope.CLUSTER): 61000}


# ---- the relay's table -----------------------------------------------------------------------------------------------


@pytest.mark.row("25.1")
def test_a_listener_for_each_endpoint_set_that_somebody_may_have():
    both = web("10.64.1.10", "10.64.2.10", external_policy_local=True)
    rules = BACKEND.render(plan(*both))
    found = {listener.scope: listener.endpoints for listener in rules.listeners.values()}
    assert found == {Scope.CLUSTER: (("10.64.1.10", 8080), ("10.64.2.10", 8080)), Scope.LOCAL: (("10.64.1.10", 8080),)}


def test_endpoints_come_and_go_without_a_rule():
    before = BACKEND.render(plan(*web("10.64.1.10")))
    after, changes = BACKEND.advance(before, plan(*web("10.64.1.10", "10.64.2.10")))
    assert not changes.tables
    assert not changes.close
    assert [listener.endpoints for listener in changes.listen] == [(("10.64.1.10", 8080), ("10.64.2.10", 8080))]
    assert changes.listen[0].port == one(before).port
    assert BACKEND.patch(before, changes) == after


def test_a_service_that_goes_closes_its_port():
    before = BACKEND.render(plan(*web("10.64.1.10")))
    after, changes = BACKEND.advance(before, plan())
    assert changes.close == (one(before).key,)
    assert not changes.listen
    assert BACKEND.patch(before, changes) == after
    assert not BACKEND.diff(after, after)


def test_ports_of_others_are_left_alone_from_one_rendering_to_the_next():
    first = BACKEND.render(plan(*web("10.64.1.10")))
    key = one(first).key
    known = msgspec.structs.replace(first, taken=frozenset({key}))
    second, _ = BACKEND.advance(known, plan(*web("10.64.1.10")))
    assert one(second).key != key
    third, _ = BACKEND.advance(second, plan(*web("10.64.1.10")))
    assert one(third) == one(second)
    assert third.taken == {key}


def test_the_range_can_be_chosen():
    rules = UserspaceBackend((7000, 7003)).render(plan(*web("10.64.1.10", external_policy_local=True)))
    assert {listener.port for listener in rules.listeners.values()} < {7000, 7001, 7002, 7003}


# ---- rules -----------------------------------------------------------------------------------------------------------


@pytest.mark.row("25.2")
def test_the_chains_have_the_old_modes_names():
    text = BACKEND.text(BACKEND.render(plan(*web("10.64.1.10"))))
    port = one(BACKEND.render(plan(*web("10.64.1.10")))).port
    assert f"# relay tcp {port}: shop/web:http (cluster) -> 10.64.1.10:8080\n" in text
    for line in (
        f'-A KUBE-PORTALS-CONTAINER -d 10.110.0.5/32 -p tcp -m comment --comment "shop/web:http cluster IP" -m tcp '
        f"--dport 80 -j REDIRECT --to-ports {port}",
        f'-A KUBE-PORTALS-HOST -d 10.110.0.5/32 -p tcp -m comment --comment "shop/web:http cluster IP" -m tcp '
        f"--dport 80 -j REDIRECT --to-ports {port}",
        f'-A KUBE-NODEPORT-CONTAINER -p tcp -m comment --comment "shop/web:http node port" -m tcp --dport 30080 '
        f"-j REDIRECT --to-ports {port}",
        f'-A KUBE-NODEPORT-HOST -p tcp -m comment --comment "shop/web:http node port" -m tcp --dport 30080 '
        f"-j REDIRECT --to-ports {port}",
        f'-A KUBE-NODEPORT-NON-LOCAL -p tcp -m comment --comment "shop/web:http" -m tcp --dport {port} '
        f"-m conntrack --ctstate DNAT -j ACCEPT",
    ):
        assert line in text, line


def test_all_chains_are_known_for_ours():
    rules = BACKEND.render(
        plan(
            *web(
                "10.64.1.10",
                external_policy_local=True,
                type="LoadBalancer",
                balancers=("203.0.113.10",),
                source_ranges=("198.51.100.0/24",),
            )
        )
    )
    chains = [(table, chain) for table, held in rules.tables.chains.items() for chain in held]
    assert any(chain.startswith("KUBE-PORTAL-") for _, chain in chains)
    assert all(is_ours(table, chain) for table, chain in chains)
    assert not is_ours("nat", "KUBE-SERVICES")
    assert not is_ours("filter", "KUBE-PORTALS-HOST")


def test_a_chains_name_does_not_depend_on_the_port():
    names = [
        sorted(
            UserspaceBackend(ports).render(plan(*web("10.64.1.10", external_policy_local=True))).tables.chains["nat"]
        )
        for ports in ((7000, 7001), (8000, 8001))
    ]
    assert names[0] == names[1]


# ---- a packet's way ----------------------------------------------------------------------------------------------------


def test_the_walk_goes_on_behind_the_relay():
    rules = BACKEND.render(plan(*web("10.64.1.10", "10.64.2.10")))
    (first, second) = BACKEND.walk(rules, packet(), HOST).outcomes
    assert [first.endpoint, second.endpoint] == [("10.64.1.10", 8080), ("10.64.2.10", 8080)]
    assert first.masquerade and second.masquerade
    assert [step.what for step in first.steps][-2:] == [
        f"port {one(rules).port}: one of 2 endpoints (cluster) in turn",
        "connects to 10.64.1.10:8080",
    ]


def test_rules_of_a_relay_that_is_gone_lead_to_a_refusal():
    rules = msgspec.structs.replace(BACKEND.render(plan(*web("10.64.1.10"))), listeners=type(plan().services)())
    (outcome,) = BACKEND.walk(rules, packet(), HOST).outcomes
    assert outcome.disposition is Disposition.REJECTED
    assert "no relay listens" in outcome.steps[-1].why


def test_nobody_gets_to_the_relay_but_by_a_service():
    rules = BACKEND.render(plan(*web("10.64.1.10")))
    straight = packet(HOST.addresses[0], one(rules).port, OUTSIDE)
    own = Packet(source=HOST.addresses[0], destination=HOST.addresses[0], port=one(rules).port, from_host=True)
    for each in (straight, own):
        (outcome,) = BACKEND.walk(rules, each, HOST).outcomes
        assert outcome.disposition is Disposition.REJECTED


@pytest.mark.row("25.8")
def test_sctp_is_refused():
    objects = (
        service("shop/web", "10.110.0.5", ports=(ServicePort(name="assoc", protocol=Protocol.SCTP, port=80),)),
        endpoint_slice(
            "shop/web", endpoint("10.64.1.10"), ports=(EndpointPort(name="assoc", protocol=Protocol.SCTP, port=8080),)
        ),
    )
    rules = BACKEND.render(plan(*objects))
    assert not rules.listeners
    (outcome,) = BACKEND.walk(rules, packet(protocol=Protocol.SCTP), HOST).outcomes
    assert outcome.disposition is Disposition.REJECTED


def test_without_a_port_a_service_is_refused():
    both = (*web("10.64.1.10"), service("shop/api", "10.110.0.6"), endpoint_slice("shop/api", endpoint("10.64.1.11")))
    rules = UserspaceBackend((7000, 7000)).render(plan(*both))
    assert one(rules).name.service.name == "api"
    ends = [BACKEND.walk(rules, packet(to), HOST).outcomes[0].disposition for to in ("10.110.0.5", "10.110.0.6")]
    assert ends == [Disposition.REJECTED, Disposition.DELIVERED]


# ---- the table as text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", list(IPFamily), ids=lambda family: family.label)
def test_the_table_is_read_back_from_its_text(family):
    six = family is IPFamily.IPV6
    ends = ("fd64:0:0:1::a", "fd64:0:0:2::a") if six else ("10.64.1.10", "10.64.2.10")
    objects = (
        service("shop/web", "fd6e::5" if six else "10.110.0.5", affinity_seconds=10800, external_policy_local=True),
        endpoint_slice("shop/web", *map(endpoint, ends), port=8080),
        service("shop/dns", "fd6e::6" if six else "10.110.0.6", ports=(ServicePort(protocol=Protocol.UDP, port=53),)),
        endpoint_slice("shop/dns", endpoint(ends[0]), ports=(EndpointPort(protocol=Protocol.UDP, port=53),)),
    )
    rules = BACKEND.render(plan(*objects, family=family))
    assert len(rules.listeners) == 2
    text = BACKEND.text(rules)
    assert table_of(text.split("\n"), family) == rules.listeners
    other = IPFamily.IPV4 if six else IPFamily.IPV6
    assert not table_of(text.split("\n"), other)


def test_a_line_that_only_begins_like_the_tables_is_an_error():
    with pytest.raises(ValueError, match="no line of a relay's table"):
        table_of(["# relay tcp 61000: nobody knows"], IPFamily.IPV4)
