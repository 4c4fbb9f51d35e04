"""Parts that fail, beside parts that go on."""

import itertools
import logging
import threading

import pytest

from narthex.model.backoff import Backoff
from narthex.node import parts as node
from narthex.node.parts import NodeSupervisor, PartSupervisor
from narthex.testing.fakes import FakeClock
from narthex.testing.load import until


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.DEBUG, "narthex")
    return caplog


class Script:
    """Makes parts, each of which lasts some seconds of a fake clock and ends as told; the last one is stopped."""

    def __init__(self, clock, *ends):
        self.clock = clock
        self.ends = list(ends)
        self.begun = []
        self.keeper = None

    def __call__(self):
        return _Scripted(self, *self.ends.pop(0))


class _Scripted:
    healthy = True

    def __init__(self, script, lasts, how):
        self.script, self.lasts, self.how = script, lasts, how

    def run(self):
        self.script.begun.append(self.script.clock.now())
        self.script.clock.advance(self.lasts)
        if isinstance(self.how, BaseException):
            raise self.how
        if self.how == "stop":
            self.script.keeper.stop()

    def stop(self):
        pass


def kept(*ends):
    """Seconds from the end of each run to the beginning of the next, and the keeper."""
    clock = FakeClock()
    script = Script(clock, *ends)
    script.keeper = PartSupervisor("dns", script, clock)
    script.keeper.keep()
    ended = [begun + lasts for begun, (lasts, _) in zip(script.begun, ends, strict=True)]
    return [begun - end for begun, end in zip(script.begun[1:], ended, strict=False)], script.keeper


def test_a_part_that_ends_is_started_again_later_each_time(log):
    fault = ValueError("no such zone")
    delays, keeper = kept(*[(1, fault)] * 8, (1, "stop"))
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60]
    assert keeper.report().failures == 8
    assert "part dns ended: ValueError: no such zone; restarting in 60 s, other parts continue" in log.text


def test_a_long_run_resets_the_backoff():
    fault = OSError("gone")
    delays, _ = kept((1, fault), (1, fault), (1, fault), (node.STEADY, fault), (1, fault), (1, "stop"))
    assert delays == [1, 2, 4, 1, 2]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("return", "it returned without being stopped"),
        (SystemExit(3), "SystemExit: 3"),
        (MemoryError(), "MemoryError: "),
    ],
)
def test_every_end_that_nobody_asked_for_is_a_failure(log, how, said):
    delays, _ = kept((1, how), (1, "stop"))
    assert delays == [1]
    assert f"part dns ended: {said};" in log.text


def test_a_part_made_anew_is_no_failure_and_comes_at_once(log):
    clock = FakeClock()
    runs = []

    class Once(Lasting):
        def run(self):
            runs.append(clock.now())
            if len(runs) == 4:
                keeper.stop()
            elif len(runs) == 2:
                raise OSError("gone")
            else:
                keeper.renew()
            super().run()

    keeper = PartSupervisor("dns", Once, clock)
    keeper.keep()
    # Only after the second run there was a delay.
    assert [later - earlier for earlier, later in itertools.pairwise(runs)] == [0, 1, 0]
    assert keeper.report().failures == 1
    assert "part dns restarts with the new settings" in log.text


def test_what_fails_while_a_part_is_made_is_its_failure_too():
    clock = FakeClock()
    calls = []

    def make():
        calls.append(clock.now())
        if len(calls) == 3:
            keeper.stop()
        raise OSError("the port is taken")

    keeper = PartSupervisor("dns", make, clock)
    keeper.keep()
    assert calls == [1000, 1001, 1003]
    assert keeper.report() == node.PartReport(
        running=False, healthy=False, failures=2, error="OSError: the port is taken"
    )


class Lasting:
    """A part that works until it is stopped, and can be made to fail from outside."""

    def __init__(self, name="", ended=None):
        self.name = name
        self.ended = [] if ended is None else ended
        self.over = threading.Event()
        self.fault = None
        self.healthy = True

    def run(self):
        assert self.over.wait(60)
        self.ended.append(self.name)
        if self.fault:
            raise self.fault

    def stop(self):
        self.over.set()

    def fail(self, fault):
        self.fault = fault
        self.over.set()


class Running:
    """A node in a thread."""

    def __init__(self, *parts, **options):
        self.node = NodeSupervisor(parts, **options)
        self.thread = threading.Thread(target=self.node.run)

    def __enter__(self):
        self.thread.start()
        return self.node

    def __exit__(self, *error):
        self.node.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()


def test_one_parts_failure_is_never_anothers(monkeypatch):
    monkeypatch.setattr(node, "RESTART_BACKOFF", Backoff(0.01, 60.0))
    good, made = Lasting(), []

    def make_bad():
        made.append(Lasting())
        return made[-1]

    with Running(("bad", make_bad), ("good", lambda: good)) as running:
        until(lambda: all(report.running for report in running.report().values()), "both parts")
        made[0].fail(RuntimeError("boom"))
        until(lambda: running.report()["bad"].failures == 1 and running.report()["bad"].running, "the second run")
        assert len(made) == 2
        assert running.report()["good"] == node.PartReport(running=True, healthy=True, failures=0, error="")
        assert running.report()["bad"] == node.PartReport(running=True, healthy=True, failures=1, error="")
        made[1].healthy = False
        # What ended it last may well be what keeps it from its work now.
        assert running.report()["bad"].error == "RuntimeError: boom"
        numbers = {
            (sample.name, sample.labels["part"]): sample.value for each in running.collect() for sample in each.samples
        }
        assert numbers == {
            ("narthex_part_running", "bad"): 1,
            ("narthex_part_running", "good"): 1,
            ("narthex_part_healthy", "bad"): 0,
            ("narthex_part_healthy", "good"): 1,
            ("narthex_part_failures_total", "bad"): 1,
            ("narthex_part_failures_total", "good"): 0,
        }


def test_parts_end_the_other_way_round():
    ended = []
    with Running(*((name, lambda name=name: Lasting(name, ended)) for name in ("proxy", "overlay", "dns"))) as running:
        until(lambda: all(report.running for report in running.report().values()), "all parts")
    assert ended == ["dns", "overlay", "proxy"]


def test_a_stop_ends_the_backoff_after_a_failure():
    def fail():
        raise OSError("no")

    with Running(("bad", fail)) as running:
        until(lambda: running.report()["bad"].failures == 1, "the failure")


def test_a_part_that_does_not_end_holds_nobody_up_for_long(log):
    class Deaf(Lasting):
        def stop(self):
            pass

    deaf, ended = Deaf(), []
    good = Lasting("good", ended)
    with Running(("good", lambda: good), ("deaf", lambda: deaf), patience=0.01) as running:
        until(lambda: all(report.running for report in running.report().values()), "both parts")
    assert ended == ["good"]
    assert "part deaf did not stop within 0.01 s" in log.text
    deaf.over.set()
