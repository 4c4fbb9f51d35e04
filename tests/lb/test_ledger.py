"""What a controller remembers between its looks."""

import msgspec

from narthex.lb.ledger import UNCONFIRMED_SECONDS, AllocationLedger
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


def pending(done=True):
    ledger = AllocationLedger()
    ledger.record_write(WEB, GIVEN, 0.0)
    if done:
        ledger.write_succeeded(WEB)
    return ledger


def settled():
    ledger = pending()
    ledger.observe([with_status(*GIVEN)], POOLS, 1.0)
    return ledger


def test_a_promise_lasts_until_it_is_seen():
    ledger = pending()
    ledger.observe([WEB], POOLS, 1.0)
    assert ledger.pending == {WEB.key: GIVEN}
    ledger.observe([with_status(*GIVEN)], POOLS, 1.0)
    assert (ledger.pending, ledger.settled) == ({}, {WEB.key})


def test_a_write_that_nobody_answered_is_promised_as_long_as_it_may_arrive():
    ledger = pending(done=False)
    for now in (1.0, 1000.0):
        ledger.observe([WEB], POOLS, now)
        ledger.drop_unmet({})
        assert bool(ledger.pending) is (now < UNCONFIRMED_SECONDS)
    ledger = pending(done=False)
    # From another version it cannot arrive any more.
    ledger.observe([with_status(version="9")], POOLS, 1.0)
    assert ledger.pending == {}


def test_a_write_that_was_refused_is_a_wish():
    ledger = pending(done=False)
    ledger.write_rejected(WEB)
    ledger.observe([WEB], POOLS, 1.0)
    ledger.drop_unmet({WEB.key: AllocationDecision(service=WEB.key, addresses=GIVEN)})
    assert ledger.pending == {WEB.key: GIVEN}
    ledger.drop_unmet({WEB.key: AllocationDecision(service=WEB.key)})
    assert ledger.pending == {}


def test_a_service_that_is_gone_or_another_is_forgotten():
    for there in ([], [with_status(uid="u2")]):
        for ledger in (pending(), settled()):
            ledger.observe(there, POOLS, 1.0)
            assert (ledger.pending, ledger.settled, ledger.overwritten) == ({}, frozenset(), frozenset())


def test_what_somebody_cleared_comes_back_as_it_was():
    for ledger in (settled(), pending()):
        ledger.observe([with_status(version="7")], POOLS, 1.0)
        assert ledger.pending == {WEB.key: GIVEN}
        assert ledger.overwritten == frozenset()


def test_who_writes_over_it_is_remembered_until_it_is_cleared():
    for ledger in (settled(), pending()):
        ledger.observe([with_status("198.51.100.7", version="7")], POOLS, 1.0)
        assert ledger.overwritten == {WEB.key}
        assert ledger.pending == {}
        ledger.observe([with_status(version="8")], POOLS, 1.0)
        assert ledger.overwritten == frozenset()


def test_another_address_of_a_pool_is_nobodys_fight():
    ledger = settled()
    ledger.observe([with_status("192.168.15.9", version="7")], POOLS, 1.0)
    assert (ledger.pending, ledger.settled, ledger.overwritten) == ({}, frozenset(), frozenset())


def test_what_is_as_decided_is_settled():
    ledger = AllocationLedger()
    ledger.confirm(with_status(*GIVEN), AllocationDecision(service=WEB.key, addresses=GIVEN))
    assert ledger.settled == {WEB.key}
    ledger.confirm(WEB, AllocationDecision(service=WEB.key))
    assert ledger.settled == frozenset()


def test_a_conflict_with_what_was_sent_before_says_nothing():
    """The write that nobody answered may be the one that was faster."""
    ledger = pending(done=False)
    ledger.record_write(WEB, ("192.168.15.5",), 1.0)
    ledger.write_rejected(WEB)
    ledger.drop_unmet({})
    assert (ledger.pending, ledger.superseded) == ({WEB.key: ("192.168.15.5",)}, {WEB.key: GIVEN})
    ledger.observe([with_status(*GIVEN)], POOLS, 2.0)
    assert (ledger.pending, ledger.superseded) == ({}, {})
