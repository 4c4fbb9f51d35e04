"""`check` over what each mode renders: nothing is wrong with the same objects, and every difference has its name."""

import re

import pytest

from narthex.model.objects import EndpointPort, ServicePort
from narthex.proxy.backends import BACKENDS
from narthex.testing.build import endpoint, endpoint_slice, plan, service
from narthex.trace.follow.views import LinkAddress, NodeView
from narthex.trace.node.network import ConntrackListing
from narthex.trace.node.view import view_of_files
from narthex.trace.reports.check import DiscrepancyKind, check

OWN = ("10.0.0.2",)
MODES = ("nftables", "iptables", "ipvs")
PORT = (EndpointPort(name="http", port=8080),)


def objects(*pods: str, **changes: object):
    web = {"ports": (ServicePort(name="http", port=80, node_port=30080),), "type": "NodePort", **changes}
    return plan(
        service("shop/web", "10.96.0.9", **web),
        endpoint_slice("shop/web", *map(endpoint, pods), ports=PORT),
        service("shop/idle", "10.96.0.10", ports=(ServicePort(name="http", port=80),)),
        cluster_cidrs=("10.244.0.0/16",),
        node_addresses=OWN,
        node_port_addresses=None,
    )


def seen(mode: str, wanted, more: str = "") -> NodeView:
    backend = BACKENDS[mode]
    text = backend.text(backend.render(wanted))
    texts = [("rules.txt", text)] + ([("more.txt", more)] if more else [])
    view = view_of_files(texts, "node-a")
    view.addresses = (LinkAddress(OWN[0], 24, "eth0"),)
    return view


def kinds(wanted, view: NodeView) -> list[tuple[DiscrepancyKind, str, str]]:
    return sorted(
        {(each.kind, each.service or each.frontend, each.endpoint) for each in check(wanted, view, OWN).findings},
        key=lambda each: (each[0].value, *each[1:]),
    )


@pytest.mark.parametrize("mode", MODES)
def test_the_same_objects_differ_in_nothing(mode: str) -> None:
    wanted = objects("10.244.1.7", "10.244.2.7", "10.244.2.8")
    report = check(wanted, seen(mode, wanted), OWN)
    assert (report.findings, report.unknown, report.status) == ((), (), 0)
    assert (report.frontends, report.endpoints) == (3, 3)


@pytest.mark.parametrize("mode", MODES)
def test_an_endpoint_that_came_and_one_that_went(mode: str) -> None:
    wanted = objects("10.244.1.7", "10.244.2.9")
    assert kinds(wanted, seen(mode, objects("10.244.1.7", "10.244.2.7"))) == [
        (DiscrepancyKind.MISSING, "shop/web:http", "10.244.2.9:8080"),
        (DiscrepancyKind.STALE, "shop/web:http", "10.244.2.7:8080"),
    ]


@pytest.mark.parametrize("mode", MODES)
def test_a_service_that_nobody_told_the_kernel_of_and_one_that_is_gone(mode: str) -> None:
    wanted = objects("10.244.1.7")
    without = plan(cluster_cidrs=("10.244.0.0/16",), node_addresses=OWN, node_port_addresses=None)
    found = kinds(wanted, seen(mode, without))
    assert (DiscrepancyKind.MISSING, "shop/web:http", "") in found
    assert {each[0] for each in kinds(without, seen(mode, wanted))} == {DiscrepancyKind.EXTRA}


@pytest.mark.parametrize("mode", MODES)
def test_a_service_without_endpoints_is_to_be_refused(mode: str) -> None:
    wanted = objects()
    assert kinds(wanted, seen(mode, wanted)) == []
    assert (DiscrepancyKind.STALE, "shop/web:http", "10.244.1.7:8080") in kinds(
        wanted, seen(mode, objects("10.244.1.7"))
    )
    assert (DiscrepancyKind.ANSWER, "shop/web:http", "") in kinds(objects("10.244.1.7"), seen(mode, wanted))


def test_a_share_that_is_wrong() -> None:
    wanted = objects("10.244.1.7", "10.244.2.7")
    view = seen("iptables", wanted)
    backend = BACKENDS["iptables"]
    text = backend.text(backend.render(wanted)).replace("--probability 0.50000000000", "--probability 0.90000000000")
    view = view_of_files([("rules.txt", text)], "node-a")
    view.addresses = (LinkAddress(OWN[0], 24, "eth0"),)
    assert {each[0] for each in kinds(wanted, view)} == {DiscrepancyKind.SHARE}


def test_a_rule_of_somebody_else_that_takes_the_packet_first() -> None:
    wanted = objects("10.244.1.7")
    backend = BACKENDS["iptables"]
    text = backend.text(backend.render(wanted))
    rule = "-A PREROUTING -d 10.96.0.9/32 -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.9.9.9:99\n"
    text = re.sub(r"^(-A PREROUTING )", rule.replace("\\", r"\\") + r"\1", text, count=1, flags=re.MULTILINE)
    view = view_of_files([("rules.txt", text)], "node-a")
    view.addresses = (LinkAddress(OWN[0], 24, "eth0"),)
    assert kinds(wanted, view) == [(DiscrepancyKind.SHADOWED, "shop/web:http", "")]


def test_two_proxies_side_by_side() -> None:
    wanted = objects("10.244.1.7")
    other = BACKENDS["nftables"]
    view = seen("iptables", wanted, other.text(other.render(wanted)))
    assert {each[0] for each in kinds(wanted, view)} == {DiscrepancyKind.DUPLICATE}


def test_known_connections_to_an_endpoint_that_is_gone() -> None:
    wanted = objects("10.244.1.7")
    view = seen("iptables", wanted)
    line = "udp 17 25 src=10.0.0.9 dst={} sport=5 dport={} src={} dst=10.0.0.9 sport=8080 dport=5 use=1"
    line = line.replace("udp 17", "tcp 6 99 ESTABLISHED")
    view.connections = ConntrackListing(
        "\n".join(
            (
                line.format("10.96.0.9", 80, "10.244.1.7"),
                line.format("10.96.0.9", 80, "10.244.1.8"),
                line.format("10.0.0.2", 30080, "10.244.1.8"),
                line.format("10.0.0.7", 443, "10.0.0.7"),
            )
        )
    )
    assert kinds(wanted, view) == [(DiscrepancyKind.CONNECTION, "shop/web:http", "10.244.1.8:8080")]
    assert len(check(wanted, view, OWN).findings) == 2


def test_without_rules_nothing_can_be_told() -> None:
    wanted = objects("10.244.1.7")
    report = check(wanted, NodeView(absent={"rules": "nft is not installed"}), OWN)
    assert report.status == 2
    assert report.unknown == ("the node's rules are unknown: nft is not installed",)


def test_a_match_that_is_not_understood_is_no_difference() -> None:
    wanted = objects("10.244.1.7")
    more = "*raw\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -m quux --frob 7 -j DROP\nCOMMIT\n"
    report = check(wanted, seen("iptables", wanted, more), OWN)
    assert report.status == 2
    assert "quux" in report.unknown[0]


def test_a_cache_of_names_on_the_node_answers_in_its_place() -> None:
    """NodeLocal DNSCache has the cluster IP on a link of its own, and rules that keep nat away from it."""
    wanted = objects("10.244.1.7")
    more = "*raw\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -d 10.96.0.9/32 -p tcp -m tcp --dport 80 -j NOTRACK\nCOMMIT\n"
    view = seen("iptables", wanted, more)
    assert kinds(wanted, view) == [(DiscrepancyKind.MISSING, "shop/web:http", "")]
    view.addresses = (*(view.addresses or ()), LinkAddress("10.96.0.9", 32, "nodelocaldns"))
    assert kinds(wanted, view) == []


def test_what_a_relay_does_no_rule_tells() -> None:
    wanted = objects("10.244.1.7")
    more = (
        "*nat\n:PREROUTING ACCEPT [0:0]\n:KUBE-PORTALS-CONTAINER - [0:0]\n-A PREROUTING -j KUBE-PORTALS-CONTAINER\n"
        "-A KUBE-PORTALS-CONTAINER -d 10.96.0.9/32 -p tcp -m tcp --dport 80 -j REDIRECT --to-ports 40000\n"
        "-A KUBE-PORTALS-CONTAINER -p tcp -m tcp --dport 30080 -j REDIRECT --to-ports 40000\nCOMMIT\n"
        "*filter\n:FORWARD ACCEPT [0:0]\n-A FORWARD -d 10.96.0.10/32 -j REJECT\nCOMMIT\n"
    )
    view = view_of_files([("rules.txt", more)], "node-a")
    view.addresses = (LinkAddress(OWN[0], 24, "eth0"),)
    report = check(wanted, view, OWN)
    assert (report.findings, report.status) == ((), 2)
    assert all("a relay on this node takes it" in text for text in report.unknown)


def test_rules_of_which_the_input_has_a_part_are_not_missing() -> None:
    wanted = objects("10.244.1.7")
    backend = BACKENDS["iptables"]
    text = backend.text(backend.render(wanted))
    part = "".join(
        line + "\n" for line in text.splitlines() if line.startswith("-A KUBE-S") and "10.96.0.9" not in line
    )
    view = view_of_files([("grep.txt", part)], "node-a")
    view.addresses = (LinkAddress(OWN[0], 24, "eth0"),)
    report = check(wanted, view, OWN)
    assert not report.findings and report.status == 2
    assert any(
        "the input is partial: grep.txt: line 1: the input contains only a part of table nat" in each
        for each in report.unknown
    )
    assert any(
        each.startswith("10.96.0.9:80/tcp (cluster IP) of shop/web:http: the input contains only")
        for each in report.unknown
    )
