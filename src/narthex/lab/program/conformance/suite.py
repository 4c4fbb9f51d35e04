"""The processes of the suite: e2e.test, which is a Ginkgo suite with options of Kubernetes' own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import msgspec

from narthex.lab.conformance import ChosenCases, choose
from narthex.lab.program.conformance.image import REGISTRIES
from narthex.lab.program.state import LabError
from narthex.linux.run import CommandError, StartedProgram, TimeoutExpired, run, start_program

_SEED = 1
"""Of the order of tests: that of the dry run must be that of all processes."""
_MOST_SECONDS = 3 * 3600
"""All tests of [sig-network] with the slow ones take under an hour."""
_PLAN_SECONDS = 120.0
"""A dry run takes a second, and most of it is the load of a program of 100 MB."""
_LAST_BYTES = 2000


class Suite:
    """The program e2e.test with the options of one run. All files that it writes are in a directory of the run."""

    def __init__(self, program: Path, directory: Path, focus: str, skip: str) -> None:
        """Choose tests by regular expressions on their names. An empty `skip` skips none."""
        self._program = program
        self._directory = directory
        self._options = ["--ginkgo.no-color", f"--ginkgo.seed={_SEED}", f"--ginkgo.focus={focus}"]
        self._options += [f"--ginkgo.skip={skip}"] if skip else []

    def version(self) -> str:
        """Return the suite's version. Raises LabError if it is not such a program."""
        try:
            return run([str(self._program), "--version"], timeout=_PLAN_SECONDS).strip()
        except (OSError, CommandError, TimeoutExpired) as error:
            raise LabError(f"{self._program} is not Kubernetes' e2e.test: {error}") from None

    def choose(self) -> ChosenCases:
        """Ask the suite for its tests by a dry run. Raises LabError if that fails or no test is chosen."""
        report = self._directory / "chosen.json"
        try:
            dry = ("--provider=skeleton", "--ginkgo.dry-run", f"--ginkgo.json-report={report}")
            run([str(self._program), *dry, *self._options], timeout=_PLAN_SECONDS)
            chosen = choose(report.read_bytes())
        except (OSError, CommandError, TimeoutExpired, msgspec.DecodeError) as error:
            raise LabError(f"{self._program} does not tell which tests it has: {error}") from None
        if not chosen.names:
            raise LabError("no test matches --focus and --skip; `--focus 'sig-network'` takes all of the network's")
        return chosen

    def start(
        self, process: int, total: int, coordinator: str, kubeconfig: Path, nodes: int, namespace: str
    ) -> StartedProgram[bytes]:
        """Start one of `total` processes in a network namespace. Raises OSError."""
        # With one process, Ginkgo does not ask the coordinator.
        parallel = [f"process={process}", f"total={max(total, 2)}", f"host={coordinator}"]
        options = [*self._options, *(f"--ginkgo.parallel.{each}" for each in parallel)]
        options += [f"--ginkgo.timeout={_MOST_SECONDS}s", "--ginkgo.output-interceptor-mode=none"]
        options += ["--provider=skeleton", f"--kubeconfig={kubeconfig}", f"--num-nodes={nodes}"]
        # Each process has a file of its own: another one may be reading the file that was written for it.
        registries = self._directory / f"registries-{process}.yaml"
        registries.write_text(json.dumps(REGISTRIES))
        # kubectl writes its cache into the home directory.
        places = {"HOME": str(self._directory), "TMPDIR": str(self._directory), "KUBECONFIG": str(kubeconfig)}
        places["KUBE_TEST_REPO_LIST"] = str(registries)
        with self._log(process).open("wb") as log:
            return start_program(
                [str(self._program), *options],
                namespace=namespace,
                output=log.fileno(),
                environment={**os.environ, **places, "GINKGO_PARALLEL_PROTOCOL": "HTTP"},
                directory=self._directory,
            )

    def last_words(self, process: int) -> str:
        """Return the end of what a process wrote."""
        with self._log(process).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_BYTES))
            return log.read().decode("utf-8", "replace")

    def _log(self, process: int) -> Path:
        return self._directory / f"{process}.log"


def kill(programs: Sequence[StartedProgram[bytes]]) -> None:
    """Kill processes with all that they started, and wait for them."""
    for each in programs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(each.pid, signal.SIGKILL)
    for each in programs:
        each.wait()
