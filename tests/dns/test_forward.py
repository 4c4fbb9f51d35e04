"""Choice of upstreams: order, failures, checks, limits (row S7). Time and chance are made up."""

import pytest

from narthex.dns.corefile.settings import ForwardSettings, Upstream
from narthex.dns.plugins.forward import ForwardedQuery, GiveUp, NextForward, QueryUpstream, UpstreamPool, UseResponse

A, B, C = (Upstream(f"192.0.2.{number}") for number in (1, 2, 3))
TLS = Upstream("192.0.2.9", 853, "tls")

pytestmark = pytest.mark.row("S7")


def pool(*upstreams, draw=lambda count: count - 1, **settings):
    return UpstreamPool(ForwardSettings(zone=".", to=upstreams, **{"policy": "sequential"} | settings), upstreams, draw)


def take_down(servers, upstream, times=2):
    assert servers.failed(upstream)
    for _ in range(times):
        assert servers.checked(upstream, False)


class TestOrder:
    def test_sequential(self):
        assert [pool(A, B, C).order() for _ in range(2)] == [(A, B, C)] * 2

    def test_round_robin(self):
        servers = pool(A, B, C, policy="round_robin")
        assert [servers.order() for _ in range(4)] == [(A, B, C), (B, C, A), (C, A, B), (A, B, C)]

    def test_random_gives_every_order(self):
        draws = [(two, three) for three in range(3) for two in range(2)]
        orders = set()
        for two, three in draws:
            servers = pool(A, B, C, policy="random", draw=lambda count, two=two, three=three: {2: two, 3: three}[count])
            orders.add(servers.order())
        assert len(orders) == 6


def test_the_first_answer_counts():
    servers = pool(A, B)
    ask = ForwardedQuery(servers, "udp")
    assert ask.begin(10.0) == QueryUpstream(A, "udp", 12.0)
    assert servers.in_flight == 1
    assert ask.answered(3, False, 10.1) == UseResponse()
    assert servers.in_flight == 0


def test_the_next_one_after_an_error():
    ask = ForwardedQuery(pool(A, B), "tcp")
    assert ask.begin(0.0) == QueryUpstream(A, "tcp", 2.0)
    assert ask.failed("refused", 0.1) == QueryUpstream(B, "tcp", 2.1)
    assert ask.answered(0, False, 0.2) == UseResponse()


def test_every_one_gets_two_chances_within_five_seconds():
    servers = pool(A, B)
    ask = ForwardedQuery(servers, "udp")
    sent = [ask.begin(0.0), *(ask.failed("refused", 0.1 * number) for number in range(3))]
    assert [each.upstream for each in sent] == [A, B, A, B]
    assert ask.failed("refused", 0.5) == GiveUp(2, "refused")
    assert servers.in_flight == 0

    ask = ForwardedQuery(pool(A), "udp")
    assert ask.begin(0.0).deadline == 2.0
    assert ask.failed("late", 4.5) == QueryUpstream(A, "udp", 5.0), "no attempt goes on beyond the end"
    assert ask.failed("late", 5.0) == GiveUp(2, "late")


def test_one_that_is_down_is_passed_over_until_a_check_goes_well():
    servers = pool(A, B)
    take_down(servers, A)
    assert servers.down(A) and not servers.failed(A), "it is being checked already"
    assert ForwardedQuery(servers, "udp").begin(0.0).upstream == B
    assert not servers.checked(A, True)
    assert not servers.down(A) and ForwardedQuery(servers, "udp").begin(0.0).upstream == A
    assert servers.failed(A), "checks begin anew"


@pytest.mark.parametrize(("most", "down"), [(1, True), (2, False), (0, False)])
def test_max_fails(most, down):
    servers = pool(A, max_fails=most)
    assert servers.failed(A) is bool(most)
    servers.checked(A, False)
    assert servers.down(A) is down


def test_all_down_means_any_once():
    servers = pool(A, B, draw=lambda count: count - 1)
    take_down(servers, A)
    take_down(servers, B)
    ask = ForwardedQuery(servers, "udp")
    assert ask.begin(0.0) == QueryUpstream(B, "udp", 2.0)
    assert ask.failed("refused", 0.1) == GiveUp(2, "refused")
    assert (servers.take_broken(), servers.take_broken()) == (1, 0)
    servers = pool(A, fail_fast=True)
    take_down(servers, A)
    assert ForwardedQuery(servers, "udp").begin(0.0) == GiveUp(2, "all upstreams are down") and servers.in_flight == 0


def test_no_upstream_at_all():
    assert ForwardedQuery(pool(), "udp").begin(0.0) == GiveUp(2, "there is no upstream")


def test_max_concurrent():
    servers = pool(A, max_concurrent=2)
    asks = [ForwardedQuery(servers, "udp") for _ in range(3)]
    assert [type(ask.begin(0.0)) for ask in asks] == [QueryUpstream, QueryUpstream, GiveUp]
    assert servers.take_rejected() == 1 and servers.in_flight == 2
    asks[0].answered(0, False, 0.1)
    assert isinstance(ForwardedQuery(servers, "udp").begin(0.2), QueryUpstream)
    rejected = ForwardedQuery(servers, "udp").begin(0.2)
    assert (rejected.rcode, servers.in_flight) == (5, 2)


@pytest.mark.parametrize(
    ("settings", "transport", "via"),
    [
        ({}, "udp", "udp"),
        ({}, "tcp", "tcp"),
        ({"force_tcp": True}, "udp", "tcp"),
        ({"prefer_udp": True}, "tcp", "udp"),
        ({"prefer_udp": True, "force_tcp": True}, "udp", "tcp"),
    ],
)
def test_transports(settings, transport, via):
    assert ForwardedQuery(pool(A, **settings), transport).begin(0.0).via == via
    assert ForwardedQuery(pool(TLS, **settings), transport).begin(0.0).via == "tcp"


def test_a_truncated_answer_stays_one_unless_udp_was_our_choice():
    ask = ForwardedQuery(pool(A), "udp")
    ask.begin(0.0)
    assert ask.answered(0, True, 0.1) == UseResponse()
    ask = ForwardedQuery(pool(A, B, prefer_udp=True), "tcp")
    ask.begin(0.0)
    assert ask.answered(0, True, 0.1) == QueryUpstream(A, "tcp", 2.1)
    assert ask.answered(0, True, 0.2) == UseResponse()


def test_failover():
    ask = ForwardedQuery(pool(A, B, C, failover_on=(2, 5)), "udp")
    ask.begin(0.0)
    assert ask.answered(2, False, 0.1).upstream == B
    assert ask.answered(5, False, 0.2).upstream == C
    assert ask.answered(2, False, 0.3) == UseResponse(), "the last one's answer is the answer"
    ask = ForwardedQuery(pool(A, B, failover_on=(2,)), "udp")
    ask.begin(0.0)
    assert ask.answered(2, False, 0.1).upstream == B
    assert ask.failed("refused", 0.2).upstream == B, "who has refused is not asked again"


def test_next():
    ask = ForwardedQuery(pool(A, next_on=(3,)), "udp")
    ask.begin(0.0)
    assert ask.answered(3, False, 0.1) == NextForward()


def test_loops():
    servers = pool(A, B)
    assert (servers.mark_looping(A), servers.mark_looping(A)) == (True, False)
    assert servers.down(A) and ForwardedQuery(servers, "udp").begin(0.0).upstream == B
    servers.mark_looping(B)
    assert ForwardedQuery(servers, "udp").begin(0.0) == GiveUp(2, "all upstreams are down"), "not even as a last chance"


def test_other_upstreams():
    servers = pool(A, B)
    take_down(servers, A)
    take_down(servers, B)
    servers.replace((A, C, C))
    assert servers.upstreams == (A, C) and servers.down(A) and not servers.down(C)
    assert not servers.checked(B, False), "checks of one that is gone end"
    servers.replace((B,))
    assert not servers.down(B), "who comes back begins anew"


def test_misuse_is_told():
    ask = ForwardedQuery(pool(A), "udp")
    with pytest.raises(RuntimeError):
        ask.answered(0, False, 0.0)
    ask.begin(0.0)
    ask.answered(0, False, 0.0)
    with pytest.raises(RuntimeError):
        ask.failed("", 0.0)
