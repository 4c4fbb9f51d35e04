"""resolv.conf: what is read, and who is left out."""

import pytest

from narthex.dns.corefile.settings import Upstream
from narthex.dns.server.resolv_conf import ResolvConf, parse_resolv_conf, split_upstreams


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ResolvConf()),
        (
            "nameserver 10.0.0.1\nnameserver\t10.0.0.2\nnameserver 10.0.0.1\n",
            ResolvConf(nameservers=("10.0.0.1", "10.0.0.2")),
        ),
        (
            "nameserver fe80::1%eth0\nnameserver FD00::1\nnameserver nobody\nnameserver",
            ResolvConf(nameservers=("fd00::1",)),
        ),
        ("# nameserver 1.1.1.1\n; nameserver 1.1.1.2\nnameserver 1.1.1.3 # here", ResolvConf(nameservers=("1.1.1.3",))),
        (
            "domain one.example\nsearch Two.example. three.example two.example",
            ResolvConf(search=("two.example.", "three.example.")),
        ),
        ("search a.example\ndomain b.example", ResolvConf(search=("b.example.",))),
        ("search a..b .", ResolvConf(search=(".",))),
        ("options ndots:5 timeout:1\noptions ndots:2", ResolvConf(options=("ndots:5", "timeout:1", "ndots:2"))),
        ("nonsense\n\x00\n\ufeff\nnameserver 1.1.1.1\r\n", ResolvConf(nameservers=("1.1.1.1",))),
    ],
)
def test_read(text, expected):
    assert parse_resolv_conf(text) == expected


@pytest.mark.parametrize(
    ("options", "ndots"),
    [((), 1), (("ndots:5",), 5), (("ndots:5", "ndots:99"), 15), (("ndots:x",), 1), (("ndots:",), 1)],
)
def test_ndots(options, ndots):
    assert ResolvConf(options=options).ndots == ndots


@pytest.mark.row("S11")
def test_stubs_and_our_own_addresses_are_left_out():
    conf = ResolvConf(nameservers=("127.0.0.53", "10.0.0.1", "169.254.20.10", "127.0.0.54", "127.0.0.11"))
    found, left_out = split_upstreams(conf, ours=("169.254.20.10",))
    assert found == (Upstream("10.0.0.1"), Upstream("127.0.0.11"))
    assert left_out == ("127.0.0.53", "169.254.20.10", "127.0.0.54")
