"""Whatever comes in: no exception, no answer to garbage, no more than the limits allow."""

import random
import struct

import dns.message
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.dns.cluster import OBJECTS, Served

from narthex.dns.message import names
from narthex.dns.message.query import Query, max_response_size, parse_query
from narthex.dns.message.response import MalformedResponseError, NameReader
from narthex.dns.plugins.kubernetes import ExternalTarget, join_external
from narthex.dns.server.dispatcher import LocalAnswer, RejectedPacket

Z = "shop.svc.cluster.local"
MUTATIONS = 100_000


@pytest.fixture(scope="module")
def cluster():
    return Served(*OBJECTS, pods="insecure")


def check(served, packet, transport="udp"):
    made = served.dispatcher.handle(packet, transport)
    short = served.dispatcher.nxdomain.lookup(packet[2:]) if len(packet) >= 2 else None
    assert short is None or short[0] == made.response.tail
    if made is None:
        # Silence is for what is no question, or what is an answer.
        assert len(packet) < 12 or packet[2] & 0x80
        return None
    if isinstance(made, RejectedPacket):
        assert len(made.message) == 12 <= len(packet)
        return None
    assert isinstance(made, LocalAnswer)
    query = parse_query(packet)
    assert isinstance(query, Query)
    answer = packet[:2] + made.response.tail
    assert len(answer) <= max_response_size(query, transport)
    assert answer[12 : query.question_end] == packet[12 : query.question_end]
    if made.response.rotation is not None:
        assert len(made.response.rotation.next()) == len(made.response.tail)
    served.dispatcher.learn(packet[2:], made, [0])
    return answer


@given(st.binary(max_size=600))
def test_any_bytes(cluster, data):
    check(cluster, data)


@given(st.binary(max_size=300), st.integers(0, 2), st.integers(0, 2))
def test_any_bytes_behind_a_good_header(cluster, data, authorities, additional):
    check(cluster, struct.pack(">6H", 1, 0x0100, 1, 0, authorities, additional) + data)


LABELS = st.sampled_from(
    [
        "web",
        "WEB",
        "heads",
        "outside",
        "inside",
        "shop",
        "svc",
        "pod",
        "cluster",
        "local",
        "_http",
        "_tcp",
        "nope",
        "10-64-1-1",
        "in-addr",
        "arpa",
        "1",
        "dns-version",
    ]
)


@given(
    st.lists(LABELS, max_size=7),
    st.sampled_from(["", Z, "svc.cluster.local", "cluster.local", "in-addr.arpa"]),
    st.integers(0, 300),
    st.sampled_from([None, 0, 512, 1232, 65535]),
)
def test_every_answer_is_a_message(cluster, labels, rest, type_, payload):
    name = ".".join([*labels, *filter(None, [rest])]) or "."
    if len(name) > 250:
        return
    edns = {"use_edns": False} if payload is None else {"use_edns": 0, "payload": payload}
    packet = dns.message.make_query(name, type_, **edns).to_wire()
    answer = check(cluster, packet)
    said = dns.message.from_wire(answer)
    for rrset in (*said.answer, *said.authority, *said.additional):
        assert rrset.ttl <= 28800


def test_headers_alone(cluster):
    """Of questions whose like has been asked for in vain."""
    for name in (f"nope.{Z}", "a.b.cluster.local"):
        packet = dns.message.make_query(name, "A", use_edns=False).to_wire()
        check(cluster, packet)
        for length in range(len(packet) + 1):
            check(cluster, packet[:length])


def test_mutations(cluster):
    """A hundred thousand damaged questions."""
    rng = random.Random(20)
    seeds = [
        dns.message.make_query(name, type_, use_edns=edns).to_wire()
        for name in (f"web.{Z}", f"heads.{Z}", f"inside.{Z}", "1.0.110.10.in-addr.arpa", f"nope.{Z}", "cluster.local")
        for type_ in ("A", "SRV", "PTR", "SOA", "NS")
        for edns in (False, 0)
    ]
    answered = 0
    for _ in range(MUTATIONS):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.choice((1, 1, 2, 5))):
            what = rng.random()
            at = rng.randrange(len(data))
            if what < 0.6:
                data[at] = rng.choice((0, 0xC0, 0x0C, 0xFF, 63, 64, rng.randrange(256)))
            elif what < 0.8:
                del data[at:]
            else:
                data[at:at] = rng.randbytes(rng.randrange(1, 8))
            if not data:
                break
        answered += check(cluster, bytes(data)) is not None
    # Some damage makes another good question.
    assert 0 < answered < MUTATIONS


def expand_name(message, at):
    try:
        end, name = NameReader(message).read(at)
    except MalformedResponseError:
        return None
    return name, end


@given(st.binary(max_size=200), st.integers(0, 220))
def test_names_in_other_servers_answers_end(data, at):
    found = expand_name(data, at)
    if found is not None:
        assert len(found[0]) <= names.MAX_NAME
        assert 0 < found[1] <= len(data)
        assert list(names.labels(found[0])) is not None


@given(st.binary(max_size=400), st.integers(0, 3), st.integers(0, 20))
def test_an_answer_behind_a_cname_is_a_message(data, questions, answers):
    query = parse_query(dns.message.make_query(f"outside.{Z}", "A").to_wire())
    outside = ExternalTarget(
        names.wire("www.example.org"), [b"\xc0\x0c\0\x05\0\x01\0\0\0\x05\0\x11" + names.wire("www.example.org")]
    )
    for message in (data, struct.pack(">6H", 1, 0x8180, questions, answers, 0, 0) + data):
        said = join_external(query, outside, message, 512)
        assert len(said) <= 512
        assert said[:2] == query.packet[:2]
        dns.message.from_wire(said)
