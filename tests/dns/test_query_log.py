"""Plugin `log`: what a line says, and which questions have one."""

import pytest

from narthex.dns.corefile.settings import LogSettings
from narthex.dns.message import wire
from narthex.dns.message.names import wire as name_of
from narthex.dns.message.query import DnsClient, parse_query
from narthex.dns.plugins.log import QueryLog, format_line

CLIENT = DnsClient("10.64.1.9", "udp")


def question(name="Web.shop.svc.cluster.local", qtype=1, edns=b"", qclass=1):
    head = wire.HEADER.pack(4567, wire.RD, 1, 0, 0, bool(edns))
    return head + name_of(name) + wire.QUESTION_TAIL.pack(qtype, qclass) + edns


def opt(size, dnssec=False):
    return b"\0\0\x29" + size.to_bytes(2, "big") + (0x8000 if dnssec else 0).to_bytes(4, "big") + b"\0\0"


def answer(code=0, answers=1, flags=wire.QR | wire.AA | wire.RD):
    return wire.HEADER.pack(4567, flags | code, 1, answers, 0, 0)


def said(*, packet=None, message=None, client=CLIENT, format_="{common}"):
    return format_line(format_, parse_query(packet or question()), message or answer(), client, 5353, 0.00012)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {},
            '10.64.1.9:5353 - 4567 "A IN Web.shop.svc.cluster.local. udp 44 false 512" NOERROR qr,aa,rd 12 0.000120000s',
        ),
        (
            {"packet": question(qtype=28, edns=opt(1232, dnssec=True)), "message": answer(3, 0, wire.QR | wire.TC)},
            '10.64.1.9:5353 - 4567 "AAAA IN Web.shop.svc.cluster.local. udp 55 true 1232" NXDOMAIN qr,tc 12 0.000120000s',
        ),
        ({"client": DnsClient("fd64::9", "tcp"), "format_": "{remote}:{port} {proto} {nope} {"}, "[fd64::9]:5353 tcp {nope} {"),
        ({"packet": question(qtype=4711, qclass=3), "format_": "{type} {class} {>opcode}"}, "TYPE4711 CH 0"),
        ({"format_": "{combined}"}, '10.64.1.9:5353 - 4567 "A IN Web.shop.svc.cluster.local. udp 44 false 512" '
         'NOERROR qr,aa,rd 12 0.000120000s "0"'),
    ],
)  # fmt: skip
def test_a_line(given, expected):
    assert said(**given) == expected


def test_nothing_a_client_sends_is_syntax():
    packet = question('a\\010b\\"c\\{rcode\\}.x')
    assert said(packet=packet, format_="{name}") == "a\\010b\\034c{rcode}.x."


@pytest.mark.parametrize(
    ("log", "written"),
    [
        (LogSettings(), "ok denied empty failed slow"),
        (LogSettings(classes=("denial",)), "denied empty"),
        (LogSettings(classes=("success", "error")), "ok failed slow"),
        (LogSettings(classes=("error",), min_duration=1.0), "failed slow"),
        (LogSettings(zones=("shop.svc.cluster.local.",)), "ok denied empty failed slow"),
        (LogSettings(zones=("other.",)), ""),
    ],
)
def test_which_have_one(log, written):
    lines = []
    one = QueryLog({"cluster.local.": (log,), "quiet.": ()}, lines.append)
    assert one.covers("cluster.local.") and not one.covers("quiet.") and not one.covers("dropped")
    cases = {
        "ok": (answer(), 0.1),
        "denied": (answer(3, 0), 0.1),
        "empty": (answer(0, 0), 0.1),
        "failed": (answer(2, 0), 0.1),
        "slow": (answer(), 2.0),
    }
    names = []
    for name, (message, seconds) in cases.items():
        before = len(lines)
        one.log_query("cluster.local.", question(), message, CLIENT, 1, seconds)
        names += [name] * (len(lines) - before)
        one.log_query("quiet.", question(), message, CLIENT, 1, seconds)
    assert " ".join(names) == written


def test_what_is_no_question_has_none():
    lines = []
    QueryLog({".": (LogSettings(),)}, lines.append).log_query(".", b"\0" * 12, answer(), CLIENT, 1, 0.1)
    assert lines == []
