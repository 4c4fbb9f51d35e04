"""Boots of the second kernel for a test run: what runs in each, what it reports, and a second try for one that hangs.

The machine appends one line of JSON to a file for each report. One process of the test run boots it and watches; it and
all others read that file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.lab.api.kubectls import DEBIAN, KubectlUnavailable, kubectl
from tests.uml.machine import Machine, MachineError

REPORTS = "NARTHEX_UML_REPORTS"
"""Names the file that reports are written to; set inside."""
MOST_SECONDS = 900.0
"""A machine that is shared with others may be slow."""
STALL_SECONDS = 200.0
"""Without a report for so long it hangs: this kernel does so once in a while."""
TRIES = 2
"""A kernel that hangs is booted once more for what is left: its faults are not ours. A second time is a failure."""
_PASSED_ON = ("CI", "HYPOTHESIS_PROFILE", "PYTHONPATH")


class Boots:
    """The boots for one group of tests, and the reports that come out of them.

    Where tests are spread over processes, the first that asks does the booting; the others read what is reported.
    """

    def __init__(self, shared: Path, names: Sequence[str], cwd: Path, turn: int = 0) -> None:
        """`shared` is a directory of this group, the same in all processes. `names` are the node ids of its tests; the
        n-th group at work at the same time says so by its `turn`."""
        self._shared = shared
        self._names = list(names)
        self._cwd = cwd
        self._turn = turn
        self._end = shared / "ended"
        """There when no more reports will come; says why, when something is amiss."""
        self._read = [0] * TRIES
        self._deadline = time.monotonic() + MOST_SECONDS
        self.told: dict[str, list[Mapping[str, object]]] = {}
        """Reports by the node id of their test, of the last try that it was in."""
        self.notes: dict[str, str] = {}
        """By node id: why it was run on a second boot."""
        try:
            shared.mkdir()
        except FileExistsError:
            self._watcher = None
            return
        self._watcher = threading.Thread(target=self._boot_all, name=shared.name)
        self._watcher.start()

    def close(self, at_once: bool) -> None:
        """End the machine, if this process booted it: when it is done, or at once."""
        if self._watcher is None:
            return
        if at_once:
            self._deadline = -math.inf
        self._watcher.join()

    def complete(self, name: str) -> bool:
        """Whether all reports of a test are there."""
        return any(report["when"] == "teardown" for report in self.told.get(name, ()))

    def wait(self, name: str) -> str:
        """Wait for a test's reports. Returns why they will not come; empty when they are there."""
        while True:
            over = self._end.exists() or time.monotonic() > self._deadline
            self._take_in()
            if self.complete(name):
                return ""
            if over:
                why = self._end.read_text() if self._end.exists() else ""
                return why or f"the second kernel told nothing of it within {MOST_SECONDS:.0f} s"
            time.sleep(0.02)

    # ---- the process that boots --------------------------------------------------------------------------------------

    def _boot_all(self) -> None:
        # What tests fetch must be here before the machine boots, which reaches no other one. Without it they say so.
        with contextlib.suppress(KubectlUnavailable):
            kubectl(DEBIAN)
        why = ""
        left, trouble = self._names, ""
        for number in range(TRIES):
            folder = self._shared / str(number)
            folder.mkdir()
            if number:
                (folder / "why").write_text(why)
            try:
                trouble, why = self._boot(folder, left)
            except OSError as error:
                trouble, why = "", str(error)
            self._take_in()
            left = [name for name in left if not self.complete(name)]
            if not trouble or not left:
                break
        self._end.write_text(why)

    def _boot(self, folder: Path, names: Sequence[str]) -> tuple[str, str]:
        """One boot: what went wrong with the kernel, if anything, and why there is no report of what has none."""
        argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *names]
        env = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        reports = folder / "reports"
        machine = Machine(folder, argv, {**env, REPORTS: str(reports)}, self._cwd, turn=self._turn)
        try:
            with machine:
                size, since = 0, time.monotonic()
                while machine.running:
                    machine.check_boot()
                    if time.monotonic() > self._deadline:
                        return "", f"the second kernel was not done within {MOST_SECONDS:.0f} s"
                    now = reports.stat().st_size if reports.exists() else 0
                    if now != size:
                        size, since = now, time.monotonic()
                    elif time.monotonic() - since > STALL_SECONDS:
                        raise MachineError(
                            f"the second kernel has told nothing for {STALL_SECONDS:.0f} s and was ended"
                        )
                    time.sleep(0.05)
            status = machine.status()
        except MachineError as error:
            return str(error), f"{error}\n{machine.output}"
        return "", f"the tests inside ended with exit status {status}, without this one:\n{machine.output}"

    # ---- everybody -----------------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Read the whole lines that are new."""
        for number in range(TRIES):
            folder = self._shared / str(number)
            if not (folder / "reports").exists():
                continue
            with (folder / "reports").open("rb") as file:
                file.seek(self._read[number])
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read[number] += len(whole)
            for line in whole.splitlines():
                report = json.loads(line)
                name = report["nodeid"]
                if report["when"] == "setup":
                    # What a machine that hung had begun to tell of it no longer counts.
                    self.told[name] = []
                    if number:
                        self.notes[name] = (folder / "why").read_text()
                self.told.setdefault(name, []).append(report)
