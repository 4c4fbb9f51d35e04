"""Tests in this folder run on another kernel: `pytest tests/uml` boots it, runs them inside, and tells their results.

Outside, nothing of a test but its collection happens. Its reports come from the same test run inside, one line of JSON
each, and are passed on as they are; a test that the machine gave no report of has failed. So single tests, `-k`, `-x` and
reports for other programs work as everywhere. The scenarios have two boots of their own, side by side, so that two
processors have work.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from uml.machine import Machine, MachineError

HERE = Path(__file__).parent
REPORTS = "NARTHEX_UML_REPORTS"
"""Names the file that reports are written to; set inside."""
INSIDE = REPORTS in os.environ
MOST_SECONDS = 900.0
"""A machine that is shared with others may be slow."""
STALL_SECONDS = 240.0
"""Without a report for so long it hangs: this kernel does so once in a while."""
_PASSED_ON = ("CI", "HYPOTHESIS_PROFILE", "PYTHONPATH")


def pytest_itemcollected(item):
    """They need root like other tests of kernels."""
    item.add_marker(pytest.mark.kernel)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):  # noqa: ARG001
    """Outside: the machine runs the test."""
    if INSIDE or HERE not in item.path.parents or item.get_closest_marker("skip"):
        return None
    config = item.config
    runs = config.stash.setdefault(_RUNS, {})
    boot = _boot_of(item)
    if boot not in runs:
        mine = [each for each in item.session.items if HERE in each.path.parents and _boot_of(each) == boot]
        runs[boot] = Run(config, boot, mine)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in runs[boot].reports(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    """Inside: write the report down."""
    report = (yield).get_result()
    if INSIDE:
        data = item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
        with Path(os.environ[REPORTS]).open("a") as out:
            out.write(json.dumps(data, default=str) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    """End the machines. Other processes of this test run may wait for their reports, unless it is over early."""
    for run in session.config.stash.get(_RUNS, {}).values():
        run.close(at_once=bool(session.shouldstop or session.shouldfail))


class Run:
    """One boot, and the reports that come out of it.

    Where tests are spread over processes, the first that needs the boot does it; the others read what it reports.
    """

    def __init__(self, config: pytest.Config, boot: str, items: list[pytest.Item]) -> None:
        self._config = config
        self._spread = hasattr(config, "workerinput")
        base = config._tmp_path_factory.getbasetemp()
        shared = (base.parent if self._spread else base) / boot
        self._file = shared / "reports"
        self._end = shared / "ended"
        """There when the machine has ended; says why it could not even begin."""
        self._read = 0
        self._reports: dict[str, list[pytest.TestReport]] = {}
        self._trouble = ""
        self._deadline = time.monotonic() + MOST_SECONDS
        argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        argv += [item.nodeid for item in items]
        env = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        self._machine = Machine(shared, argv, env={**env, REPORTS: str(self._file)}, cwd=config.rootpath)
        try:
            shared.mkdir()
        except FileExistsError:
            self._watcher = None
            return
        self._watcher = threading.Thread(target=self._boot, name=boot)
        self._watcher.start()

    def _boot(self) -> None:
        """Be the machine's company until it ends."""
        why = ""
        try:
            with self._machine:
                size, since = 0, time.monotonic()
                while self._machine.running and time.monotonic() < self._deadline:
                    time.sleep(0.05)
                    now = self._file.stat().st_size if self._file.exists() else 0
                    if now != size:
                        size, since = now, time.monotonic()
                    elif time.monotonic() - since > STALL_SECONDS:
                        why = f"the machine has told nothing for {STALL_SECONDS:.0f} s and was ended"
                        break
        except (MachineError, OSError) as error:
            why = str(error)
        self._end.write_text(why)

    def close(self, at_once: bool) -> None:
        """End the machine, if this process began it: when it is done, or at once."""
        if self._watcher is None:
            return
        if at_once or not self._spread:
            self._deadline = -math.inf
        self._watcher.join()

    def reports(self, item: pytest.Item) -> Iterator[pytest.TestReport]:
        """What the machine reported of a test, up to its end."""
        name = item.nodeid
        while not self._complete(name) and not self._trouble:
            self._take_in()
            if not self._complete(name):
                self._trouble = self._ended()
                time.sleep(0.05)
        reports = self._reports.get(name, [])
        if not self._complete(name):
            reports = [_failed(item, self._trouble)]
        yield from reports

    def _complete(self, name: str) -> bool:
        return any(report.when == "teardown" for report in self._reports.get(name, ()))

    def _take_in(self) -> None:
        """Read the whole lines that are new."""
        if not self._file.exists():
            return
        with self._file.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            data = json.loads(line)
            report = self._config.hook.pytest_report_from_serializable(config=self._config, data=data)
            self._reports.setdefault(report.nodeid, []).append(report)

    def _ended(self) -> str:
        """Why no more reports will come; empty while they may."""
        try:
            self._machine.check_boot()
            if not self._end.exists() and time.monotonic() < self._deadline:
                return ""
            self._take_in()
            why = self._end.read_text() if self._end.exists() else ""
            status = 0 if why else self._machine.status()
        except MachineError as error:
            return f"{error}\n{self._machine.output}"
        return why or f"the tests inside ended with exit status {status}, without this one:\n{self._machine.output}"


_RUNS = pytest.StashKey[dict[str, Run]]()


def _boot_of(item: pytest.Item) -> str:
    if item.path.stem != "test_scenarios":
        return "uml"
    return f"uml-scenarios-{zlib.crc32(item.name.encode()) % 2}"


def _failed(item: pytest.Item, why: str) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=item.nodeid, location=item.location, keywords={}, outcome="failed", longrepr=why, when="call"
    )
