"""Laws of announcers on a network that loses, cuts and heals: in the end one answers for each address; while nothing is cut,
somebody always does; and nobody is asked to wait for long."""

from functools import cache

import hypothesis.strategies as st
from hypothesis import given, settings

from narthex.lb.election import AnnouncementReason, ElectionInput, NodeAnnouncerState, elect
from narthex.lb.handover import AddressOwnership, PeerClaims
from narthex.lb.heartbeat import HeartbeatPayload, Membership, PeerState
from narthex.model.objects import IPAddressPool
from narthex.testing.build import endpoint, endpoint_slice, node, service, snapshot

NAMES = ("a", "b", "c", "d")
ADDRESSES = ("192.0.2.1", "192.0.2.2", "2001:db8::3")
OBJECTS = snapshot(
    IPAddressPool(name="all", namespace="x", addresses=("192.0.2.0/24", "2001:db8::/64")),
    *(node(name) for name in NAMES),
    *(
        service(f"shop/s{place}", "10.110.0.1", type="LoadBalancer", balancers=(ip,))
        for place, ip in enumerate(ADDRESSES)
    ),
    *(endpoint_slice(f"shop/s{place}", endpoint("10.64.1.5", node="elsewhere")) for place, _ in enumerate(ADDRESSES)),
)
STEP = 0.05


@cache
def decided(announcers):
    return elect(ElectionInput(snapshot=OBJECTS, announcers=dict(announcers)))


class Node:
    """One announcer: what `apps/lb` does with the three pure parts."""

    def __init__(self, name, run, now):
        self.name = name
        self.member = Membership(name, run, (b"k" * 32,), now)
        self.member.set_nodes({each: each for each in NAMES})
        self.ownership = AddressOwnership(name)

    def turn(self, now):
        member = self.member
        member.tick(now)
        member.probes(now)  # No kernel answers.
        if member.listening(now):
            return
        back = member.standing_back(now)
        announcers = {
            name: NodeAnnouncerState(state=peer.state, leaving=peer.leaving, standing_back=peer.standing_back)
            for name, peer in member.peers.items()
        }
        announcers[self.name] = NodeAnnouncerState(standing_back=back, leaving=member.leaving)
        rivals = {
            name: PeerClaims(
                held=frozenset(peer.payload.held), yielding=frozenset(peer.payload.yielding),
                leaving=peer.leaving, standing_back=peer.standing_back,
            )
            for name, peer in member.alive.items()
        }  # fmt: skip
        decisions = decided(tuple(sorted(announcers.items())))
        if self.ownership.update(decisions, rivals, now, standing_back=back).gained:
            member.end_initial_stand_back()
        member.publish(
            HeartbeatPayload(held=tuple(self.ownership.held), yielding=tuple(sorted(self.ownership.yielding)))
        )


class Cluster:
    """All of them in made-up time."""

    def __init__(self):
        self.now, self.runs = 100.0, 0
        self.nodes = {}
        self.side = dict.fromkeys(NAMES, 0)
        for name in NAMES:
            self.start(name)

    def start(self, name):
        self.runs += 1
        self.nodes[name] = Node(name, self.runs, self.now)

    def deliver(self, sender, datagrams):
        for to, data in datagrams:
            if to in self.nodes and self.side[to] == self.side[sender]:
                self.deliver(to, self.nodes[to].member.receive(data, self.now))

    def step(self):
        self.now += STEP
        for name, each in list(self.nodes.items()):
            self.deliver(name, each.member.due(self.now))
        for each in self.nodes.values():
            each.turn(self.now)

    def run(self, seconds):
        for _ in range(round(seconds / STEP)):
            self.step()

    def holders(self, address, side=0):
        return [name for name, each in self.nodes.items() if address in each.ownership.held and self.side[name] == side]


ACTIONS = st.one_of(
    st.tuples(st.just("kill"), st.sampled_from(NAMES)),
    st.tuples(st.just("start"), st.sampled_from(NAMES)),
    st.tuples(st.just("leave"), st.sampled_from(NAMES)),
    st.tuples(st.just("part"), st.sets(st.sampled_from(NAMES))),
    st.tuples(st.just("wait"), st.floats(0.1, 6)),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(ACTIONS, max_size=8))
def test_whatever_happens_one_answers_in_the_end(actions):
    cluster = Cluster()
    cluster.run(1)
    for what, argument in actions:
        if what == "kill":
            cluster.nodes.pop(argument, None)
        elif what == "start":
            cluster.start(argument)
        elif what == "leave" and argument in cluster.nodes:
            cluster.nodes[argument].member.leave()
        elif what == "part":
            cluster.side = {name: int(name in argument) for name in NAMES}
        elif what == "wait":
            cluster.run(argument)
    cluster.run(4)
    for side in (0, 1):
        staying = [n for n, each in cluster.nodes.items() if not each.member.leaving and cluster.side[n] == side]
        for address in ADDRESSES:
            assert len(cluster.holders(address, side)) == min(1, len(staying))
    cluster.side = dict.fromkeys(NAMES, 0)
    cluster.run(6)
    staying = [name for name, each in cluster.nodes.items() if not each.member.leaving]
    for address in ADDRESSES:
        assert len(cluster.holders(address)) == min(1, len(staying))


@settings(max_examples=6, deadline=None)
@given(st.permutations(NAMES), st.floats(0.05, 3))
def test_nothing_is_unanswered_when_nodes_leave_and_come_one_after_the_other(order, pause):
    cluster = Cluster()
    cluster.run(4)
    for name in order:
        cluster.nodes[name].member.leave()
        for _ in range(round(3.2 / STEP)):
            cluster.step()
            assert all(cluster.holders(address) for address in ADDRESSES)
            assert all(len(cluster.holders(address)) <= 2 for address in ADDRESSES)
        assert not cluster.nodes[name].ownership.held
        gone = cluster.nodes.pop(name)
        cluster.deliver(name, gone.member.farewell(cluster.now))
        cluster.run(pause)
        cluster.start(name)
        for _ in range(round(5 / STEP)):
            cluster.step()
            assert all(cluster.holders(address) for address in ADDRESSES)


@settings(max_examples=6, deadline=None)
@given(st.sampled_from(NAMES), st.sampled_from(ADDRESSES))
def test_a_dead_holder_is_replaced_within_a_second(spared, address):
    cluster = Cluster()
    cluster.run(5)
    (holder,) = cluster.holders(address)
    del cluster.nodes[holder]
    cluster.run(0.8)
    assert len(cluster.holders(address)) == 1
    assert cluster.nodes[cluster.holders(address)[0]].member.peers[holder].state is PeerState.LOST
    verdicts = elect(ElectionInput(snapshot=OBJECTS, announcers={spared: NodeAnnouncerState()}))[address]
    assert verdicts.verdict(spared).reason is AnnouncementReason.ANNOUNCES
