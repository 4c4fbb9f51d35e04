"""The cluster's controllers at work: a turn whenever something has changed, or one of them has asked for it."""

from __future__ import annotations

import threading
import time
import traceback
from datetime import UTC, datetime

from narthex.lab.controllers.controller_manager import ControllerManager, run_until_stable
from narthex.lab.program.recording import HistoryRecorder
from narthex.lab.program.shared_registry import SharedRegistry

_ERROR_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE = 0.25
_PAUSES = 2.0
"""After a turn it rests so many times as long as the turn took: what comes in crowds is looked at together, and what comes alone
at once."""


class ControllerLoop:
    """`run` belongs to one thread."""

    def __init__(self, ledger: SharedRegistry, control: ControllerManager) -> None:
        self._ledger = ledger
        self._control = control
        self._news = threading.Event()
        self._done = 0
        self.problems: tuple[str, ...] = ()
        """What controllers cannot make out or may not write, in sentences."""
        self.recorder: HistoryRecorder | None = None
        """Is told of each turn. Belongs to whoever holds the objects' lock."""
        ledger.listen(self._news.set)

    @property
    def resting(self) -> bool:
        """All that has happened has been looked at."""
        with self._ledger.held() as registry:
            return registry.version == self._done

    def begin_anew(self, control: ControllerManager, recorder: HistoryRecorder) -> None:
        """From now on with controllers that know nothing yet, whose turns are recorded. The caller holds the objects' lock."""
        self._control, self.recorder = control, recorder
        self._news.set()

    def turn(self) -> float | None:
        """Do all there is to do now; seconds until something is due by itself."""
        with self._ledger.held() as registry:
            now = datetime.now(UTC)
            before = registry.version
            run_until_stable(self._control, registry, now)
            if self.recorder is not None:
                self.recorder.turned(now, before, datetime.now(UTC))
            self.problems = tuple(sorted(set(self._control.problems.values())))
            self._done = registry.version
            return self._control.next_due(registry, now)

    def run(self) -> None:
        """For good."""
        due: float | None = 0.0
        while True:
            self._news.wait(due)
            self._news.clear()
            began = time.monotonic()
            try:
                due = self.turn()
                time.sleep(min(_PAUSES * (time.monotonic() - began), _LONGEST_PAUSE))
            except Exception:
                # One fault must not end all care; what was not done is due still.
                traceback.print_exc()
                due = _ERROR_PAUSE_SECONDS
