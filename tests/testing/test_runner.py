"""One scenario that breaks does not stop the others; counts and modes."""

import pytest

from narthex.proxy.backends import BACKENDS
from narthex.testing import runner, witnesses
from narthex.testing.findings import WitnessFinding
from narthex.testing.runner import ScenarioCounts, ScenarioRequest, hear, hear_all, modes_of
from narthex.testing.scenario import parse

FLOW = {"label": "one", "from": "10.64.1.200", "to": "10.64.2.10", "port": 80, "expect": "none"}
PURE = ("plan", "rules")


def scenario(name="x", **more):
    """A scenario with one flow that nothing touches."""
    return parse({"name": name, "node": {"name": "a", "ips": ["10.20.0.11"]}, "flows": [FLOW], **more}, "x.yaml", "x")


def test_each_mode_and_witness_gives_one_finding():
    said = list(hear(scenario(modes=list(BACKENDS)), ScenarioRequest(against=PURE)))
    assert [(finding.mode, finding.against) for finding in said] == [(m, a) for m in BACKENDS for a in PURE]
    assert all(finding.ok and finding.got == "none" for finding in said)


def test_modes_without_backend_are_not_run(monkeypatch):
    monkeypatch.setattr(runner, "BACKENDS", {mode: BACKENDS[mode] for mode in BACKENDS if mode != "ipvs"})
    assert modes_of(scenario(modes=["ipvs", "iptables"]), ScenarioRequest()) == ("iptables",)
    assert modes_of(scenario(modes=["ipvs"]), ScenarioRequest()) == ()
    assert modes_of(scenario(), ScenarioRequest(modes=("nftables",))) == ("nftables",)


def test_levels_are_left_out():
    request = ScenarioRequest(against=PURE, skip_levels=frozenset({"quirk"}))
    assert not list(hear(scenario(level="quirk"), request))
    both = [FLOW, {**FLOW, "label": "two", "level": "quirk"}]
    assert {finding.label for finding in hear(scenario(flows=both), request)} == {"one"}


def test_a_witness_that_breaks_fails_its_flows_only(monkeypatch):
    def broken(*_):
        raise RuntimeError("no such table")

    monkeypatch.setitem(witnesses.ANSWERS, "rules", broken)
    said = list(hear(scenario(), ScenarioRequest(modes=("nftables",), against=PURE)))
    assert [finding.ok for finding in said] == [True, False]
    assert said[1].got == {"error": "RuntimeError: no such table"}
    assert runner.WITNESSES == ("plan", "rules", "kernel")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_several_at_a_time_keep_their_order():
    scenarios = [scenario(f"s{number}") for number in range(5)]
    heard = list(hear_all(scenarios, ScenarioRequest(against=("plan",)), jobs=3))
    assert [(case.name, {finding.scenario for finding in said}) for case, said in heard] == [
        (f"s{number}", {f"s{number}"}) for number in range(5)
    ]


def test_counts():
    good = WitnessFinding(
        scenario="x", label="one", mode="nftables", against="plan", expect="none", got="none", ok=True
    )
    counts = ScenarioCounts()
    assert not counts.all_hold
    counts.add([good, good])
    assert counts.all_hold and (counts.flows, counts.ok, counts.failed) == (2, 2, 0)
    counts.invalid += 1
    assert not counts.all_hold
