"""The cluster's controllers at work: a turn whenever something has changed, or one of them has asked for it."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from narthex.lab.controllers.controller_manager import ControllerManager, run_until_stable
from narthex.lab.program.recording import HistoryRecorder
from narthex.lab.program.shared_registry import SharedRegistry
from narthex.linux.clock import SystemClock
from narthex.model.backoff import Backoff
from narthex.runtime.reconciler import Reconciler, Throttle

_BACKOFF = Backoff(0.5, 0.5)
"""An error in one turn does not end the controllers' work; what was not done is still due."""
_THROTTLE = Throttle(share=2.0, longest=0.25)
"""Changes that come together are handled in one turn, a single change at once."""


class ControllerLoop:
    """`run` belongs to one thread."""

    def __init__(self, ledger: SharedRegistry, control: ControllerManager) -> None:
        self._ledger = ledger
        self._control = control
        self._reconciler = Reconciler(SystemClock(), throttle=_THROTTLE, backoff=_BACKOFF)
        self._done = 0
        self.problems: tuple[str, ...] = ()
        """What controllers cannot make out or may not write, in sentences."""
        self.recorder: HistoryRecorder | None = None
        """Is told of each turn. Belongs to whoever holds the objects' lock."""
        ledger.listen(self._reconciler.wake)

    @property
    def resting(self) -> bool:
        """All that has happened has been looked at."""
        with self._ledger.held() as registry:
            return registry.version == self._done

    def begin_anew(self, control: ControllerManager, recorder: HistoryRecorder) -> None:
        """From now on with controllers that know nothing yet, whose turns are recorded. The caller holds the objects' lock."""
        self._control, self.recorder = control, recorder
        self._reconciler.wake()

    def turn(self) -> float:
        """Do what is due now; return the seconds until something is due without a change."""
        with self._ledger.held() as registry:
            now = datetime.now(UTC)
            before = registry.version
            run_until_stable(self._control, registry, now)
            if self.recorder is not None:
                self.recorder.turned(now, before, datetime.now(UTC))
            self.problems = tuple(sorted(set(self._control.problems.values())))
            self._done = registry.version
            due = self._control.next_due(registry, now)
            return math.inf if due is None else due

    def run(self) -> None:
        """Take turns for good."""
        self._reconciler.run(self.turn)
