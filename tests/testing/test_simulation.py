"""The simulation of the whole proxy process: its properties hold, its runs repeat, and it finds faults that are put in."""

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from narthex.kube import manifests
from narthex.kube.manifests import ManifestSource
from narthex.kube.watch import Watch
from narthex.proxy.backends.ipvs.rules import RealChanges
from narthex.proxy.program import schedule as sync_schedule
from narthex.proxy.program.health import ProxyHealth
from narthex.proxy.program.schedule import FamilySchedule
from narthex.proxy.program.sync import FamilySync
from narthex.testing.simulation import writes as kernel_writes
from narthex.testing.simulation.command import main
from narthex.testing.simulation.kernel import SimulatedKernel
from narthex.testing.simulation.schedule import simulate

SEEDS = 1000
PARTS = 20
"""Each part is one test, so that processes of pytest share them."""


@pytest.mark.parametrize("part", range(PARTS))
def test_the_properties_hold_for_every_seed(part):
    violations = {}
    for seed in range(part, SEEDS, PARTS):
        result = simulate(seed)
        if result.violation:
            violations[seed] = result.violation
    assert not violations, f"replay one with: narthex-sim {min(violations)}"


def test_a_seed_gives_the_same_run_in_every_process():
    replays = [
        subprocess.run(
            [sys.executable, "-c", "from narthex.testing.simulation.command import main; main()", "7"],
            env={**os.environ, "PYTHONHASHSEED": hashes},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hashes in ("1", "2")
    ]
    assert replays[0] == replays[1]
    assert "everything heals" in replays[0]


@pytest.mark.parametrize("seeds", ["x", "3-1", "-3", "1-", ""])
def test_what_is_no_range_of_seeds_is_a_usage_error(seeds):
    result = CliRunner().invoke(main, ["--", seeds])
    assert result.exit_code == 2 and "is no seed or range of seeds" in result.output


def finds(text, seeds=300):
    return any(text in simulate(seed).violation for seed in range(seeds))


def test_it_finds_a_proxy_that_obeys_an_empty_list(monkeypatch):
    monkeypatch.setattr(Watch, "_judge", lambda *_: None)
    assert finds("the proxy removed the rules of steady")


def test_it_finds_a_proxy_that_starts_and_obeys_an_empty_list(monkeypatch):
    monkeypatch.setattr(FamilySync, "_is_doubtful", lambda *_: False)
    assert finds("the proxy removed the rules of steady")


def test_it_finds_a_contest_that_goes_on_since_repairs_take_long(monkeypatch):
    monkeypatch.setattr(sync_schedule, "CONTEST_SHARE", 0)
    assert finds("the proxy does not settle")


def test_it_finds_a_monitor_that_does_not_wait_for_transactions_under_way(monkeypatch):
    """The kernel counts a transaction before it notifies of it."""
    monkeypatch.setattr(SimulatedKernel, "wait_for_transactions", lambda _: None)
    assert finds("has no rules")


def test_it_finds_endpoints_that_leave_before_others_come(monkeypatch):
    def reals_last(change):
        return RealChanges(edited=change.edited, removed=change.removed), RealChanges(added=change.added)

    monkeypatch.setattr(kernel_writes, "real_writes", reals_last)
    assert finds("the proxy removed the rules of steady")


def test_it_finds_a_source_that_believes_in_half_a_file(monkeypatch):
    monkeypatch.setattr(manifests, "SETTLE_SECONDS", 0.0)
    assert finds("the proxy removed the rules of steady")


def test_it_finds_a_source_that_never_believes_in_a_deletion(monkeypatch):
    monkeypatch.setattr(ManifestSource, "_drop_settled", lambda _: None)
    assert finds("s ago and is still known")


def test_it_finds_repairs_that_wait_for_a_share_of_the_time(monkeypatch):
    def succeeded(self, now, periods, snapshot, done):
        plain(self, now, periods, snapshot, done)
        if "read" in done.seconds:
            self.settled_at = now + sync_schedule.READ_BACK_SHARE * done.seconds["read"]

    plain = FamilySchedule.succeeded
    monkeypatch.setattr(FamilySchedule, "succeeded", succeeded)
    assert finds("was without rules for")


def test_it_finds_a_health_check_that_does_not_know_of_missing_rules(monkeypatch):
    monkeypatch.setattr(ProxyHealth, "suspected", lambda *_: None)
    monkeypatch.setattr(sync_schedule, "CONTEST_REPAIRS", 1)
    assert finds("/healthz answers 200")
