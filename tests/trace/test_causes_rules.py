"""Causes and Service names that the rules of a Service proxy state themselves, for dumps without the cluster's objects."""

from __future__ import annotations

from pathlib import Path

import pytest

from narthex.model.store import Snapshot
from narthex.trace.causes.catalogue import CauseFinding
from narthex.trace.causes.find import find
from narthex.trace.model import Fate, PacketPath, PathStep, Stage
from narthex.trace.names import service_of_chain, service_of_steps
from narthex.trace.node.view import view_of_files
from narthex.trace.program.travel import KnownCluster, TraceRequest, travel

DUMPS = Path(__file__).parents[1] / "dumps"

NFTABLES = """\
table ip6 kube-proxy {
	comment "rules for kube-proxy"
	set cluster-ips {
		type ipv6_addr
		elements = { fd00:96::50, fd00:96::60, fd00:96::70, fd00:96::80 }
	}
	set nodeport-ips {
		type ipv6_addr
		elements = { fd00::11 }
	}
	map no-endpoint-services {
		type ipv6_addr . inet_proto . inet_service : verdict
		elements = { fd00:96::60 . udp . 53 comment "dns/cache:dns" : drop, fd00:96::60 . tcp . 53 comment "dns/cache" : goto reject-chain, fd00:96::70 . sctp . 80 comment "shop/web-2" : goto reject-chain, fd00:1b::7 . sctp . 80 comment "shop/web-2" : goto reject-chain }
	}
	map no-endpoint-nodeports {
		type inet_proto . inet_service : verdict
		elements = { tcp . 30090 comment "shop/late:http" : drop }
	}
	map firewall-ips {
		type ipv6_addr . inet_proto . inet_service : verdict
		elements = { fd00:1b::7 . sctp . 80 : goto firewall-ABCDEFGH-shop/web-2/sctp/ }
	}
	map service-ips {
		type ipv6_addr . inet_proto . inet_service : verdict
		elements = { fd00:96::50 . tcp . 80 : goto service-CSFNDQHX-shop/web/tcp/http, fd00:96::50 . tcp . 443 : goto service-MSFNDQHX-shop/web/tcp/https, fd00:96::80 . tcp . 80 : goto service-LSFNDQHX-shop/late/tcp/http }
	}
	chain reject-chain {
		reject
	}
	chain service-CSFNDQHX-shop/web/tcp/http {
		numgen random mod 1 vmap { 0 : goto endpoint-6E7XQMQ4-shop/web/tcp/http__fd00..244.1.5/8080 }
	}
	chain endpoint-6E7XQMQ4-shop/web/tcp/http__fd00..244.1.5/8080 {
		meta l4proto tcp dnat to [fd00::244:1:5]:8080
	}
	chain firewall-ABCDEFGH-shop/web-2/sctp/ {
		ip6 saddr != { fd00:b::/64 } drop
	}
	chain services {
		ip6 daddr . meta l4proto . th dport vmap @service-ips
	}
	chain firewall-check {
		ip6 daddr . meta l4proto . th dport vmap @firewall-ips
	}
	chain service-endpoints-check {
		ip6 daddr . meta l4proto . th dport vmap @no-endpoint-services
	}
	chain nodeport-endpoints-check {
		ip6 daddr @nodeport-ips meta l4proto . th dport vmap @no-endpoint-nodeports
	}
	chain cluster-ips-check {
		ip6 daddr @cluster-ips reject comment "Reject traffic to invalid ports of ClusterIPs"
		ip6 daddr fd00:96::/112 drop comment "Drop traffic to unallocated ClusterIPs"
	}
	chain filter-prerouting-pre-dnat {
		type filter hook prerouting priority dstnat - 10; policy accept;
		ct state new jump firewall-check
	}
	chain filter-input {
		type filter hook input priority filter; policy accept;
		ct state new jump nodeport-endpoints-check
		ct state new jump service-endpoints-check
	}
	chain filter-forward {
		type filter hook forward priority filter; policy accept;
		ct state new jump service-endpoints-check
		ct state new jump cluster-ips-check
	}
	chain nat-prerouting {
		type nat hook prerouting priority dstnat; policy accept;
		jump services
	}
}
"""

RANGES = """\
*filter
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
-A FORWARD -m conntrack --ctstate NEW -j KUBE-PROXY-FIREWALL
-A KUBE-PROXY-FIREWALL -d 192.0.2.7/32 -p tcp -m comment --comment "shop/web:http traffic not accepted by KUBE-FW-A2B3C4D5E6F7A2B3" -m tcp --dport 80 -j DROP
COMMIT
*nat
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KUBE-EXT-A2B3C4D5E6F7A2B3 - [0:0]
:KUBE-FW-A2B3C4D5E6F7A2B3 - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-A2B3C4D5E6F7A2B3 - [0:0]
-A PREROUTING -j KUBE-SERVICES
-A KUBE-EXT-A2B3C4D5E6F7A2B3 -m comment --comment "masquerade LOCAL traffic for shop/web:http external destinations" -m addrtype --src-type LOCAL -j KUBE-MARK-MASQ
-A KUBE-EXT-A2B3C4D5E6F7A2B3 -s 10.64.0.0/12 -m comment --comment "pod traffic for shop/web:http external destinations" -j KUBE-SVC-A2B3C4D5E6F7A2B3
-A KUBE-EXT-A2B3C4D5E6F7A2B3 -m comment --comment "route LOCAL traffic for shop/web:http external destinations" -m addrtype --src-type LOCAL -j KUBE-SVC-A2B3C4D5E6F7A2B3
-A KUBE-FW-A2B3C4D5E6F7A2B3 -s 198.51.100.0/28 -m comment --comment "shop/web:http loadbalancer IP" -j KUBE-EXT-A2B3C4D5E6F7A2B3
-A KUBE-FW-A2B3C4D5E6F7A2B3 -m comment --comment "other traffic to shop/web:http will be dropped by KUBE-PROXY-FIREWALL"
-A KUBE-SERVICES -d 192.0.2.7/32 -p tcp -m comment --comment "shop/web:http loadbalancer IP" -m tcp --dport 80 -j KUBE-FW-A2B3C4D5E6F7A2B3
COMMIT
"""

IPTABLES = """\
*filter
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:KUBE-EXTERNAL-SERVICES - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
-A INPUT -m conntrack --ctstate NEW -j KUBE-PROXY-FIREWALL
-A INPUT -m conntrack --ctstate NEW -j KUBE-EXTERNAL-SERVICES
-A FORWARD -m conntrack --ctstate NEW -j KUBE-PROXY-FIREWALL
-A FORWARD -m conntrack --ctstate NEW -j KUBE-EXTERNAL-SERVICES
-A KUBE-EXTERNAL-SERVICES -d 192.0.2.8/32 -p tcp -m comment --comment "shop/api:rest has no local endpoints" -m tcp --dport 80 -j DROP
-A KUBE-PROXY-FIREWALL -d 192.0.2.7/32 -p tcp -m comment --comment "shop/web:http traffic not accepted by KUBE-FW-A2B3C4D5E6F7A2B3" -m tcp --dport 80 -j DROP
COMMIT
*nat
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
COMMIT
"""


def asked(text: str, source: str, destination: str, *own: str) -> tuple[PacketPath, list[CauseFinding]]:
    """Return the path through the rules in a text, and its causes."""
    view = view_of_files([("rules.txt", text)])
    known = KnownCluster(views=(view,), snapshot=Snapshot(), node_ips=own)
    iif = "" if source in own else "eth0"
    path = travel(known, TraceRequest(source=source, destination=destination, iif=iif))
    return path, find(path, {view.name: view})


@pytest.mark.parametrize(
    ("destination", "cause", "words", "service"),
    [
        ("[fd00:96::60]:53/udp", "local-policy", "dns/cache:dns has no endpoint on it", "dns/cache:dns"),
        ("[fd00:96::60]:53/tcp", "no-endpoints", "dns/cache has no endpoints", "dns/cache"),
        ("[fd00::11]:30090/tcp", "local-policy", "shop/late:http has no endpoint on it", "shop/late:http"),
        ("[fd00:1b::7]:80/sctp", "source-range", "drop fd00:c::9 because of shop/web-2's source ranges", "shop/web-2"),
        ("[fd00:96::50]:81/tcp", "port-not-served", "Service shop/web (fd00:96::50) has no port 81/tcp", ""),
        ("[fd00:96::99]:80/tcp", "no-such-service", "no Service has the address fd00:96::99", ""),
    ],
)
def test_maps_and_chain_names_of_nftables_state_the_cause(
    destination: str, cause: str, words: str, service: str
) -> None:
    path, found = asked(NFTABLES, "fd00:c::9", destination, "fd00::11")
    assert [(each.cause.id, each.certain) for each in found if each.explains] == [(cause, True)]
    assert words in found[0].sentence
    assert path.service == service


def test_a_port_that_a_service_with_policy_local_lacks_is_certain_only_if_no_line_is_missing() -> None:
    """Without its line, kube-proxy's drop of another port reads as a refusal."""
    path, found = asked(NFTABLES, "fd00:c::9", "[fd00:96::60]:81/tcp")
    assert [(each.cause.id, each.certain) for each in found] == [("port-not-served", False)]
    assert "Service dns/cache (fd00:96::60) has no port 81/tcp" in found[0].sentence
    assert "no element for another port of fd00:96::60 is missing" in str(path.tree)


def test_an_unserved_port_is_answered_with_the_ports_that_are() -> None:
    _, found = asked(NFTABLES, "fd00:c::9", "[fd00:96::50]:81/tcp")
    assert "ports that the rules serve at fd00:96::50: 80/tcp (http), 443/tcp (https)" in found[0].evidence


@pytest.mark.parametrize("name", ["kube-proxy.nft-list-a", "kube-proxy.nft-json"])
def test_json_and_text_of_nft_name_the_service(name: str) -> None:
    text = (DUMPS / name).read_text()
    path, found = asked(text, "198.51.100.7", "10.96.0.77:80")
    assert (path.service, found[0].cause.id) == ("shop/empty:http", "no-endpoints")
    assert asked(text, "198.51.100.7", "10.96.0.50:80")[0].service == "shop/web:http"


@pytest.mark.parametrize(
    ("destination", "cause", "service"),
    [("192.0.2.7:80", "source-range", "shop/web:http"), ("192.0.2.8:80", "local-policy", "shop/api:rest")],
)
def test_comments_of_iptables_state_the_cause(destination: str, cause: str, service: str) -> None:
    path, found = asked(IPTABLES, "198.51.100.7", destination)
    assert [each.cause.id for each in found] == [cause]
    assert path.service == service


@pytest.mark.parametrize(
    ("rule", "cause"),
    [
        ("-A KUBE-SERVICES -d 10.96.0.77/32 -p tcp -m tcp --dport 80 -j REJECT", "no-endpoints"),
        ("-A KUBE-SERVICES -d 10.96.0.77/32 -p tcp -m tcp --dport 80 -j DROP", "local-policy"),
        ("-A KUBE-PROXY-FIREWALL -d 10.96.0.77/32 -p tcp -m tcp --dport 80 -j DROP", "source-range"),
    ],
)
def test_a_chain_that_only_refuses_states_the_cause_without_a_comment(rule: str, cause: str) -> None:
    text = IPTABLES.replace("-A INPUT", f"-A FORWARD -m conntrack --ctstate NEW -j KUBE-SERVICES\n{rule}\n-A INPUT", 1)
    text = text.replace(":KUBE-EXT", ":KUBE-SERVICES - [0:0]\n:KUBE-EXT")
    assert [each.cause.id for each in asked(text, "198.51.100.7", "10.96.0.77:80")[1]] == [cause]


@pytest.mark.parametrize(
    ("text", "service"),
    [
        ("service-CSFNDQHX-shop/web/tcp/http", "shop/web:http"),
        ("local-CSFNDQHX-shop/web/tcp/http", "shop/web:http"),
        ("external-CSFNDQHX-shop/web/udp/", "shop/web"),
        ("endpoint-WFQ3BF5P-a/b/sctp/__10.244.1.6/80", "a/b"),
        ("endpoint-WFQ3BF5P-a/b/tcp/dns-tcp__fd00..1/53", "a/b:dns-tcp"),
        ("firewall-ips { 192.0.2.7 . tcp . 80 : goto firewall-ABCDEFGH-shop/web/tcp/http }", "shop/web:http"),
        ("firewall-check", ""),
        ("service-endpoints-check", ""),
        ("service-shop/web/tcp/http", ""),
    ],
)
def test_chain_names_of_nftables_name_the_service(text: str, service: str) -> None:
    assert service_of_chain(text) == service


@pytest.mark.parametrize(
    ("chain", "comment", "service"),
    [
        ("KUBE-SERVICES", "shop/web:http cluster IP", "shop/web:http"),
        ("KUBE-NODEPORTS", "shop/web:http", "shop/web:http"),
        ("KUBE-SERVICES", "shop/web has no endpoints", "shop/web"),
        ("KUBE-EXT-A2B3C4D5E6F7A2B3", "masquerade traffic for shop/web:http external destinations", "shop/web:http"),
        ("KUBE-SEP-A2B3C4D5E6F7A2B3", "shop/web:http -> 10.244.1.5:8080", "shop/web:http"),
        ("KUBE-SERVICES", "kubernetes service nodeports; NOTE: this must be the last rule in this chain", ""),
        ("DOCKER", "shop/web:http cluster IP", ""),
    ],
)
def test_comments_of_kube_proxys_chains_name_the_service(chain: str, comment: str, service: str) -> None:
    step = PathStep(stage=Stage.PREROUTING, table="nat", chain=chain, what="jump", why=comment)
    assert service_of_steps([step]) == service


@pytest.mark.parametrize(("source", "cause"), [("198.51.100.7", "local-policy"), ("198.51.100.77", "source-range")])
def test_a_sender_within_the_source_ranges_is_dropped_by_the_local_policy(source: str, cause: str) -> None:
    _, found = asked(RANGES, source, "192.0.2.7:80")
    assert [each.cause.id for each in found] == [cause]


def test_a_process_that_calls_its_own_node_port_is_refused_without_a_list_of_addresses() -> None:
    path, found = asked(NFTABLES, "fd00::11", "[fd00::11]:30090", "fd00::11")
    assert [each.cause.id for each in found] == ["local-policy"]
    assert path.service == "shop/late:http"


def test_a_pod_that_meets_itself_is_certain_only_if_it_is_on_the_node() -> None:
    _, found = asked(NFTABLES, "fd00::244:1:5", "[fd00:96::50]:80")
    assert [(each.cause.id, each.certain) for each in found] == [("missing-hairpin", False)]


NODE_PORTS = """\
*nat
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-SEP-A2B3C4D5E6F7A2B3 - [0:0]
:KUBE-SERVICES - [0:0]
-A PREROUTING -j KUBE-SERVICES
-A OUTPUT -j KUBE-SERVICES
-A KUBE-NODEPORTS -p tcp -m comment --comment "shop/web:http" -m tcp --dport 30080 -j KUBE-SEP-A2B3C4D5E6F7A2B3
-A KUBE-SEP-A2B3C4D5E6F7A2B3 -s 10.244.1.5/32 -j KUBE-MARK-MASQ
-A KUBE-SEP-A2B3C4D5E6F7A2B3 -p tcp -m tcp -j DNAT --to-destination 10.244.1.5:8080
-A KUBE-SERVICES -d 10.96.0.50/32 -p tcp -m tcp --dport 80 -j KUBE-SEP-A2B3C4D5E6F7A2B3
COMMIT
"""


def test_node_ports_that_nothing_calls_are_supposed_only_in_a_fragment() -> None:
    """kube-proxy writes no call of KUBE-NODEPORTS on a node without an address for node ports."""
    whole = asked(NODE_PORTS, "198.51.100.7", "10.0.0.11:30080", "10.0.0.11")[0].leaves()
    assert {leaf.end.fate for leaf in whole} == {Fate.UNKNOWN}
    assert all("nodePortAddresses" in leaf.end.reason for leaf in whole)
    fragment = "".join(line for line in NODE_PORTS.splitlines(keepends=True) if "KUBE-" in line and line[0] == "-")
    assumed = asked(fragment, "198.51.100.7", "10.0.0.11:30080", "10.0.0.11")[0].leaves()
    assert "the jump is assumed to be there" in " ".join(text for leaf in assumed for text in leaf.end.supposing)


def test_an_address_that_node_ports_are_open_on_is_the_nodes_own() -> None:
    path, found = asked(NFTABLES, "fd00:c::9", "[fd00::11]:30090")
    assert [each.cause.id for each in found] == ["local-policy"]
    assert path.service == "shop/late:http"
