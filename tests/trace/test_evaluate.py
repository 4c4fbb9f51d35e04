"""The reference meaning, tabled: who sends what where, and what becomes of it."""

from fractions import Fraction

import pytest

from narthex.model.net import Protocol
from narthex.model.objects import ServiceCIDR
from narthex.model.packet import Disposition, Host, Memory, Packet
from narthex.proxy.plan.ir import Deviation, Sender
from narthex.testing.build import HOST, endpoint, endpoint_slice, packet, plan, service
from narthex.trace.evaluate import evaluate, sender_of

ENDS = endpoint_slice("shop/web", endpoint("10.64.1.10"), endpoint("10.64.2.10", node="worker-b"))
POD, NODE, OUTSIDE = "10.64.1.200", "10.20.0.11", "198.51.100.7"


def ends(the_plan, source, destination, **options):
    trace = evaluate(the_plan, packet(source, destination), HOST, **options)
    assert sum(outcome.probability for outcome in trace.outcomes) == 1
    return {(end[0].value, end[1] and end[1][0], end[2]) for end in trace.ends()}


@pytest.mark.parametrize("source, masquerade", [(POD, False), ("10.64.2.200", False), (NODE, True), (OUTSIDE, True)])
def test_cluster_ip(source, masquerade):
    got = ends(plan(service("shop/web", "10.110.0.5"), ENDS), source, "10.110.0.5:80")
    assert got == {("delivered", "10.64.1.10", masquerade), ("delivered", "10.64.2.10", masquerade)}


def test_hairpin_depends_on_the_draw():
    got = ends(plan(service("shop/web", "10.110.0.5"), ENDS), "10.64.1.10", "10.110.0.5:80")
    assert got == {("delivered", "10.64.1.10", True), ("delivered", "10.64.2.10", False)}


def test_hairpin_of_a_remote_endpoint_is_a_deviation_of_some_backends():
    the_plan = plan(service("shop/web", "10.110.0.5"), ENDS)
    assert ("delivered", "10.64.2.10", True) in ends(the_plan, "10.64.2.10", "10.110.0.5:80")
    deviating = ends(the_plan, "10.64.2.10", "10.110.0.5:80", deviations=frozenset({Deviation.HAIRPIN_LOCAL_ONLY}))
    assert ("delivered", "10.64.2.10", False) in deviating


def test_probabilities_are_exact():
    trace = evaluate(plan(service("shop/web", "10.110.0.5"), ENDS), packet(POD, "10.110.0.5:80"), HOST)
    assert set(trace.ends().values()) == {Fraction(1, 2)}


@pytest.mark.parametrize("deviations, expect", [((), "rejected"), ((Deviation.NO_CLUSTER_IP_GUARD,), "not-ours")])
def test_unknown_port_of_a_cluster_ip(deviations, expect):
    the_plan = plan(service("shop/web", "10.110.0.5"), ENDS)
    assert ends(the_plan, POD, "10.110.0.5:81", deviations=frozenset(deviations)) == {(expect, None, False)}


def test_free_address_of_a_service_cidr():
    the_plan = plan(ServiceCIDR(name="kubernetes", cidrs=("10.110.0.0/16",)))
    assert ends(the_plan, POD, "10.110.7.7:80") == {("dropped", None, False)}
    assert ends(the_plan, POD, "10.111.7.7:80") == {("not-ours", None, False)}


def test_icmp_to_a_cluster_ip_is_refused():
    the_plan = plan(service("shop/web", "10.110.0.5"), ENDS)
    echo = Packet(source=POD, destination="10.110.0.5", protocol=Protocol.ICMP)
    assert evaluate(the_plan, echo, HOST).outcomes[0].disposition is Disposition.REJECTED


def test_source_ranges_come_before_the_rest_unless_a_backend_deviates():
    closed = service("shop/web", "10.110.0.5", balancers=("203.0.113.10",), source_ranges=("192.0.2.0/24",))
    assert ends(plan(closed, ENDS), OUTSIDE, "203.0.113.10:80") == {("dropped", None, False)}
    assert ends(plan(closed), OUTSIDE, "203.0.113.10:80") == {("dropped", None, False)}
    refuses = frozenset({Deviation.REJECT_BEFORE_RANGES})
    assert ends(plan(closed), OUTSIDE, "203.0.113.10:80", deviations=refuses) == {("rejected", None, False)}
    assert ends(plan(closed, ENDS), OUTSIDE, "203.0.113.10:80", deviations=refuses) == {("dropped", None, False)}


@pytest.mark.parametrize(
    "destination, answers", [("10.20.0.11", True), ("10.20.1.11", False), ("10.110.0.5", False), ("203.0.113.9", False)]
)
def test_node_ports_answer_on_the_listed_own_addresses_only(destination, answers):
    the_plan = plan(service("shop/web", "10.110.0.5", node_port=30080), ENDS)
    got = ends(the_plan, OUTSIDE, f"{destination}:30080", deviations=frozenset({Deviation.NO_CLUSTER_IP_GUARD}))
    assert ({end[0] for end in got} == {"delivered"}) is answers


def test_an_exact_address_wins_over_a_node_port():
    port = service("shop/aaa", "10.110.0.5", node_port=30080)
    ip = service("shop/web", "10.110.0.6", port=30080, external_ips=("10.20.0.11",))
    assert {end[1] for end in ends(plan(port, ip, ENDS), OUTSIDE, "10.20.0.11:30080")} == {"10.64.1.10", "10.64.2.10"}


@pytest.mark.parametrize("localhost, expect", [(True, "delivered"), (False, "not-ours")])
def test_localhost_node_ports(localhost, expect):
    the_plan = plan(
        service("shop/web", "10.110.0.5", node_port=30080),
        ENDS,
        node_port_addresses=None,
        localhost_node_ports=localhost,
    )
    got = ends(the_plan, "127.0.0.1", "127.0.0.1:30080")
    assert {(end[0], end[2]) for end in got} == {(expect, localhost)}


def test_a_packet_to_a_process_on_this_node_never_reaches_postrouting():
    own = endpoint_slice("shop/web", endpoint("10.20.0.11"), endpoint("10.20.0.12", node="worker-b"))
    the_plan = plan(service("shop/web", "10.110.0.5", node_port=30080), own)
    expect = {("delivered", "10.20.0.11", False), ("delivered", "10.20.0.12", True)}
    assert ends(the_plan, OUTSIDE, "10.20.0.11:30080") == expect
    assert ends(the_plan, NODE, "10.20.0.11:30080") == {(*end[:2], True) for end in expect}


def test_affinity_keeps_a_client_while_it_returns_in_time():
    the_plan = plan(service("shop/web", "10.110.0.5", affinity_seconds=10), ENDS)
    memory = Memory()
    first = evaluate(the_plan, packet(POD, "10.110.0.5:80"), HOST, memory=memory, now=0).outcomes[1]
    for record in first.remembers:
        memory.touch(*record, 0)
    again = evaluate(the_plan, packet(POD, "10.110.0.5:80"), HOST, memory=memory, now=9)
    assert [each.endpoint for each in again.outcomes] == [first.endpoint]
    assert len(evaluate(the_plan, packet(POD, "10.110.0.5:80"), HOST, memory=memory, now=10).outcomes) == 2
    assert len(evaluate(the_plan, packet(NODE, "10.110.0.5:80"), HOST, memory=memory, now=9).outcomes) == 2


@pytest.mark.parametrize(
    "config, source, iif, expect",
    [
        ({}, POD, "", Sender.POD),
        ({}, NODE, "", Sender.NODE),
        ({}, "127.0.0.1", "", Sender.NODE),
        ({}, OUTSIDE, "eth0", Sender.OTHER),
        ({"detect_local_mode": "NodeCIDR"}, "10.64.2.200", "", Sender.OTHER),
        ({"detect_local_mode": "BridgeInterface", "bridge_interface": "cni0"}, OUTSIDE, "cni0", Sender.POD),
        ({"detect_local_mode": "BridgeInterface", "bridge_interface": "cni0"}, POD, "cni00", Sender.OTHER),
        ({"detect_local_mode": "InterfaceNamePrefix", "interface_name_prefix": "veth"}, POD, "veth12", Sender.POD),
        ({"detect_local_mode": "InterfaceNamePrefix", "interface_name_prefix": "veth"}, NODE, "", Sender.NODE),
        ({"detect_local_mode": ""}, POD, "", Sender.OTHER),
    ],
)
def test_sender_classes(config, source, iif, expect):
    sent = packet(source, "10.110.0.5:80", iif=iif)
    assert sender_of(plan(**config), sent, HOST) is expect


def test_a_host_without_addresses_knows_loopback():
    sent = packet("127.0.0.1", "10.110.0.5:80")
    assert sender_of(plan(), sent, Host()) is Sender.NODE
