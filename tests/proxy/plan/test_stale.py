"""Which tracked connections are stale (group 18; rows 29.3, 29.4)."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from narthex.model.net import ConntrackFlow, IPFamily, Protocol
from narthex.model.objects import EndpointPort, ServicePort
from narthex.proxy.plan.planner import Planner
from narthex.proxy.plan.stale import StaleReason, StaleSearch
from narthex.testing.build import CONFIG, NODE_IPS, endpoint, endpoint_slice, service, snapshot

TCP, UDP, SCTP = Protocol.TCP, Protocol.UDP, Protocol.SCTP
OWN = frozenset((*NODE_IPS, "127.0.0.1", "::1"))
A, B, C = "10.64.1.5", "10.64.1.6", "10.64.2.7"
VIP, NODE_IP = "10.110.0.1", "10.20.0.11"


def web(*endpoints, protocol=UDP, ip=VIP, node_port=30080, text="shop/web", port=80, **fields):
    """A Service with these endpoints; one given as text is ready."""
    made = [endpoint(each) if isinstance(each, str) else each for each in endpoints]
    ports = (ServicePort(name="http", port=80, protocol=protocol, node_port=node_port),)
    return (
        service(text, ip, type="NodePort", ports=ports, **fields),
        endpoint_slice(text, *made, ports=(EndpointPort(name="http", port=port, protocol=protocol),)),
    )


def unready(address, **fields):
    return endpoint(address, ready=False, serving=False, **fields)


def fading(address, serving=True):
    return endpoint(address, ready=False, serving=serving, terminating=True)


def plans(*states, **config):
    """The plans for successive states of the cluster, each made from the one before."""
    planner = Planner(msgspec.structs.replace(CONFIG, **config), IPFamily.IPV4)
    return [planner.plan(snapshot(*state)) for state in states]


def after(old, new, **config):
    """The search after a change from one state to another."""
    before, plan = plans(old, new, **config)
    return StaleSearch(plan, before, plan.lineage.changed)


def at_start(*objects, **config):
    (plan,) = plans(objects, **config)
    return StaleSearch(plan, None, plan.services, everything=True)


def flow(destination, end=None, protocol=UDP, end_port=80):
    """To `address:port`; `end` is the endpoint it was given, None for none."""
    address, _, port = destination.partition(":")
    return ConntrackFlow(
        protocol, "10.64.1.200", 40000, address, int(port), end or address, end_port if end else int(port)
    )


def verdict(search, *what, **fields):
    return search.reason(flow(*what, **fields), OWN)


GONE, FRONTEND, HOLE = StaleReason.ENDPOINT_GONE, StaleReason.FRONTEND_GONE, StaleReason.BLACK_HOLE


@pytest.mark.parametrize("protocol", [UDP, TCP, SCTP])
@pytest.mark.parametrize("to", [f"{VIP}:80", "203.0.113.5:80", "203.0.113.9:80", f"{NODE_IP}:30080"])
def test_an_endpoint_that_is_gone(protocol, to):
    ways = {"external_ips": ("203.0.113.5",), "balancers": ("203.0.113.9",), "protocol": protocol}
    search = after(web(A, B, **ways), web(B, **ways))
    assert verdict(search, to, A, protocol=protocol) is GONE
    assert verdict(search, to, B, protocol=protocol) is None
    other = TCP if protocol is UDP else UDP
    assert verdict(search, to, A, protocol=other) is None


@pytest.mark.parametrize("protocol", [UDP, TCP, SCTP])
def test_scale_to_zero(protocol):
    search = after(web(A, protocol=protocol), web(protocol=protocol))
    assert verdict(search, f"{VIP}:80", A, protocol=protocol) is GONE
    assert verdict(search, f"{NODE_IP}:30080", A, protocol=protocol) is GONE


def test_another_target_port():
    search = after(web(A), web(A, port=81))
    assert verdict(search, f"{VIP}:80", A) is GONE
    assert verdict(search, f"{VIP}:80", A, end_port=81) is None


@pytest.mark.parametrize(
    ("state", "udp", "tcp"),
    [
        (endpoint(A), None, None),
        (fading(A), None, None),
        (fading(A, serving=False), GONE, None),
        (unready(A), GONE, None),
        (None, GONE, GONE),
    ],
    ids=["ready", "terminating and serving", "terminating", "unready", "not there"],
)
def test_who_may_finish(state, udp, tcp):
    """Rows 3.11 and 18.6: TCP stays while the pod is there, UDP while it serves."""
    for protocol, expected in ((UDP, udp), (TCP, tcp), (SCTP, tcp)):
        rest = () if state is None else (state,)
        search = after(web(A, B, C, protocol=protocol), web(B, *rest, protocol=protocol))
        assert verdict(search, f"{VIP}:80", A, protocol=protocol) is expected
        assert verdict(search, f"{VIP}:80", C, protocol=protocol) is GONE


def test_policies_and_topology_do_not_matter():
    """Row 18.6: any serving endpoint will do, also one that nobody would be given now."""
    local = web(endpoint(A), endpoint(C, node="worker-b"), internal_policy_local=True)
    search = after(web(A, B, endpoint(C, node="worker-b")), local)
    assert verdict(search, f"{VIP}:80", C) is None
    assert verdict(search, f"{VIP}:80", B) is GONE


@pytest.mark.row("18.5", "18.10")
def test_udp_that_was_never_sent_anywhere():
    search = after((), web(A))
    for to in (f"{VIP}:80", f"{NODE_IP}:30080"):
        assert verdict(search, to) is HOLE
        assert verdict(search, to, protocol=TCP) is None
    assert verdict(search, f"{VIP}:81") is None
    search = after(web(), web(A))
    assert verdict(search, f"{VIP}:80") is HOLE
    search = after((), web(A, protocol=TCP))
    assert search.towards == frozenset()


def test_node_ports_are_looked_for_on_the_nodes_own_addresses_only():
    """Row 29.4."""
    search = after(web(A), web(B))
    assert verdict(search, f"{NODE_IP}:30080", A) is GONE
    for elsewhere in ("10.20.0.12", "198.51.100.7", C):
        assert verdict(search, f"{elsewhere}:30080", A) is None
        assert verdict(search, f"{elsewhere}:30080") is None


def test_node_ports_are_looked_for_only_where_they_answer():
    second, loopback = "10.20.1.11:30080", "127.0.0.1:30080"
    everywhere, local = {"node_port_addresses": None}, {"node_port_addresses": None, "localhost_node_ports": True}
    for config, expected in (({}, (None, None)), (everywhere, (GONE, None)), (local, (GONE, GONE))):
        search = after(web(A), web(B), **config)
        assert (verdict(search, second, A), verdict(search, loopback, A)) == expected


def test_what_led_to_a_deleted_service():
    search = after(web(A), ())
    for to in (f"{VIP}:80", f"{NODE_IP}:30080"):
        assert verdict(search, to, A) is FRONTEND
        assert verdict(search, to) is None, "never ours"
        assert verdict(search, to, C) is None, "rewritten by somebody else"
    assert verdict(search, "10.20.0.12:30080", A) is None


@pytest.mark.row("18.10")
def test_what_led_through_an_address_that_was_taken_away():
    search = after(web(A, external_ips=("203.0.113.5",)), web(A))
    assert verdict(search, "203.0.113.5:80", A) is FRONTEND
    assert verdict(search, f"{VIP}:80", A) is None


def test_an_address_that_moved_on_belongs_to_its_new_owner():
    ip = {"external_ips": ("203.0.113.5",)}
    other = {"text": "shop/other", "ip": "10.110.0.2", "node_port": 30081}
    search = after((*web(A, **ip), *web(B, **other)), (*web(A), *web(A, B, **other, **ip)))
    assert verdict(search, "203.0.113.5:80", A) is None, "the new owner has the same endpoint"
    search = after((*web(A, **ip), *web(B, **other)), (*web(A), *web(B, **other, **ip)))
    assert verdict(search, "203.0.113.5:80", A) is GONE
    assert verdict(search, "203.0.113.5:80", B) is None


@pytest.mark.row("18.11")
def test_udp_clients_of_a_relay_are_not_led_to_the_port_of_a_service_that_is_gone():
    def search(old, new):
        before, plan = plans(old, new)
        return StaleSearch(plan, before, plan.lineage.changed, relayed=True)

    deleted = search(web(A), ())
    for to in (f"{VIP}:80", f"{NODE_IP}:30080"):
        assert verdict(deleted, to, NODE_IP, end_port=40001) is FRONTEND
        assert verdict(deleted, to, NODE_IP, end_port=40001, protocol=TCP) is None
    taken_over = search(web(A), web(A, text="shop/other"))
    assert verdict(taken_over, f"{VIP}:80", NODE_IP, end_port=40001) is FRONTEND
    # The relay has the Service still, whatever its endpoints are.
    for new in (web(B), web()):
        assert verdict(search(web(A), new), f"{VIP}:80", NODE_IP, end_port=40001) is None
    tcp = search(web(A, protocol=TCP), ())
    assert verdict(tcp, f"{VIP}:80", NODE_IP, end_port=40001, protocol=TCP) is None


def test_an_exact_address_of_another_service_wins_over_a_node_port():
    rival = service(
        "shop/rival", "10.110.0.9", external_ips=(NODE_IP,), ports=(ServicePort(name="http", port=30080, protocol=UDP),)
    )
    ends = endpoint_slice("shop/rival", endpoint(C), ports=(EndpointPort(name="http", port=80, protocol=UDP),))
    search = after((*web(A), rival, ends), (*web(B), rival, ends))
    assert verdict(search, f"{NODE_IP}:30080", C) is None
    assert verdict(search, f"{NODE_IP}:30080", A) is GONE
    search = after((*web(A), rival, ends), web(A))
    assert verdict(search, f"{NODE_IP}:30080", C) is GONE, "now it is the node port"
    assert verdict(search, f"{NODE_IP}:30080", A) is None


def test_nothing_is_looked_for_when_nothing_can_be_stale():
    for old, new in (
        (web(A), web(A, B)),
        (web(A), web(A, affinity_seconds=10)),
        (web(A), web(A, external_policy_local=True)),
        (web(A, protocol=TCP), web(A, protocol=TCP, external_ips=("203.0.113.5",))),
        (web(unready(A), protocol=TCP), web(A, protocol=TCP)),
        (web(A, protocol=TCP), web(unready(A), protocol=TCP)),
        ((), web(A, protocol=TCP)),
    ):
        assert after(old, new).towards == frozenset(), (old, new)
    assert after(web(A), web(B)).towards == {(UDP, 80), (UDP, 30080)}
    assert after(web(A), web(A, external_ips=("203.0.113.5",))).towards == {(UDP, 80)}


def test_sockets_are_searched_by_the_endpoints_that_left():
    """Only sockets of UDP, and only those connected to an endpoint that some frontend no longer leads to."""
    assert after(web(A, B), web(B, C)).left == {(A, 80)}
    assert after(web(A, B, protocol=TCP), web(B, protocol=TCP)).left == set()
    assert after(web(A), web(A, B)).left == set()
    assert after(web(A, B), ()).left == {(A, 80), (B, 80)}
    assert after(web(A), web(A, port=81)).left == {(A, 80)}
    assert after(web(A, B), web(A, unready(B))).left == {(B, 80)}
    # Whoever used the external IP is still connected to an endpoint that serves.
    assert after(web(A, external_ips=("203.0.113.5",)), web(A)).left == {(A, 80)}


def test_other_services_are_left_out():
    other = web(A, text="shop/other", ip="10.110.0.2", node_port=30081)
    search = after((*web(A), *other), (*web(B), *other))
    assert verdict(search, "10.110.0.2:80", C) is None
    assert verdict(search, f"{NODE_IP}:30081", C) is None


def test_at_the_start_all_are_looked_at():
    search = at_start(*web(A), *web(A, protocol=TCP, text="shop/other", ip="10.110.0.2", node_port=30081))
    assert verdict(search, f"{VIP}:80", B) is GONE
    assert verdict(search, f"{VIP}:80") is HOLE
    assert verdict(search, "10.110.0.2:80", B, protocol=TCP) is GONE
    assert verdict(search, "10.110.0.2:80", protocol=TCP) is None
    assert verdict(search, "10.110.0.3:80", B) is None


_ends = st.lists(st.sampled_from([A, B, C]), unique=True)


@given(old=_ends, new=_ends, end=st.sampled_from([A, B, C]), protocol=st.sampled_from([UDP, TCP, SCTP]))
def test_what_is_looked_for_is_what_is_stale(old, new, end, protocol):
    """A change finds the same as a look at everything, for connections that were right before it."""
    if end not in old:
        return
    before, plan = plans(web(*old, protocol=protocol), web(*new, protocol=protocol))
    changed = StaleSearch(plan, before, plan.lineage.changed if plan is not before else ())
    everything = StaleSearch(plan, before, plan.services, everything=True)
    left = changed.left
    assert everything.left is None
    for to in (f"{VIP}:80", f"{NODE_IP}:30080"):
        found = verdict(changed, to, end, protocol=protocol)
        assert found is verdict(everything, to, end, protocol=protocol)
        assert (found is GONE) is (end not in new)
        if found:
            assert (protocol, int(to.partition(":")[2])) in changed.towards
            assert ((end, 80) in left) is (protocol is UDP)


@pytest.mark.row("24.8")
def test_a_gentle_dataplane_lets_tcp_connections_end_by_themselves():
    """They go on to the endpoint that left; not where the whole Service is gone, and not with another protocol."""
    for protocol, expected in ((TCP, None), (SCTP, StaleReason.ENDPOINT_GONE), (UDP, StaleReason.ENDPOINT_GONE)):
        before, plan, empty = plans(web(A, B, protocol=protocol), web(A, protocol=protocol), ())
        kept = flow(f"{VIP}:80", B, protocol)
        assert StaleSearch(plan, before, plan.lineage.changed, gentle=True).reason(kept, OWN) is expected
        assert StaleSearch(plan, before, plan.lineage.changed).reason(kept, OWN) is StaleReason.ENDPOINT_GONE
        gone = StaleSearch(empty, before, before.services, gentle=True)
        assert gone.reason(kept, OWN) is StaleReason.FRONTEND_GONE
