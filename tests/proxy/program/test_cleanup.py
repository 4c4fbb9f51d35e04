"""When a proxy takes over from another mode: after its first sync, once, and again when something was left."""

import logging
from contextlib import contextmanager

import pytest

from narthex.linux.monitor import OwnTransactions
from narthex.model.net import IPFamily
from narthex.proxy.kernel.cleanup import CleanupOutcome, RemainingObject, RemovedObjects
from narthex.proxy.program.cleanup import RETRY_SECONDS, LeftoverRemover, described, to_builtins
from narthex.proxy.program.sync import SyncResult
from narthex.testing.build import plan
from narthex.testing.fakes import FakeClock

GONE = RemovedObjects("nftables table", IPFamily.IPV4, ("ip kube-proxy",))
STUCK = RemainingObject("ipset", IPFamily.IPV4, "KUBE-CLUSTER-IP", "in use")


class Bench:
    """A takeover whose clean-ups do what the test says."""

    def __init__(self, *outcomes, mode="nftables"):
        self.clock = FakeClock()
        self.calls = []
        self.writing_now = False
        self.outcomes = list(outcomes)
        self.takeover = LeftoverRemover(mode, self.clock, self.writing, self.cleanup)

    @contextmanager
    def writing(self):
        self.writing_now = True
        self.own = OwnTransactions()
        yield self.own
        self.writing_now = False

    def cleanup(self, **settings):
        self.settings = settings
        return self

    def clean(self, family):
        assert self.writing_now, "what it writes is ours"
        self.calls.append(family)
        return self.outcomes.pop(0)

    def synced(self, family=IPFamily.IPV4, **config):
        made = plan(family=family, **config)
        self.takeover.after(SyncResult(family=family, plan=made, first=False, seconds={}))


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.INFO, "narthex")
    return caplog


def test_each_family_is_cleaned_once(log):
    bench = Bench(CleanupOutcome((GONE,), transactions=1), CleanupOutcome())
    bench.synced(IPFamily.IPV4)
    assert bench.own.transactions == 1
    for _ in range(3):
        bench.synced(IPFamily.IPV4)
        bench.synced(IPFamily.IPV6)
        bench.clock.advance(100)
    assert bench.calls == [IPFamily.IPV4, IPFamily.IPV6]
    (record,) = log.records
    assert record.getMessage() == (
        "removed what another mode or kube-proxy had left: 1 nftables table (IPv4): ip kube-proxy"
    )


def test_what_was_left_is_tried_again_and_told_once(log):
    bench = Bench(CleanupOutcome(left=(STUCK,)), CleanupOutcome(left=(STUCK,)), CleanupOutcome())
    bench.synced()
    bench.synced()
    assert len(bench.calls) == 1
    bench.clock.advance(RETRY_SECONDS)
    bench.synced()
    bench.clock.advance(RETRY_SECONDS)
    bench.synced()
    bench.clock.advance(RETRY_SECONDS)
    bench.synced()
    assert len(bench.calls) == 3
    assert [record.getMessage() for record in log.records] == [
        "cannot remove ipset KUBE-CLUSTER-IP (IPv4): in use",
        "what could not be removed before is gone (IPv4)",
    ]


@pytest.mark.parametrize(
    ("mode", "localhost", "kept"), [("iptables", True, True), ("iptables", False, False), ("nftables", True, False)]
)
def test_route_localnet_stays_for_rules_that_guard_it(mode, localhost, kept):
    bench = Bench(CleanupOutcome(), mode=mode)
    bench.synced(localhost_node_ports=localhost, node_port_addresses=None)
    assert bench.settings == {"keep": mode, "keep_localnet": kept}


def test_words_for_people_and_for_programs():
    many = RemovedObjects("iptables-nft chain", IPFamily.IPV6, ("nat A", "nat B", "nat C", "nat D", "nat E"))
    assert described(many) == "5 iptables-nft chains (IPv6): nat A, nat B, nat C and 2 more"
    assert to_builtins(CleanupOutcome((GONE,), (STUCK,))) == {
        "removed": [{"kind": "nftables table", "family": "IPv4", "count": 1, "names": ["ip kube-proxy"]}],
        "left": [{"kind": "ipset", "family": "IPv4", "name": "KUBE-CLUSTER-IP", "reason": "in use"}],
    }
