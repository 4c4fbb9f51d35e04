"""`narthex lab conformance` with a stand-in for the suite: progress, results, exit status, and what is left."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from narthex.lab import topology
from narthex.lab.program import labs as lab
from narthex.lab.program.state import StateDirectory
from narthex.linux.namespaces import namespace_names

pytestmark = pytest.mark.kernel

SOURCE = Path(lab.__file__).parents[3]
STAND_IN = Path(__file__).with_name("suite_stand_in.py")
PATIENCE = 120.0


def program(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def run(tmp_path):
    """Start the command, with its temporary files in a directory of their own; at the end, nothing may be left."""
    name = f"nxt-{os.getpid()}-suite"
    files = tmp_path / "tmp"
    files.mkdir()
    e2e = program(tmp_path / "e2e.test", f'#!/bin/sh\nexec {sys.executable} {STAND_IN} "$@"\n')
    agnhost = program(tmp_path / "agnhost", '#!/bin/sh\necho "agnhost $*"\nexec sleep 1000\n')
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "TMPDIR": str(files)}

    def start(*words, **more):
        argv = [sys.executable, "-m", "narthex", "lab", "conformance", "--e2e", e2e, "--agnhost", agnhost]
        return subprocess.Popen(
            [*argv, "--name", name, "--nodes", "2", *words],
            env={**environment, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    try:
        yield start
        assert [each for each in namespace_names() if topology.owns(name, each)] == []
        assert not StateDirectory(name).path.exists()
        assert list(files.iterdir()) == []
    finally:
        lab.down(name)


def test_a_run_shows_what_failed_and_why(run, tmp_path):
    junit = tmp_path / "junit.xml"
    with run("--procs", "2", "--junit", str(junit), "-o", "json") as running:
        out, err = running.communicate(timeout=PATIENCE)
    assert running.returncode == 1, err
    found = json.loads(out)
    assert (found["suite"], found["nodes"], found["processes"]) == ("v1.36.2", 2, 2)
    assert {each["name"]: (each["state"], each["reason"]) for each in found["tests"]} == {
        "[sig-network] Services serve a pod [Conformance]": ("passed", ""),
        "[sig-network] Pods run the image [Conformance]": ("passed", ""),
        "[sig-network] DNS [Serial] runs last [Conformance]": ("passed", ""),
        "[sig-network] Services fail [Conformance]": ("failed", "Unexpected error: 2 nodes are odd"),
        "[sig-network] Services skip themselves [Conformance]": ("skipped", "needs two families"),
    }
    assert found["tests"][-1]["name"].endswith("runs last [Conformance]")
    assert (found["passed"], found["failed"], found["skipped"]) == (3, 1, 1)
    assert "5/5  passed" in err
    suite = ElementTree.parse(junit).getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("5", "1", "1")
    assert "ran Services fail" in suite.findtext(".//system-out")


def test_an_interrupt_leaves_nothing(run, tmp_path):
    started = tmp_path / "started"
    with run("--procs", "1", "--focus", "takes a signal", STAND_IN_WAIT=str(started)) as running:
        deadline = time.monotonic() + PATIENCE
        while not (started.exists() and started.read_text()):
            assert time.monotonic() < deadline and running.poll() is None, running.communicate()
            time.sleep(0.05)
        running.send_signal(signal.SIGTERM)
        _, err = running.communicate(timeout=PATIENCE)
    assert running.returncode == 2
    assert "interrupted after 0 of 1 tests" in err
    assert not Path(f"/proc/{started.read_text()}").exists()
