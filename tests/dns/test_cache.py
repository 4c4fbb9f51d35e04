"""The cache: how long, for whom, how many (rows S9, S10). Times are made up."""

import pytest

from narthex.dns.corefile.settings import CacheBounds, CacheSettings, PrefetchSettings, ServeStaleSettings
from narthex.dns.message import names, wire
from narthex.dns.message.query import UpstreamQuery, parse_query
from narthex.dns.message.response import parse_response
from narthex.dns.plugins import cache as caches
from narthex.dns.plugins.cache import ResponseCache, cache_key

SOA = b"\xc0\x0c" + wire.RECORD_TAIL.pack(wire.SOA, 1, 600, 22) + b"\0\0" + b"\0" * 16


def query(name="www.example.org", flags=0x100, size=None, dnssec=False, qtype=1):
    packed = names.wire(name)
    return parse_query(UpstreamQuery(packed, qtype, 1, flags, size, dnssec).packet(9, packed))


def answer(ttl=60, *, rcode=0, minimum=None, name="www.example.org", flags=0, size=4):
    """An address, or with `minimum` a denial."""
    head = wire.HEADER.pack(
        0, 0x8180 | flags | rcode, 1, int(minimum is None and not rcode), int(minimum is not None), 0
    )
    body = names.wire(name) + b"\0\1\0\1"
    if minimum is not None:
        body += SOA + minimum.to_bytes(4, "big")
    elif not rcode:
        body += b"\xc0\x0c" + wire.RECORD_TAIL.pack(16, 1, ttl, size) + b"\3" * size
    return parse_response(head + body)


def cache(**settings):
    return ResponseCache(CacheSettings(zones=(".",), **settings))


@pytest.mark.row("S9")
@pytest.mark.parametrize(
    ("settings", "kept", "lifetime"),
    [
        ({}, answer(60), 60),
        ({}, answer(0), 5),
        ({}, answer(99999), 3600),
        ({}, answer(minimum=30), 30),
        ({}, answer(minimum=30, rcode=3), 30),
        ({}, answer(minimum=99999, rcode=3), 600),
        ({"denial": CacheBounds(max_ttl=20)}, answer(minimum=30, rcode=3), 20),
        ({"success": CacheBounds(max_ttl=30)}, answer(60), 30),
        ({"success": CacheBounds(max_ttl=30, min_ttl=0)}, answer(0), None),
        ({"success": CacheBounds(max_ttl=30, min_ttl=12)}, answer(1), 12),
        ({}, answer(rcode=2), 5),
        ({"servfail": 0.0}, answer(rcode=2), None),
        ({"servfail": 120.0}, answer(rcode=2), 120),
        ({}, answer(rcode=5), None),
        ({}, answer(60, flags=wire.TC), None),
        ({"no_success": ("org.",)}, answer(60), None),
        ({"no_success": ("org.",)}, answer(minimum=30, rcode=3), 30),
        ({"no_denial": ("org.",)}, answer(minimum=30, rcode=3), None),
    ],
)
def test_how_long(settings, kept, lifetime):
    held = cache(**settings)
    wanted = cache_key(query())
    assert held.store(wanted, kept, 100.0) == lifetime
    if lifetime is None:
        assert held.find(wanted, 100.0) is None
        return
    assert held.find(wanted, 100.0).ttl == lifetime
    assert held.find(wanted, 100.5).ttl == lifetime
    assert held.find(wanted, 102.0).ttl == lifetime - 2
    assert held.find(wanted, 100.0 + lifetime - 0.01).ttl == 1
    assert held.find(wanted, 100.0 + lifetime) is None
    assert held.counters.requests == 5 and held.counters.misses == 1


def test_ttls_count_down_in_the_message_and_the_case_is_the_clients():
    held = cache()
    held.store(cache_key(query()), answer(60), 0.0)
    asked = query("WWW.example.ORG")
    message = held.find(cache_key(asked), 10.0).for_client(asked)
    assert message[12:].startswith(names.wire("WWW.example.ORG"))
    assert message.endswith(wire.RECORD_TAIL.pack(16, 1, 50, 4) + b"\3\3\3\3") and message[:2] == b"\0\x09"
    held = cache(keep_ttl=True)
    held.store(cache_key(query()), answer(60), 0.0)
    assert held.find(cache_key(query()), 10.0).ttl == 60


def test_no_ttl_is_longer_than_it_was():
    """A clock's seconds do not add up exactly: here 7 s more are a little more than 7 s."""
    now = 1021.3577132326949
    assert now + 7 - now > 7
    held = cache()
    assert held.store(cache_key(query()), answer(7), now) == 7
    assert held.find(cache_key(query()), now).ttl == 7


def test_questions_that_differ():
    held = cache()
    held.store(cache_key(query()), answer(60), 0.0)
    for other in (query("example.org"), query(qtype=28), query(size=1232, dnssec=True), query(flags=0x110)):
        assert held.find(cache_key(other), 1.0) is None
    for same in (query("WWW.EXAMPLE.ORG"), query(flags=0), query(size=512), query(flags=0x120)):
        assert held.find(cache_key(same), 1.0) is not None


def test_what_a_message_says_of_other_names_is_not_kept_under_them():
    held = cache()
    name = names.wire("victim.example")
    body = names.wire("www.example.org") + b"\0\1\0\1" + b"\xc0\x0c" + wire.RECORD_TAIL.pack(5, 1, 60, len(name)) + name
    poisoned = parse_response(
        wire.HEADER.pack(0, 0x8180, 1, 2, 0, 0) + body + name + wire.RECORD_TAIL.pack(1, 1, 60, 4) + b"evil"
    )
    assert held.store(cache_key(query()), poisoned, 0.0) == 60
    assert held.find(cache_key(query("victim.example")), 1.0) is None


def test_the_newer_answer_counts():
    held = cache()
    wanted = cache_key(query())
    held.store(wanted, answer(60), 0.0)
    held.store(wanted, answer(minimum=30, rcode=3), 1.0)
    assert held.find(wanted, 2.0).entry.response.rcode == 3 and held.entries("success") == 0
    held.store(wanted, answer(60), 3.0)
    assert held.find(wanted, 4.0).entry.response.rcode == 0 and held.entries("denial") == 0


def test_the_least_used_go_first():
    held = cache(success=CacheBounds(capacity=3, max_ttl=60))
    for name in "abc":
        held.store(cache_key(query(name)), answer(name=name), 0.0)
    assert held.find(cache_key(query("a")), 1.0)
    held.store(cache_key(query("d")), answer(name="d"), 1.0)
    assert [held.find(cache_key(query(name)), 1.0) is not None for name in "abcd"] == [True, False, True, True]
    assert held.entries("success") == 3 and held.counters.evictions == {"success": 1, "denial": 0}


def test_messages_are_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr(caches, "MAX_BYTES", 10_000)
    held = cache()
    for number in range(20):
        held.store(cache_key(query(f"n{number}")), answer(name=f"n{number}", size=2000), 0.0)
    assert held.entries("success") == 4
    held.store(cache_key(query("big")), answer(name="big", size=20_000), 0.0)
    assert held.entries("success") == 0


@pytest.mark.row("S10")
class TestStale:
    def test_immediately(self):
        held = cache(stale=ServeStaleSettings(max_stale=100.0))
        wanted = cache_key(query())
        held.store(wanted, answer(10), 0.0)
        assert not held.find(wanted, 9.0).stale and not held.verifies
        found = held.find(wanted, 11.0)
        assert (found.stale, found.ttl, found.refresh) == (True, 0, True)
        assert not held.find(wanted, 11.1).refresh, "one refresh at a time"
        assert held.find(wanted, 109.9).stale
        assert held.find(wanted, 110.0) is None
        assert held.counters.stale == 3

    def test_a_failure_does_not_take_its_place(self):
        held = cache(stale=ServeStaleSettings(max_stale=100.0))
        wanted = cache_key(query())
        held.store(wanted, answer(10), 0.0)
        assert held.store(wanted, answer(rcode=2), 20.0) is None
        assert held.find(wanted, 21.0).stale and not held.find(wanted, 24.9).refresh
        assert held.find(wanted, 25.1).refresh
        held.failed(wanted, 30.0)
        assert not held.find(wanted, 34.0).refresh and held.find(wanted, 36.0).refresh

    def test_a_denial_does(self):
        held = cache(stale=ServeStaleSettings(max_stale=100.0))
        wanted = cache_key(query())
        held.store(wanted, answer(10), 0.0)
        held.store(wanted, answer(minimum=30, rcode=3), 20.0)
        assert not held.find(wanted, 21.0).stale and held.find(wanted, 21.0).entry.response.rcode == 3

    def test_a_failure_is_never_stale(self):
        held = cache(stale=ServeStaleSettings(max_stale=100.0, verify=True))
        held.store(cache_key(query()), answer(rcode=2), 0.0)
        assert held.find(cache_key(query()), 6.0) is None and held.verifies

    def test_off(self):
        held = cache()
        held.store(cache_key(query()), answer(10), 0.0)
        assert held.find(cache_key(query()), 10.0) is None


class TestPrefetch:
    settings = {"prefetch": PrefetchSettings(amount=3, window=20.0, percent=50)}

    def ask(self, held, *times):
        return [held.find(cache_key(query()), when).refresh for when in times]

    def test_popular_names_near_their_end(self):
        held = cache(**self.settings)
        held.store(cache_key(query()), answer(60), 0.0)
        assert self.ask(held, 1, 12, 20, 29) == [False] * 4, "half of its life is left"
        assert self.ask(held, 30.5, 31) == [True, False], "once"
        held.store(cache_key(query()), answer(60), 32.0)
        assert self.ask(held, 40, 55, 63) == [False, False, True], "what was popular stays so"
        assert held.counters.prefetches == 2

    def test_gaps(self):
        held = cache(**self.settings)
        held.store(cache_key(query()), answer(60), 0.0)
        assert self.ask(held, 1, 2, 3, 31, 51.5, 59) == [False] * 6
