"""Tests in this folder run on another kernel: `pytest tests/uml` boots it, runs them inside, and tells their results.

Outside, nothing of a test but its collection happens. Its reports come from the same test run inside, one line of JSON
each, and are passed on as they are; a test that the machine gave no report of has failed. So single tests, `-k`, `-x` and
reports for other programs work as everywhere. There are two boots side by side, so that two processors have work; they
begin with the run, and what they tell is passed on at its end.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from tests.uml.boots import REPORTS, Boots

HERE = Path(__file__).parent
INSIDE = REPORTS in os.environ
GROUPS = ("uml", "uml-scenarios")
SHARE = 4
"""One scenario of so many is in the first group, so that both take about as long."""
_BOOTS = pytest.StashKey[dict[str, Boots]]()


def pytest_itemcollected(item: pytest.Item) -> None:
    """They need root like other tests of kernels."""
    item.add_marker(pytest.mark.kernel)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Outside: the machines begin, in the first process of the test run."""
    config = session.config
    worker = getattr(config, "workerinput", None)
    if not INSIDE and not config.option.collectonly and worker and worker["workerid"] == "gw0":
        for item in session.items:
            if _is_ours(item):
                _boots_of(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:  # noqa: ARG001
    """Outside: the machine runs the test."""
    if INSIDE or not _is_ours(item):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports(item, _boots_of(item)):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    """Inside: write the report down."""
    report = (yield).get_result()
    if INSIDE:
        data = item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
        with Path(os.environ[REPORTS]).open("a") as out:
            out.write(json.dumps(data, default=str) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the machines. Other processes of this test run may wait for their reports, unless it is over early."""
    spread = hasattr(session.config, "workerinput")
    for boots in session.config.stash.get(_BOOTS, {}).values():
        boots.close(at_once=bool(session.shouldstop or session.shouldfail) or not spread)


def _is_ours(item: pytest.Item) -> bool:
    return HERE in item.path.parents and not item.get_closest_marker("skip")


def _boots_of(item: pytest.Item) -> Boots:
    """The boots that a test is in; they begin with the first who asks."""
    config, group = item.config, _group_of(item)
    boots = config.stash.setdefault(_BOOTS, {})
    if group not in boots:
        names = [each.nodeid for each in item.session.items if _is_ours(each) and _group_of(each) == group]
        base = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        shared = (base.parent if hasattr(config, "workerinput") else base) / group
        boots[group] = Boots(shared, names, config.rootpath, GROUPS.index(group))
    return boots[group]


def _group_of(item: pytest.Item) -> str:
    first = item.path.stem != "test_scenarios" or zlib.crc32(item.name.encode()) % SHARE == 0
    return GROUPS[0 if first else 1]


def _reports(item: pytest.Item, boots: Boots) -> list[pytest.TestReport]:
    why = boots.wait(item.nodeid)
    if why:
        return [_failed(item, why)]
    hook = item.config.hook
    told = boots.told[item.nodeid]
    reports = [hook.pytest_report_from_serializable(config=item.config, data=dict(data)) for data in told]
    if item.nodeid in boots.notes:
        reports[0].user_properties.append(("second boot", boots.notes[item.nodeid]))
    return reports


def _failed(item: pytest.Item, why: str) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=item.nodeid, location=item.location, keywords={}, outcome="failed", longrepr=why, when="call"
    )
