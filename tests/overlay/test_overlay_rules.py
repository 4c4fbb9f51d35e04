"""Masquerading rules, and the way to them; the choice of a link; what the self-test's answers mean."""

import struct

import pytest

from narthex.model.net import IPFamily
from narthex.netfilter.nft.parse import parse_ruleset
from narthex.netfilter.nft.print import nft_script
from narthex.netfilter.xtables.parse import parse_save_text
from narthex.overlay.interfaces import InterfaceNotFound, InterfaceSelection, NodeInterface, select_interface
from narthex.overlay.masquerade import MasqueradeRules, iptables_changes
from narthex.overlay.program.checksums import PAYLOAD, ChecksumVerdict, datagram, verdict

FOUR, SIX = IPFamily.IPV4, IPFamily.IPV6
EMPTY = "*nat\n:PREROUTING ACCEPT [0:0]\n:POSTROUTING ACCEPT [0:0]\nCOMMIT\n*filter\n:FORWARD DROP [0:0]\nCOMMIT\n"
THERE = """*nat
:POSTROUTING ACCEPT [0:0]
:FLANNEL-POSTRTG - [0:0]
:KUBE-POSTROUTING - [0:0]
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG
-A FLANNEL-POSTRTG -m comment --comment "flanneld masq" -m mark --mark 0x4000/0x4000 -j RETURN
-A FLANNEL-POSTRTG -s 10.244.1.0/24 -d 10.244.0.0/16 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s 10.244.0.0/16 -d 10.244.1.0/24 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG ! -s 10.244.0.0/16 -d 10.244.1.0/24 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s 10.244.0.0/16 ! -d 224.0.0.0/4 -m comment --comment "flanneld masq" -j MASQUERADE --random-fully
-A FLANNEL-POSTRTG ! -s 10.244.0.0/16 -d 10.244.0.0/16 -m comment --comment "flanneld masq" -j MASQUERADE --random-fully
COMMIT
*filter
:FORWARD DROP [0:0]
:FLANNEL-FWD - [0:0]
-A FORWARD -m comment --comment "flanneld forward" -j FLANNEL-FWD
-A FLANNEL-FWD -s 10.244.0.0/16 -m comment --comment "flanneld forward" -j ACCEPT
-A FLANNEL-FWD -d 10.244.0.0/16 -m comment --comment "flanneld forward" -j ACCEPT
COMMIT
"""


def wish(family=FOUR, cluster="10.244.0.0/16", own="10.244.1.0/24", masquerade=True, forward=True):
    return MasqueradeRules(family, cluster, own, masquerade=masquerade, forward=forward)


def step(told, listed):
    return iptables_changes(told, parse_save_text(listed, told.family))


def lines(text, *beginnings):
    return [line for line in text.splitlines() if line.startswith(beginnings)]


def test_from_nothing():
    made = step(wish(), EMPTY)
    assert lines(made, "-A") == [
        *lines(THERE, "-A FLANNEL-POSTRTG"),
        '-A POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG',
        *lines(THERE, "-A FLANNEL-FWD"),
        '-A FORWARD -m comment --comment "flanneld forward" -j FLANNEL-FWD',
    ]
    assert lines(made, ":") == [":FLANNEL-POSTRTG - [0:0]", ":FLANNEL-FWD - [0:0]"]


def test_nothing_is_written_when_all_is_there():
    assert step(wish(), THERE) == ""


def test_only_what_is_wrong_is_written():
    without_jump = THERE.replace('-A FORWARD -m comment --comment "flanneld forward" -j FLANNEL-FWD\n', "")
    jump = '-A FORWARD -m comment --comment "flanneld forward" -j FLANNEL-FWD'
    assert step(wish(), without_jump).splitlines() == ["*filter", jump, "COMMIT"]
    doubled = THERE.replace("-A FLANNEL-FWD -s", f"{jump}\n-A FLANNEL-FWD -s")
    delete = jump.replace("-A", "-D", 1)
    assert step(wish(), doubled).splitlines() == ["*filter", delete, delete, jump, "COMMIT"]
    # Another pod range: the chain is written anew, the jump stays.
    made = step(wish(own="10.244.5.0/24"), THERE)
    assert lines(made, ":") == [":FLANNEL-POSTRTG - [0:0]"]
    assert "POSTROUTING -m" not in made.replace("FLANNEL-POSTRTG", "")


def test_what_is_not_wanted_any_more_goes():
    made = step(wish(masquerade=False), THERE)
    assert made.splitlines() == [
        "*nat",
        ":FLANNEL-POSTRTG - [0:0]",
        '-D POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG',
        "-X FLANNEL-POSTRTG",
        "COMMIT",
    ]
    nothing = MasqueradeRules(FOUR, "", "", masquerade=False, forward=False)
    assert step(nothing, EMPTY) == ""
    assert nothing.table() is None


@pytest.mark.parametrize(
    ("told", "multicast"),
    [(wish(), "224.0.0.0/4"), (wish(SIX, "fd44::/16", "fd44:1::/64"), "ff00::/8")],
    ids=["IPv4", "IPv6"],
)
def test_nftables_says_the_same(told, multicast):
    text = nft_script(told.table())
    assert parse_ruleset(text).tables == (told.table(),)
    ip = told.family.nft
    assert f"table {ip} flannel-ipv{told.family.value} {{" in text
    assert f"{ip} daddr != {multicast} masquerade fully-random" in text
    # Upstream's fourth rule is about the cluster, which leaves nothing for the last; and it compares the whole mark.
    cluster, own = ("10.244.0.0/16", "10.244.1.0/24") if told.family is FOUR else ("fd44::/16", "fd44:1::/64")
    assert f"{ip} saddr != {cluster} {ip} daddr {own} return" in text
    assert f"{ip} saddr != {cluster} {ip} daddr {cluster} masquerade" in text
    assert "meta mark & 0x00004000 == 0x00004000" in text or "meta mark & 0x4000 == 0x4000" in text


@pytest.mark.parametrize(
    ("family", "cluster", "own", "sources"),
    [
        (FOUR, "10.244.0.0/16", "10.244.1.0/24", {"eth0": "192.0.2.1", "flannel.1": "10.244.1.0"}),
        (SIX, "fd44::/16", "fd44:1::/64", {"eth0": "fd02::1", "flannel-v6.1": "fd44:1::"}),
    ],
    ids=["IPv4", "IPv6"],
)
def test_a_table_in_front_of_masquerading_rules_names_the_addresses(family, cluster, own, sources):
    def table(**told):
        return MasqueradeRules(family, cluster, own, masquerade=True, **{"forward": True, "sources": sources, **told})

    text = nft_script(table().to_peers)
    assert parse_ruleset(text).tables == (table().to_peers,)
    assert "priority srcnat - 1" in text
    for link, address in sources.items():
        of_link = lines(text.replace("\t", ""), f'oifname "{link}" ')
        assert len(of_link) == 2
        assert all(one.endswith(f" snat to {address} fully-random") for one in of_link)
        assert all(f" daddr {cluster} " in one and f" daddr != {own} " in one for one in of_link)
    unmarked = MasqueradeRules(family, cluster, own, masquerade=False, forward=True, sources=sources).to_peers
    assert [len(chain.rules) for chain in unmarked.chains.values()] == [2]
    assert table(sources={}).to_peers is None
    assert MasqueradeRules(family, cluster, "", masquerade=True, forward=True, sources=sources).to_peers is None


LINKS = (
    NodeInterface(name="eth0", index=2, mtu=1500, addresses=("10.0.2.15", "fd00::15")),
    NodeInterface(name="eth1", index=3, mtu=1500, addresses=("192.0.2.1", "192.0.2.2")),
    NodeInterface(name="cni0", index=4, mtu=1450, addresses=()),
)


def chosen(families=(FOUR,), default=2, towards="", **told):
    return select_interface(InterfaceSelection(**told), LINKS, families, lambda: default, lambda address: towards)  # noqa: ARG005


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ({}, "eth0"),
        ({"default": 3}, "eth1"),
        ({"names": ("eth1",)}, "eth1"),
        ({"names": ("eth9", "192.0.2.2")}, "eth1"),
        ({"patterns": (r"192\.0\.2\..*",)}, "eth1"),
        ({"patterns": ("^eth",)}, "eth0"),
        ({"names": ("eth1",), "patterns": ("eth0",)}, "eth1"),
        ({"can_reach": "192.0.2.9", "towards": "192.0.2.1"}, "eth1"),
        ({"families": (FOUR, SIX)}, "eth0"),
    ],
)
def test_a_link_is_chosen(told, name):
    assert chosen(**told).name == name


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"default": 0}, "no default route .* --iface; there is eth0 .10.0.2.15, fd00::15., eth1"),
        ({"names": ("eth7",)}, "no interface is or has 'eth7'; there is eth0"),
        ({"patterns": ("nothing",)}, "no interface is or has 'nothing'"),
        ({"can_reach": "198.51.100.1"}, "no interface leads to 198.51.100.1"),
        ({"names": ("eth1",), "families": (FOUR, SIX)}, "interface eth1 has no address of IPv6"),
        ({"names": ("cni0",)}, "interface cni0 has no address of IPv4"),
    ],
)
def test_no_link(told, said):
    with pytest.raises(InterfaceNotFound, match=said):
        chosen(**told)


def test_a_pattern_that_is_none():
    with pytest.raises(ValueError, match=r"--iface-regex '.': missing"):
        InterfaceSelection(patterns=("(",))


@pytest.mark.parametrize(
    ("attempts", "found"),
    [
        ([(True, True)], ChecksumVerdict.FINE),
        ([(False, False), (False, True)], ChecksumVerdict.FINE),
        ([(True, False)] * 3, ChecksumVerdict.BROKEN),
        ([(True, False), (False, False), (True, False)], ChecksumVerdict.BROKEN),
        ([(True, False), (False, False), (False, False)], ChecksumVerdict.UNCLEAR),
        ([(False, False)] * 3, ChecksumVerdict.UNCLEAR),
        ([], ChecksumVerdict.UNCLEAR),
    ],
)
def test_verdicts(attempts, found):
    assert verdict(attempts) is found


@pytest.mark.parametrize(("source", "destination"), [("10.244.1.0", "10.244.2.0"), ("fd44:1::", "fd44:2::")])
def test_the_datagram_has_a_right_checksum(source, destination):
    from socket import AF_INET, AF_INET6, inet_pton

    made = datagram(source, destination, 40000)
    assert struct.unpack(">HHH", made[:6]) == (40000, 33434, 8 + len(PAYLOAD))
    number = AF_INET6 if ":" in source else AF_INET
    pseudo = inet_pton(number, source) + inet_pton(number, destination)
    pseudo += struct.pack(">II", len(made), 17) if number == AF_INET6 else struct.pack(">HH", 17, len(made))
    data = pseudo + made + bytes(len(made) % 2)
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    assert total == 0xFFFF
