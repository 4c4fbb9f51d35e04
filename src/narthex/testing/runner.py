"""Run scenarios with all witnesses; a scenario that crashes does not stop the others."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from types import FrameType

import msgspec

from narthex.proxy.backends import BACKENDS
from narthex.testing import witnesses
from narthex.testing.findings import WitnessFinding, say
from narthex.testing.kernel import witness as kernel
from narthex.testing.kernel import world as kernel_world
from narthex.testing.scenario import Scenario, ScenarioFlow

_PR_SET_PDEATHSIG = 1

WITNESSES = ("plan", "rules", "kernel")


class ScenarioRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to check."""

    modes: tuple[str, ...] = ()
    """Empty: every mode of the file that has a backend."""
    against: tuple[str, ...] = WITNESSES
    skip_levels: frozenset[str] = frozenset()
    not_here: frozenset[str] = frozenset()
    """Modes that this kernel cannot do: the witness `kernel` is not asked for them."""

    def asks(self, against: str, mode: str) -> bool:
        """Return True if a witness is to be asked about a mode."""
        return against in self.against and not (against == "kernel" and mode in self.not_here)


def modes_of(scenario: Scenario, request: ScenarioRequest) -> tuple[str, ...]:
    """Return the modes in which to run a scenario, in the order of BACKENDS."""
    return tuple(mode for mode in BACKENDS if mode in scenario.modes and (not request.modes or mode in request.modes))


def hear(scenario: Scenario, request: ScenarioRequest) -> Iterator[WitnessFinding]:
    """Return all findings of one scenario, by mode and witness."""
    if scenario.level in request.skip_levels:
        return
    for mode in modes_of(scenario, request):
        flows = tuple(flow for flow in scenario.flows_in(mode) if flow.level not in request.skip_levels)
        if not flows and not scenario.steps_in(mode):
            continue
        for against in WITNESSES:
            if request.asks(against, mode):
                yield from _testify(scenario, mode, against, flows)


def hear_all(
    scenarios: Sequence[Scenario], request: ScenarioRequest, jobs: int
) -> Iterator[tuple[Scenario, list[WitnessFinding]]]:
    """Yield the findings of each scenario in order, running `jobs` scenarios at a time.

    The kernel witness mostly waits, so that more jobs than processors pay off.
    """
    if jobs <= 1 or len(scenarios) <= 1:
        for scenario in scenarios:
            yield scenario, list(hear(scenario, request))
        return
    pool = ProcessPoolExecutor(
        min(jobs, len(scenarios)),
        mp_context=multiprocessing.get_context("fork"),
        initializer=_die_with_parent,
        initargs=(os.getpid(),),
    )
    try:
        pending = [pool.submit(_heard, scenario, request) for scenario in scenarios]
        for scenario, future in zip(scenarios, pending, strict=True):
            yield scenario, future.result()
    except BaseException:
        # Stopped in the middle: the workers take their namespaces along (`_die_with_parent`).
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _die_with_parent(parent: int) -> None:
    """End this worker, and with it its namespaces, when its parent process ends."""

    def leave(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        """Delete this worker's namespaces and exit with the status that a shell shows for the signal."""
        kernel_world.close_all()
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        leave(signal.SIGTERM, None)


def _heard(scenario: Scenario, request: ScenarioRequest) -> list[WitnessFinding]:
    return list(hear(scenario, request))


def _testify(scenario: Scenario, mode: str, against: str, flows: tuple[ScenarioFlow, ...]) -> list[WitnessFinding]:
    try:
        if against == "kernel":
            return kernel.testify(scenario, mode, flows)
        return witnesses.testify(scenario, mode, against, flows)
    except Exception as error:
        # Whatever a witness breaks on is that witness' answer; the other files are heard all the same.
        said = {"error": f"{type(error).__name__}: {error}"}
        labels = [(flow.label, say(flow.expect)) for flow in flows]
        labels += [(f"step {step.number}", step.pick) for step in scenario.steps_in(mode)]
        return [
            WitnessFinding(
                scenario=scenario.name, label=label, mode=mode, against=against, expect=expect, got=said, ok=False
            )
            for label, expect in labels
        ]


class ScenarioCounts(msgspec.Struct, kw_only=True):
    """The totals of a run."""

    scenarios: int = 0
    flows: int = 0
    """Findings: one per flow or step, mode and witness."""
    ok: int = 0
    failed: int = 0
    invalid: int = 0
    """Files that are no scenario."""

    def add(self, findings: Iterable[WitnessFinding]) -> None:
        """Count them."""
        for finding in findings:
            self.flows += 1
            self.ok += finding.ok
            self.failed += not finding.ok

    @property
    def all_hold(self) -> bool:
        """Return True if something was checked and nothing failed."""
        return self.flows > 0 and not self.failed and not self.invalid


def clean_up_on_signals(signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGHUP)) -> None:
    """Turn signals into SystemExit, so that no namespace remains, and remove what a killed run left."""

    def leave(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        """Raise `SystemExit` with the status that a shell shows for the signal."""
        sys.exit(128 + number)

    for each in signals:
        signal.signal(each, leave)
    kernel_world.sweep()
