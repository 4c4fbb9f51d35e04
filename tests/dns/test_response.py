"""Responses of others: what is taken, what is not, and what a client gets to see. dnspython is the judge."""

import random
import struct

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest

from narthex.dns.message import names, wire
from narthex.dns.message import query as question
from narthex.dns.message.query import parse_query
from narthex.dns.message.response import MalformedResponseError, local_response, parse_response


def query(name="Www.Example.ORG.", qtype="A", *, edns=False, do=False, flags="RD", id=77):
    message = dns.message.make_query(name, qtype, use_edns=0 if edns or do else False, want_dnssec=do, payload=4096)
    message.id = id
    message.flags = dns.flags.from_text(flags)
    return parse_query(message.to_wire())


def reply(
    name="wWW.eXAMPLE.org.", qtype="A", answer=(), authority=(), additional=(), *, rcode="NOERROR", edns=None, flags=""
):
    message = dns.message.make_response(dns.message.make_query(name, qtype), recursion_available=True)
    message.flags |= dns.flags.from_text(flags)
    for section, texts in ((message.answer, answer), (message.authority, authority), (message.additional, additional)):
        for text in texts:
            owner, ttl, type_, *data = text.split(" ", 3)
            section.append(dns.rrset.from_text(owner, int(ttl), "IN", type_, *data[0].split("|")))
    if edns is not None:
        message.use_edns(0, ednsflags=edns, payload=1232)
    message.set_rcode(dns.rcode.from_text(rcode))
    return message.to_wire(max_size=65535)


def seen(packet):
    return dns.message.from_wire(packet)


def test_a_client_sees_its_own_question():
    answer = parse_response(
        reply(answer=["wWW.eXAMPLE.org. 300 A 192.0.2.1", "wWW.eXAMPLE.org. 60 TXT hello"], flags="QR RD RA AD")
    )
    assert (answer.kind, answer.ttl, len(answer.ttls)) == ("success", 60, 2)
    message = seen(answer.for_client(query(), 17))
    assert message.id == 77
    assert str(message.question[0].name) == "Www.Example.ORG."
    assert {str(each.name) for each in message.answer} == {"Www.Example.ORG."}
    assert {each.ttl for each in message.answer} == {17}
    assert message.flags & dns.flags.RD and message.flags & dns.flags.RA and not message.flags & dns.flags.AD
    assert message.edns == -1
    assert {each.ttl for each in seen(answer.for_client(query())).answer} == {300, 60}, "as they came"
    assert seen(answer.for_client(query(flags="AD"))).flags & (dns.flags.AD | dns.flags.RD) == dns.flags.AD


@pytest.mark.row("S4")
def test_an_opt_record_comes_back_only_to_who_sent_one():
    answer = parse_response(
        reply(answer=["www.example.org. 9 A 192.0.2.1"], additional=["x.example.org. 9 A 192.0.2.2"], edns=0)
    )
    assert (
        answer.for_client(query(), 5).count(b"\0\0\x29") == 0
        and len(seen(answer.for_client(query(), 5)).additional) == 1
    )
    message = seen(answer.for_client(query(edns=True), 5))
    assert message.edns == 0 and message.payload == 1232 and not message.ednsflags and len(message.additional) == 1
    assert seen(answer.for_client(query(do=True), 5)).ednsflags == dns.flags.DO


def test_what_stands_behind_an_opt_record_goes_with_it():
    packet = bytearray(reply(answer=["www.example.org. 9 A 192.0.2.1"], edns=0))
    packet += b"\x01x\0" + wire.RECORD_TAIL.pack(wire.A, wire.IN, 1, 4) + b"abcd"
    packet[11] += 1
    message = seen(parse_response(bytes(packet)).for_client(query(edns=True), 5))
    assert not message.additional and message.edns == 0


def test_an_uncompressed_owner_gets_the_clients_case():
    name = names.wire("wWW.eXAMPLE.org")
    packet = wire.HEADER.pack(1, 0x8180, 1, 2, 0, 0) + name + b"\0\1\0\1"
    for owner in (name.lower(), names.wire("other.example")):
        packet += owner + wire.RECORD_TAIL.pack(wire.A, wire.IN, 7, 4) + b"\1\2\3\4"
    owners = [str(each.name) for each in seen(parse_response(packet).for_client(query(), 5)).answer]
    assert owners == ["Www.Example.ORG.", "other.example."]


@pytest.mark.row("S8")
def test_addresses_change_places_and_nothing_else():
    texts = [
        "www.example.org. 9 CNAME web.example.net.",
        "web.example.net. 9 A 192.0.2.1|192.0.2.2|192.0.2.3|192.0.2.4",
    ]
    answer = parse_response(reply(answer=[*texts, "web.example.net. 9 AAAA 2001:db8::1|2001:db8::2"]))
    shuffle = random.Random(1).shuffle
    orders = set()
    for _ in range(200):
        first, *rest = seen(answer.for_client(query(), 9, shuffle)).answer
        assert first.to_text() == "Www.Example.ORG. 9 IN CNAME web.example.net."
        assert [sorted(each.to_text().split("\n")) for each in rest] == [
            [f"web.example.net. 9 IN A 192.0.2.{number}" for number in (1, 2, 3, 4)],
            [f"web.example.net. 9 IN AAAA 2001:db8::{number}" for number in (1, 2)],
        ]
        orders.add(tuple(str(each) for each in rest[0]))
    assert len(orders) == 24


SOA = "example.org. 600 SOA ns.example.org. h.example.org. 1 2 3 4 60"


@pytest.mark.parametrize(
    ("packet", "kind", "ttl"),
    [
        (reply(answer=["a.example.org. 0 A 192.0.2.1"]), "success", 0),
        (reply(answer=["a.example.org. 9999 A 192.0.2.1"]), "success", 3600),
        (reply(authority=[SOA]), "nodata", 60),
        (reply(authority=[SOA], rcode="NXDOMAIN"), "nxdomain", 60),
        (reply(rcode="NXDOMAIN"), "other", 5),
        (reply(), "other", 5),
        (reply(authority=["example.org. 30 NS ns.example.org."]), "success", 30),
        (reply(rcode="SERVFAIL"), "servfail", 5),
        (reply(rcode="REFUSED"), "other", 5),
        (reply(answer=["a.example.org. 7 CNAME b.example."], authority=[SOA], rcode="NXDOMAIN"), "nxdomain", 7),
    ],
)
def test_kinds(packet, kind, ttl):
    answer = parse_response(packet)
    assert (answer.kind, answer.ttl) == (kind, ttl)


def test_a_ttl_with_its_first_bit_set_counts_as_none():
    packet = bytearray(reply(answer=["www.example.org. 9 A 192.0.2.1"]))
    packet[-10:-6] = b"\xff\0\0\0"
    assert parse_response(bytes(packet)).ttl == 0


HEAD = wire.HEADER.pack(1, 0x8180, 1, 1, 0, 0)
ASKED = names.wire("example.org") + b"\0\1\0\1"
TAIL = wire.RECORD_TAIL.pack(wire.A, wire.IN, 7, 4) + b"\1\2\3\4"


@pytest.mark.parametrize(
    ("packet", "reason"),
    [
        (b"", "shorter"),
        (b"\0" * 11, "shorter"),
        (wire.HEADER.pack(1, 0x0100, 1, 0, 0, 0) + ASKED, "not a response"),
        (wire.HEADER.pack(1, 0xA800, 1, 0, 0, 0) + ASKED, "not a response"),
        (wire.HEADER.pack(1, 0x8180, 0, 0, 0, 0), "0 questions"),
        (wire.HEADER.pack(1, 0x8180, 2, 0, 0, 0) + ASKED + ASKED, "2 questions"),
        (wire.HEADER.pack(1, 0x8180, 1, 0, 0, 0) + ASKED[:-1], "invalid question"),
        (wire.HEADER.pack(1, 0x8180, 1, 0, 0, 0) + b"\x07exam", "within a name"),
        (HEAD + ASKED + b"\xc0\x1d" + TAIL, "lead back"),
        (HEAD + ASKED + b"\xc0\xff" + TAIL, "lead back"),
        (HEAD + ASKED + b"\x01a\xc0\x1d" + TAIL, "lead back"),
        (HEAD + ASKED + b"\xc0", "within a name"),
        (HEAD + ASKED + b"\x80\x00" + TAIL, "unknown kind"),
        (HEAD + ASKED + b"\x40abc" + TAIL, "unknown kind"),
        (HEAD + ASKED + b"\xc0\x0c" + TAIL[:9], "within a record"),
        (HEAD + ASKED + b"\xc0\x0c" + TAIL[:-1], "data of a record"),
        (HEAD + ASKED + b"\xc0\x0c" + TAIL[:8] + b"\0\3\1\2\3", "address of a wrong size"),
        (HEAD + ASKED + b"\xc0\x0c" + wire.RECORD_TAIL.pack(wire.CNAME, 1, 7, 2) + b"\xc0\x2b", "lead back"),
        (HEAD + ASKED + b"\xc0\x0c" + wire.RECORD_TAIL.pack(wire.CNAME, 1, 7, 3) + b"\xc0\x0cx", "wrong size"),
        (HEAD + ASKED + b"\xc0\x0c" + wire.RECORD_TAIL.pack(wire.SOA, 1, 7, 4) + b"\xc0\x0c\xc0\x0c", "wrong size"),
        (HEAD + ASKED + b"\0" + wire.RECORD_TAIL.pack(wire.OPT, 1232, 0, 0), "OPT record outside"),
        (
            HEAD + names.wire(".".join(["a" * 60] * 4)) + b"\0\1\0\1" + b"\x3f" + b"b" * 63 + b"\xc0\x0c" + TAIL,
            "too long",
        ),
    ],
)
def test_garbage(packet, reason):
    with pytest.raises(MalformedResponseError, match=reason):
        parse_response(packet)


def test_chains_of_pointers_have_an_end():
    packet = HEAD + ASKED
    targets = [12]
    body = b""
    for _ in range(100):
        targets.append(len(packet) + len(body) + 12)
        body += b"\0" + wire.RECORD_TAIL.pack(99, 1, 1, 2) + struct.pack(">H", 0xC000 | targets[-2])
        targets[-1] = len(packet) + len(body) - 2
    body += struct.pack(">H", 0xC000 | targets[-1]) + TAIL
    packet = wire.HEADER.pack(1, 0x8180, 1, 101, 0, 0) + ASKED + body
    with pytest.raises(MalformedResponseError, match="too many compression pointers"):
        parse_response(packet)


def test_sixty_four_kilobytes_of_records():
    count = 4000
    packet = wire.HEADER.pack(1, 0x8180, 1, count, 0, 0) + ASKED + (b"\xc0\x0c" + TAIL) * count
    answer = parse_response(packet)
    assert len(answer.ttls) == count
    assert (
        len(
            seen(
                answer.for_client(
                    parse_query(
                        question.UpstreamQuery(names.wire("example.org"), 1, 1, 0).packet(3, names.wire("example.org"))
                    )
                )
            ).answer[0]
        )
        == 1
    )


def test_made():
    answer = seen(
        local_response(
            query(edns=True), wire.NOERROR, [(wire.A, 9, b"\1\2\3\4"), (wire.A, 9, b"\1\2\3\5")], authoritative=True
        )
    )
    assert answer.id == 77 and answer.flags == dns.flags.QR | dns.flags.AA | dns.flags.RD | dns.flags.RA
    assert sorted(map(str, answer.answer[0])) == ["1.2.3.4", "1.2.3.5"] and answer.edns == 0
    assert str(answer.answer[0].name) == "Www.Example.ORG."
    assert seen(local_response(query(), wire.REFUSED)).rcode() == wire.REFUSED


def test_do_bit():
    assert [each.dnssec_ok for each in (query(), query(edns=True), query(do=True))] == [False, False, True]
    plain = query(do=True)
    cookie = b"\x01x\0" + wire.RECORD_TAIL.pack(250, 255, 0, 0)
    packet = bytearray(plain.packet[: plain.question_end] + cookie + plain.packet[plain.question_end :])
    packet[11] += 1
    assert parse_query(bytes(packet)).dnssec_ok
    circle = bytes(packet).replace(cookie, b"\xc0\xff" + cookie[3:])
    assert not parse_query(circle).dnssec_ok, "a client's pointers may lead anywhere"


class TestQuestions:
    def test_only_the_question_goes_out(self):
        message = dns.message.make_query("Www.Example.org", "AAAA", use_edns=0, payload=4096)
        message.use_edns(0, payload=4096, options=[dns.edns.GenericOption(10, b"12345678")])
        asked = question.upstream_query(parse_query(message.to_wire()))
        sent = dns.message.from_wire(asked.packet(5, asked.name))
        assert str(sent.question[0]) == "www.example.org. IN AAAA" and sent.id == 5
        assert sent.edns == 0 and sent.payload == 1232 and not sent.options and sent.flags == dns.flags.RD

    @pytest.mark.parametrize(("size", "sent"), [(None, None), (100, 512), (700, 700), (65535, 1232)])
    def test_sizes(self, size, sent):
        message = dns.message.make_query("a.b", "A", use_edns=False if size is None else 0, payload=size or 0)
        assert question.upstream_query(parse_query(message.to_wire())).size == sent

    def test_case(self):
        name = names.wire("ab-1.c")
        assert question.count_letters(name) == 3
        assert question.randomize_case(name, 0b101) == names.wire("Ab-1.C") and question.randomize_case(name, 0) == name

    def test_who_belongs_to_whom(self):
        sent = question.UpstreamQuery(names.wire("ab.c"), 1, 1, 0x100).packet(7, names.wire("aB.c"))
        good = sent[:2] + b"\x81\x80" + sent[4:]
        assert question.match_response(good, sent) == "yes"
        assert question.match_response(good.replace(b"aB", b"ab"), sent) == "case"
        for bad in (
            b"\0\x08" + good[2:],
            good.replace(b"aB", b"ax"),
            good[:-1] + b"\2",
            good[:-3] + b"\x1c" + good[-2:],
            good[:4] + b"\0\0" + good[6:],
            good[:-1],
            b"",
        ):
            assert question.match_response(bad, sent) == "no", bad
