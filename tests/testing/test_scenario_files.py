"""Every scenario of ours, in every mode that has a backend, against the plan and against the rendered rules."""

import pytest
from tests.scenario_files import SCENARIOS as ALL

from narthex.proxy.backends import BACKENDS
from narthex.testing import witnesses
from narthex.testing.findings import print_said

SCENARIOS = {scenario.name: scenario for scenario in ALL}
CASES = [
    pytest.param(scenario, mode, against, id=f"{name}-{mode}-{against}")
    for name, scenario in SCENARIOS.items()
    for mode in BACKENDS
    for against in ("plan", "rules")
    if mode in scenario.modes
]
DONE_BETTER = {"no-endpoints-host-upstream", "no-endpoints-node-port-upstream"}
"""Quirks of upstream that are not imitated; docs/reference/differences.md says why."""


@pytest.mark.parametrize(
    ("scenario", "mode", "against"), [case for case in CASES if case.values[0].name not in DONE_BETTER]
)
def test_witness_says_what_the_scenario_says(scenario, mode, against):
    wrong = [
        finding for finding in witnesses.testify(scenario, mode, against, scenario.flows_in(mode)) if not finding.ok
    ]
    assert not wrong, "\n".join(
        f"{each.label}: expected {print_said(each.expect)}, got {print_said(each.got)}" for each in wrong
    )


@pytest.mark.parametrize("name", sorted(DONE_BETTER))
def test_a_quirk_done_better_is_declared_and_still_differs(name):
    scenario = SCENARIOS[name]
    assert scenario.level == "quirk"
    modes = [mode for mode in BACKENDS if mode in scenario.modes]
    assert modes and not all(
        finding.ok for mode in modes for finding in witnesses.testify(scenario, mode, "plan", scenario.flows_in(mode))
    )


def test_there_are_enough_of_them():
    ours = [scenario for scenario in SCENARIOS.values() if set(scenario.modes) & BACKENDS.keys()]
    assert len(ours) >= 66
