"""Plugin hosts."""

import dns.message
import pytest

from narthex.dns.corefile.settings import HostsSettings
from narthex.dns.message.query import parse_query
from narthex.dns.plugins.hosts import HostsPlugin, parse_hosts

FILE = """
127.0.0.1 localhost loopback # here
192.0.2.1 Gateway.example gw
192.0.2.2 gateway.example
fd00::1   gateway.example
fe80::1%eth0 link.example
nonsense line
192.0.2.9
192.0.2.300 wrong.example
192.0.2.8 a..b good.example
"""


def hosts(inline=("10.0.0.1 router.example gateway.example",), **settings):
    made = HostsPlugin(HostsSettings(zones=("example.", "."), inline=inline, **settings))
    made.load(FILE.splitlines())
    return made


def ask(served, name, qtype="A"):
    answer = served.answer(parse_query(dns.message.make_query(name, qtype).to_wire()))
    if answer is None:
        return None
    message = dns.message.from_wire(answer)
    assert all(str(each.name).lower().rstrip(".") == name.lower().rstrip(".") for each in message.answer)
    return message.rcode(), sorted(str(data) for each in message.answer for data in each)


def test_addresses():
    served = hosts(inline=())
    assert ask(served, "GATEWAY.example") == (0, ["192.0.2.1", "192.0.2.2"])
    assert ask(served, "gateway.example", "AAAA") == (0, ["fd00::1"])
    assert ask(served, "gw") == (0, ["192.0.2.1"])
    assert ask(served, "gw", "AAAA") == (0, []), "it is there, without such an address"
    assert ask(served, "gw", "TXT") == (0, [])
    assert ask(served, "good.example") == (0, ["192.0.2.8"])
    assert ask(served, "link.example", "AAAA") == (0, ["fe80::1"])
    for name in ("wrong.example", "a..b", "nonsense", "line"):
        if ".." not in name:
            assert ask(served, name) == (2, [])


def test_names():
    served = hosts(inline=())
    assert ask(served, "1.2.0.192.in-addr.arpa", "PTR") == (0, ["Gateway.example.".lower(), "gw."])
    v6 = "1." + "0." * 27 + "0.0.d.f.ip6.arpa"
    assert ask(served, v6, "PTR") == (0, ["gateway.example."])
    assert ask(served, "1.2.0.192.in-addr.arpa", "A") == (0, [])
    assert ask(hosts(reverse=False), "1.2.0.192.in-addr.arpa", "PTR") == (2, [])


def test_the_corefiles_own_lines_win_and_stay():
    served = hosts()
    assert ask(served, "gateway.example") == (0, ["10.0.0.1"])
    assert len(served) == len(parse_hosts(FILE.splitlines())) + 4
    served.load(())
    assert ask(served, "router.example") == (0, ["10.0.0.1"]) and ask(served, "gw") == (2, [])


@pytest.mark.parametrize(
    ("through", "name", "falls"),
    [
        (None, "x.example", False),
        ((".",), "x.example", True),
        (("other.",), "x.example", False),
        (("other.",), "y.other", True),
    ],
)
def test_fallthrough(through, name, falls):
    assert (ask(hosts(fallthrough=through), name) is None) is falls


def test_zones():
    served = HostsPlugin(HostsSettings(zones=("example.",)))
    served.load(FILE.splitlines())
    assert ask(served, "gw") is None and ask(served, "gateway.example") is not None


def test_ttl():
    answer = hosts(ttl=60).answer(parse_query(dns.message.make_query("gw", "A").to_wire()))
    assert dns.message.from_wire(answer).answer[0].ttl == 60
