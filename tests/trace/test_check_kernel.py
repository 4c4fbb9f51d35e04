"""`check` beyond the Service rules: what keeps rewritten packets from their endpoints, and rules of a real layout that are right."""

import re

import pytest

from narthex.model.objects import EndpointPort, ServicePort
from narthex.proxy.backends import BACKENDS
from narthex.testing.build import endpoint, endpoint_slice, plan, service
from narthex.trace.follow.views import LinkAddress, NextHop, NodeLink, NodeNeighbour, NodeRoute, NodeView
from narthex.trace.node.view import view_of_files
from narthex.trace.reports.check import CheckReport, DiscrepancyKind, check

OWN = ("10.0.0.2",)
POD, FAR = "10.244.1.7", "10.244.2.9"
PORT = (EndpointPort(name="http", port=8080),)
MODES = ("nftables", "iptables", "ipvs")


def objects(*pods: str, **changes: object):
    web = {"ports": (ServicePort(name="http", port=80, node_port=30080),), "type": "NodePort", **changes}
    return plan(
        service("shop/web", "10.96.0.9", **web),
        endpoint_slice("shop/web", *(endpoint(pod, "worker-a" if pod == POD else "far") for pod in pods), ports=PORT),
        cluster_cidrs=("10.244.0.0/16",),
        node_addresses=OWN,
        node_port_addresses=None,
    )


def route(destination: str, link: str, via: str = "", **more: object) -> NodeRoute:
    return NodeRoute(destination=destination, hops=(NextHop(link=link, via=via),), text=destination, **more)


def node(rules: str, *more: str) -> NodeView:
    """Return the view of a node with a bridge for its pods and a router."""
    view = view_of_files([(f"{number}.txt", text) for number, text in enumerate((rules, *more))], "worker-a")
    view.addresses = (LinkAddress(OWN[0], 24, "eth0"), LinkAddress("10.244.1.1", 24, "cni0"))
    view.links = (NodeLink(name="eth0"), NodeLink(name="cni0", kind="bridge"))
    view.routes = (
        route("0.0.0.0/0", "eth0", "10.0.0.1"),
        route("10.0.0.0/24", "eth0"),
        route("10.244.1.0/24", "cni0"),
        route("10.244.2.0/24", "eth0", "10.0.0.3"),
    )
    view.neighbours = ()
    view.sysctls = {"net.ipv4.ip_forward": "1", "net.ipv4.conf.all.rp_filter": "0", "net.ipv4.conf.eth0.rp_filter": "0"}
    return view


def rendered(mode: str, wanted) -> str:
    backend = BACKENDS[mode]
    return backend.text(backend.render(wanted))


def only(report: CheckReport) -> str:
    (finding,) = report.findings
    assert finding.kind is DiscrepancyKind.BLOCKED
    return finding.said


FORWARD_DROP = "*filter\n:FORWARD DROP [0:0]\nCOMMIT\n"
TO_FAR = "table inet mine {\n\tchain f {\n\t\ttype filter hook forward priority 50; policy accept;\n\t\tip daddr 10.244.2.0/24 drop\n\t}\n}\n"


@pytest.mark.parametrize("mode", MODES)
def test_a_node_that_passes_packets_on(mode: str) -> None:
    wanted = objects(POD, FAR)
    report = check(wanted, node(rendered(mode, wanted)), OWN)
    assert (report.findings, report.unknown) == ((), ())


def test_the_policy_of_forward_is_drop() -> None:
    wanted = objects(POD, FAR)
    report = check(wanted, node(rendered("nftables", wanted), FORWARD_DROP), OWN)
    (finding,) = report.findings
    assert (report.status, finding.kind) == (1, DiscrepancyKind.BLOCKED)
    assert "and then dropped: forward, table filter, chain FORWARD: the policy of the chain is drop" in finding.said


def test_one_obstacle_is_said_once() -> None:
    wanted = objects(POD, FAR)
    report = check(wanted, node(rendered("nftables", wanted), FORWARD_DROP), OWN)
    assert only(report).endswith("the same for 3 more")
    assert report.findings[0].others == 3


@pytest.mark.parametrize("mode", MODES)
def test_a_foreign_table_drops_what_goes_to_one_node(mode: str) -> None:
    wanted = objects(POD, FAR)
    # What IPVS sends on passes output, and not forward.
    foreign = TO_FAR.replace("hook forward", "hook output") if mode == "ipvs" else TO_FAR
    report = check(wanted, node(rendered(mode, wanted), foreign), OWN)
    assert {each.endpoint for each in report.findings} == {f"{FAR}:8080"}
    assert "table mine, chain f: ip daddr 10.244.2.0/24 drop" in only(report)


def test_an_endpoint_without_a_route() -> None:
    wanted = objects(POD, FAR)
    view = node(rendered("nftables", wanted))
    view.routes = (*(view.routes or ())[:3], NodeRoute(destination="10.244.2.0/24", kind="blackhole", text="blackhole"))
    assert "is sent to 10.244.2.9:8080 and then lost: a blackhole route" in only(check(wanted, view, OWN))


def test_an_endpoint_whose_neighbour_does_not_respond() -> None:
    wanted = objects(POD, "10.244.1.8")
    view = node(rendered("nftables", wanted))
    view.neighbours = (NodeNeighbour("10.244.1.8", "cni0", "", "FAILED"), NodeNeighbour(POD, "cni0", "a:b", "STALE"))
    assert "no neighbour responds for 10.244.1.8 on cni0" in only(check(wanted, view, OWN))


def test_a_link_that_is_down_and_a_node_that_forwards_nothing() -> None:
    wanted = objects(POD)
    view = node(rendered("nftables", wanted))
    view.links = (NodeLink(name="eth0"), NodeLink(name="cni0", kind="bridge", up=False))
    assert "the link cni0 is down" in only(check(wanted, view, OWN))
    view = node(rendered("nftables", wanted))
    view.sysctls = {"net.ipv4.ip_forward": "0"}
    assert "net.ipv4.ip_forward is 0" in only(check(wanted, view, OWN))


def test_what_later_rules_depend_on_that_is_not_known() -> None:
    wanted = objects(POD)
    more = "*filter\n:FORWARD ACCEPT [0:0]\n-A FORWARD -m quux --frob 7 -j DROP\nCOMMIT\n"
    report = check(wanted, node(rendered("nftables", wanted), more), OWN)
    assert (report.findings, report.status) == ((), 2)
    assert "followed no further" in report.unknown[-1]


def test_a_node_without_a_default_route_is_asked_by_a_neighbour() -> None:
    wanted = objects(POD)
    view = node(rendered("nftables", wanted))
    view.routes = (view.routes or ())[1:]
    view.sysctls = {**(view.sysctls or {}), "net.ipv4.conf.all.rp_filter": "1"}
    assert check(wanted, view, OWN).status == 0


# ---- kube-proxy's own nftables layout --------------------------------------------------------------------------------

KUBE_PROXY = """table ip kube-proxy {
	set cluster-ips {
		type ipv4_addr
		elements = { 10.96.0.9 }
	}
	map no-endpoint-services {
		type ipv4_addr . inet_proto . inet_service : verdict
		elements = { %(none)s }
	}
	map firewall-ips {
		type ipv4_addr . inet_proto . inet_service : verdict
		elements = { 192.0.2.7 . tcp . 80 : goto firewall-AAAAAAAA-shop/web/tcp/http }
	}
	map service-ips {
		type ipv4_addr . inet_proto . inet_service : verdict
		elements = { 192.0.2.7 . tcp . 80 : goto external-AAAAAAAA-shop/web/tcp/http, 10.96.0.9 . tcp . 80 : goto service-AAAAAAAA-shop/web/tcp/http }
	}
	map service-nodeports {
		type inet_proto . inet_service : verdict
		elements = { tcp . 30080 : goto external-AAAAAAAA-shop/web/tcp/http }
	}
	chain mark-for-masquerade {
		meta mark set meta mark | 0x00004000
	}
	chain endpoint-BBBBBBBB-shop/web/tcp/http__%(pod)s/8080 {
		ip saddr %(pod)s jump mark-for-masquerade
		meta l4proto tcp dnat to %(pod)s:8080
	}
	chain service-AAAAAAAA-shop/web/tcp/http {
		ip daddr 10.96.0.9 tcp dport 80 ip saddr != 10.244.0.0/16 jump mark-for-masquerade
		numgen random mod 1 vmap { 0 : goto endpoint-BBBBBBBB-shop/web/tcp/http__%(pod)s/8080 }
	}
	chain external-AAAAAAAA-shop/web/tcp/http {
		%(external)s
	}
	chain firewall-AAAAAAAA-shop/web/tcp/http {
		ip saddr != { 203.0.113.0/24 } drop
	}
	chain services {
		ip daddr . meta l4proto . th dport vmap @service-ips
		fib daddr type local ip daddr != 127.0.0.0/8 meta l4proto . th dport vmap @service-nodeports
	}
	chain filter-prerouting-pre-dnat {
		type filter hook prerouting priority dstnat - 10; policy accept;
		ct state new ip daddr . meta l4proto . th dport vmap @firewall-ips
	}
	chain filter-input {
		type filter hook input priority filter; policy accept;
		ct state new ip daddr . meta l4proto . th dport vmap @no-endpoint-services
		ct state new fib daddr type local meta l4proto . th dport vmap { tcp . 1 : drop }
	}
	chain filter-forward {
		type filter hook forward priority filter; policy accept;
		ct state new ip daddr . meta l4proto . th dport vmap @no-endpoint-services
		ct state new ip daddr @cluster-ips reject
	}
	chain nat-prerouting {
		type nat hook prerouting priority dstnat; policy accept;
		jump services
	}
}
"""
LOCAL_ONLY = "ip saddr 10.244.0.0/16 goto service-AAAAAAAA-shop/web/tcp/http"
EVERYBODY = "goto service-AAAAAAAA-shop/web/tcp/http"
BALANCED = {"type": "LoadBalancer", "balancers": ("192.0.2.7",), "source_ranges": ("203.0.113.0/24",)}


def kube_proxy(pod: str, external: str, none: str = "") -> str:
    text = KUBE_PROXY % {"pod": pod, "external": external, "none": none}
    return text if none else re.sub(r"\n\t\telements = \{  \}", "", text)


def test_source_ranges_are_no_duplicates_and_their_drop_is_right() -> None:
    wanted = objects(POD, **BALANCED)
    report = check(wanted, node(kube_proxy(POD, EVERYBODY)), OWN)
    assert [each.said for each in report.findings] == []


def test_a_local_service_without_endpoint_here_has_elements_in_two_maps() -> None:
    wanted = objects(FAR, external_policy_local=True, **BALANCED)
    rules = kube_proxy(FAR, LOCAL_ONLY, "192.0.2.7 . tcp . 80 : drop")
    report = check(wanted, node(rules), OWN)
    assert not [each.said for each in report.findings if "30080" not in each.frontend]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pods", [(), (POD,), (FAR,)], ids=["nowhere", "here", "elsewhere"])
@pytest.mark.parametrize("internal", [False, True])
def test_a_local_service_is_right_wherever_its_endpoints_are(mode: str, pods: tuple[str, ...], internal: bool) -> None:
    wanted = objects(*pods, external_policy_local=True, internal_policy_local=internal, **BALANCED)
    report = check(wanted, node(rendered(mode, wanted)), OWN)
    assert [each.said for each in report.findings] == []


def test_two_elements_that_rewrite_are_duplicates() -> None:
    wanted = objects(POD, **BALANCED)
    twice = (
        kube_proxy(POD, EVERYBODY)
        .replace("@firewall-ips", "@nothing")
        .replace("table ip kube-proxy", "table ip narthex-x")
    )
    report = check(wanted, node(kube_proxy(POD, EVERYBODY), twice), OWN)
    assert DiscrepancyKind.DUPLICATE in {each.kind for each in report.findings}


@pytest.mark.parametrize("mode", MODES)
def test_source_ranges_of_each_mode_are_right(mode: str) -> None:
    wanted = objects(POD, FAR, external_policy_local=True, **BALANCED)
    report = check(wanted, node(rendered(mode, wanted)), OWN)
    assert [each.said for each in report.findings] == []
