"""Processes by identity."""

import os
import subprocess
import sys

from narthex.linux import processes
from narthex.linux.processes import ProcessIdentity


def sleeper():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_this_process_is_alive_and_another_with_its_number_is_not():
    own = processes.identify(os.getpid())
    assert own is not None
    assert processes.alive(own)
    assert not processes.alive(ProcessIdentity(own.pid, own.started + 1))


def test_kill_ends_only_the_process_that_was_meant():
    child = sleeper()
    try:
        meant = processes.identify(child.pid)
        assert meant is not None
        processes.kill([ProcessIdentity(meant.pid, meant.started - 1)])
        assert child.poll() is None
        processes.kill([meant])
        assert not processes.alive(meant)
        # Nobody has collected it yet, so its number is still taken.
        assert processes.identify(child.pid) is None
        processes.kill([meant])
    finally:
        child.kill()
        child.wait()


def test_numbers_that_nobody_has():
    assert processes.identify(2**22 + 1) is None
    processes.kill([ProcessIdentity(2**22 + 1, 1)])


def test_no_namespace_holds_no_process():
    assert processes.inside([]) == []
    assert processes.inside(["no-such-namespace"]) == []
