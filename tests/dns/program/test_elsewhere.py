"""Who may have questions handed on."""

import dns.message
import pytest

from narthex.dns.message.query import DnsClient
from narthex.dns.server.counters import AnswerCounter
from narthex.dns.server.dispatcher import DEFAULT_RECURSION_NETWORKS, BlockPlugins, Dispatcher, Recursion

QUERY = dns.message.make_query("example.org", "A", use_edns=False)


class Resolver:
    """Answers at once, later or never, as told."""

    def __init__(self, message):
        self.message = message
        self.asked = []

    def resolve(self, query, client, reply, now):
        self.asked.append((query, client, now))
        reply(self.message)


def handed_on(client, networks=DEFAULT_RECURSION_NETWORKS, message=None):
    resolver = Resolver(dns.message.make_response(QUERY).to_wire() if message is None else message)
    ask = Dispatcher([BlockPlugins((".",), None, resolver)]).handle(QUERY.to_wire(), "udp")
    tally = AnswerCounter(lambda: None)
    got = []
    Recursion(networks, tally, lambda: 7.0).resolve(ask, DnsClient(client), got.append)
    return resolver, [dns.message.from_wire(each) for each in got], tally.take()


@pytest.mark.parametrize(
    ("client", "allowed"),
    [
        ("127.0.0.1", True),
        ("10.64.1.1", True),
        ("172.31.255.255", True),
        ("172.32.0.0", False),
        ("192.168.1.1", True),
        ("100.64.0.1", True),
        ("169.254.20.10", True),
        ("fd00::1", True),
        ("fe80::1", True),
        ("198.51.100.1", False),
        ("2001:db8::1", False),
    ],
)
def test_private_networks_by_default(client, allowed):
    resolver, got, counts = handed_on(client)
    assert len(resolver.asked) == allowed
    assert [each.rcode() for each in got] == [0 if allowed else 5]
    family = 2 if ":" in client else 1
    labels = ("A", "NOERROR", "forward") if allowed else ("A", "REFUSED", "acl")
    assert counts.answers == {("udp", family, ".", *labels): 1}


def test_other_networks_when_they_are_named():
    assert len(handed_on("198.51.100.1", ("198.51.100.0/24",))[0].asked) == 1
    assert handed_on("10.64.1.1", ("198.51.100.0/24",))[1][0].rcode() == 5


def test_a_long_answer_is_cut():
    long = dns.message.make_response(QUERY).to_wire() + bytes(700)
    (said,) = handed_on("10.64.1.1", message=long)[1]
    assert said.flags & dns.flags.TC
