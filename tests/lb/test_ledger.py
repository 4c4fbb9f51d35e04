"""What a controller remembers between its looks."""

import msgspec

from narthex.lb.ledger import UNANSWERED_SECONDS, AllocationLedger
from narthex.lb.pools import validate_pools
from narthex.lb.service_status import AllocationDecision
from narthex.model.objects import IPAddressPool, LoadBalancerIngress
from narthex.testing import build

POOLS = validate_pools([IPAddressPool(name="lan", namespace="x", addresses=("192.168.15.0/28",))])
WEB = build.service("shop/web", "10.110.0.1", type="LoadBalancer", uid="u1", resource_version="5")
GIVEN = ("192.168.15.0",)


def with_status(*addresses, version="6", **fields):
    ingress = tuple(LoadBalancerIngress(ip=address) for address in addresses)
    return msgspec.structs.replace(WEB, ingress=ingress, resource_version=version, **fields)


def promised(done=True):
    ledger = AllocationLedger()
    ledger.promise(WEB, GIVEN, 0.0)
    if done:
        ledger.done(WEB)
    return ledger


def settled():
    ledger = promised()
    ledger.see([with_status(*GIVEN)], POOLS, 1.0)
    return ledger


def test_a_promise_lasts_until_it_is_seen():
    ledger = promised()
    ledger.see([WEB], POOLS, 1.0)
    assert ledger.promised == {WEB.key: GIVEN}
    ledger.see([with_status(*GIVEN)], POOLS, 1.0)
    assert (ledger.promised, ledger.settled) == ({}, {WEB.key})


def test_a_write_that_nobody_answered_is_promised_as_long_as_it_may_arrive():
    ledger = promised(done=False)
    for now in (1.0, 1000.0):
        ledger.see([WEB], POOLS, now)
        ledger.decided({})
        assert bool(ledger.promised) is (now < UNANSWERED_SECONDS)
    ledger = promised(done=False)
    # From another version it cannot arrive any more.
    ledger.see([with_status(version="9")], POOLS, 1.0)
    assert ledger.promised == {}


def test_a_write_that_was_refused_is_a_wish():
    ledger = promised(done=False)
    ledger.refused(WEB)
    ledger.see([WEB], POOLS, 1.0)
    ledger.decided({WEB.key: AllocationDecision(service=WEB.key, addresses=GIVEN)})
    assert ledger.promised == {WEB.key: GIVEN}
    ledger.decided({WEB.key: AllocationDecision(service=WEB.key)})
    assert ledger.promised == {}


def test_a_service_that_is_gone_or_another_is_forgotten():
    for there in ([], [with_status(uid="u2")]):
        for ledger in (promised(), settled()):
            ledger.see(there, POOLS, 1.0)
            assert (ledger.promised, ledger.settled, ledger.overwritten) == ({}, frozenset(), frozenset())


def test_what_somebody_cleared_comes_back_as_it_was():
    for ledger in (settled(), promised()):
        ledger.see([with_status(version="7")], POOLS, 1.0)
        assert ledger.promised == {WEB.key: GIVEN}
        assert ledger.overwritten == frozenset()


def test_who_writes_over_it_is_remembered_until_it_is_cleared():
    for ledger in (settled(), promised()):
        ledger.see([with_status("198.51.100.7", version="7")], POOLS, 1.0)
        assert ledger.overwritten == {WEB.key}
        assert ledger.promised == {}
        ledger.see([with_status(version="8")], POOLS, 1.0)
        assert ledger.overwritten == frozenset()


def test_another_address_of_a_pool_is_nobodys_fight():
    ledger = settled()
    ledger.see([with_status("192.168.15.9", version="7")], POOLS, 1.0)
    assert (ledger.promised, ledger.settled, ledger.overwritten) == ({}, frozenset(), frozenset())


def test_what_is_as_decided_is_settled():
    ledger = AllocationLedger()
    ledger.confirm(with_status(*GIVEN), AllocationDecision(service=WEB.key, addresses=GIVEN))
    assert ledger.settled == {WEB.key}
    ledger.confirm(WEB, AllocationDecision(service=WEB.key))
    assert ledger.settled == frozenset()


def test_a_conflict_with_what_was_sent_before_says_nothing():
    """The write that nobody answered may be the one that was faster."""
    ledger = promised(done=False)
    ledger.promise(WEB, ("192.168.15.5",), 1.0)
    ledger.refused(WEB)
    ledger.decided({})
    assert (ledger.promised, ledger.withheld) == ({WEB.key: ("192.168.15.5",)}, {WEB.key: GIVEN})
    ledger.see([with_status(*GIVEN)], POOLS, 2.0)
    assert (ledger.promised, ledger.withheld) == ({}, {})
