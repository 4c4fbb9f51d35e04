"""The reconcile loop, on a clock that advances only while it sleeps."""

import math

import pytest

from narthex.model.backoff import Backoff
from narthex.runtime.reconciler import Reconciler, Throttle
from narthex.testing.fakes import FakeClock


class Program:
    """Records when it was called; each call takes `seconds`, returns `wait`, and does what `then` says for its number."""

    def __init__(self, *, wait=math.inf, seconds=0.0, then=None, **options):
        self.clock = FakeClock()
        self.calls = []
        self.wait, self.seconds, self.then = wait, seconds, then or {}
        self.loop = Reconciler(self.clock, **options)

    def reconcile(self):
        self.calls.append(self.clock.now())
        self.clock.advance(self.seconds)
        self.then.get(len(self.calls), lambda: None)()
        return self.wait

    def run(self, calls):
        began = self.clock.now()
        self.loop.run(self.reconcile, until=lambda: len(self.calls) == calls)
        return [when - began for when in self.calls]


def broken():
    raise ValueError("broken")


def test_it_is_called_at_once_and_at_each_deadline():
    assert Program(wait=4.0).run(3) == [0.0, 4.0, 8.0]


def test_a_wake_ends_the_wait():
    program = Program(wait=4.0)
    program.then = {1: program.loop.wake}
    assert program.run(3) == [0.0, 0.0, 4.0]


def test_a_burst_of_events_is_throttled_by_the_duration_of_the_call():
    program = Program(wait=math.inf, seconds=0.01, throttle=Throttle(share=10.0, least=0.05, longest=0.5))
    program.then = dict.fromkeys(range(1, 4), program.loop.wake)
    assert program.run(3) == pytest.approx([0.0, 0.11, 0.22])


def test_a_pause_has_limits():
    throttle = Throttle(share=10.0, least=0.05, longest=0.5)
    assert [throttle.pause(seconds) for seconds in (0.0, 0.01, 9.0)] == [0.05, 0.1, 0.5]


def test_failures_back_off_and_a_success_resets():
    program = Program(wait=100.0, backoff=Backoff(1.0, 3.0))
    program.then = dict.fromkeys((1, 2, 3, 5), broken)
    assert program.run(6) == [0.0, 1.0, 3.0, 6.0, 106.0, 107.0]


def test_without_a_backoff_a_failure_ends_it():
    with pytest.raises(ValueError, match="broken"):
        Program(then={1: broken}).run(2)


def test_stop_ends_it_before_during_and_after_a_call():
    program = Program(wait=4.0)
    program.loop.stop()
    program.loop.run(program.reconcile)
    assert program.calls == [] and program.loop.stopping
    program = Program(wait=4.0, throttle=Throttle(least=9.0, longest=9.0))
    program.then = {2: program.loop.stop}
    began = program.clock.now()
    program.loop.run(program.reconcile)
    assert len(program.calls) == 2 and program.clock.now() - began == 9.0
