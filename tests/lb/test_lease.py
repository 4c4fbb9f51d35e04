"""Who may write: one Lease among several candidates, in made-up time, with clocks that jump and a server that is away."""

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from narthex.kube.leader_election import (
    Elector,
    LeaseRecord,
    LeaseTimes,
    Moment,
    ReadLease,
    WaitUntil,
    WriteLease,
    record_of,
    spec_of,
)

TIMES = LeaseTimes(lease=15.0, renew=10.0, retry=2.0)


class Server:
    """Holds one Lease."""

    def __init__(self):
        self.record = None
        self.version = 0
        self.writers = []

    def write(self, wanted):
        if wanted.version != (self.record.version if self.record else ""):
            return None
        self.version += 1
        self.record = msgspec.structs.replace(wanted, version=str(self.version))
        self.writers.append(wanted.holder)
        return self.record


class World:
    """Time, a server and candidates."""

    def __init__(self, *names):
        self.time = 1000.0
        self.offsets = dict.fromkeys(names, 0.0)
        self.server = Server()
        self.candidates = {name: Elector(name, TIMES) for name in names}

    def now(self, name):
        return Moment(self.time, self.time + 1e9 + self.offsets[name])

    def step(self, name, *, answer=True, done=True):
        """One action of a candidate. Without `answer` it hears nothing; without `done` nothing was done either."""
        elector, now = self.candidates[name], self.now(name)
        action = elector.act(now)
        if isinstance(action, ReadLease):
            elector.read(self.server.record, now) if answer else elector.failed(now)
        elif isinstance(action, WriteLease):
            stored = self.server.write(action.record) if done else None
            if not answer or not done:
                elector.failed(now)
            elif stored is None:
                elector.refused(now)
            else:
                elector.wrote(stored, now, now)
        return action

    def run(self, seconds, *names, **how):
        end = self.time + seconds
        while self.time < end:
            for name in names or self.candidates:
                while not isinstance(self.step(name, **how), WaitUntil):
                    pass
            self.time += 0.5

    def may_write(self):
        return [name for name, each in self.candidates.items() if each.allowance(self.now(name)) > 0]


def test_one_leads_and_renews():
    world = World("a", "b")
    world.run(60)
    assert world.may_write() == ["a"]
    assert world.candidates["a"].term == 1
    assert world.server.record.transitions == 0
    assert set(world.server.writers) == {"a"}


def test_the_next_leads_when_the_holder_is_dead():
    world = World("a", "b")
    world.run(10)
    world.run(14, "b")
    assert world.may_write() == []
    world.run(6, "b")
    assert world.may_write() == ["b"]
    assert (world.server.record.holder, world.server.record.transitions) == ("b", 1)
    # The dead one comes back and sees it.
    world.run(20)
    assert world.may_write() == ["b"]


def test_released_it_is_taken_at_once():
    world = World("a", "b")
    world.run(10)
    stored = world.server.write(world.candidates["a"].release(world.now("a")).record)
    assert stored.holder == ""
    assert world.may_write() == []
    world.run(3, "b")
    assert world.may_write() == ["b"]


def test_who_does_not_lead_releases_nothing():
    world = World("a", "b")
    world.run(10)
    assert world.candidates["b"].release(world.now("b")) is None


def test_a_server_that_is_away_ends_leading_in_time():
    world = World("a", "b")
    world.run(10)
    world.run(7, answer=False, done=False)
    assert world.may_write() == ["a"]
    world.run(4, answer=False, done=False)
    assert world.may_write() == []
    assert not world.candidates["a"].leading
    world.run(30, answer=False, done=False)
    world.run(20)
    assert len(world.may_write()) == 1
    assert sum(each.term for each in world.candidates.values()) == 2


def test_lost_answers_do_not_lose_the_lease():
    world = World("a")
    world.run(1)
    world.run(5, answer=False)
    world.run(3)
    assert world.may_write() == ["a"]
    assert world.candidates["a"].term == 1


@pytest.mark.parametrize("jump", [-86400.0, 86400.0, 5.0])
def test_a_wall_clock_that_jumps_pauses_at_most(jump):
    world = World("a", "b")
    world.run(10)
    world.offsets["a"] += jump
    assert set(world.may_write()) <= {"a"}
    assert (world.may_write() == []) is (jump > 10)
    world.run(30)
    assert world.may_write() == ["a"]
    assert world.candidates["a"].term == 1


def test_a_machine_that_was_stopped_knows_by_its_wall_clock():
    """Its steady clock stood still, while the others went on."""
    world = World("a", "b")
    world.run(10)
    asleep = world.now("a")
    world.run(30, "b")
    assert world.may_write() == ["b"]
    woken = Moment(asleep.steady, world.now("a").wall)
    assert world.candidates["a"].allowance(woken) <= 0


def test_a_lease_of_another_length_is_waited_for():
    world = World("a")
    world.server.write(LeaseRecord(holder="z", seconds=60.0))
    world.run(55)
    assert world.may_write() == []
    world.run(10)
    assert world.may_write() == ["a"]


def test_there_and_back():
    record = LeaseRecord(version="7", holder="a", seconds=15.0, acquired="x", renewed="y", transitions=3)
    assert record_of({"metadata": {"resourceVersion": "7"}, "spec": spec_of(record)}) == record
    assert record_of({"metadata": {}, "spec": {"holderIdentity": None}}) == LeaseRecord()


class Candidates(RuleBasedStateMachine):
    """Three candidates, any order of steps, lost requests and answers, clocks set at will, sudden ends."""

    @initialize()
    def begin(self):
        self.world = World("a", "b", "c")

    @rule(name=st.sampled_from("abc"), answer=st.booleans(), done=st.booleans())
    def step(self, name, answer, done):
        self.world.step(name, answer=answer, done=done)

    @rule(name=st.sampled_from("abc"))
    def good_step(self, name):
        self.world.step(name)

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.0, 4.0, 9.0, 16.0]))
    def wait(self, seconds):
        self.world.time += seconds

    @rule(name=st.sampled_from("abc"), jump=st.sampled_from([-1e6, -3.0, 3.0, 1e6]))
    def set_clock(self, name, jump):
        self.world.offsets[name] += jump

    @rule(name=st.sampled_from("abc"))
    def start_anew(self, name):
        self.world.candidates[name] = Elector(f"{name}{self.world.time}", TIMES)

    @invariant()
    def never_two(self):
        if hasattr(self, "world"):
            assert len(self.world.may_write()) <= 1


Candidates.TestCase.settings = settings(max_examples=60, stateful_step_count=60)
TestCandidates = Candidates.TestCase
