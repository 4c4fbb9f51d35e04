"""How answers look on the wire: rows S1 to S8 and S12, by dnspython's reading of them."""

import struct
from collections import Counter

import dns.edns
import dns.flags
import dns.message
import dns.opcode
import dns.rdataclass
import pytest
from tests.dns.cluster import OBJECTS, Served, code, texts

from narthex.dns.message import wire
from narthex.dns.message.query import MAX_UDP_SIZE, max_response_size, parse_query
from narthex.dns.message.response import truncate
from narthex.dns.server.dispatcher import LocalAnswer, RejectedPacket
from narthex.dns.server.packet_cache import PacketCache
from narthex.model.store import Upsert
from narthex.testing.build import endpoint, endpoint_slice, service

Z = "shop.svc.cluster.local"
MANY = 120


@pytest.fixture(scope="module")
def cluster():
    crowd = [endpoint(f"10.64.{n // 100}.{n % 100 + 1}", hostname=f"h{n}") for n in range(MANY)]
    return Served(*OBJECTS, service("shop/crowd", "None"), endpoint_slice("shop/crowd", *crowd))


@pytest.mark.row("S1")
@pytest.mark.parametrize("ttl", [0, 5, 30, 3600])
def test_s1_ttl(ttl):
    served = Served(*OBJECTS, ttl=ttl)
    assert served.ask(f"web.{Z}").answer[0].ttl == ttl
    beside = served.ask(f"nope.{Z}").authority[0]
    assert (beside.ttl, beside[0].minimum) == (min(ttl, 300), ttl)


@pytest.mark.row("S2")
def test_s2_the_case_of_the_question_stays(cluster):
    said = cluster.ask("WeB.Shop.sVc.CLUSTER.local")
    assert str(said.answer[0].name) == "WeB.Shop.sVc.CLUSTER.local."
    assert texts(said.answer) == ["A 10.110.0.1"]
    assert str(cluster.ask("Nope.Shop.sVc.CLUSTER.local").authority[0].name) == "CLUSTER.local."


@pytest.mark.row("S3")
@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"use_edns": False}, 512),
        ({"use_edns": 0, "payload": 100}, 512),
        ({"use_edns": 0, "payload": 1232}, 1232),
        ({"use_edns": 0, "payload": 65535}, MAX_UDP_SIZE),
    ],
)
@pytest.mark.parametrize("type_", ["A", "SRV"])
def test_s3_udp_takes_what_fits(cluster, options, size, type_):
    said = cluster.ask(f"crowd.{Z}", type_, **options)
    whole = cluster.ask(f"crowd.{Z}", type_, transport="tcp", **options)
    assert len(whole.answer[0]) == MANY
    assert not whole.flags & dns.flags.TC
    room = size - len(said.to_wire(max_size=65535))
    # dnspython compresses a little more than we do, so ours may look shorter than it was.
    if said.flags & dns.flags.TC:
        assert len(said.answer[0]) < MANY
        assert room < 60 or type_ == "SRV"
        assert not said.additional
    else:
        assert len(said.answer[0]) == MANY


@pytest.mark.row("S3")
def test_s3_additional_records_go_without_a_word(cluster):
    said = cluster.ask(f"heads.{Z}", "SRV", use_edns=False)
    assert len(said.to_wire()) <= 512
    assert len(said.answer[0]) >= 3


@pytest.mark.row("S4")
def test_s4_an_opt_for_an_opt(cluster):
    assert cluster.ask(f"web.{Z}", use_edns=False).edns == -1
    said = cluster.ask(f"web.{Z}", use_edns=0, payload=1232, options=[dns.edns.GenericOption(10, b"12345678")])
    assert (said.edns, said.payload, said.options) == (0, MAX_UDP_SIZE, ())
    for name in (f"web.{Z}", f"nope.{Z}", "example.org"):
        said = cluster.ask(name, use_edns=1)
        assert (code(said), said.edns, said.answer) == ("BADVERS", 0, [])


@pytest.mark.row("S5")
@pytest.mark.parametrize("name", [f"web.{Z}", f"nope.{Z}"])
@pytest.mark.parametrize("flags", [0, dns.flags.RD, dns.flags.RD | dns.flags.CD, dns.flags.AD])
def test_s5_flags(cluster, name, flags):
    said = cluster.ask(name, id=4242, flags=flags)
    assert said.id == 4242
    assert said.flags & ~0xF == dns.flags.QR | dns.flags.AA | flags & (dns.flags.RD | dns.flags.CD)
    assert len(said.question) == 1


@pytest.mark.row("S5")
@pytest.mark.parametrize("type_", ["AXFR", "IXFR"])
@pytest.mark.parametrize("name", ["cluster.local", f"web.{Z}", "in-addr.arpa"])
def test_s5_no_transfers(cluster, name, type_):
    said = cluster.ask(name, type_)
    assert (code(said), said.answer) == ("REFUSED", [])


@pytest.mark.row("S5")
@pytest.mark.parametrize("class_", ["CH", "HS", "ANY"])
def test_s5_other_classes(cluster, class_):
    assert code(cluster.ask(f"web.{Z}", rdclass=class_)) == "REFUSED"


@pytest.mark.row("S6")
def test_s6_elsewhere_is_refused(cluster):
    said = cluster.ask("www.example.org")
    assert (code(said), said.flags & dns.flags.AA) == ("REFUSED", 0)


@pytest.mark.row("S8")
def test_s8_every_address_comes_first_now_and_then(cluster):
    query = dns.message.make_query(f"crowd.{Z}", "A", use_edns=False).to_wire()
    made = cluster.dispatcher.handle(query, "udp")
    firsts = Counter()
    for _ in range(MANY):
        said = dns.message.from_wire(query[:2] + made.response.rotation.next())
        assert said.flags & dns.flags.TC
        firsts[said.answer[0][0].to_text()] += 1
    assert len(firsts) == MANY


@pytest.mark.row("S8")
def test_s8_the_cname_stays_in_front():
    served = Served(*OBJECTS, service("shop/alias", type="ExternalName", external_name=f"twins.{Z}"))
    query = dns.message.make_query(f"alias.{Z}", "A").to_wire()
    made = served.dispatcher.handle(query, "udp")
    seen = set()
    for _ in range(4):
        said = texts(dns.message.from_wire(query[:2] + made.response.rotation.next()).answer)
        assert said[0] == f"CNAME twins.{Z}."
        seen.add(tuple(said[1:]))
    assert len(seen) == 2


@pytest.mark.row("S8")
def test_s8_without_loadbalance_the_order_is_one():
    query = dns.message.make_query(f"twins.{Z}", "A").to_wire()
    assert Served(*OBJECTS, rotate=False).dispatcher.handle(query, "udp").response.rotation is None


@pytest.mark.row("S12")
def test_s12_before_the_first_list():
    served = Served(synced=False)
    assert code(served.ask(f"web.{Z}")) == "SERVFAIL"
    for name, type_ in (("cluster.local", "SOA"), ("svc.cluster.local", "A"), ("dns-version.cluster.local", "TXT")):
        assert code(served.ask(name, type_)) == "NOERROR", name


def header(id_=7, flags=0x0100, counts=(1, 0, 0, 0)):
    return struct.pack(">HH4H", id_, flags, *counts)


QUESTION = b"\x03web\x04shop\x03svc\x07cluster\x05local\0\0\x01\0\x01"
OPT = b"\0\0\x29\x10\0\0\0\0\0\0\0"


@pytest.mark.parametrize(
    ("packet", "rcode"),
    [
        (b"", None),
        (b"\0" * 11, None),
        (header(flags=0x8100) + QUESTION, None),
        (header(flags=0x2800) + QUESTION, wire.NOTIMP),
        (header(flags=0x2000) + QUESTION, wire.NOTIMP),
        (header(counts=(0, 0, 0, 0)), wire.FORMERR),
        (header(counts=(2, 0, 0, 0)) + QUESTION * 2, wire.FORMERR),
        (header(counts=(1, 1, 0, 0)) + QUESTION, wire.FORMERR),
        (header(), wire.FORMERR),
        (header() + QUESTION[:-1], wire.FORMERR),
        (header() + QUESTION + b"\0", wire.FORMERR),
        (header() + b"\xc0\x0c\0\x01\0\x01", wire.FORMERR),
        (header() + b"\x40" + b"a" * 64 + b"\0\0\x01\0\x01", wire.FORMERR),
        (header() + b"\x3f" + b"a" * 63 + (b"\x3f" + b"a" * 63) * 3 + b"\0\0\x01\0\x01", wire.FORMERR),
        (header(counts=(1, 0, 0, 2)) + QUESTION + OPT * 2, wire.FORMERR),
        (header(counts=(1, 0, 0, 1)) + QUESTION + b"\x01a" + OPT, wire.FORMERR),
        (header(counts=(1, 0, 1, 0)) + QUESTION + OPT, wire.FORMERR),
        (header(counts=(1, 0, 0, 1)) + QUESTION + OPT[:-2] + b"\0\x09", wire.FORMERR),
        (header(counts=(1, 0, 0, 9999)) + QUESTION + OPT, wire.FORMERR),
        (header(counts=(1, 0, 0, 1)) + QUESTION + b"\xc0\x0c\0\x10\0\x01" + bytes(6), 0),
    ],
)
def test_what_is_no_question(cluster, packet, rcode):
    made = cluster.dispatcher.handle(packet, "udp")
    if rcode is None:
        assert made is None
    elif rcode:
        assert isinstance(made, RejectedPacket)
        assert len(made.message) == 12 <= len(packet)
        assert made.message[:2] == packet[:2]
        assert struct.unpack(">H", made.message[2:4])[0] & 0x800F == 0x8000 | rcode
    else:
        assert isinstance(made, LocalAnswer)


def test_unknown_names_are_told_shortly_until_something_changes():
    served = Served(*OBJECTS)
    for name in (f"new.{Z}", f"web.{Z}.{Z}", "a.b.cluster.local", f"x.new.{Z}"):
        served.ask(name)
        key = dns.message.make_query(
            name.replace(
                name.split(".")[0], "zz" if len(name.split(".")[0]) == 2 else "z" * len(name.split(".")[0]), 1
            ),
            "A",
        ).to_wire()[2:]
        short = served.dispatcher.nxdomain.lookup(key)
        assert short is not None, name
        assert short[0] == served.dispatcher.handle(b"\0\0" + key, "udp").response.tail
    # A name that exists is not told so, although its like was asked for.
    served.ask(f"abc.{Z}")
    assert served.dispatcher.nxdomain.lookup(dns.message.make_query(f"web.{Z}", "A").to_wire()[2:]) is None
    served.store.apply(Upsert(service("shop/new", "10.110.7.7")))
    served.update()
    assert texts(served.ask(f"new.{Z}").answer) == ["A 10.110.7.7"]


def test_the_table_is_bounded():
    served = Served(*OBJECTS)
    table = PacketCache(max_bytes=20_000)
    for number in range(2000):
        packet = dns.message.make_query(
            f"web.{Z}", "A", options=[dns.edns.GenericOption(10, b"%08d" % number)]
        ).to_wire()
        table.store(packet[2:], served.dispatcher.handle(packet, "udp").response, [0])
        assert sum(len(key) + len(kept.tail) for key, kept in table.entries.items()) < 20_000
    for number in range(2000):
        table.store_negative(b"%d" % number, b"tail", [0])
    assert len(table.entries) < 100
    table.store_negative(b"again", b"tail", [0])
    table.store_negative(b"again", b"tail", [0])
    assert b"again" in table.entries


def test_answers_of_others_are_cut_to_what_the_client_takes():
    query = parse_query(dns.message.make_query("example.org", "TXT", use_edns=False).to_wire())
    long = dns.message.make_response(dns.message.from_wire(query.packet)).to_wire() + bytes(600)
    short = dns.message.from_wire(truncate(long, query, max_response_size(query, "udp")))
    assert short.flags & dns.flags.TC
    assert not short.answer
    assert truncate(long, query, max_response_size(query, "tcp")) == long
