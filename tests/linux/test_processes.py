"""Processes by identity."""

import os
import subprocess
import sys

from narthex.linux.processes import ProcessIdentity, identify_process, is_alive, kill_processes, processes_inside


def sleeper():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_this_process_is_alive_and_another_with_its_number_is_not():
    own = identify_process(os.getpid())
    assert own is not None
    assert is_alive(own)
    assert not is_alive(ProcessIdentity(own.pid, own.started + 1))


def test_kill_ends_only_the_process_that_was_meant():
    child = sleeper()
    try:
        meant = identify_process(child.pid)
        assert meant is not None
        kill_processes([ProcessIdentity(meant.pid, meant.started - 1)])
        assert child.poll() is None
        kill_processes([meant])
        assert not is_alive(meant)
        # Nobody has collected it yet, so its number is still taken.
        assert identify_process(child.pid) is None
        kill_processes([meant])
    finally:
        child.kill()
        child.wait()


def test_numbers_that_nobody_has():
    assert identify_process(2**22 + 1) is None
    kill_processes([ProcessIdentity(2**22 + 1, 1)])


def test_no_namespace_holds_no_process():
    assert processes_inside([]) == []
    assert processes_inside(["no-such-namespace"]) == []
