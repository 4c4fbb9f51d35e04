"""Routing decisions and source checks, as tables. tests/trace/kernel/test_paths_kernel.py holds them against the kernel."""

from fractions import Fraction

import pytest

from narthex.model.net import IPFamily
from narthex.trace.follow.routing import RouteQuery, check_source, look_up
from narthex.trace.follow.views import LinkAddress, NodeView
from narthex.trace.node.routes import policy_lines, route_lines

ROUTES = """\
default via 10.0.0.1 dev eth0
10.0.0.0/24 dev eth0 proto kernel scope link src 10.0.0.2
10.244.1.0/24 dev cni0 proto kernel scope link src 10.244.1.1
10.244.2.0/24 via 10.244.2.0 dev flannel.1 onlink
10.244.2.128/25 via 10.0.0.9 dev eth0 metric 50
10.244.2.128/25 via 10.0.0.8 dev eth0 metric 20
blackhole 10.244.3.0/24
unreachable 10.244.4.0/24
10.7.0.0/16
	nexthop via 10.0.0.5 dev eth0 weight 3
	nexthop via 10.0.0.6 dev eth1 weight 1
local 10.0.0.2 dev eth0 table local
local 127.0.0.0/8 dev lo table local
broadcast 10.0.0.255 dev eth0 table local
default via 10.9.0.1 dev eth1 table 77
throw 10.244.5.0/24 table 77
"""


def view(policies: str = "", **sysctls: str) -> NodeView:
    base = {f"net.ipv4.conf.{name}.{key}": "0" for name in ("all", "eth0", "eth1", "cni0") for key in ("rp_filter", "accept_local", "route_localnet", "src_valid_mark")}  # fmt: skip
    given = {key.replace("__", "."): value for key, value in sysctls.items()}
    return NodeView(
        routes=route_lines(ROUTES),
        policies=policy_lines(policies) or None,
        addresses=(LinkAddress("10.0.0.2", 24, "eth0"), LinkAddress("10.244.1.1", 24, "cni0")),
        sysctls=base | {f"net.ipv4.conf.{key}": value for key, value in given.items()},
    )


@pytest.mark.parametrize(
    ("destination", "kind", "hops"),
    [
        ("8.8.8.8", "unicast", [("eth0", "10.0.0.1", 1)]),
        ("10.0.0.7", "unicast", [("eth0", "", 1)]),
        ("10.0.0.2", "local", []),
        ("127.0.0.5", "local", []),
        ("10.0.0.255", "broadcast", []),
        ("10.244.1.7", "unicast", [("cni0", "", 1)]),
        ("10.244.2.7", "unicast", [("flannel.1", "10.244.2.0", 1)]),
        ("10.244.2.200", "unicast", [("eth0", "10.0.0.8", 1)]),
        ("10.244.3.7", "lost", []),
        ("10.244.4.7", "lost", []),
        ("10.7.1.1", "unicast", [("eth0", "10.0.0.5", Fraction(3, 4)), ("eth1", "10.0.0.6", Fraction(1, 4))]),
    ],
)
def test_the_longest_prefix_then_the_lowest_metric(destination, kind, hops) -> None:
    found = look_up(view(), RouteQuery(destination=destination))
    assert (found.kind, [(hop.link, hop.via, share) for hop, share in found.hops]) == (kind, hops)


RULES = """\
0:	from all lookup local
90:	not from 10.0.0.0/8 prohibit
100:	from 10.244.1.0/24 lookup 77
110:	from all fwmark 0x10/0xf0 lookup 77
32766:	from all lookup main
"""


@pytest.mark.parametrize(
    ("question", "told"),
    [
        (RouteQuery(destination="8.8.8.8", source="10.244.1.7"), "10.9.0.1"),
        (RouteQuery(destination="8.8.8.8", source="10.244.2.7"), "10.0.0.1"),
        (RouteQuery(destination="8.8.8.8", source="10.244.2.7", mark=0x4010), "10.9.0.1"),
        (RouteQuery(destination="8.8.8.8", source="10.244.2.7", mark=0x4020), "10.0.0.1"),
        (RouteQuery(destination="10.244.5.1", source="10.244.1.7"), "10.0.0.1"),
        (RouteQuery(destination="10.0.0.2", source="10.244.1.7"), "local"),
        (RouteQuery(destination="10.99.0.1", source="192.168.0.1"), "the policy rule says prohibit"),
        (RouteQuery(destination="10.99.0.1", source="10.3.0.1"), "10.0.0.1"),
    ],
)
def test_policy_rules_in_their_order(question, told) -> None:
    found = look_up(view(RULES), question)
    assert (found.hops[0][0].via if found.hops else found.reason or found.kind) == told


def test_what_is_not_known_is_said() -> None:
    assert look_up(NodeView(absent={"routes": "ip is not installed"}), RouteQuery(destination="8.8.8.8")).reason == (
        "the node's routes are unknown: ip is not installed"
    )
    strange = NodeView(routes=route_lines("default via 10.0.0.1 dev eth0"), policies=())
    strange.policies = policy_lines("10:\tfrom all uidrange 0-99 lookup 9\n32766:\tfrom all lookup main\n")
    found = look_up(strange, RouteQuery(destination="8.8.8.8"))
    assert found.kind == "unknown"
    assert "uidrange" in found.reason


@pytest.mark.parametrize(
    ("sysctls", "source", "iif", "passed"),
    [
        ({}, "10.244.1.7", "eth0", True),
        ({"all__rp_filter": "1"}, "10.244.1.7", "cni0", True),
        ({"all__rp_filter": "1"}, "10.244.1.7", "eth0", False),
        ({"eth0__rp_filter": "1"}, "10.244.1.7", "eth0", False),
        ({"all__rp_filter": "1", "eth0__rp_filter": "2"}, "10.244.1.7", "eth0", True),
        ({"all__rp_filter": "2"}, "10.244.3.7", "eth0", False),
        ({"all__rp_filter": "1"}, "10.7.0.9", "eth1", True),
        ({}, "10.0.0.2", "eth0", False),
        ({"eth0__accept_local": "1"}, "10.0.0.2", "eth0", True),
        ({}, "127.0.0.1", "eth0", False),
    ],
)
def test_the_source_check(sysctls, source, iif, passed) -> None:
    checked = check_source(view(**sysctls), RouteQuery(destination="10.244.2.7", source=source, iif=iif))
    assert checked.passed is passed, checked


def test_without_settings_nobody_knows() -> None:
    unknown = view()
    unknown.sysctls = None
    assert check_source(unknown, RouteQuery(destination="10.0.0.2", source="8.8.8.8", iif="eth0")).passed is None


def test_both_families_have_rules_of_their_own() -> None:
    both = view(RULES)
    assert look_up(both, RouteQuery(destination="fd00::1")).reason == "no routes of IPv6 are known"
    assert IPFamily.IPV6 not in {rule.family for rule in both.policies or ()}
