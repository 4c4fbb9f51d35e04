"""Announcers that are killed in the middle of a takeover: the next one takes over, and restarted ones agree on one."""

import signal

import pytest

from narthex.linux import failpoints
from narthex.testing.kernel.segment import VIP, VIP_SIX, EthernetSegment, endpoints
from narthex.testing.load import until

pytestmark = pytest.mark.kernel
TAKEOVER_POINTS = [name for name in failpoints.POINTS if name.startswith("lb.takeover.")]


def test_killed_at_each_step_of_a_takeover(tmp_path, monkeypatch):
    nodes = dict(zip("abcde", TAKEOVER_POINTS, strict=True))
    with EthernetSegment(tmp_path, "nxk", tuple(nodes)) as segment:
        for name, point in nodes.items():
            monkeypatch.setenv(failpoints.ENVIRONMENT, point)
            segment.start(name)
        monkeypatch.delenv(failpoints.ENVIRONMENT)
        # Each one that dies leaves the addresses to the next.
        for name in nodes:
            until(lambda name=name: segment.processes[name].poll() is not None, f"{name} to die", also=segment.logs)
            assert segment.processes[name].poll() == -signal.SIGKILL, segment.logs()
            segment.kill(name)
        assert segment.ask(seconds=0.1) == ""
        segment.put(endpoints("web", "a", "b"))
        segment.start("a", "b")
        segment.steady()
        (holder,) = segment.holders()
        assert segment.ask(VIP) == segment.ask(VIP_SIX) == holder
