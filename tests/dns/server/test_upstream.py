"""Asking upstreams over real sockets on loopback: transports, forgeries, failures (row S7)."""

import errno
import secrets

import pytest
from tests.dns.fake_upstream import FakeUpstream, answer

from narthex.dns.corefile.settings import ForwardSettings, HealthCheckSettings, Upstream
from narthex.dns.message import names, wire
from narthex.dns.message import query as question
from narthex.dns.message.response import header_response
from narthex.dns.message.wire import SERVFAIL
from narthex.dns.plugins import forward
from narthex.dns.server import queries_in_flight as upstreams
from narthex.dns.server import upstream_exchange as exchanges
from narthex.dns.server.counters import UpstreamCounter
from narthex.dns.server.event_loop import EventLoop
from narthex.dns.server.queries_in_flight import Forwarder

LONG = 60.0
"""Seconds after which a test fails that waits for something."""


class World:
    """A loop, fake upstreams, and a forwarder that asks them."""

    def __init__(self):
        self.loop = EventLoop()
        self.meter = UpstreamCounter()
        self.fakes = []
        self.forwarder = None

    def fake(self, script=lambda query, _: [answer(query, "192.0.2.1")]):
        made = FakeUpstream(self.loop, script)
        self.fakes.append(made)
        return made

    def forward(self, *upstreams, **settings):
        given = ForwardSettings(zone=".", to=upstreams, **{"policy": "sequential"} | settings)
        self.forwarder = Forwarder(self.loop, given, upstreams, self.meter)
        return self.forwarder

    def ask(self, name="www.example.org", transport="udp", times=1):
        told = []
        asked = question.UpstreamQuery(names.wire(name), wire.A, wire.IN, wire.RD)
        for _ in range(times):
            self.forwarder.forward(asked, transport, told.append)
        self.until(lambda: len(told) >= times)
        assert len(told) == times
        return told[0] if times == 1 else told

    def until(self, condition):
        end = self.loop.now() + LONG
        while not condition():
            self.loop.turn(1.0)
            assert self.loop.now() < end, "it did not happen"

    def close(self):
        if self.forwarder is not None:
            self.forwarder.close()
        for fake in self.fakes:
            fake.close()
        self.loop.close()


@pytest.fixture
def world():
    made = World()
    yield made
    made.close()


def unused():
    """A port of loopback where nobody listens."""
    loop = EventLoop()
    fake = FakeUpstream(loop, lambda *_: [])
    fake.close()
    loop.close()
    return fake.upstream


def test_an_answer_over_udp(world):
    fake = world.fake()
    world.forward(fake.upstream)
    how = world.ask()
    assert how.response.rcode == 0 and how.response.packet.endswith(b"\xc0\0\2\1")
    ((query, via),) = fake.asked
    assert via == "udp" and query.name == names.wire("www.example.org") and query.edns_size is None
    assert world.meter.counts.connections == {(str(fake.upstream), "udp", False): 1}
    assert world.meter.counts.durations[str(fake.upstream), "NOERROR"].counts


def test_ports_ids_and_letters_are_drawn(world):
    fake = world.fake()
    world.forward(fake.upstream)
    for number in range(40):
        world.ask(f"{number}.wide-open.example.org")
    queries = [query for query, _ in fake.asked]
    assert len({query.id for query in queries}) > 20
    assert len(fake.ports) > 20
    plain = names.wire("wide-open.example.org")
    tails = {query.qname[-len(plain) :] for query in queries}
    assert len(tails) > 20 and {tail.lower() for tail in tails} == {plain}


def test_many_at_once_over_few_sockets(world, monkeypatch):
    monkeypatch.setattr(exchanges, "MAX_SOCKETS", 10)
    fake = world.fake()
    world.forward(fake.upstream, max_fails=0)
    told = []
    for number in range(30):
        asked = question.UpstreamQuery(names.wire(f"n{number}"), wire.A, wire.IN, wire.RD)
        world.forwarder.forward(asked, "udp", told.append)
    world.until(lambda: len(told) == 30)
    assert sorted(how.rcode for how in told) == [0] * 10 + [SERVFAIL] * 20


def test_equal_questions_go_out_once(world):
    fake = world.fake()
    world.forward(fake.upstream)
    told = world.ask(times=20)
    assert len(fake.asked) == 1 and world.meter.counts.coalesced == 19
    assert len({id(how.response) for how in told}) == 1
    world.ask()
    assert len(fake.asked) == 2, "one that is over is not waited for"


@pytest.mark.parametrize("settings", [{"max_concurrent": 10}, {}], ids=["max_concurrent", "without a setting"])
def test_queries_that_wait_for_an_equal_one_count(world, monkeypatch, settings):
    monkeypatch.setattr(forward, "MAX_IN_FLIGHT", 10)
    fake = world.fake(lambda *_: [])
    pool = world.forward(fake.upstream, **settings).pool
    told = []
    asked = question.UpstreamQuery(names.wire("www.example.org"), wire.A, wire.IN, wire.RD)
    for _ in range(50):
        world.forwarder.forward(asked, "udp", told.append)
    assert [how.rcode for how in told] == [wire.REFUSED] * 40
    assert (pool.in_flight, pool.take_rejected(), world.meter.counts.coalesced) == (10, 40, 9)
    fake.script = lambda query, _: [answer(query, "192.0.2.1")]
    world.until(lambda: len(told) == 50)
    assert [how.rcode for how in told[40:]] == [0] * 10
    assert pool.in_flight == 0
    assert world.ask().rcode == 0


def test_of_equal_failures_all_but_one_are_repeated(world):
    fake = world.fake(lambda *_: [])
    world.forward(fake.upstream)
    told = []
    asked = question.UpstreamQuery(names.wire("www.example.org"), wire.A, wire.IN, wire.RD)
    for _ in range(5):
        world.forwarder.forward(asked, "udp", told.append)
    world.forwarder.close()
    assert [how.repeated for how in told] == [False] + [True] * 4


@pytest.mark.parametrize(
    ("forge", "reason"),
    [
        (lambda query: (query.id ^ 1).to_bytes(2, "big") + answer(query, "6.6.6.6")[2:], "question"),
        (lambda query: answer(query, "6.6.6.6", name=names.wire("xxx.example.org")), "question"),
        (lambda query: answer(query, "6.6.6.6")[:-1], "malformed"),
        (
            lambda query: (
                query.id.to_bytes(2, "big") + b"\x81\x80" + b"\0\1\0\1\0\0\0\0" + query.packet[12:] + b"\xc0\xff"
            ),
            "malformed",
        ),
        (lambda query: query.packet, "malformed"),
        (lambda _: b"", "question"),
        (lambda _: secrets.token_bytes(400), "question"),
    ],
)
def test_what_does_not_fit_is_dropped_and_the_wait_goes_on(world, forge, reason):
    fake = world.fake(lambda query, _: [forge(query), answer(query, "192.0.2.1")])
    world.forward(fake.upstream)
    how = world.ask()
    assert how.response.packet.endswith(b"\xc0\0\2\1") and len(fake.asked) == 1
    assert world.meter.counts.drops == {reason: 1}


class TestCase:
    def test_a_forgery_in_lower_case_leads_to_tcp(self, world):
        def script(query, via):
            if via == "tcp":
                return [answer(query, "192.0.2.1")]
            return [answer(query, "6.6.6.6", name=query.name)]

        fake = world.fake(script)
        world.forward(fake.upstream)
        self.asked_until_mixed(world, fake)
        assert world.meter.counts.drops == {"case": 1}
        assert fake.asked[-1][1] == "tcp"
        world.ask("another.example.org")
        assert fake.asked[-1][0].qname != fake.asked[-1][0].name or fake.asked[-1][1] == "tcp"

    def test_a_server_that_does_not_keep_the_case_is_remembered(self, world):
        fake = world.fake(lambda query, _: [answer(query, "192.0.2.1", name=query.name)])
        world.forward(fake.upstream)
        self.asked_until_mixed(world, fake)
        before = len(fake.asked)
        for number in range(20):
            assert world.ask(f"n{number}.example.org").response is not None
        assert [(query.qname == query.name, via) for query, via in fake.asked[before:]] == [(True, "udp")] * 20

    def test_nor_does_it_need_tcp(self, world):
        fake = world.fake(lambda query, _: [answer(query, "192.0.2.1", name=query.name)])
        fake.stop_tcp()
        world.forward(fake.upstream)
        self.asked_until_mixed(world, fake)
        assert fake.asked[-1][0].qname == fake.asked[-1][0].name

    @staticmethod
    def asked_until_mixed(world, fake):
        """Ask for names with letters enough: one in 2**40 is sent in lower case as it stands."""
        how = world.ask("abcdefghijklmnopqrstuvwxyz.abcdefghijklmn.example")
        assert how.response.packet.endswith(b"\xc0\0\2\1")
        assert fake.asked[0][0].qname != fake.asked[0][0].name


class TestTcp:
    def test_connections_are_used_again(self, world):
        fake = world.fake()
        world.forward(fake.upstream, force_tcp=True)
        for number in range(5):
            assert world.ask(f"n{number}").response is not None
        assert fake.accepted == 1 and {via for _, via in fake.asked} == {"tcp"}
        assert world.meter.counts.connections == {
            (str(fake.upstream), "tcp", False): 1,
            (str(fake.upstream), "tcp", True): 4,
        }

    def test_several_at_once_have_one_each(self, world):
        fake = world.fake()
        world.forward(fake.upstream, force_tcp=True)
        told = []
        for number in range(8):
            asked = question.UpstreamQuery(names.wire(f"n{number}"), wire.A, wire.IN, wire.RD)
            world.forwarder.forward(asked, "udp", told.append)
        world.until(lambda: len(told) == 8)
        assert fake.accepted == 8 and all(how.response for how in told)

    def test_a_connection_closed_meanwhile_is_made_anew(self, world):
        fake = world.fake()
        world.forward(fake.upstream, force_tcp=True)
        world.ask("a")
        fake.hang_up()
        assert world.ask("b").response is not None
        assert fake.accepted == 2 and not world.meter.counts.failed_checks

    def test_idle_ones_are_closed(self, world):
        fake = world.fake()
        world.forward(fake.upstream, force_tcp=True, expire=0.05)
        world.ask("a")
        world.until(lambda: not fake._connections)

    def test_an_answer_of_64_kilobytes(self, world):
        def script(query, _):
            body = answer(query, *["192.0.2.1"] * 4000)
            return [body]

        fake = world.fake(script)
        world.forward(fake.upstream, force_tcp=True)
        assert len(world.ask().response.packet) > 64_000

    def test_the_upstream_hangs_up(self, world):
        def script(*_):
            world.loop.at(world.loop.now(), fake.hang_up)
            return []

        fake = world.fake(script)
        world.forward(fake.upstream, force_tcp=True, max_fails=0)
        how = world.ask()
        assert (how.rcode, how.reason) == (SERVFAIL, "the upstream closed the connection") and len(fake.asked) == 2

    def test_garbage(self, world):
        fake = world.fake(lambda query, _: [answer(query, "6.6.6.6")[:-1]])
        world.forward(fake.upstream, force_tcp=True, max_fails=0)
        how = world.ask()
        assert how.response is None and "ends within" in how.reason

    def test_a_truncated_answer_is_asked_again(self, world):
        fake = world.fake(lambda query, via: [answer(query, "192.0.2.1", flags=0 if via == "tcp" else wire.TC)])
        world.forward(fake.upstream, prefer_udp=True)
        assert not world.ask().response.truncated and [via for _, via in fake.asked] == ["udp", "tcp"]
        world.forwarder.close()
        world.forward(fake.upstream)
        assert world.ask().response.truncated, "unless the client is to ask again itself"


class TestFailures:
    def test_the_next_upstream_is_asked(self, world):
        nobody, fake = unused(), world.fake()
        world.forward(nobody, fake.upstream)
        assert world.ask().response is not None
        assert (str(nobody), "NOERROR") not in world.meter.counts.durations

    def test_over_tcp_as_well(self, world):
        fake = world.fake()
        world.forward(unused(), fake.upstream, force_tcp=True)
        assert world.ask().response is not None

    def test_nobody_is_there(self, world):
        world.forward(unused(), unused(), max_fails=0)
        how = world.ask()
        assert (how.response, how.rcode) == (None, SERVFAIL) and errno.errorcode[
            errno.ECONNREFUSED
        ].lower() in how.reason

    def test_no_route(self, world):
        world.forward(Upstream("255.255.255.255"), max_fails=0)
        assert world.ask().rcode == SERVFAIL

    def test_silence_ends_and_checks_go_on_until_it_answers(self, world, monkeypatch):
        monkeypatch.setattr(upstreams, "CHECK_TIMEOUT", 0.1)
        well = []
        fake = world.fake(lambda query, _: [answer(query, "192.0.2.1")] if well or query.qtype == wire.A else [])
        dead = world.fake(lambda query, _: [answer(query, rcode=5)] if well else [])
        dead_upstream = dead.upstream
        world.forward(
            dead_upstream, fake.upstream, health_check=HealthCheckSettings(interval=0.01, domain="check.example.")
        )
        pool = world.forwarder.pool
        began = world.loop.now()
        assert world.ask("a").response is not None
        assert world.loop.now() - began >= 1.9
        world.until(lambda: pool.down(dead_upstream))
        before = [query.name for query, _ in dead.asked if query.qtype == wire.A]
        assert world.ask("b").response is not None
        assert [query.name for query, _ in dead.asked if query.qtype == wire.A] == before, "it is left alone"
        assert world.meter.counts.failed_checks[str(dead_upstream)] >= 2
        assert {query.name for query, _ in dead.asked if query.qtype == wire.NS} == {names.wire("check.example")}
        well.append(True)
        world.until(lambda: not pool.down(dead_upstream))

    @pytest.mark.parametrize("tcp", [False, True])
    def test_a_bare_header_is_a_refusal_and_a_sign_of_life(self, world, tcp):
        puzzled = world.fake(lambda query, _: [header_response(query.packet, 1)])
        fake = world.fake()
        world.forward(puzzled.upstream, fake.upstream, force_tcp=tcp)
        assert world.ask().response is not None and len(puzzled.asked) == 1
        assert not world.forwarder.pool.health(puzzled.upstream).checking
        assert not world.meter.counts.drops
        world.forwarder.pool.failed(puzzled.upstream)
        world.forwarder._check_health(puzzled.upstream)
        world.until(lambda: not world.forwarder.pool.health(puzzled.upstream).checking)
        assert not world.meter.counts.failed_checks

    def test_who_waits_when_it_ends_is_told(self, world):
        fake = world.fake(lambda *_: [])
        world.forward(fake.upstream)
        told = []
        world.forwarder.forward(question.UpstreamQuery(names.wire("x"), 1, 1, 0), "udp", told.append)
        world.forwarder.close()
        assert [how.rcode for how in told] == [SERVFAIL]


def test_what_a_forward_takes(world):
    forwarder = world.forward(Upstream("192.0.2.1"))
    assert forwarder.takes(names.wire("any.thing"))
    world.forwarder = Forwarder(
        world.loop,
        ForwardSettings(zone="Example.org.", to=(), excluded=("a.example.org.", "example.org.")),
        (),
        world.meter,
    )
    takes = world.forwarder.takes
    assert takes(names.wire("example.org")), "its own name is never excluded"
    assert (
        not takes(names.wire("x.a.example.org"))
        and not takes(names.wire("org"))
        and not takes(names.wire("xexample.org"))
    )
