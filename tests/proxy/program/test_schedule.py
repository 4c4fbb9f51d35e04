"""When another program competes for our rules: the repairs of one family become rarer, whatever a repair costs."""

import math
from itertools import pairwise

import msgspec
import pytest

from narthex.model.net import IPFamily
from narthex.model.store import Snapshot
from narthex.netfilter.ast import TouchedPart
from narthex.proxy.program.schedule import CONTEST_BACKOFF, LONGEST_DEFERRAL, FamilySchedule, LookBudget, SyncPeriods
from narthex.proxy.program.sync import Look, SyncResult
from narthex.testing.build import plan

SNAPSHOT, PERIODS = Snapshot(), SyncPeriods(watched=True)


def repaired(schedule, every, seconds, times, *, removed=False):
    """Repair what another program changed at once after each repair; return the times of the repairs.

    `removed`: the other program only removed rules, so a repair waits for nothing.
    """
    now, found = 0.0, []
    done = SyncResult(
        family=IPFamily.IPV4, plan=plan(), first=False, drift=True, seconds={"read": seconds}, changes=True
    )
    waits = msgspec.structs.replace(done, drift=False, deferred=True, changes=None)
    for _ in range(times):
        schedule.suspect(None, PERIODS)
        now = max(now + every, schedule.due(SNAPSHOT) + seconds)
        if now - seconds < schedule.settled_at and not removed:
            schedule.succeeded(now, PERIODS, SNAPSHOT, waits)
            now = max(now, schedule.due(SNAPSHOT) + seconds)
        schedule.succeeded(now, PERIODS, SNAPSHOT, done)
        found.append(now)
    return found


@pytest.mark.parametrize(("every", "seconds"), [(0.5, 0.01), (1.9, 0.3), (4.8, 1.2), (19.0, 4.0)])
def test_repairs_of_a_contest_become_rare(every, seconds):
    schedule = FamilySchedule(None, LookBudget())
    times = repaired(schedule, every, seconds, 15)
    assert schedule.contests
    assert times[-1] - times[-2] >= CONTEST_BACKOFF.longest


@pytest.mark.parametrize(("every", "seconds"), [(0.5, 0.01), (1.9, 0.3), (4.8, 1.2), (19.0, 4.0)])
def test_repairs_of_removed_rules_do_not_become_rare(every, seconds):
    schedule = FamilySchedule(None, LookBudget())
    times = repaired(schedule, every, seconds, 15, removed=True)
    assert schedule.contests
    assert (
        max(later - before for before, later in pairwise(times))
        <= max(every, LONGEST_DEFERRAL + seconds, 2 * seconds) + 1e-6
    )


@pytest.mark.parametrize("every", [0.1, 1.0])
def test_looks_at_what_another_program_wrote_take_a_quarter_of_the_time(every):
    """It changes our rules all the time, and none of them is missing."""
    schedule, seconds, looks = FamilySchedule(None, LookBudget()), 2.0, 0
    repaired(schedule, 0.5, seconds, 15)
    now = began = schedule.ended
    waits = SyncResult(family=IPFamily.IPV4, plan=plan(), first=False, deferred=True, seconds={"read": seconds})
    while now < began + CONTEST_BACKOFF.longest - seconds:
        now += every
        schedule.suspect(None, PERIODS)
        if now >= schedule.due(SNAPSHOT):
            now += seconds
            schedule.succeeded(now, PERIODS, SNAPSHOT, waits)
            looks += 1
    assert 1 <= looks <= CONTEST_BACKOFF.longest / (4 * seconds) + 1


@pytest.mark.parametrize("inconclusive", [False, True])
@pytest.mark.parametrize("seconds", [0.01, 0.3, 2.0])
def test_checks_of_parts_take_at_most_half_of_the_time_and_looks_come_in_the_end(seconds, inconclusive):
    """Another program removes rules of a chain all the time."""
    schedule, spent, looks = FamilySchedule(None, LookBudget()), [], 0
    repaired(schedule, 0.5, seconds, 15)
    schedule.settled_at, now, began = math.inf, schedule.ended, schedule.ended
    while now < began + 100:
        now += 0.1
        schedule.suspect(frozenset((TouchedPart("nat", "KUBE-SERVICES"),)), PERIODS)
        look = schedule.look(now)
        parts_only = look is Look.MISSING_PARTS
        looks += look is Look.MISSING
        if look is not Look.NOTHING:
            spent.append(seconds)
            now += seconds
            done = SyncResult(
                family=IPFamily.IPV4,
                plan=plan(),
                first=False,
                drift=parts_only,
                parts_only=parts_only,
                inconclusive=parts_only and inconclusive,
                seconds={"read": seconds},
                changes=True,
            )
            schedule.succeeded(now, PERIODS, SNAPSHOT, done)
            schedule.settled_at = math.inf
    assert sum(spent) <= 0.55 * (now - began)
    assert len(spent) >= (now - began) / (2 * max(LONGEST_DEFERRAL, 4 * seconds))
    assert bool(looks) is inconclusive


@pytest.mark.parametrize(("every", "seconds"), [(2.6, 0.01), (6.5, 1.2), (60.0, 4.0)])
def test_changes_now_and_then_are_no_contest(every, seconds):
    schedule = FamilySchedule(None, LookBudget())
    repaired(schedule, every, seconds, 15)
    assert not schedule.contests
