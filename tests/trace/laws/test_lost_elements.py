"""Elements of kube-proxy's nft maps and sets that a copied text lacks as whole lines.

Where the rest of the text shows the loss, the answer is unknown; where nothing shows it, the answer says what it assumes.
"""

from __future__ import annotations

import pytest
from tests.trace.kube_proxy_layouts import BASE_CHAINS

from narthex.model import Snapshot
from narthex.trace.model import Fate, PathLeaf
from narthex.trace.node.view import view_of_files
from narthex.trace.program.travel import KnownCluster, TraceRequest, travel

NODE, OUTSIDE, POD = "192.168.1.11", "198.51.100.7", "10.244.1.5"
TEXT = """\
table ip kube-proxy {
	set hairpin-connections {
		type ipv4_addr . ipv4_addr . inet_proto . inet_service
		elements = { 10.244.1.5 . 10.244.1.5 . tcp . 8080,
			10.244.1.5 . 10.244.1.5 . tcp . 8443,
			192.168.1.11 . 192.168.1.11 . tcp . 9100 }
	}

	set cluster-ips {
		type ipv4_addr
		elements = { 10.96.0.20, 10.96.0.30, 10.96.0.40, 10.96.0.50 }
	}

	set nodeport-ips {
		type ipv4_addr
		elements = { 192.168.1.11 }
	}

	map no-endpoint-services {
		type ipv4_addr . inet_proto . inet_service : verdict
		elements = { 192.0.2.9 . tcp . 80 comment "shop/idle:http" : goto reject-chain,
			10.96.0.30 . tcp . 80 comment "shop/idle:http" : goto reject-chain,
			192.0.2.7 . tcp . 80 comment "shop/far:http" : drop,
			10.96.0.50 . tcp . 81 comment "shop/here:more" : drop,
			192.0.2.10 . tcp . 80 comment "shop/idle:http" : goto reject-chain }
	}

	map no-endpoint-nodeports {
		type inet_proto . inet_service : verdict
		elements = { tcp . 30030 comment "shop/idle:http" : goto reject-chain,
			tcp . 30040 comment "shop/far:http" : drop }
	}

	map firewall-ips {
		type ipv4_addr . inet_proto . inet_service : verdict
		elements = { 192.0.2.8 . tcp . 80 : goto firewall-AAAAAAAA-shop/web/tcp/http }
	}

	map service-ips {
		type ipv4_addr . inet_proto . inet_service : verdict
		elements = { 192.0.2.11 . tcp . 80 : goto external-CCCCCCCC-shop/far/tcp/http,
			10.96.0.20 . tcp . 80 : goto service-AAAAAAAA-shop/web/tcp/http,
			10.96.0.20 . tcp . 443 : goto service-BBBBBBBB-shop/web/tcp/https,
			192.0.2.8 . tcp . 80 : goto external-AAAAAAAA-shop/web/tcp/http,
			10.96.0.40 . tcp . 80 : goto service-CCCCCCCC-shop/far/tcp/http,
			192.0.2.7 . tcp . 80 : goto external-CCCCCCCC-shop/far/tcp/http,
			10.96.0.50 . tcp . 80 : goto local-DDDDDDDD-shop/here/tcp/http }
	}

	map service-nodeports {
		type inet_proto . inet_service : verdict
		elements = { tcp . 30080 : goto external-AAAAAAAA-shop/web/tcp/http,
			tcp . 30081 : goto external-AAAAAAAA-shop/web/tcp/http,
			tcp . 30040 : goto external-CCCCCCCC-shop/far/tcp/http,
			tcp . 30082 : goto external-AAAAAAAA-shop/web/tcp/http }
	}

"""
TEXT += BASE_CHAINS
TEXT += """\
	chain services {
		ip daddr @cluster-ips ip saddr != 10.244.0.0/16 meta mark set meta mark | 0x00004000
		ip daddr . meta l4proto . th dport vmap @service-ips
		ip daddr @nodeport-ips meta l4proto . th dport vmap @service-nodeports
	}

	chain service-endpoints-check {
		ip daddr . meta l4proto . th dport vmap @no-endpoint-services
	}

	chain nodeport-endpoints-check {
		ip daddr @nodeport-ips meta l4proto . th dport vmap @no-endpoint-nodeports
	}

	chain firewall-check {
		ip daddr . meta l4proto . th dport vmap @firewall-ips
	}

	chain cluster-ips-check {
		ip daddr @cluster-ips reject
	}

	chain reject-chain {
		reject
	}

	chain masquerading {
		meta mark & 0x00004000 != 0x00000000 meta mark set meta mark ^ 0x00004000 masquerade fully-random
		ct status dnat ip saddr . ip daddr . meta l4proto . th dport @hairpin-connections masquerade fully-random
	}

	chain service-AAAAAAAA-shop/web/tcp/http {
		meta l4proto tcp dnat ip to numgen random mod 2 map { 0 : 10.244.1.5 . 8080, 1 : 10.244.2.6 . 8080 }
	}

	chain external-AAAAAAAA-shop/web/tcp/http {
		meta mark set meta mark | 0x00004000
		goto service-AAAAAAAA-shop/web/tcp/http
	}

	chain firewall-AAAAAAAA-shop/web/tcp/http {
		ip saddr 203.0.113.0/24 return
		drop
	}

	chain service-BBBBBBBB-shop/web/tcp/https {
		meta l4proto tcp dnat ip to numgen random mod 1 map { 0 : 10.244.1.5 . 8443 }
	}

	chain service-CCCCCCCC-shop/far/tcp/http {
		meta l4proto tcp dnat ip to numgen random mod 1 map { 0 : 10.244.2.7 . 8080 }
	}

	chain external-CCCCCCCC-shop/far/tcp/http {
		ip saddr 10.244.0.0/16 goto service-CCCCCCCC-shop/far/tcp/http comment "short-circuit pod traffic"
		fib saddr type local meta mark set meta mark | 0x00004000 comment "masquerade local traffic"
		fib saddr type local goto service-CCCCCCCC-shop/far/tcp/http comment "short-circuit local traffic"
	}

	chain local-DDDDDDDD-shop/here/tcp/http {
		meta l4proto tcp dnat ip to numgen random mod 1 map { 0 : 192.168.1.11 . 9100 }
	}
}
"""


def cluster(text: str) -> KnownCluster:
    return KnownCluster(views=(view_of_files([("rules.txt", text)]),), snapshot=Snapshot(), node_ips=(NODE,))


def leaves(known: KnownCluster, source: str, to: str) -> list[PathLeaf]:
    return list(travel(known, TraceRequest(source=source, destination=to, iif="eth0")).leaves())


def without(element: str) -> str:
    """Return the text without the line of an element."""
    lines = [line for line in TEXT.splitlines(keepends=True) if element not in line]
    assert len(lines) == TEXT.count("\n") - 1
    return "".join(lines)


def ends(found: list[PathLeaf]) -> set[tuple[Fate, str, bool]]:
    return {(leaf.end.fate, leaf.end.address, leaf.end.masqueraded) for leaf in found}


ASKED = [
    (OUTSIDE, "10.96.0.20:80"),
    (POD, "10.96.0.20:80"),
    (POD, "10.96.0.20:443"),
    ("10.244.2.6", "10.96.0.20:80"),
    (OUTSIDE, "10.96.0.20:99"),
    (OUTSIDE, "10.96.0.30:80"),
    (POD, "10.96.0.40:80"),
    (OUTSIDE, "192.0.2.7:80"),
    (POD, "192.0.2.7:80"),
    (OUTSIDE, "192.0.2.8:80"),
    ("203.0.113.7", "192.0.2.8:80"),
    (POD, "10.96.0.50:80"),
    (POD, "10.96.0.50:81"),
    (OUTSIDE, f"{NODE}:30080"),
    (OUTSIDE, f"{NODE}:30030"),
    (OUTSIDE, f"{NODE}:30040"),
    (POD, f"{NODE}:30040"),
]
LINES = TEXT.split("\n")
ELEMENTS = [n for n, line in enumerate(LINES) if "elements = " in line or line.startswith("\t\t\t")]


def test_any_element_that_is_missing_is_noticed_or_its_absence_assumed() -> None:
    """Every line with elements is left out once, and every packet asked for."""
    whole = cluster(TEXT)
    right = {each: ends(leaves(whole, *each)) for each in ASKED}
    for number in ELEMENTS:
        known = cluster("\n".join((*LINES[:number], *LINES[number + 1 :])))
        for each in ASKED:
            for leaf in leaves(known, *each):
                end = leaf.end
                is_right = (end.fate, end.address, end.masqueraded) in right[each]
                assert is_right or end.fate is Fate.UNKNOWN or end.supposing, (LINES[number], each, end)


@pytest.mark.parametrize(
    ("element", "source", "to", "reason"),
    [
        ("10.96.0.20 . tcp . 443 :", OUTSIDE, "10.96.0.20:443", "no rule of the input calls chain service-BBBBBBBB-shop/web/tcp/https"),
        ("\t10.96.0.20 . tcp . 80 :", OUTSIDE, "10.96.0.20:80", "the maps of table kube-proxy lack the cluster IP of shop/web:http"),
        ("10.96.0.30 . tcp . 80 comment", OUTSIDE, "10.96.0.30:80", "lack the cluster IP 10.96.0.30"),
        ("\t192.0.2.7 . tcp . 80 : goto", POD, "192.0.2.7:80", "the map service-ips of table kube-proxy lacks 192.0.2.7 . tcp . 80"),
        ("\t192.0.2.8 . tcp . 80 : goto external", "203.0.113.7", "192.0.2.8:80", "the map service-ips of table kube-proxy lacks 192.0.2.8 . tcp . 80"),
        ("tcp . 30040 : goto", POD, f"{NODE}:30040", "the map service-nodeports of table kube-proxy lacks tcp . 30040"),
        ("10.244.1.5 . tcp . 8443,", POD, "10.96.0.20:443", "does not have 10.244.1.5:8443, an endpoint of this node"),
    ],
)  # fmt: skip
def test_an_element_that_others_show_to_be_missing(element: str, source: str, to: str, reason: str) -> None:
    (leaf,) = leaves(cluster(without(element)), source, to)
    assert leaf.end.fate is Fate.UNKNOWN
    assert reason in leaf.end.reason


@pytest.mark.parametrize(
    ("element", "source", "to", "assumed"),
    [
        ("tcp . 30081 :", OUTSIDE, f"{NODE}:30081", f"no rule for {NODE}:30081 is missing from the input"),
        ("10.96.0.50 . tcp . 81", POD, "10.96.0.50:81", "no element for another port of 10.96.0.50 is missing"),
    ],
)
def test_an_element_that_nothing_shows_to_be_missing(element: str, source: str, to: str, assumed: str) -> None:
    (leaf,) = leaves(cluster(without(element)), source, to)
    assert any(assumed in each for each in leaf.end.supposing)


def test_a_pod_that_meets_itself_without_any_element() -> None:
    text = TEXT.replace("10.244.1.5 . 10.244.1.5 . tcp . 8080,", "").replace(
        "10.244.1.5 . 10.244.1.5 . tcp . 8443,", ""
    )
    (leaf,) = leaves(cluster(text), POD, "10.96.0.20:443")
    assert any("10.244.1.5 is assumed not to be a pod of this node" in each for each in leaf.end.supposing)


def test_two_chains_without_the_lines_between_them() -> None:
    joined = TEXT.replace("\t}\n\n\tchain reject-chain {\n", "")
    (leaf,) = leaves(cluster(joined), POD, "10.96.0.20:443")
    assert leaf.end.fate is Fate.UNKNOWN
    assert "chain cluster-ips-check of table kube-proxy has a rule of another chain" in leaf.end.reason


def test_elements_that_fit_together_lack_nothing() -> None:
    whole = cluster(TEXT)
    allowed = ("does not have 10.244.2.6:8080, and 10.244.2.6 is assumed not to be", "is missing from ")
    for source, to in ASKED:
        for leaf in leaves(whole, source, to):
            assert leaf.end.fate is not Fate.UNKNOWN, to
            assert all(any(words in each for words in allowed) for each in leaf.end.supposing), (to, leaf.end.supposing)


@pytest.mark.parametrize(
    "strange",
    [
        "chain local-x__/x/y/z {\n\t\tdnat to 10.244.1.5:8080\n\t}",
        "chain service-a/b/c/d/e {\n\t\tdnat to 10.244.1.5\n\t}",
        "chain endpoint-/// {\n\t\tdnat to 10.244.1.5:8080\n\t}",
        "map firewall-ips {\n\t\ttype ipv4_addr : verdict\n\t\telements = { 192.0.2.8 : drop }\n\t}",
        "map no-endpoint-services {\n\t\ttype inet_service : verdict\n\t\telements = { 80 : drop }\n\t}",
        "map no-endpoint-nodeports {\n\t\ttype ipv4_addr : verdict\n\t\telements = { 192.0.2.8 : drop, 192.0.2.9 : drop }\n\t}",
        "set hairpin-connections {\n\t\ttype inet_service\n\t\telements = { 80 }\n\t}",
        "set cluster-ips {\n\t\ttype inet_service\n\t\telements = { 80, 81-90 }\n\t}",
    ],
)
def test_names_and_elements_that_kube_proxy_does_not_write(strange: str) -> None:
    """Anybody can write a table of this name. The trace still answers."""
    kind, name, *_ = strange.split()
    begin = TEXT.find(f"{kind} {name} {{")
    text = TEXT.replace("\tset cluster-ips", f"\t{strange}\n\n\tset cluster-ips", 1)
    if begin >= 0:
        text = TEXT[:begin] + strange + TEXT[TEXT.index("\n\t}", begin) + 3 :]
    known = cluster(text)
    for each in ASKED:
        assert leaves(known, *each)
