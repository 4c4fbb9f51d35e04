"""Every scenario of ours with real packets, in every mode that this kernel can do."""

from __future__ import annotations

import pytest
from tests.proxy.kernel.modes import MODES_HERE
from tests.scenario_files import SCENARIOS

from narthex.testing.findings import print_said
from narthex.testing.kernel import witness as kernel

CASES = [
    pytest.param(scenario, mode, id=f"{scenario.name}-{mode}")
    for scenario in SCENARIOS
    for mode in MODES_HERE
    if mode in scenario.modes and scenario.level == "must"
]
"""Quirks are where this proxy does better on purpose; tests/testing/test_scenario_files.py keeps their list."""


@pytest.mark.kernel
@pytest.mark.parametrize(("scenario", "mode"), CASES)
def test_kernel_does_what_the_scenario_says(scenario, mode):
    wrong = [finding for finding in kernel.testify(scenario, mode, scenario.flows_in(mode)) if not finding.ok]
    assert not wrong, "\n".join(
        f"{each.label}: expected {print_said(each.expect)}, got {print_said(each.got)}" for each in wrong
    )
