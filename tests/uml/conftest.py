"""Tests in this folder run on another kernel: `pytest tests/uml` boots it, runs them inside, and tells their results.

Outside, nothing of a test but its collection happens. Its reports come from the same test run inside, one line of JSON
each, and are passed on as they are; a test that the machine gave no report of has failed. So single tests, `-k`, `-x` and
reports for other programs work as everywhere. The scenarios have two boots of their own, side by side, so that two processors have work.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
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
_PASSED_ON = ("CI", "HYPOTHESIS_PROFILE", "PYTHONPATH")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """They need root like other tests of kernels. Those of one boot stay in one process when tests are spread."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.kernel)
            if not INSIDE:
                item.add_marker(pytest.mark.xdist_group(_boot_of(item)))


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
        runs[boot] = Run(config, mine)
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


def pytest_unconfigure(config):
    """End the machine, also after `-x`."""
    for run in config.stash.get(_RUNS, {}).values():
        run.close()


class Run:
    """One boot, and the reports that come out of it."""

    def __init__(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self._config = config
        self._folder = tempfile.TemporaryDirectory(prefix="narthex-uml-")
        shared = Path(self._folder.name)
        self._file = shared / "reports"
        self._read = 0
        self._reports: dict[str, list[pytest.TestReport]] = {}
        self._trouble = ""
        self._deadline = time.monotonic() + MOST_SECONDS
        root = config.rootpath
        argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        argv += [_plain(item.nodeid) for item in items]
        env = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        self._machine = Machine(shared, argv, env={**env, REPORTS: str(self._file)}, cwd=root)
        try:
            self._machine.__enter__()
        except (MachineError, OSError) as error:
            self._trouble = str(error)

    def close(self) -> None:
        """End the machine and forget what it wrote."""
        self._machine.__exit__(None, None, None)
        self._folder.cleanup()

    def reports(self, item: pytest.Item) -> Iterator[pytest.TestReport]:
        """What the machine reported of a test, up to its end."""
        name = _plain(item.nodeid)
        while not self._complete(name) and not self._trouble:
            self._take_in()
            if not self._complete(name):
                self._trouble = self._ended()
                time.sleep(0.02)
        reports = self._reports.get(name, [])
        if not self._complete(name):
            reports = [_failed(item, self._trouble)]
        for report in reports:
            report.nodeid = item.nodeid
            yield report

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
            if self._machine.running and time.monotonic() < self._deadline:
                return ""
            status = self._machine.status()
        except MachineError as error:
            return f"{error}\n{self._machine.output}"
        self._take_in()
        return f"the tests inside ended with exit status {status}, without this one:\n{self._machine.output}"


_RUNS = pytest.StashKey[dict[str, Run]]()


def _plain(name: str) -> str:
    """The test's name without the group that xdist appends."""
    return re.sub(r"@uml[-\w]*$", "", name)


def _boot_of(item: pytest.Item) -> str:
    if item.path.stem != "test_scenarios":
        return "uml"
    return f"uml-scenarios-{zlib.crc32(_plain(item.name).encode()) % 2}"


def _failed(item: pytest.Item, why: str) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=item.nodeid, location=item.location, keywords={}, outcome="failed", longrepr=why, when="call"
    )
