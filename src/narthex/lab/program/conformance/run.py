"""A run of the suite in a lab of its own, from the image of its pods to the removal of everything."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from narthex.kube.client import ApiError, writing
from narthex.lab.conformance import CaseOutput, ChosenCases, lost, result_of
from narthex.lab.program import labs
from narthex.lab.program.conformance.coordinator import Coordinator
from narthex.lab.program.conformance.image import make_image
from narthex.lab.program.conformance.suite import Suite, kill
from narthex.lab.program.options import LabOptions
from narthex.lab.program.state import LabError, LabState, StateDirectory
from narthex.linux.namespaces import in_namespace
from narthex.linux.run import CommandError, StartedProgram
from narthex.runtime.process import ended_by_signal

_POLL_SECONDS = 0.1
_ZONES = 3
"""Tests of topology need three, and some of them two nodes in each."""
_LABEL_SECONDS = 60.0
"""Time for one write; it takes milliseconds unless the machine is busy."""


class ConformanceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to run, and in which lab."""

    e2e: Path
    agnhost: Path
    name: str
    lab: LabOptions
    """The lab without the image of the tests' pods."""
    processes: int
    focus: str
    skip: str = ""


class ConformanceProgress(NamedTuple):
    """How far a run is."""

    done: int
    total: int
    failed: int
    last: CaseOutput | None = None
    """The test that has just ended."""


class ConformanceRun(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a run."""

    version: str
    seconds: float
    """Time from the start of the suite's processes to their end, without the lab's start."""
    results: tuple[CaseOutput, ...]
    """In the order in which the tests ended."""


def run_suite(options: ConformanceOptions, report: Callable[[ConformanceProgress], None]) -> ConformanceRun:
    """Run the suite; nothing is left afterwards, also after SIGINT and SIGTERM.

    Raises:
        LabError: The lab cannot start, the suite cannot run, or a signal ended it.
    """
    stopped = threading.Event()
    with ended_by_signal(stopped.set), _directory() as directory:
        suite = Suite(options.e2e, directory, options.focus, options.skip)
        version, chosen = suite.version(), suite.choose()
        try:
            images = make_image(directory / "image", options.agnhost)
        except (OSError, CommandError) as error:
            raise LabError(f"the image of the tests' pods cannot be made: {error}") from None
        _check(stopped)
        with _lab(options, images) as lab:
            _check(stopped)
            run = _Run(suite, chosen, options, lab)
            try:
                seconds = run.finish(stopped, report)
            finally:
                run.close()
        return ConformanceRun(version=version, seconds=seconds, results=tuple(run.results))


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="narthex-conformance-"))
    try:
        # Pods with users of their own read the image.
        path.chmod(0o755)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _lab(options: ConformanceOptions, images: tuple[str, ...]) -> Iterator[LabState]:
    """Start the lab and return its state; remove it at the end."""
    started = labs.up(options.name, msgspec.structs.replace(options.lab, images=images))
    try:
        asyncio.run(_label_zones(started.state))
        yield started.state
    finally:
        labs.down(options.name)


async def _label_zones(lab: LabState) -> None:
    """Spread the nodes over zones, which tests of topology need. Raises LabError."""
    try:
        async with writing(labs.access_of(lab), _LABEL_SECONDS) as api:
            for number, node in enumerate(lab.nodes):
                zone = {"topology.kubernetes.io/zone": f"zone-{number % _ZONES + 1}"}
                await api.patch(f"/api/v1/nodes/{node.name}", {"metadata": {"labels": zone}})
    except ApiError as error:
        raise LabError(f"the nodes cannot be labelled with their zones: {error}") from None


def _check(stopped: threading.Event) -> None:
    if stopped.is_set():
        raise LabError("interrupted before the first test; nothing is left")


class _Run:
    """The suite's processes and what they have reported."""

    def __init__(self, suite: Suite, chosen: ChosenCases, options: ConformanceOptions, lab: LabState) -> None:
        """Start the processes where a client outside the cluster is, which reaches nodes and load balancers."""
        self._suite = suite
        self._chosen = chosen
        with in_namespace(lab.outside):
            self._coordinator = Coordinator(chosen, options.processes)
        kubeconfig = StateDirectory(lab.name).node_kubeconfig
        self._programs: dict[int, StartedProgram[bytes]] = {}
        self._ended: set[int] = set()
        self.results: list[CaseOutput] = []
        try:
            for process in range(1, options.processes + 1):
                self._programs[process] = suite.start(
                    process, options.processes, self._coordinator.address, kubeconfig, options.lab.nodes, lab.outside
                )
        except BaseException:
            self.close()
            raise

    def finish(self, stopped: threading.Event, report: Callable[[ConformanceProgress], None]) -> float:
        """Wait for the end and return its time in seconds. Raises LabError."""
        begin = time.monotonic()
        report(self._progress())
        while not stopped.is_set():
            running = self._poll()
            self._take(report, _POLL_SECONDS if running else 0.0)
            if not running and self._coordinator.reports.empty():
                self._note_lost()
                return round(time.monotonic() - begin, 3)
        raise LabError(f"interrupted after {len(self.results)} of {len(self._chosen.names)} tests; nothing is left")

    def close(self) -> None:
        """Kill what still runs."""
        kill(list(self._programs.values()))
        self._coordinator.close()

    def _poll(self) -> bool:
        """Return True while a process runs."""
        for process, program in self._programs.items():
            if process not in self._ended and program.poll() is not None:
                self._ended.add(process)
                self._coordinator.ended(process)
        return len(self._ended) < len(self._programs)

    def _take(self, report: Callable[[ConformanceProgress], None], patience: float) -> None:
        try:
            found = self._coordinator.reports.get(timeout=patience)
        except queue.Empty:
            return
        output = result_of(found)
        if not found.is_test:
            raise LabError(f"the suite's {found.leaf_node_type} failed: {output.result.reason}")
        self.results.append(output)
        report(self._progress(output))

    def _progress(self, last: CaseOutput | None = None) -> ConformanceProgress:
        failed = sum(each.result.state == "failed" for each in self.results)
        return ConformanceProgress(len(self.results), len(self._chosen.names), failed, last)

    def _note_lost(self) -> None:
        """Add a result for each test of which no process reported anything. Raises LabError if that holds for all."""
        words = {process: self._suite.last_words(process) for process in self._programs}
        said = next((text for process, text in words.items() if self._programs[process].returncode), words[1])
        last = next((line for line in reversed(said.splitlines()) if line.strip()), "it wrote nothing")
        if not self.results:
            raise LabError(f"the suite ended before its first test: {last.strip()}")
        for name in sorted(self._chosen.names - {each.result.name for each in self.results}):
            self.results.append(lost(name, f"the suite ended before it reported this test: {last.strip()}"))
