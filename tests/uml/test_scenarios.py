"""Every scenario of mode ipvs, with real packets through real virtual servers."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from tests.scenario_files import SCENARIOS

from narthex.testing.findings import print_said
from narthex.testing.kernel import witness as kernel
from narthex.testing.runner import ScenarioRequest, hear_all

MODE = "ipvs"
CASES = [
    pytest.param(scenario, MODE, id=scenario.name)
    for scenario in SCENARIOS
    if MODE in scenario.modes and scenario.level == "must"
]
ROUNDS = 2
"""Draws per target. IPVS takes turns: the second round shows every target that the first has not."""


@pytest.fixture(scope="session")
def heard(request):
    """Gives a scenario's findings, of all that this run has asked for."""
    kernel.FURTHER_DRAWS = ROUNDS
    asked = [item.callspec.params["scenario"] for item in request.session.items if _is_ours(item)]
    # Those whose steps wait for seconds to pass wait side by side. The others have one process: what a process costs on
    # this kernel is more than the silences that it would wait for beside others'.
    slow = [scenario for scenario in asked if scenario.steps_in(MODE)]
    quick = [scenario for scenario in asked if not scenario.steps_in(MODE)]
    what = ScenarioRequest(modes=(MODE,), against=("kernel",))
    coming = itertools.chain(hear_all(slow, what, len(slow)), hear_all(quick, what, 1))
    come = {}

    def of(scenario):
        while scenario.path not in come:
            other, findings = next(coming)
            come[other.path] = findings
        return come[scenario.path]

    return of


def _is_ours(item):
    return item.path == Path(__file__) and "scenario" in getattr(item, "callspec", _Nothing).params


class _Nothing:
    params = ()


@pytest.mark.parametrize(("scenario", "mode"), CASES)
def test_kernel_does_what_the_scenario_says(scenario, mode, heard):
    findings = heard(scenario)
    assert findings, f"no flow of {scenario.name} is of mode {mode}"
    wrong = [finding for finding in findings if not finding.ok]
    assert not wrong, "\n".join(
        f"{each.label}: expected {print_said(each.expect)}, got {print_said(each.got)}" for each in wrong
    )
