"""Laws of socket load balancing over random clusters and changes: the plan and the interpreted programs agree."""

import itertools
from collections import Counter

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from narthex.model import Disposition, Host, Packet, Protocol, family_of
from narthex.model.store import Store
from narthex.proxy.backends import BACKENDS
from narthex.proxy.backends.sockets.rows import SocketRows
from narthex.proxy.backends.sockets.walk import SimulatedSocket, SimulatedSockets, SocketAnswer
from narthex.proxy.plan.ir import Balancing, Reject, Sender
from narthex.proxy.plan.planner import Planner
from narthex.proxy.plan.sockets import LeftToRules, SocketDeviation, SocketForward, deviation, socket_decision
from narthex.testing import strategies as some
from narthex.testing.build import NODE_IPS
from narthex.trace.evaluate import evaluate, find_frontend


def planned(config, family, turns):
    """Yield the plan after each turn of events."""
    store, planner = Store(), Planner(msgspec.structs.replace(config, localhost_node_ports=False), family)
    for turn in turns:
        for event in turn:
            store.apply(event)
        yield planner.plan(store.snapshot, store.take_changed())


def meant(plan, service, front, sender, bound):
    """Return all addresses to which a socket may connect, by the plan."""
    decision = socket_decision(plan, service, front, sender)
    left = {SocketAnswer(front.address, front.port)}
    if isinstance(decision, Reject):
        return {SocketAnswer(front.address, front.port, refused=True)}
    if not isinstance(decision, SocketForward) or (decision.unbound_only and bound):
        return left
    pool = service.pool(decision.scope)
    return {SocketAnswer(endpoint.address, endpoint.port) for endpoint in pool.endpoints}


def assert_peer(sockets, sock, front):
    """A socket that connects is told that its peer is the frontend."""
    answer = sockets.connect(sock, front.address, front.port)
    if not answer.refused:
        told = sockets.peer_name(sock, answer.address, answer.port)
        assert told == SocketAnswer(front.address, front.port)


def check(plan, sockets):
    for service in plan.services.values():
        draws = range(max([1, *(len(pool.endpoints) for pool in service.pools.values())]))
        for front in service.frontends:
            if front.address is None:
                continue
            for sender in (Sender.POD, Sender.NODE):
                for source in ("", "10.0.0.1" if ":" not in front.address else "fd00::1"):
                    sock = SimulatedSocket(protocol=front.protocol, in_node=sender is Sender.NODE, source=source)
                    expected = meant(plan, service, front, sender, bool(source))
                    found = {sockets.connect(sock, front.address, front.port, draw) for draw in draws}
                    assert found == expected, (front, sender, source)
                    assert_peer(sockets, sock, front)
                    if ":" not in front.address:
                        mapped = msgspec.structs.replace(sock, mapped=True)
                        assert {sockets.connect(mapped, front.address, front.port, draw) for draw in draws} == expected
                    if front.protocol is Protocol.UDP:
                        sent = {
                            sockets.send(
                                msgspec.structs.replace(sock, cookie=100 + draw), front.address, front.port, draw
                            )
                            for draw in draws
                        }
                        assert sent == expected


def assert_counted(rows, sockets, family):
    kernel = sockets.rows(family)
    assert (rows.frontend_count, rows.slot_count) == (len(kernel.frontends), len(kernel.slots))


turns = st.lists(some.changes, min_size=1, max_size=4)


@settings(max_examples=60)
@given(some.configs, some.families, turns)
def test_programs_do_what_the_plan_says(config, family, turns):
    rows, sockets = SocketRows(family), SimulatedSockets()
    for plan in planned(config, family, turns):
        sockets.apply(family, rows.advance(plan))
        assert_counted(rows, sockets, family)
        assert not rows.advance(plan)
        check(plan, sockets)


@settings(max_examples=60)
@given(some.configs, some.families, turns, st.integers(0, 4))
def test_a_process_takes_over_what_another_left(config, family, turns, leaves):
    sockets = SimulatedSockets()
    rows = SocketRows(family)
    plans = list(planned(config, family, turns))
    for plan in plans[: leaves + 1]:
        sockets.apply(family, rows.advance(plan))
    left = plans[min(leaves, len(plans) - 1)]

    again = SocketRows(family, sockets.rows(family))
    assert not again.advance(left)
    other = SocketRows(family, sockets.rows(family))
    sockets.apply(family, other.advance(plans[-1]))
    check(plans[-1], sockets)
    assert_counted(other, sockets, family)
    fresh = SimulatedSockets()
    fresh.apply(family, SocketRows(family).advance(plans[-1]))
    assert sockets.rows(family).frontends.keys() == fresh.rows(family).frontends.keys()
    assert sorted(sockets.rows(family).counts.values()) == sorted(fresh.rows(family).counts.values())


@settings(max_examples=60)
@given(some.configs, some.families, turns, st.data())
def test_a_write_that_was_torn_is_repaired(config, family, turns, data):
    """Any part of the writes may have happened when a process ends."""
    sockets, rows = SimulatedSockets(), SocketRows(family)
    for plan in planned(config, family, turns):
        changes = rows.advance(plan)
        part = data.draw(st.integers(0, 3))
        for name in ("frontends", "pools", "slots")[:part]:
            changes = msgspec.structs.replace(changes, **{name: type(changes.slots)()})
        sockets.apply(family, changes)
        rows = SocketRows(family, sockets.rows(family))
        sockets.apply(family, rows.advance(plan))
        check(plan, sockets)


# ---- exactly the declared differences ------------------------------------------------------------------------------

HOST = Host(addresses=NODE_IPS)
MODE = BACKENDS["nftables"]


def holds(reason, packet, place, ends):
    """Return True if a reason to leave a connection to the rules is true, by other means than the decision."""
    if place is None:
        return reason is LeftToRules.NO_FRONTEND
    service, front = place
    return {
        LeftToRules.HASHING: service.balancing is Balancing.MAGLEV,
        LeftToRules.AFFINITY: service.affinity_seconds is not None,
        LeftToRules.SOURCE_RANGES: front.allow_from is not None,
        LeftToRules.MASQUERADE: any(masqueraded for _, _, masqueraded in ends),
        LeftToRules.DROP: {end for end, _, _ in ends} == {Disposition.DROPPED},
        LeftToRules.PROTOCOL: packet.protocol is Protocol.SCTP,
        LeftToRules.NODE_PORT: front.address is None,
        LeftToRules.NO_FRONTEND: False,
    }[reason]


def check_packet(plan, sockets, packet):
    """Compare a bound socket with the specification of its packets; return what was met."""
    sock = SimulatedSocket(protocol=packet.protocol, in_node=packet.from_host, source=packet.source)
    answers = {sockets.connect(sock, packet.destination, packet.port, draw) for draw in range(6)}
    ends = evaluate(plan, packet, HOST, MODE.deviations).ends().keys()
    place = find_frontend(plan, packet, HOST)
    sender = Sender.NODE if packet.from_host else Sender.POD
    decision = socket_decision(plan, *place, sender) if place else LeftToRules.NO_FRONTEND
    if isinstance(decision, SocketForward) and decision.unbound_only:
        decision = LeftToRules.MASQUERADE
    if isinstance(decision, LeftToRules):
        assert answers == {SocketAnswer(packet.destination, packet.port)}
        assert holds(decision, packet, place, ends), (packet, decision, ends)
        return [decision]
    if isinstance(decision, Reject):
        assert answers == {SocketAnswer(packet.destination, packet.port, refused=True)}
        assert {end for end, _, _ in ends} == {Disposition.REJECTED}
        return [Reject]
    reached = {(answer.address, answer.port) for answer in answers}
    differing = {end for end in reached if (Disposition.DELIVERED, end, False) not in ends}
    declared = {deviation(plan, decision, sender, packet.source, address) for address, _ in differing}
    assert None not in declared, (packet, differing, ends)
    if SocketDeviation.NAMESPACE_IS_SENDER not in declared:
        assert reached == {end for _, end, _ in ends}
    return [SocketForward, *declared]


def packets_here(plan, family):
    """Yield packets to all frontends, and to others, that sockets of the node and of its pods can send."""
    places = [
        (front.address, front.protocol, front.port) for each in plan.services.values() for front in each.frontends
    ]
    node = next(ip for ip in NODE_IPS if family_of(ip) is family)
    others = [(some.CLUSTER_IPS[family][0], Protocol.TCP, 8080)]
    sources = itertools.cycle((*some.CLIENTS[family][1:3], *some.PODS[family][:3]))
    for address, protocol, port in places + others:
        target = {"destination": address or node, "protocol": protocol, "port": port}
        yield Packet(source=node, from_host=True, **target)
        source = next(sources)
        known = [iif for iif in ("cni0", "veth1") if not plan.pods.enabled or plan.pods.matches(source, iif)]
        # Where pods are known by their addresses, one of other networks on the node counts as a pod, too.
        for iif in known[:1] or ["cni0"]:
            yield Packet(source=source, iif=iif, **target)


def test_what_sockets_do_otherwise_than_the_plan_is_exactly_what_is_declared():
    met = Counter()

    @settings(max_examples=60)
    @given(some.configs, some.families, turns)
    def law(config, family, turns):
        rows, sockets = SocketRows(family), SimulatedSockets()
        for plan in planned(config, family, turns):
            sockets.apply(family, rows.advance(plan))
            for packet in packets_here(plan, family):
                met.update(check_packet(plan, sockets, packet))

    law()
    assert {*LeftToRules, SocketForward, Reject} <= met.keys(), met
