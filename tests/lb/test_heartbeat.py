"""Who is alive, and what cannot pass for a sign of life."""

import msgspec
import pytest

from narthex.lb.heartbeat import (
    MAGIC,
    Heartbeat,
    HeartbeatPayload,
    HeartbeatTimes,
    Membership,
    PeerLink,
    PeerState,
    seal,
)

KEY = b"k" * 32
TIMES = HeartbeatTimes()


class Wire:
    """Announcers on a network that may be cut, in made-up time. Each has its own address: its name."""

    def __init__(self, *names, keys=None):
        self.now = 100.0
        self.cut = set()
        self.kernels = set()
        """Nodes whose kernels answer probes."""
        self.sent = []
        self.members = {}
        self.runs = 0
        self.keys = keys or {}
        for name in names:
            self.start(name, names)

    def start(self, name, names=None):
        self.runs += 1
        member = Membership(name, self.runs, self.keys.get(name, (KEY,)), self.now)
        self.members[name] = member
        member.set_nodes({each: each for each in names or self.members})
        return member

    def stop(self, name):
        return self.members.pop(name)

    def parted(self, one, two):
        return (one, two) in self.cut or (two, one) in self.cut

    def deliver(self, sender, datagrams):
        for to, data in datagrams:
            self.sent.append((sender, to, data))
            if to in self.members and not self.parted(sender, to):
                self.deliver(to, self.members[to].receive(data, self.now))

    def run(self, seconds, step=0.05):
        for _ in range(round(seconds / step)):
            self.now += step
            for name, member in list(self.members.items()):
                self.deliver(name, member.due(self.now))
            for name, member in self.members.items():
                member.tick(self.now)
                for address in member.probes(self.now):
                    if address in self.kernels and not self.parted(name, address):
                        member.answered(address, self.now)

    def alive(self, name):
        return set(self.members[name].alive)


def test_they_find_each_other_while_they_listen():
    wire = Wire("a", "b", "c")
    wire.run(TIMES.listen / 2)
    assert [wire.alive(each) for each in "abc"] == [{"b", "c"}, {"a", "c"}, {"a", "b"}]
    assert wire.members["a"].listening(wire.now)
    wire.run(TIMES.listen)
    assert not wire.members["a"].listening(wire.now)


def test_one_that_falls_silent_is_lost_within_a_second():
    wire = Wire("a", "b", "c")
    wire.run(2)
    wire.stop("c")
    wire.run(TIMES.timeout + 0.1)
    assert wire.alive("a") == {"b"} and wire.alive("b") == {"a"}
    assert wire.members["a"].peers["c"].state is PeerState.LOST
    assert wire.members["a"].lost(wire.now) == {"c"}
    assert TIMES.timeout < 0.8


def test_a_node_that_answers_for_a_dead_announcer_is_not_gone():
    wire = Wire("a", "b", "c")
    wire.run(2)
    wire.stop("c")
    wire.run(1)
    wire.members["a"].refused("c", wire.now)
    assert wire.alive("a") == {"b"} and wire.members["a"].lost(wire.now) == set()
    wire.run(4)
    assert wire.members["a"].lost(wire.now) == {"c"}


def test_a_silent_process_whose_kernel_answers_has_more_time_but_not_forever():
    wire = Wire("a", "b", "c")
    wire.kernels = {"c"}
    wire.run(2)
    silent = wire.stop("c")
    wire.run(TIMES.timeout * (TIMES.patience - 1))
    assert wire.alive("a") == {"b", "c"} and wire.alive("b") == {"a", "c"}
    wire.members["c"] = silent
    wire.run(1)
    assert wire.alive("a") == {"b", "c"} and wire.members["a"].counts.lost == 0
    wire.stop("c")
    wire.run(TIMES.timeout * TIMES.patience + 0.1)
    assert wire.alive("a") == {"b"} and wire.members["a"].counts.lost == 1


@pytest.mark.parametrize("ends", ["with its kernel", "and its port is closed"])
def test_one_whose_process_was_silent_before_it_died_is_lost_within_a_second(ends):
    wire = Wire("a", "b", "c")
    wire.kernels = {"c"}
    wire.run(2)
    wire.stop("c")
    wire.run(TIMES.timeout + 0.1)
    assert wire.alive("a") == {"b", "c"}
    if ends == "with its kernel":
        wire.kernels.clear()
    else:
        wire.members["a"].refused("c", wire.now)
    wire.run(TIMES.timeout + 0.1)
    assert wire.alive("a") == {"b"}


def test_nobody_is_lost_before_its_kernel_had_time_to_answer():
    wire = Wire("a", "b")
    wire.run(2)
    member = wire.members["a"]
    # This node did not run for a while, and heard nothing.
    wire.now += 10
    assert member.tick(wire.now) == () and member.probes(wire.now) == ["b"]
    wire.now += TIMES.interval / 2
    assert member.tick(wire.now) == () and member.probes(wire.now) == []
    wire.now += TIMES.interval
    assert member.next_due() <= wire.now and member.tick(wire.now) == ("b",)


def test_who_stood_still_for_a_moment_learns_from_its_peers_whether_it_was_missed():
    for kernels, missed in (({"c"}, False), (set(), True)):
        wire = Wire("a", "b", "c")
        wire.kernels = kernels
        wire.run(2)
        still = wire.members.pop("c")
        waiting = []
        still_receive, still.receive = still.receive, lambda data, _, waiting=waiting: waiting.append(data) or []
        wire.members["c"] = still
        still_due, still.due = still.due, lambda _: []
        wire.run(TIMES.timeout * 1.5)
        still.receive, still.due = still_receive, still_due
        for data in waiting:
            still.receive(data, wire.now)
        assert still.taken_over(TIMES.timeout * 1.5, wire.now) is missed
        assert still.taken_over(TIMES.timeout * TIMES.patience + 1, wire.now)


def test_a_refusal_alone_loses_nobody():
    wire = Wire("a", "b")
    wire.run(2)
    wire.members["a"].refused("b", wire.now)
    wire.run(1)
    assert wire.alive("a") == {"b"}


def test_who_is_restarted_is_known_again_and_its_earlier_run_forgotten():
    wire = Wire("a", "b")
    wire.members["b"].publish(HeartbeatPayload(held=("192.0.2.1",)))
    wire.run(2)
    assert wire.members["a"].peers["b"].payload.held == ("192.0.2.1",)
    wire.stop("b")
    wire.run(0.2)
    wire.start("b", ("a", "b"))
    wire.run(0.3)
    assert wire.alive("a") == {"b"} and wire.members["a"].peers["b"].payload.held == ()


def test_both_must_hear_each_other():
    wire = Wire("a", "b", "c")
    wire.run(2)
    # b hears a, a does not hear b.
    deaf = wire.members["a"].receive
    wire.members["a"].receive = lambda data, now: [] if b"\xa1b\xa1a" in data[:60] else deaf(data, now)
    wire.run(3)
    assert wire.alive("a") == {"c"} and wire.alive("b") == {"c"} and wire.alive("c") == {"a", "b"}
    wire.members["a"].receive = deaf
    wire.run(1)
    assert wire.alive("a") == {"b", "c"} and wire.alive("b") == {"a", "c"}


def test_what_is_told_arrives_at_once_and_once_whole_is_not_repeated_each_time():
    wire = Wire("a", "b")
    wire.run(2)
    told = HeartbeatPayload(
        links=(PeerLink("eth0", b"\2" * 6),), held=("192.0.2.1", "2001:db8::1"), yielding=("192.0.2.1",)
    )
    assert wire.members["a"].publish(told) and not wire.members["a"].publish(told)
    wire.run(0.05)
    assert wire.members["b"].peers["a"].payload == told
    wire.sent.clear()
    wire.run(6)
    whole = [b"192.0.2.1" in data for sender, _, data in wire.sent if sender == "a"]
    assert 0 < sum(whole) < len(whole) / 4


def test_a_change_whose_beats_were_lost_is_no_longer_believed():
    wire = Wire("a", "b")
    wire.members["a"].publish(HeartbeatPayload(held=("192.0.2.1",)))
    wire.run(2)
    held = wire.members["b"].peers["a"]
    wire.members["a"].publish(HeartbeatPayload())
    dropped = (
        wire.members["a"].due(wire.now),
        wire.members["a"].due(wire.now + 0.2),
        wire.members["a"].due(wire.now + 0.4),
    )
    assert all(dropped) and held.payload.held == ("192.0.2.1",)
    wire.run(0.7)
    assert held.payload.held == ()


def test_leaving_and_a_farewell():
    wire = Wire("a", "b")
    wire.run(2)
    member = wire.members["a"]
    member.leave()
    wire.run(0.05)
    assert wire.members["b"].peers["a"].leaving and wire.alive("b") == {"a"}
    late = member.due(wire.now + 1)
    wire.deliver("a", member.farewell(wire.now + 1))
    wire.stop("a")
    assert wire.members["b"].peers["a"].state is PeerState.LEFT
    wire.deliver("a", late)
    wire.run(2)
    assert wire.members["b"].peers["a"].state is PeerState.LEFT
    assert wire.members["b"].counts.lost == 0
    wire.start("a", ("a", "b"))
    wire.run(1)
    assert wire.alive("b") == {"a"}


def test_a_wrong_key_is_counted_and_nothing_is_believed():
    wire = Wire("a", "b", keys={"b": (b"x" * 32,)})
    wire.run(2)
    assert wire.alive("a") == wire.alive("b") == set()
    assert wire.members["a"].counts.wrong_key > 0
    # A key is exchanged without a gap: first all know both, then the new one signs.
    wire.members["a"].keys = (KEY, b"x" * 32)
    wire.members["b"].keys = (b"x" * 32, KEY)
    wire.run(1)
    assert wire.alive("a") == {"b"} and wire.alive("b") == {"a"}


def recorded(wire, sender, to):
    return [data for one, two, data in wire.sent if (one, two) == (sender, to)]


def test_what_was_recorded_is_no_sign_of_life():
    wire = Wire("a", "b", "c")
    wire.run(2)
    tape = recorded(wire, "b", "a")
    wire.stop("b")

    def replay(to="a"):
        for data in tape:
            wire.members[to].receive(data, wire.now)

    for _ in range(40):
        replay()
        replay("c")
        wire.run(0.05)
    assert wire.alive("a") == {"c"} and wire.alive("c") == {"a"}
    # Nor to a later run, nor when the sender has begun anew.
    wire.start("a", ("a", "b", "c"))
    for _ in range(40):
        replay()
        wire.run(0.05)
    assert wire.alive("a") == {"c"}
    wire.start("b", ("a", "b", "c"))
    wire.run(1)
    wire.stop("b")
    tape += recorded(wire, "b", "a")
    for _ in range(40):
        replay()
        wire.run(0.05)
    assert wire.alive("a") == {"c"} and wire.members["a"].counts.replayed > 0


def test_an_ended_run_does_not_come_back():
    wire = Wire("a", "b")
    wire.run(1)
    first = recorded(wire, "b", "a")
    wire.stop("b")
    again = wire.start("b", ("a", "b"))
    again.publish(HeartbeatPayload(held=("192.0.2.1",)))
    wire.run(1)
    for data in first:
        wire.members["a"].receive(data, wire.now)
    assert wire.members["a"].peers["b"].payload.held == ("192.0.2.1",)


@pytest.mark.parametrize(
    "data",
    [b"", b"x", MAGIC, MAGIC + bytes(32), MAGIC + bytes(64), b"\0" * 70000,
     seal(msgspec.Raw(b"\x90"), KEY), seal(msgspec.Raw(b"\xc1"), KEY)],
)  # fmt: skip
def test_garbage(data):
    member = Membership("a", 1, (KEY,), 0.0)
    member.set_nodes({"b": "b"})
    assert member.receive(data, 0.0) == []
    assert member.counts.malformed + member.counts.wrong_key == 1


def beat(**fields):
    given = {"sender": "b", "receiver": "a", "incarnation": 9, "echo": 1, "sequence": 1, "interval": 0.15, "losses": 0,
             "leaving": False, "gone": False, "standing_back": False, "version": 0, "payload": HeartbeatPayload()}  # fmt: skip
    return seal(Heartbeat(**{**given, **fields}), KEY)


def test_strangers_and_what_is_for_others():
    member = Membership("a", 1, (KEY,), 0.0)
    member.set_nodes({"a": "a", "b": "b"})
    assert member.receive(beat(sender="z"), 0.0) == [] and member.counts.unknown_senders == 1
    assert member.receive(beat(receiver="c"), 0.0) == [] and member.counts.replayed == 1
    assert set(member.peers) == {"b"} and not member.alive
    member.receive(beat(), 0.0)
    assert set(member.alive) == {"b"}
    member.set_nodes({"a": "a"})
    assert not member.peers


def test_beats_go_seldom_to_who_was_never_heard():
    member = Membership("a", 1, (KEY,), 0.0)
    member.set_nodes({"b": "b", "c": ""})
    sent = [to for step in range(200) for to, _ in member.due(step * 0.05)]
    assert set(sent) == {"b"} and 10 <= len(sent) <= 18
    assert member.next_due() > 9.9


def test_a_large_cluster_beats_more_slowly_and_says_so():
    member = Membership("n0", 1, (KEY,), 0.0)
    member.set_nodes({f"n{number}": f"n{number}" for number in range(401)})
    ((_, data), *_) = member.due(0.0)
    assert msgspec.msgpack.decode(data[36:])[5] == pytest.approx(0.6)


def test_a_young_run_stands_back_and_one_that_comes_and_goes_longer():
    wire = Wire("a", "b", "c")
    wire.run(2)
    assert wire.members["a"].standing_back(wire.now)
    wire.run(2)
    assert not any(member.standing_back(wire.now) for member in wire.members.values())
    waits = []
    for _ in range(4):
        wire.stop("c")
        wire.run(1)
        member = wire.start("c", ("a", "b", "c"))
        begun = wire.now
        wire.run(1)
        assert wire.members["a"].peers["c"].standing_back
        while member.standing_back(wire.now):
            wire.run(0.5)
        waits.append(wire.now - begun)
    assert waits == sorted(waits) and 2.5 < waits[0] < 5 and waits[3] > 20
    wire.run(700)
    wire.stop("c")
    wire.run(1)
    assert wire.start("c", ("a", "b", "c")) and wire.run(4) is None
    assert not wire.members["c"].standing_back(wire.now)


def test_a_young_run_that_has_an_address_lets_nobody_go_first_one_that_was_cut_off_does():
    wire = Wire("a", "b")
    wire.run(1)
    member = wire.members["a"]
    member.end_initial_stand_back()
    assert not member.standing_back(wire.now)
    member.cut_off(wire.now)
    member.end_initial_stand_back()
    assert member.standing_back(wire.now)
    member.restart_listening(wire.now)
    assert member.listening(wire.now) and member.standing_back(wire.now)
    member.end_initial_stand_back()
    assert not member.standing_back(wire.now)


def test_who_was_cut_off_from_all_stands_back_and_the_others_do_not():
    wire = Wire("a", "b", "c")
    wire.run(5)
    wire.cut = {("c", "a"), ("c", "b")}
    wire.run(2)
    assert wire.alive("c") == set() and wire.alive("a") == {"b"}
    wire.cut = set()
    wire.run(1)
    assert wire.alive("c") == {"a", "b"}
    assert [wire.members[each].standing_back(wire.now) for each in "abc"] == [False, False, True]
    assert wire.members["a"].peers["c"].standing_back
