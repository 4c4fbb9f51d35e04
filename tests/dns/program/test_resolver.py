"""A server block's resolver in a worker's loop, with fake upstreams: hosts, cache, forward, loops, files."""

import dns.message
import pytest
from tests.dns.fake_upstream import FakeUpstream, answer, denial

from narthex.dns.corefile import parse as corefile
from narthex.dns.message import wire
from narthex.dns.message.query import DnsClient, parse_query
from narthex.dns.program.metrics import resolver_metrics
from narthex.dns.program.serve import draw_secrets
from narthex.dns.server import plugin_chain as resolvers
from narthex.dns.server import queries_in_flight as upstreams
from narthex.dns.server.counters import ResolverCounts
from narthex.dns.server.event_loop import EventLoop
from narthex.dns.server.plugin_chain import PluginChain, tls_file_error
from narthex.dns.server.resolv_conf import upstreams_of_file

LONG = 60.0


class Desk:
    """A loop, one resolver, one fake upstream; the loop's clock can be put forward."""

    def __init__(self):
        self.loop = EventLoop()
        self.fake = FakeUpstream(self.loop, lambda query, _: [answer(query, "192.0.2.1")])
        self.said = []
        self.resolver = None
        self.ahead = 0.0

    def open(self, body, secrets=None, ours=(), port=53):
        """`{up}` in the body is the fake upstream."""
        text = f".:{port} {{\n" + body.replace("{up}", str(self.fake.upstream)) + "\n}"
        (block,) = corefile.parse(text).blocks
        self.resolver = PluginChain(block, self.loop, secrets or draw_secrets(), ours, self.said.append)
        self.resolver.open()
        return self

    def start(self, name="www.example.org", qtype="A", transport="udp", **how):
        told = []
        message = dns.message.make_query(name, qtype, **how)
        query = parse_query(message.to_wire())
        self.resolver.resolve(query, DnsClient("10.0.0.7", transport), told.append, self.loop.now() + self.ahead)
        return told

    def ask(self, *args, **how):
        told = self.start(*args, **how)
        self.until(lambda: told)
        assert len(told) == 1
        return dns.message.from_wire(told[0])

    def until(self, condition):
        end = self.loop.now() + LONG
        while not condition():
            self.loop.turn(1.0)
            assert self.loop.now() < end, "it did not happen"

    def close(self):
        self.resolver.close()
        self.fake.close()
        self.loop.close()


@pytest.fixture
def desk():
    made = Desk()
    yield made
    made.close()


def addresses(message):
    return sorted(str(data) for each in message.answer for data in each)


def test_forward_alone(desk):
    desk.open("forward . {up}")
    for _ in range(2):
        message = desk.ask("WWW.example.org")
        assert addresses(message) == ["192.0.2.1"] and message.answer[0].ttl == 60
        assert str(message.question[0].name) == str(message.answer[0].name) == "WWW.example.org."
    assert len(desk.fake.asked) == 2


@pytest.mark.row("S6")
def test_refused_without_forward_and_its_code_with_one(desk):
    desk.open("forward example.org {up}")
    assert desk.ask("example.com").rcode() == 5 and desk.ask("x.y", "AXFR").rcode() == 5
    desk.fake.script = lambda query, _: [answer(query, rcode=4)]
    assert desk.ask().rcode() == 4


@pytest.mark.row("S9")
def test_the_cache_answers_the_second_time(desk):
    desk.open("cache 30\nforward . {up}")
    assert desk.ask().answer[0].ttl == 30, "the cap holds for the first answer as well"
    assert desk.ask("WWW.Example.ORG").answer[0].ttl <= 30
    assert len(desk.fake.asked) == 1
    desk.fake.script = lambda query, _: [denial(query)]
    assert desk.ask("no.example").rcode() == desk.ask("no.example").rcode() == 3
    assert len(desk.fake.asked) == 2
    counts = desk.resolver.take()
    assert counts.cache.counters.hits == {"success": 1, "denial": 1} and counts.cache.counters.misses == 2
    assert counts.cache.entries == {"success": 1, "denial": 1}
    assert desk.resolver.take().cache.entries == {"success": 0, "denial": 0}, "what has been taken is not taken again"


def test_failures_are_not_kept_when_nothing_came(desk):
    desk.open("errors\ncache\nforward . {up} {\n max_fails 0\n}")
    desk.fake.script = lambda *_: []
    upstream = desk.fake.upstream
    desk.fake.close()
    assert desk.ask().rcode() == 2
    assert desk.said == ["www.example.org. (type 1): econnrefused: Connection refused"]
    desk.fake = FakeUpstream(desk.loop, lambda query, _: [answer(query, "192.0.2.1")])
    assert upstream != desk.fake.upstream and desk.ask().rcode() == 2


@pytest.mark.row("S10")
@pytest.mark.parametrize("mode", ["immediate", "verify"])
def test_stale(desk, mode):
    desk.open(f"cache {{\n serve_stale 1h {mode}\n}}\nforward . {{up}}")
    desk.ask()
    desk.ahead = 100.0
    desk.fake.script = lambda query, _: [answer(query, "192.0.2.2", ttl=600)]
    first = desk.ask()
    if mode == "immediate":
        assert addresses(first) == ["192.0.2.1"] and first.answer[0].ttl == 0
        desk.until(lambda: len(desk.fake.asked) == 2 and desk.resolver._cache.entries("success") == 1)
        desk.until(lambda: desk.resolver._forwarders[0].pool.in_flight == 0)
        assert addresses(desk.ask()) == ["192.0.2.2"], "the refresh came behind the client's back"
    else:
        assert addresses(first) == ["192.0.2.2"] and first.answer[0].ttl == 600


@pytest.mark.parametrize(
    "script", [lambda query, _: [answer(query, rcode=2)], lambda query, _: [answer(query, rcode=5)]]
)
def test_verified_stale_answers_when_the_source_fails(desk, script):
    desk.open("cache {\n serve_stale 1h verify\n}\nforward . {up}")
    desk.ask()
    desk.ahead = 100.0
    desk.fake.script = script
    assert addresses(desk.ask()) == ["192.0.2.1"] and len(desk.fake.asked) == 2
    desk.fake.script = lambda query, _: [denial(query)]
    desk.ahead = 110.0
    assert desk.ask().rcode() == 3


def test_prefetch(desk):
    desk.open("cache {\n prefetch 2 1m 50%\n}\nforward . {up}")
    desk.ask()
    desk.ahead = 35.0
    desk.ask()
    assert len(desk.fake.asked) == 1
    assert addresses(desk.ask()) == ["192.0.2.1"]
    desk.until(lambda: len(desk.fake.asked) == 2)


def test_truncated_answers_are_not_kept(desk):
    desk.open("cache\nforward . {up}")
    desk.fake.script = lambda query, via: [answer(query, "192.0.2.1", flags=wire.TC if via == "udp" else 0)]
    assert desk.ask().flags & dns.flags.TC
    assert not desk.ask(transport="tcp").flags & dns.flags.TC
    assert not desk.ask().flags & dns.flags.TC, "what came over TCP serves UDP's clients, too"
    assert [via for _, via in desk.fake.asked] == ["udp", "tcp"]


def test_equal_questions_of_many_clients_go_out_once(desk):
    desk.open("cache\nforward . {up}")
    told = [desk.start(name) for name in ("a.example", "A.example", "a.EXAMPLE") * 5]
    desk.until(lambda: all(told))
    assert len(desk.fake.asked) == 1
    assert {str(dns.message.from_wire(each[0]).question[0].name) for each in told} == {
        "a.example.",
        "A.example.",
        "a.EXAMPLE.",
    }


def test_the_order_of_forwards_and_next(desk):
    other = FakeUpstream(desk.loop, lambda query, _: [answer(query, "192.0.2.9")])
    try:
        desk.open(f"forward org {{up}} {{\n next NXDOMAIN\n except b.org\n}}\nforward . {other.upstream}")
        desk.fake.script = lambda query, _: [denial(query)]
        assert addresses(desk.ask("a.org")) == ["192.0.2.9"]
        assert addresses(desk.ask("b.org")) == ["192.0.2.9"] and len(desk.fake.asked) == 1
        desk.resolver.close()
        desk.open("forward org {up} {\n next NXDOMAIN\n}\nforward com {up}")
        assert desk.ask("a.org").rcode() == 3, "no other forward takes the name"
    finally:
        other.close()


def test_loadbalance(desk):
    desk.open("cache\nloadbalance\nforward . {up}")
    desk.fake.script = lambda query, _: [answer(query, *(f"192.0.2.{number}" for number in range(8)))]
    orders = set()
    for _ in range(40):
        (section,) = desk.ask().answer
        orders.add(tuple(map(str, section)))
        assert len(section) == 8
    assert len(orders) > 10 and len(desk.fake.asked) == 1


class TestFiles:
    def test_resolv_conf_is_followed(self, desk, tmp_path, monkeypatch):
        monkeypatch.setattr(resolvers, "RESOLV_CONF_INTERVAL", 0.01)
        path = tmp_path / "resolv.conf"
        path.write_text("search x\nnameserver 192.0.2.1\nnameserver fd00::1\n")
        desk.open(f"forward . {path}")
        pool = desk.resolver._forwarders[0].pool
        assert [str(each) for each in pool.upstreams] == ["192.0.2.1:53", "[fd00::1]:53"]
        path.with_suffix(".new").write_text("nameserver 192.0.2.200\n")
        path.with_suffix(".new").rename(path)
        desk.until(lambda: [str(each) for each in pool.upstreams] == ["192.0.2.200:53"])
        path.unlink()
        desk.until(lambda: desk.said)
        assert "cannot be read: No such file" in desk.said[0]
        assert pool.upstreams, "those known before stay"

    @pytest.mark.row("S11")
    def test_stubs_are_left_out(self, desk, tmp_path):
        path = tmp_path / "resolv.conf"
        path.write_text("nameserver 127.0.0.53\nnameserver 192.0.2.1\nnameserver 169.254.20.10\n")
        desk.open(f"forward . {path}", ours=("169.254.20.10",))
        assert [str(each) for each in desk.resolver._forwarders[0].pool.upstreams] == ["192.0.2.1:53"]
        assert "127.0.0.53, 169.254.20.10 skipped" in desk.said[0]
        desk.resolver.close()
        desk.open(f"forward . {path}", ours=("169.254.20.10",), port=5300)
        assert len(desk.resolver._forwarders[0].pool.upstreams) == 2, "at 53 there is somebody else"

    @pytest.mark.row("S11")
    def test_the_real_file_behind_a_stub(self, tmp_path):
        real = tmp_path / "real"
        said = []
        assert upstreams_of_file("/r", "nameserver 127.0.0.53", (), said.append, str(real)) == ()
        assert "No such file" in said[-1]
        real.write_text("nameserver 192.0.2.7")
        assert [str(each) for each in upstreams_of_file("/r", "nameserver 127.0.0.53", (), said.append, str(real))] == [
            "192.0.2.7:53"
        ]
        assert "using the servers of" in said[-1]

    def test_one_of_several_workers_reports_files(self, desk, tmp_path):
        (block,) = corefile.parse(f". {{\n forward . {tmp_path}/none\n}}").blocks
        for tells in (False, True):
            desk.resolver = PluginChain(block, desk.loop, draw_secrets(), (), desk.said.append, reports_files=tells)
            desk.resolver.open()
            assert bool(desk.said) is tells

    def test_several_files_keep_their_places(self, desk, tmp_path):
        for name in ("a.conf", "b.conf"):
            (tmp_path / name).write_text(f"nameserver 192.0.2.{ord(name[0])}")
        desk.open(f"forward . {tmp_path}/b.conf 192.0.2.1 {tmp_path}/a.conf {tmp_path}/none.conf")
        found = [str(each) for each in desk.resolver._forwarders[0].pool.upstreams]
        assert found == ["192.0.2.98:53", "192.0.2.1:53", "192.0.2.97:53"]
        assert len(desk.said) == 2 and "names no server" in desk.said[1]

    def test_hosts(self, desk, tmp_path):
        path = tmp_path / "hosts"
        path.write_text("192.0.2.50 node-1\n")
        desk.open(f"cache\nhosts {path} {{\n 192.0.2.51 node-2\n reload 10ms\n fallthrough\n}}\nforward . {{up}}")
        assert addresses(desk.ask("node-1")) == ["192.0.2.50"] and addresses(desk.ask("node-2")) == ["192.0.2.51"]
        assert addresses(desk.ask("other")) == ["192.0.2.1"]
        path.write_text("192.0.2.60 node-1\n192.0.2.61 node-3\n")
        desk.until(lambda: len(desk.resolver._hosts) == 6)
        assert addresses(desk.ask("node-1")) == ["192.0.2.60"]
        assert desk.resolver.take().hosts == 6


@pytest.mark.row("S11")
class TestLoops:
    def test_what_comes_back_is_told_and_stopped(self, desk):
        def script(query, _):
            told = []
            desk.resolver.resolve(query, DnsClient("127.0.0.1"), told.append, desk.loop.now())
            return told

        desk.fake.script = script
        desk.open("loop\nforward . {up}")
        desk.until(lambda: desk.said)
        assert len(desk.said) == 1 and str(desk.fake.upstream) in desk.said[0] and "loopback address" in desk.said[0]
        asked = len(desk.fake.asked)
        assert desk.ask().rcode() == 2 and len(desk.fake.asked) == asked, "it is not asked any more"

    def test_another_worker_may_get_the_probe(self, desk):
        secrets = draw_secrets()
        other = Desk()
        other.open("loop\nforward . 192.0.2.1 {\n max_fails 0\n}", secrets)

        def script(query, _):
            told = []
            other.resolver.resolve(query, DnsClient("127.0.0.1"), told.append, other.loop.now())
            return told

        desk.fake.script = script
        desk.open("loop\nforward . {up}", secrets)
        desk.until(lambda: desk.said)
        assert desk.resolver._forwarders[0].pool.health(desk.fake.upstream).looping
        other.close()

    def test_an_honest_upstream(self, desk):
        desk.open("loop\nforward . {up}")
        desk.until(lambda: desk.fake.asked)
        assert addresses(desk.ask()) == ["192.0.2.1"] and not desk.said

    def test_an_upstream_that_comes_later_is_probed_later(self, desk, monkeypatch):
        monkeypatch.setattr(resolvers.loop_plugin, "PROBE_INTERVAL", 0.01)
        monkeypatch.setattr(upstreams, "CHECK_TIMEOUT", 0.05)
        desk.fake.script = lambda *_: []
        desk.open("loop\nforward . {up}")
        desk.until(lambda: len(desk.fake.asked) >= 3)
        desk.fake.script = lambda query, _: [answer(query, rcode=4)]
        before = len(desk.fake.asked)
        desk.until(lambda: len(desk.fake.asked) > before and not desk.resolver._forwarders[0]._exchange.in_use)
        probes = len(desk.fake.asked)
        for _ in range(10):
            desk.loop.turn(0.01)
        assert len(desk.fake.asked) == probes, "one that answers is let be"

    def test_without_the_plugin_nobody_is_probed(self, desk):
        desk.open("forward . {up}")
        desk.ask()
        assert [query.qtype for query, _ in desk.fake.asked] == [1]


def test_errors_are_consolidated(desk):
    desk.open('errors {\n consolidate 20ms "econnrefused" warning\n}\nforward . 127.0.0.1:1 {\n max_fails 0\n}')
    for number in range(4):
        desk.ask(f"n{number}.example")
    desk.until(lambda: desk.said)
    total = 0
    desk.until(lambda: sum(int(line.split()[1]) for line in desk.said) == 4)
    for line in desk.said:
        assert line.startswith("warning: ") and "errors like 'econnrefused' in the last 20ms" in line
        total += int(line.split()[1])
    assert total == 4


@pytest.mark.parametrize("cache", ["cache", ""])
def test_one_line_on_many_equal_queries_that_fail(desk, cache):
    desk.open(f"errors\n{cache}\nforward . 127.0.0.1:1 {{\n max_fails 0\n}}")
    # The first query does not fail before the others wait for it.
    sent = []
    desk.resolver._forwarders[0]._exchange.send = lambda *given: sent.append(given[-1])
    told = [desk.start() for _ in range(1000)]
    while sent:
        sent.pop()("no response in time")
        desk.loop.turn(0.0)
    assert all(len(each) == 1 for each in told)
    assert desk.said == ["www.example.org. (type 1): no response in time"]


def test_errors_beyond_a_limit_are_left_out(desk, monkeypatch):
    monkeypatch.setattr(resolvers, "_ERROR_SECONDS", 10 * LONG)
    desk.open("errors\nforward . 127.0.0.1:1 {\n max_fails 0\n}")
    for number in range(resolvers._ERROR_LINES + 50):
        desk.ask(f"n{number}.example")
    assert len(desk.said) == resolvers._ERROR_LINES


def test_files_for_tls_are_looked_for_before_anything_starts(tmp_path):
    (good,) = corefile.parse(". {\n forward . tls://192.0.2.1 {\n tls_servername x\n }\n}").blocks
    assert tls_file_error(good) is None
    (bad,) = corefile.parse(f". {{\n forward . tls://192.0.2.1 {{\n tls {tmp_path}/none\n }}\n}}").blocks
    assert tls_file_error(bad) == "Corefile:1: forward .: tls: No such file or directory"


def test_metrics(desk):
    from prometheus_client import CollectorRegistry, generate_latest

    desk.open("cache 30\nhosts {\n 192.0.2.1 a\n no_reverse\n fallthrough\n}\nforward . {up}")
    for _ in range(3):
        desk.ask()
    total = ResolverCounts()
    total.merge(desk.resolver.take())
    desk.ask()
    total.merge(desk.resolver.take())

    class Collector:
        def collect(self):
            return resolver_metrics({".": total})

    registry = CollectorRegistry()
    registry.register(Collector())
    text = generate_latest(registry).decode()
    up = desk.fake.upstream
    for line in (
        'coredns_cache_entries{server="dns://",type="success",view="",zones="."} 1.0',
        'coredns_cache_hits_total{server="dns://",type="success",view="",zones="."} 3.0',
        'coredns_cache_misses_total{server="dns://",view="",zones="."} 1.0',
        'coredns_cache_requests_total{server="dns://",view="",zones="."} 4.0',
        f'coredns_proxy_request_duration_seconds_count{{proxy_name="forward",rcode="NOERROR",to="{up}"}} 1.0',
        f'coredns_proxy_conn_cache_misses_total{{proto="udp",proxy_name="forward",to="{up}"}} 1.0',
        "coredns_forward_max_concurrent_rejects_total 0.0",
        "coredns_forward_healthcheck_broken_total 0.0",
    ):
        assert line in text, text
