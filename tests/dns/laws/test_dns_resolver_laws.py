"""Laws of the resolver: a Corefile printed is the same Corefile; the cache never gives what a plain model would not; every
question to upstreams ends in exactly one verdict; no bytes from an upstream do harm."""

import random
import string

import dns.exception
import dns.message
import hypothesis.strategies as st
import msgspec
from hypothesis import assume, example, given, settings
from tests.dns import corefile_text

from narthex.dns.corefile.parse import CorefileError, parse
from narthex.dns.corefile.settings import (
    AutopathSettings,
    BindSettings,
    CacheBounds,
    CacheSettings,
    ConsolidateRule,
    CorefilePosition,
    ErrorsSettings,
    ForwardSettings,
    HealthCheckSettings,
    HealthSettings,
    HostsSettings,
    HttpEndpoint,
    K8sExternalSettings,
    KubernetesSettings,
    LoadBalanceSettings,
    LogSettings,
    PrefetchSettings,
    PrometheusSettings,
    ReadySettings,
    ReloadSettings,
    ServerBlock,
    ServeStaleSettings,
    Upstream,
    UpstreamTlsSettings,
)
from narthex.dns.message import names, wire
from narthex.dns.message.query import UpstreamQuery, parse_query
from narthex.dns.message.response import MalformedResponseError, parse_response
from narthex.dns.plugins.cache import ResponseCache, cache_key
from narthex.dns.plugins.forward import (
    READ_TIMEOUT,
    TOTAL_TIMEOUT,
    ForwardedQuery,
    GiveUp,
    NextForward,
    QueryUpstream,
    UpstreamPool,
    UseResponse,
)
from narthex.model.selector import Requirement

LABELS = st.text(string.ascii_lowercase + string.digits + "_", min_size=1, max_size=8)
ZONES = st.lists(LABELS, max_size=3).map(lambda labels: ".".join(labels) + ".")
ZONE_LISTS = st.lists(ZONES, min_size=1, max_size=3, unique=True).map(tuple)
MAYBE_ZONES = st.none() | ZONE_LISTS
WORDS = st.text(string.ascii_letters + string.digits + '/.-_"# {}', min_size=1, max_size=12).filter(
    lambda word: word not in ("{", "}") and not word.startswith("import")
)
PATHS = st.text(string.ascii_letters + "/ #", max_size=8).map(lambda path: "/" + path)
DURATIONS = st.integers(0, 10**7).map(lambda count: count / 1000)
PORTS = st.integers(1, 65535)
ADDRESSES = st.ip_addresses(v=4).map(str) | st.ip_addresses(v=6).map(str)
UPSTREAMS = st.builds(Upstream, ADDRESSES, PORTS, st.sampled_from(["dns", "tls"]))
LISTEN = st.builds(HttpEndpoint, st.sampled_from(["", "localhost", "10.0.0.1", "fd00::1"]), PORTS)
KEPT = st.builds(
    CacheBounds, capacity=st.integers(1, 99999), max_ttl=st.integers(1, 99999), min_ttl=st.integers(0, 999)
)
TTLS = st.integers(0, 3600)
REQUIREMENTS = st.lists(
    st.builds(
        lambda cache_key, operator, values: Requirement(
            cache_key, operator, tuple(sorted(values)) if "in" in operator else ()
        ),
        LABELS.filter(lambda label: label[0] != "_" and label[-1] != "_"),
        st.sampled_from(["in", "notin", "exists", "absent"]),
        st.sets(st.sampled_from(["a", "b2", ""]), min_size=1),
    ),
    max_size=2,
).map(tuple)
FORWARDS = st.builds(
    ForwardSettings,
    zone=ZONES,
    to=st.lists(UPSTREAMS | PATHS.map(lambda path: path + ".conf"), min_size=1, max_size=4).map(tuple),
    excluded=st.lists(ZONES, max_size=2, unique=True).map(tuple),
    force_tcp=st.booleans(),
    prefer_udp=st.booleans(),
    expire=DURATIONS,
    max_fails=st.integers(0, 9),
    tls=st.builds(
        lambda pair, authority, name: UpstreamTlsSettings(
            certificate=pair[0], key=pair[1], authority=authority, server_name=name
        ),
        st.just(("", "")) | st.tuples(PATHS, PATHS),
        st.just("") | PATHS,
        st.just("") | LABELS,
    ),
    policy=st.sampled_from(["random", "round_robin", "sequential"]),
    health_check=st.builds(
        HealthCheckSettings,
        interval=DURATIONS.filter(lambda seconds: seconds >= 0.01),
        recursion=st.booleans(),
        domain=ZONES,
    ),
    max_concurrent=st.integers(0, 9999),
    next_on=st.lists(st.integers(0, 9), max_size=3, unique=True).map(tuple),
    failover_on=st.lists(st.integers(0, 9), max_size=3, unique=True).map(tuple),
    fail_fast=st.booleans(),
)
CACHES = st.builds(
    CacheSettings,
    zones=ZONE_LISTS,
    success=KEPT,
    denial=KEPT,
    prefetch=st.none()
    | st.builds(PrefetchSettings, amount=st.integers(1, 99), window=DURATIONS, percent=st.integers(10, 90)),
    stale=st.none() | st.builds(ServeStaleSettings, max_stale=DURATIONS, verify=st.booleans()),
    servfail=DURATIONS.map(lambda seconds: min(seconds, 300.0)),
    no_success=st.just(()) | ZONE_LISTS,
    no_denial=st.just(()) | ZONE_LISTS,
    keep_ttl=st.booleans(),
)
KUBERNETES = st.builds(
    KubernetesSettings,
    zones=ZONE_LISTS,
    endpoint=st.sampled_from(["", "https://10.0.0.1:6443"]),
    kubeconfig=st.just("") | PATHS,
    namespaces=st.lists(LABELS, max_size=2, unique=True).map(tuple),
    labels=REQUIREMENTS,
    pods=st.sampled_from(["disabled", "insecure", "verified"]),
    endpoint_pod_names=st.booleans(),
    ttl=TTLS,
    endpoints=st.booleans(),
    fallthrough=MAYBE_ZONES,
    ignore_empty_service=st.booleans(),
    startup_timeout=DURATIONS,
)
HOSTS = st.builds(
    HostsSettings,
    path=PATHS,
    zones=ZONE_LISTS,
    inline=st.lists(st.tuples(ADDRESSES, LABELS).map(" ".join), max_size=2).map(tuple),
    ttl=st.integers(1, 9999),
    reverse=st.booleans(),
    reload=DURATIONS,
    fallthrough=MAYBE_ZONES,
)
BLOCKS = st.builds(
    ServerBlock,
    zones=ZONE_LISTS,
    port=PORTS,
    bind=st.none() | st.builds(BindSettings, to=st.lists(WORDS, min_size=1, max_size=2, unique=True).map(tuple)),
    debug=st.booleans(),
    errors=st.none()
    | st.builds(
        ErrorsSettings,
        consolidate=st.lists(
            st.builds(ConsolidateRule, interval=DURATIONS, pattern=st.sampled_from(["^a b$", "#", '"x"']), level=st.just("info")),
            max_size=2,
        ).map(tuple),
    ),
    log=st.lists(
        st.builds(LogSettings, zones=ZONE_LISTS, format=st.sampled_from(["{common}", 'a {name} "b"']), min_duration=st.none() | DURATIONS),
        max_size=2,
    ).map(tuple),
    health=st.none() | st.builds(HealthSettings, listen=LISTEN, lameduck=DURATIONS),
    ready=st.none() | st.builds(ReadySettings, listen=LISTEN, monitor=st.sampled_from(["until-ready", "continuously"])),
    prometheus=st.none() | st.builds(PrometheusSettings, listen=LISTEN),
    loadbalance=st.none() | st.builds(LoadBalanceSettings, limit=st.integers(0, 9)),
    cache=st.none() | CACHES,
    autopath=st.none() | st.builds(AutopathSettings, zones=ZONE_LISTS, path=st.just("") | PATHS),
    hosts=st.none() | HOSTS,
    external=st.none() | st.builds(K8sExternalSettings, zones=ZONE_LISTS, apex=st.just("ns"), ttl=TTLS, headless=st.booleans(), fallthrough=MAYBE_ZONES),
    kubernetes=KUBERNETES,
    loop=st.booleans(),
    forwards=st.lists(FORWARDS, max_size=3).map(tuple),
    reload=st.none() | st.builds(lambda interval, part: ReloadSettings(interval=round(2 + interval, 3), jitter=round(1 + interval * part / 2, 3)), DURATIONS.map(float), st.sampled_from([0.0, 0.5])),
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(BLOCKS)
def test_a_corefile_printed_is_the_same(block):
    (again,) = parse(corefile_text.text([block])).blocks
    assert msgspec.structs.replace(again, where=CorefilePosition("", 0)) == msgspec.structs.replace(
        block, where=CorefilePosition("", 0)
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(["forward", "cache", ".", "{", "}", "\n", "\n", " ", '"', "\\", "#", "(a)", "import", "a", "{$A}", "10.0.0.0/8", "\x00", "é"]), max_size=30))  # fmt: skip
def test_no_text_breaks_the_reader(words):
    try:
        assert parse(" ".join(words), environment={"A": "{\n}"}).blocks
    except CorefileError as error:
        assert error.problems


# --- cache --------------------------------------------------------------------------------------------------------------

NAMES = [names.wire(name) for name in ("a.example", "A.example", "b.example", "c.other")]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("keep"), st.sampled_from(NAMES), st.integers(0, 20), st.sampled_from(["success", "nxdomain", "servfail"])),
        st.tuples(st.just("find"), st.sampled_from(NAMES)),
        st.tuples(st.just("wait"), st.floats(0.01, 15)),
    ),
    max_size=40,
)  # fmt: skip


def message(name, ttl, kind):
    answers, code = {"success": (1, 0), "nxdomain": (0, 3), "servfail": (0, 2)}[kind]
    head = wire.HEADER.pack(0, 0x8180 | code, 1, answers, int(kind == "nxdomain"), 0) + name + b"\0\1\0\1"
    if kind == "success":
        return parse_response(head + b"\xc0\x0c" + wire.RECORD_TAIL.pack(1, 1, ttl, 4) + b"abcd")
    if kind == "nxdomain":
        soa = wire.RECORD_TAIL.pack(6, 1, 600, 22) + b"\0" * 18 + ttl.to_bytes(4, "big")
        return parse_response(head + b"\xc0\x0c" + soa)
    return parse_response(head)


@settings(max_examples=120, deadline=None)
@given(STEPS, st.integers(1, 3), st.sampled_from([None, 5.0]))
def test_the_cache_gives_the_last_answer_or_none(steps, capacity, stale):
    kept = CacheBounds(capacity=capacity, max_ttl=12, min_ttl=3)
    cache = ResponseCache(
        CacheSettings(
            zones=(".",), success=kept, denial=kept, servfail=4.0, stale=stale and ServeStaleSettings(max_stale=stale)
        )
    )
    model = {}
    now = 100.0
    for step in steps:
        if step[0] == "wait":
            now += step[1]
            continue
        query = parse_query(UpstreamQuery(step[1], 1, 1, 0x100).packet(1, step[1]))
        wanted = cache_key(query)
        if step[0] == "keep":
            _, name, ttl, kind = step
            answer = message(name, ttl, kind)
            lifetime = 4 if kind == "servfail" else min(max(ttl, 3), 12)
            if cache.store(wanted, answer, now) is None:
                held, _, ends = model[wanted]
                assert kind == "servfail" and stale and held.kind != "servfail" and now < ends + stale
            else:
                model[wanted] = answer, lifetime, now + lifetime
        else:
            found = cache.find(wanted, now)
            if found is not None:
                answer, lifetime, ends = model[wanted]
                assert found.entry.response is answer
                assert found.stale == (now >= ends) and found.ttl == 0 if found.stale else 0 < found.ttl <= lifetime
                assert now < ends + (stale or 0) or abs(now - ends) < 1e-6
                assert found.for_client(query)[12 : 12 + len(step[1])] == step[1]
        assert all(cache.entries(half) <= capacity for half in ("success", "denial"))


# --- forward ------------------------------------------------------------------------------------------------------------

EVENTS = st.lists(
    st.tuples(st.sampled_from(["late", "refused", "answer", "truncated", "servfail"]), st.integers(0, 3)), max_size=60
)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 4),
    EVENTS,
    st.builds(
        ForwardSettings,
        zone=st.just("."),
        to=st.just(()),
        max_fails=st.integers(0, 2),
        policy=st.sampled_from(["random", "round_robin", "sequential"]),
        prefer_udp=st.booleans(),
        max_concurrent=st.integers(0, 2),
        failover_on=st.sampled_from([(), (2,)]),
        next_on=st.sampled_from([(), (2,)]),
        fail_fast=st.booleans(),
    ),
    st.integers(0, 10),
)
def test_every_question_ends_once_and_in_time(count, events, given_settings, seed):
    upstreams = tuple(Upstream(f"192.0.2.{number}") for number in range(count))
    pool = UpstreamPool(given_settings, upstreams, lambda most: seed % most)
    now, running, over = 0.0, [], 0
    started = 0
    for happened, which in [*events, *[("refused", 0)] * 200]:
        if len(running) < 3 and started < 20:
            ask = ForwardedQuery(pool, "udp")
            started += 1
            verdict = ask.begin(now)
            if isinstance(verdict, QueryUpstream):
                running.append((ask, verdict, now))
            else:
                assert isinstance(verdict, GiveUp)
                over += 1
        if not running:
            continue
        # Time stands still but for the deadline that comes next.
        late = min(range(len(running)), key=lambda place: running[place][1].deadline)
        ask, sent, began = running.pop(late if happened == "late" else which % len(running))
        assert sent.upstream in upstreams and now <= sent.deadline <= began + TOTAL_TIMEOUT
        assert sent.deadline - now <= READ_TIMEOUT or happened != "late"
        now = sent.deadline if happened == "late" else now
        if happened in ("late", "refused"):
            if pool.failed(sent.upstream):
                pool.checked(sent.upstream, which == 0)
            verdict = ask.failed(happened, now)
        else:
            verdict = ask.answered(2 if happened == "servfail" else 0, happened == "truncated", now)
        if isinstance(verdict, QueryUpstream):
            running.append((ask, verdict, began))
        else:
            assert isinstance(verdict, UseResponse | NextForward | GiveUp)
            assert now <= began + TOTAL_TIMEOUT
            over += 1
        assert pool.in_flight == len(running)
        assert not given_settings.max_concurrent or pool.in_flight <= given_settings.max_concurrent
    assert over == started


# --- hostile upstreams --------------------------------------------------------------------------------------------------


def sample():
    made = dns.message.make_response(dns.message.make_query("www.Example.org", "A"), recursion_available=True)
    for text in (
        "www.example.org. 60 IN CNAME b.example.org.",
        "b.example.org. 30 IN A 192.0.2.1",
        "b.example.org. 30 IN A 192.0.2.2",
    ):
        owner, ttl, _, type_, data = text.split()
        made.answer.append(dns.rrset.from_text(owner, int(ttl), "IN", type_, data))
    made.authority.append(
        dns.rrset.from_text("example.org.", 60, "IN", "SOA", "ns.example.org. h.example.org. 1 2 3 4 5")
    )
    made.additional.append(dns.rrset.from_text("x.example.org.", 60, "IN", "SRV", "0 1 2 b.example.org."))
    made.use_edns(0, payload=1232)
    return made.to_wire()


SAMPLE = sample()
QUERY = parse_query(dns.message.make_query("WWW.example.org", "A", use_edns=0).to_wire())


def test_twenty_thousand_broken_responses():
    draw = random.Random(7)
    taken = 0
    for _ in range(20_000):
        packet = bytearray(SAMPLE)
        for _ in range(draw.randrange(1, 8)):
            packet[draw.randrange(2, len(packet))] = draw.choice(
                (0, 0x0C, 0x29, 0x3F, 0x40, 0x80, 0xC0, 0xFF, draw.randrange(256))
            )
        del packet[draw.randrange(12, len(packet) + 200) :]
        try:
            answer = parse_response(bytes(packet))
        except MalformedResponseError:
            continue
        taken += 1
        if answer.packet[12 : answer.question_end] == SAMPLE[12 : answer.question_end]:
            assert len(answer.for_client(QUERY, 9, draw.shuffle)) <= len(packet) + 11
    assert 0 < taken < 20_000


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(SAMPLE) - 1), st.integers(0, 255)), min_size=1, max_size=6),
    st.integers(12, len(SAMPLE)),
)
@example([(0, 0)], len(SAMPLE))
def test_broken_responses_are_refused_or_readable(changes, length):
    packet = bytearray(SAMPLE)
    for at, byte in changes:
        packet[at] = byte
    try:
        answer = parse_response(bytes(packet[:length]))
    except MalformedResponseError:
        return
    assume(answer.packet[12 : answer.question_end] == SAMPLE[12 : answer.question_end])
    given_on = answer.for_client(QUERY, 9)
    assert len(given_on) <= length + 11
    try:
        seen = dns.message.from_wire(given_on)
    except (dns.exception.DNSException, ValueError):
        return  # data that dnspython alone understands, of types that are handed on as they are
    assert seen.id == QUERY.id and str(seen.question[0].name) == "WWW.example.org."
    assert all(each.ttl == 9 for section in (seen.answer, seen.authority, seen.additional) for each in section)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_bytes_are_refused(packet):
    try:
        parse_response(SAMPLE[:2] + b"\x81\x80" + packet)
    except MalformedResponseError:
        return
