"""The loop that runs the cluster's controllers, and records their history on request."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from narthex.lab.controllers.controller_manager import ControllerManager, lab_controllers, run_until_stable
from narthex.lab.faults import InjectedFault
from narthex.lab.program.recording import HistoryRecorder
from narthex.lab.program.shared_registry import SharedRegistry
from narthex.lab.program.state import LabError
from narthex.model.backoff import Backoff
from narthex.runtime.reconciler import Reconciler, Throttle

_BACKOFF = Backoff(0.5, 0.5)
"""An error in one call does not end the controllers' work; keys that were not reconciled are still due."""
_THROTTLE = Throttle(share=2.0, longest=0.25)
"""Changes that come together are handled in one call, a single change at once."""


class ControllerLoop:
    """Runs the controllers when objects change or a key becomes due. `run` belongs to one thread."""

    def __init__(self, registry: SharedRegistry, manager: ControllerManager) -> None:
        self._registry = registry
        self._manager = manager
        self._reconciler = Reconciler(throttle=_THROTTLE, backoff=_BACKOFF)
        self._done = 0
        self._recorder: HistoryRecorder | None = None
        """Guarded by the registry's lock."""
        self.problems: tuple[str, ...] = ()
        """Current errors of the controllers, as sentences."""
        registry.listen(self._reconciler.wake)

    @property
    def idle(self) -> bool:
        """True if the controllers have handled all changes."""
        with self._registry.held() as registry:
            return registry.version == self._done

    def reconcile(self) -> float:
        """Do what is due now; return the seconds until something is due without a change."""
        with self._registry.held() as registry:
            now = datetime.now(UTC)
            before = registry.version
            run_until_stable(self._manager, registry, now)
            if self._recorder is not None:
                self._recorder.record_controllers(now, before, datetime.now(UTC))
            self.problems = tuple(sorted(set(self._manager.problems.values())))
            self._done = registry.version
            due = self._manager.next_due(registry, now)
            return math.inf if due is None else due

    def run(self) -> None:
        """Run the controllers until the process ends."""
        self._reconciler.run(self.reconcile)

    def start_recording(self, path: Path, lab: str, faults: Iterable[InjectedFault]) -> Path:
        """Record the history to a new file; return its path. Raises LabError."""
        with self._registry.held() as registry:
            if self._recorder is not None:
                raise LabError(f"a recording to {self._recorder.path} is running; `narthex lab record --end` ends it")
            now = datetime.now(UTC)
            try:
                self._recorder = HistoryRecorder(path, lab, registry.store, now)
            except FileExistsError:
                raise LabError(f"{path} already exists; choose another name") from None
            except OSError as error:
                raise LabError(f"cannot write {path}: {error.strerror}") from None
            for fault in faults:
                self._recorder.record_fault(fault, now)
            # A replay starts without the controllers' earlier state, so the recording does too.
            self._manager = lab_controllers()
            self._reconciler.wake()
        return path

    def stop_recording(self) -> Path:
        """End the recording; return the path of its file. Raises LabError if none is running."""
        with self._registry.held():
            recorder, self._recorder = self._recorder, None
            if recorder is None:
                raise LabError("no recording is running; `narthex lab record FILE` starts one")
            recorder.close(datetime.now(UTC))
        return recorder.path

    def record_fault(self, fault: InjectedFault, started: bool) -> None:
        """Record the start or end of a fault if a recording is running."""
        with self._registry.held():
            if self._recorder is not None and started:
                self._recorder.record_fault(fault, datetime.now(UTC))
            elif self._recorder is not None:
                self._recorder.record_fault_end(fault.number, datetime.now(UTC))
