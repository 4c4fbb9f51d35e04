"""What `ip`, `bridge`, `conntrack` and `sysctl` print, as parts of a view."""

import pytest

from narthex.model.net import IPFamily, Protocol
from narthex.trace.follow.views import NextHop
from narthex.trace.node.network import ConntrackListing, fdb_of, links_of, neighbours_of, read_line
from narthex.trace.node.routes import policies_of, policy_lines, route_line, route_lines, routes_of
from narthex.trace.node.view import settings_of, view_of_files

V4 = IPFamily.IPV4


@pytest.mark.parametrize(
    ("line", "destination", "kind", "hops"),
    [
        ("default via 10.0.0.1 dev eth0 proto dhcp metric 100", "0.0.0.0/0", "unicast", [NextHop(link="eth0", via="10.0.0.1")]),
        ("10.244.3.0/24 dev cni0 proto kernel scope link src 10.244.3.1", "10.244.3.0/24", "unicast", [NextHop(link="cni0")]),
        (
            "10.244.3.0/24 via 10.244.3.0 dev flannel.1 onlink",
            "10.244.3.0/24",
            "unicast",
            [NextHop(link="flannel.1", via="10.244.3.0", onlink=True)],
        ),
        ("blackhole 10.244.9.0/26 proto bird", "10.244.9.0/26", "blackhole", []),
        ("unreachable default dev lo metric 4294967295", "0.0.0.0/0", "unreachable", [NextHop(link="lo")]),
        ("172.30.3.0      0.0.0.0         255.255.255.192 U     0      0        0 cni0", "172.30.3.0/26", "unicast", [NextHop(link="cni0")]),
        (
            "0.0.0.0         172.30.3.1      0.0.0.0         UG    0      0        0 eth0",
            "0.0.0.0/0",
            "unicast",
            [NextHop(link="eth0", via="172.30.3.1")],
        ),
        ("10.88.0.0/16 via inet6 fe80::1 dev br0", "10.88.0.0/16", "unicast", [NextHop(link="br0", via="fe80::1")]),
    ],
)  # fmt: skip
def test_lines_of_routes(line, destination, kind, hops) -> None:
    route = route_line(line)
    assert route is not None
    assert (route.destination, route.kind, list(route.hops)) == (destination, kind, hops)


@pytest.mark.parametrize(
    "line",
    [
        "-A KUBE-SERVICES -j X",
        "*nat",
        "hello world",
        "",
        "Kernel IP routing table",
        "default something strange here",
        "0.0.0.0/0",
    ],
)
def test_lines_that_are_no_routes(line) -> None:
    assert route_line(line) is None


def test_several_next_hops_stand_in_lines_of_their_own() -> None:
    (route,) = route_lines(
        "10.7.0.0/16 \n\tnexthop via 10.1.0.2 dev br0 weight 2 \n\tnexthop via 10.1.0.3 dev br0 weight 1 "
    )
    assert [(hop.via, hop.weight) for hop in route.hops] == [("10.1.0.2", 2), ("10.1.0.3", 1)]


def test_json_of_routes() -> None:
    data = [
        {"dst": "default", "gateway": "10.0.0.1", "dev": "eth0", "metrics": [{"mtu": 1400}], "flags": []},
        {"type": "local", "dst": "10.0.0.2", "dev": "eth0", "table": "local", "flags": []},
        {
            "dst": "10.7.0.0/16",
            "flags": [],
            "nexthops": [{"gateway": "10.0.0.3", "dev": "eth0", "weight": 2, "flags": ["dead"]}],
        },
    ]
    default, own, several = routes_of(data, V4)
    assert (default.destination, default.mtu, default.table) == ("0.0.0.0/0", 1400, "main")
    assert (own.destination, own.kind, own.table) == ("10.0.0.2/32", "local", "local")
    assert several.hops[0].dead


def test_a_route_of_ipv6_with_several_hops_is_one() -> None:
    data = [{"dst": "fd01::/64", "gateway": f"fd00::{n}", "dev": "eth0", "metric": 1024, "flags": []} for n in (1, 2)]
    (route,) = routes_of(data, IPFamily.IPV6)
    assert [hop.via for hop in route.hops] == ["fd00::1", "fd00::2"]


def test_policy_rules_of_both_forms() -> None:
    data = [
        {"priority": 100, "src": "10.1.0.0", "srclen": 24, "fwmark": "0x10", "fwmask": "0xff", "table": "77"},
        {"priority": 101, "not": None, "src": "10.5.0.0", "srclen": 16, "iif": "br0", "action": "unreachable"},
    ]
    text = "100:\tfrom 10.1.0.0/24 fwmark 0x10/0xff lookup 77\n101:\tnot from 10.5.0.0/16 iif br0 unreachable\n"
    ours, theirs = policies_of(data, V4), policy_lines(text)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.priority, one.table, one.action, one.source, one.iif, one.mark, one.mask, one.negate) == (
            other.priority, other.table, other.action, other.source, other.iif, other.mark, other.mask, other.negate,
        )  # fmt: skip
    assert ours[0].mark == 16
    assert ours[1].negate


def test_a_selector_that_is_not_understood_is_kept_as_a_doubt() -> None:
    (rule,) = policies_of([{"priority": 5, "src": "all", "uid_start": 0, "uid_end": 99, "table": "9"}], V4)
    assert rule.strange == "uid_end, uid_start"


def test_links_neighbours_and_forwarding_entries() -> None:
    vxlan = {
        "ifindex": 5, "ifname": "flannel.1", "flags": ["UP"], "mtu": 1450,
        "linkinfo": {"info_kind": "vxlan", "info_data": {"id": 1, "local": "10.0.0.2", "port": 8472, "link": "eth0"}},
    }  # fmt: skip
    port = {"ifname": "veth1", "flags": [], "master": "cni0",
            "linkinfo": {"info_kind": "veth", "info_slave_kind": "bridge", "info_slave_data": {"hairpin": False}}}  # fmt: skip
    one, other = links_of([vxlan, port])
    assert (one.kind, one.vxlan_id, one.vxlan_local, one.vxlan_port, one.vxlan_under, one.up) == (
        "vxlan", 1, "10.0.0.2", 8472, "eth0", True,
    )  # fmt: skip
    assert (other.master, other.hairpin, other.up) == ("cni0", False, False)
    (neighbour,) = neighbours_of([{"dst": "10.244.2.0", "dev": "flannel.1", "lladdr": "aa:bb", "state": ["PERMANENT"]}])
    assert (neighbour.mac, neighbour.state) == ("aa:bb", "PERMANENT")
    (entry,) = fdb_of(
        [{"mac": "aa:bb", "ifname": "flannel.1", "dst": "10.0.0.3"}, {"mac": "33:33:00:00:00:01", "ifname": "x"}]
    )
    assert (entry.link, entry.remote) == ("flannel.1", "10.0.0.3")


CONNECTIONS = """\
tcp      6 431999 ESTABLISHED src=10.244.1.7 dst=10.96.0.1 sport=40000 dport=443 src=10.0.0.1 dst=10.244.1.7 sport=6443 dport=40000 [ASSURED] mark=0 use=1
udp      17 25 src=10.244.1.7 dst=10.96.0.10 sport=5353 dport=53 [UNREPLIED] src=10.244.2.9 dst=10.244.1.7 sport=53 dport=5353 mark=2 use=1
ipv4     2 icmp     1 29 src=10.0.0.2 dst=10.0.0.3 type=8 code=0 id=77 src=10.0.0.3 dst=10.0.0.2 type=0 code=0 id=77 use=1
conntrack v1.4.7 (conntrack-tools): 3 flow entries have been shown.
"""


def test_connections_are_found_by_where_they_were_sent_to_and_who_answers() -> None:
    table = ConntrackListing(CONNECTIONS)
    assert len(table) == 3
    (found,) = table.to(Protocol.TCP, "10.96.0.1", 443)
    assert (found.reply_source, found.reply_source_port, found.state, found.flags, found.seconds) == (
        "10.0.0.1", 6443, "ESTABLISHED", ("ASSURED",), 431999,
    )  # fmt: skip
    assert table.to(Protocol.UDP, "10.96.0.1", 443) == ()
    (dns,) = [each for each in table.all() if each.reply_source == "10.244.2.9"]
    assert (dns.flags, dns.mark, dns.state) == (("UNREPLIED",), 2, "")
    assert [each.protocol for each in table.all()] == ["tcp", "udp", "icmp"]
    assert read_line("tcp 6 nonsense") is None


def test_settings() -> None:
    text = "net.ipv4.ip_forward = 1\nnet.ipv4.ip_local_port_range = 32768\t60999\nkernel.x = 1\n"
    assert settings_of(text) == {"net.ipv4.ip_forward": "1", "net.ipv4.ip_local_port_range": "32768 60999"}


def test_single_files_are_told_by_what_stands_in_them() -> None:
    view = view_of_files(
        [
            ("routes", "10.244.3.0/24 dev cni0 proto kernel scope link src 10.244.3.1\n"),
            ("policies", "0:\tfrom all lookup local\n"),
            ("settings", "net.ipv4.ip_forward = 1\n"),
            ("connections", CONNECTIONS),
            ("neighbours", '[{"dst":"10.0.0.3","dev":"eth0","lladdr":"aa:bb","state":["STALE"]}]'),
            (
                "addresses",
                '[{"ifname":"eth0","addr_info":[{"family":"inet","local":"10.0.0.2","prefixlen":24,"scope":"global"}]}]',
            ),
            ("nat", "*nat\n:PREROUTING ACCEPT [0:0]\nCOMMIT\n"),
        ],
        "node-1",
    )
    assert view.routes is not None
    assert view.routes[0].hops[0].link == "cni0"
    assert view.policies is not None
    assert view.sysctl("net.ipv4.ip_forward") == "1"
    assert view.connections is not None
    assert view.neighbours is not None
    assert view.own("10.0.0.2") is not None
    assert view.rules is not None
    assert [table.name for table in view.rules[V4].ruleset.tables] == ["nat"]
    assert set(view.absent) == {"fdb"}
