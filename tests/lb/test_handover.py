"""Make before break: an address changes hands without a question that nobody answers, and never for long two answer."""

import pytest

from narthex.lb.election import AddressElection, AnnouncementReason, NodeEligibility, rank
from narthex.lb.handover import CONFLICT_SECONDS, HANDOVER_SECONDS, AddressOwnership, PeerClaims
from narthex.lb.schedule import ANNOUNCE_AFTER, PROBE_AFTER, PROBE_EVERY, AnnouncementSchedule

IP = "192.0.2.7"
FIRST, SECOND, THIRD = sorted("abc", key=lambda node: rank(node, IP))


def decision(*order, out=(), first=IP):
    verdicts = [
        NodeEligibility(node=node, reason=AnnouncementReason.ELECTION_LOST, text=f"not {node}") for node in order[1:]
    ]
    verdicts += [NodeEligibility(node=node, reason=AnnouncementReason.EXCLUDED, text=f"{node} is out") for node in out]
    verdicts += [NodeEligibility(node=order[0], reason=AnnouncementReason.ANNOUNCES, text="")] if order else []
    return {IP: AddressElection(address=IP, services=(), first=first, order=order, verdicts=tuple(verdicts))}


def holder(**fields):
    return PeerClaims(held=frozenset((IP,)), **fields)


GIVING = {"yielding": frozenset((IP,))}


def holding(node, order=None):
    made = AddressOwnership(node)
    assert made.update(decision(*(order or (node,))), {}, 0.0).gained == (IP,)
    return made


def test_an_address_is_gained_once_and_lost_with_its_service():
    made = holding(FIRST)
    assert not made.update(decision(FIRST), {}, 1.0)
    moves = made.update({}, {}, 2.0)
    assert moves.lost == ((IP, "no Service has it any more"),) and not made.held


def test_who_has_to_give_it_up_answers_until_the_next_one_does():
    made = holding(FIRST)
    assert not made.update(decision(SECOND, out=(FIRST,)), {SECOND: PeerClaims()}, 1.0)
    assert made.yielding == {IP}
    moves = made.update(decision(SECOND, out=(FIRST,)), {SECOND: holder()}, 1.2)
    assert moves.lost == ((IP, f"{SECOND} has it now"),)


def test_who_may_not_answer_does_not_wait_for_ever():
    made = holding(FIRST)
    gone = decision(SECOND, out=(FIRST,))
    assert not made.update(gone, {SECOND: PeerClaims()}, 1.0)
    assert made.next_due() == 1.0 + HANDOVER_SECONDS
    assert not made.update(gone, {SECOND: PeerClaims()}, 3.9)
    ((_, why),) = made.update(gone, {SECOND: PeerClaims()}, 4.0).lost
    assert why == f"{FIRST} is out; {SECOND} has not taken it within 3 s"


def test_who_is_only_not_the_best_waits_as_long_as_it_takes():
    made = holding(SECOND)
    for now in (1.0, 10.0, 100.0):
        assert not made.update(decision(FIRST, SECOND), {FIRST: PeerClaims()}, now)
    assert made.update(decision(FIRST, SECOND), {FIRST: holder()}, 101.0).lost


def test_nobody_else_means_that_it_ends_at_once():
    made = holding(FIRST)
    assert made.update(decision(out=(FIRST,)), {}, 1.0).lost == ((IP, f"{FIRST} is out"),)


def test_a_giver_that_is_chosen_again_keeps_it():
    made = holding(FIRST)
    made.update(decision(SECOND, out=(FIRST,)), {SECOND: PeerClaims()}, 1.0)
    assert not made.update(decision(FIRST, SECOND), {SECOND: PeerClaims()}, 1.5)
    assert not made.yielding and made.next_due() == float("inf")


@pytest.mark.parametrize("rival", [holder(**GIVING), holder(leaving=True)])
def test_the_next_one_takes_it_while_the_other_still_answers(rival):
    made = AddressOwnership(SECOND)
    assert made.update(decision(SECOND, out=(FIRST,)), {FIRST: rival}, 0.0).gained == (IP,)
    for now in (1.0, 5.0):
        assert not made.update(decision(SECOND, out=(FIRST,)), {FIRST: rival}, now)


def test_after_a_partition_the_better_one_keeps_it():
    better, worse = holding(FIRST), holding(SECOND)
    assert not better.update(decision(FIRST, SECOND), {SECOND: holder()}, 10.0)
    assert worse.update(decision(FIRST, SECOND), {FIRST: holder()}, 10.0).lost == ((IP, f"{FIRST} has it now"),)
    assert not better.update(decision(FIRST, SECOND), {SECOND: holder()}, 10.2)
    # Everybody has to hear who has it.
    assert better.update(decision(FIRST, SECOND), {SECOND: PeerClaims()}, 10.3).settled == (IP,)


def test_a_rival_that_does_not_give_way_is_told_once():
    made, rivals = holding(FIRST), {SECOND: holder()}
    assert not made.update(decision(FIRST, SECOND), rivals, 10.0)
    now = 10.0 + CONFLICT_SECONDS
    assert made.update(decision(FIRST, SECOND), rivals, now).duplicates == ((IP, SECOND),)
    assert not made.update(decision(FIRST, SECOND), rivals, now + 1)


def test_two_whose_views_differ_settle_it_by_the_order_alone():
    better, worse = holding(FIRST), holding(SECOND)
    views = decision(FIRST, out=(SECOND,)), decision(SECOND, out=(FIRST,))
    now = 10.0
    assert not better.update(views[0], {SECOND: holder()}, now).lost
    assert not worse.update(views[1], {FIRST: holder()}, now).lost
    assert worse.next_due() == now + CONFLICT_SECONDS
    now += CONFLICT_SECONDS
    assert not better.update(views[0], {SECOND: holder()}, now).lost
    ((_, why),) = worse.update(views[1], {FIRST: holder()}, now).lost
    assert why == f"{FIRST} has it too, and comes first"
    # It does not come back while the other has it, and does when that gives way.
    for later in (now + 0.1, now + 60):
        assert not worse.update(views[1], {FIRST: holder()}, later)
    assert worse.update(views[1], {FIRST: holder(**GIVING)}, now + 61).gained == (IP,)


def test_who_stands_back_gives_way_to_a_worse_place():
    young = holding(FIRST)
    views = decision(FIRST, SECOND)
    young.update(views, {SECOND: holder()}, 10.0, standing_back=True)
    assert young.update(views, {SECOND: holder()}, 10.0 + CONFLICT_SECONDS, standing_back=True).lost


def test_all_is_dropped():
    made = holding(FIRST)
    assert made.drop_all() == (IP,) and not made.held


def test_announcements_are_repeated_for_a_minute_and_end_when_it_is_lost():
    repeats = AnnouncementSchedule()
    repeats.begin([IP], 100.0)
    times = [now for now in range(100, 400) if repeats.announcements(float(now))]
    assert len([now for now in times if now <= 106]) >= 5 and 155 <= max(times) <= 161
    assert len(times) == len(ANNOUNCE_AFTER) and repeats.announcements(1000.0) == []
    repeats.begin([IP], 1000.0)
    assert repeats.next_due() == 1000.0 and repeats.announcements(1000.0) == [IP]
    repeats.end([IP])
    assert repeats.announcements(1001.5) == [] and repeats.next_due() == float("inf")


def test_announcements_that_were_missed_are_one():
    repeats = AnnouncementSchedule()
    repeats.begin([IP], 0.0)
    assert repeats.announcements(30.0) == [IP] and repeats.announcements(30.0) == []


def test_probes_go_on_for_ever():
    repeats = AnnouncementSchedule()
    repeats.begin([IP], 0.0)
    times = [now for now in range(400) if repeats.probes(float(now))]
    assert times == [*map(int, PROBE_AFTER), *range(int(PROBE_EVERY), 400, int(PROBE_EVERY))]
