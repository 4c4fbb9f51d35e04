"""When another program competes for our rules: the repairs of one family become rarer, whatever a repair costs."""

import pytest

from narthex.model.net import IPFamily
from narthex.model.store import Snapshot
from narthex.proxy.program.schedule import CONTEST_BACKOFF, FamilySchedule, SyncPeriods
from narthex.proxy.program.sync import SyncResult
from narthex.testing.build import plan

SNAPSHOT, PERIODS = Snapshot(), SyncPeriods(watched=True)


def repaired(schedule, every, seconds, times):
    """Repair what another program changed at once after each repair; return the times of the repairs."""
    now, found = 0.0, []
    done = SyncResult(
        family=IPFamily.IPV4, plan=plan(), first=False, drift=True, seconds={"read": seconds}, changes=True
    )
    for _ in range(times):
        schedule.suspect(None, PERIODS)
        now = max(now + every, schedule.due(SNAPSHOT) + seconds)
        schedule.succeeded(now, PERIODS, SNAPSHOT, done)
        found.append(now)
    return found


@pytest.mark.parametrize(("every", "seconds"), [(0.5, 0.01), (1.9, 0.3), (4.8, 1.2), (19.0, 4.0)])
def test_repairs_of_a_contest_become_rare(every, seconds):
    schedule = FamilySchedule(None)
    times = repaired(schedule, every, seconds, 15)
    assert schedule.contests
    assert times[-1] - times[-2] >= CONTEST_BACKOFF.longest


@pytest.mark.parametrize(("every", "seconds"), [(2.6, 0.01), (6.5, 1.2), (60.0, 4.0)])
def test_changes_now_and_then_are_no_contest(every, seconds):
    schedule = FamilySchedule(None)
    repaired(schedule, every, seconds, 15)
    assert not schedule.contests
