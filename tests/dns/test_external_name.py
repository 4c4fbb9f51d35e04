"""An ExternalName's answer: our CNAME, then what others say of its end."""

import dns.message
import dns.rcode
import dns.rrset
import pytest
from tests.dns.cluster import OBJECTS, Served, code, texts

from narthex.dns.message import names
from narthex.dns.message.query import parse_query
from narthex.dns.plugins.kubernetes import external_query, join_external

NAME = "OutSide.shop.svc.cluster.local"


@pytest.fixture(scope="module")
def ask():
    served = Served(*OBJECTS, resolver=object())
    return served.dispatcher.handle(dns.message.make_query(NAME, "A", id=99, use_edns=0, payload=1232).to_wire(), "udp")


def upstream(ask, rcode=0, records=(), edit=lambda message: message):
    """What a server says that was asked for the end."""
    asked = dns.message.from_wire(external_query(ask.query, ask.external).packet)
    said = dns.message.make_response(asked)
    said.set_rcode(rcode)
    for owner, ttl, type_, data in records:
        said.answer.append(dns.rrset.from_text(owner, ttl, "IN", type_, data))
    return dns.message.from_wire(join_external(ask.query, ask.external, edit(said.to_wire()), 1232))


def test_the_end_is_asked_for_with_the_clients_id_and_options(ask):
    asked = external_query(ask.query, ask.external)
    said = dns.message.from_wire(asked.packet)
    assert (said.id, str(said.question[0].name), said.payload) == (99, "www.example.org.", 1232)
    assert asked.packet[12 : asked.question_end] == names.wire("www.example.org") + b"\0\1\0\1"
    assert parse_query(asked.packet) == asked


def test_the_answer_is_whole_and_keeps_the_others_ttl(ask):
    records = [
        ("www.example.org.", 77, "CNAME", "edge.example.net."),
        ("edge.example.net.", 60, "A", "192.0.2.7"),
        ("edge.example.net.", 60, "TXT", "hello"),
    ]
    said = upstream(ask, records=records)
    assert str(said.question[0].name) == f"{NAME}."
    assert texts(said.answer) == ["CNAME www.example.org.", "CNAME edge.example.net.", "A 192.0.2.7"]
    assert [rrset.ttl for rrset in said.answer] == [5, 77, 60]
    assert [str(rrset.name) for rrset in said.answer] == [f"{NAME}.", "www.example.org.", "edge.example.net."]


@pytest.mark.parametrize(
    ("rcode", "said", "answers"), [(3, "NXDOMAIN", 1), (2, "SERVFAIL", 0), (5, "REFUSED", 0), (0, "NOERROR", 1)]
)
def test_the_others_code_is_ours(ask, rcode, said, answers):
    found = upstream(ask, rcode)
    assert (code(found), len(found.answer)) == (said, answers)


@pytest.mark.parametrize(
    "edit",
    [
        lambda _message: b"",
        lambda message: message[:11],
        lambda message: message[:-12],
        lambda message: message[:6] + b"\xff\xff" + message[8:],
        lambda message: message[:12] + b"\xc0\x0c" + message[14:],
    ],
)
def test_a_broken_answer_is_a_failure(ask, edit):
    found = upstream(ask, records=[("www.example.org.", 60, "A", "192.0.2.7")], edit=edit)
    assert (code(found), found.answer) == ("SERVFAIL", [])
