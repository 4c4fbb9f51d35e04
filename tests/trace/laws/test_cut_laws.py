"""A law: remove lines, chains, or tables from a complete dump, and the answer may become unknown, but never silently wrong."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from narthex.model import IPFamily, Snapshot
from narthex.netfilter.xtables.listing import ChainListing
from narthex.trace.causes.find import find
from narthex.trace.model import Fate, PacketPath
from narthex.trace.node.view import view_of_files
from narthex.trace.program.travel import KnownCluster, TraceRequest, travel

DUMPS = Path(__file__).parents[2] / "dumps"
CUTS = 25
"""Cuts of each dump and kind. Their seeds are fixed, and a failure names its own."""
OWN = ("192.168.1.11",)
FLOWS = {
    "cut-law.iptables-save": (
        "10.96.0.20:80",
        "10.96.0.30:80",
        "10.96.0.40:80",
        "192.168.1.11:30080",
        "192.168.15.7:80",
    ),
    "kube-proxy.nft-list-a": (
        "10.96.0.50:80",
        "10.96.0.77:80",
        "192.168.1.11:30080",
        "192.168.15.7:80",
        "10.96.0.60:80",
    ),
}


def asked(text: str, to: str) -> PacketPath:
    known = KnownCluster(views=(view_of_files([("rules.txt", text)]),), snapshot=Snapshot(), node_ips=OWN)
    return travel(known, TraceRequest(source="198.51.100.7", destination=to, iif="eth0"))


def ends(path: PacketPath) -> dict[tuple[Fate, str, int, bool], float]:
    return {key: round(float(share), 3) for key, share in path.ends().items() if share}


def lines(text: str, rng: random.Random) -> str:
    """Remove one to three rules."""
    every = text.splitlines(keepends=True)
    rules = [
        n for n, line in enumerate(every) if re.match(r"-A|\t\t(?!type|comment|elements|size|flags|timeout|\s)", line)
    ]
    gone = set(rng.sample(rules, rng.randint(1, 3)))
    return "".join(line for n, line in enumerate(every) if n not in gone)


def tail(text: str, rng: random.Random) -> str:
    """Cut the end off."""
    every = text.splitlines(keepends=True)
    return "".join(every[: rng.randint(len(every) // 5, len(every) - 2)])


def chain(text: str, rng: random.Random) -> str:
    """Remove a chain with all its rules."""
    names = re.findall(r"^(?::|\tchain )(\S+) ", text, re.MULTILINE)
    name = re.escape(rng.choice(names))
    text = re.sub(rf"^(?::|-A ){name} .*\n", "", text, flags=re.MULTILINE)
    return re.sub(rf"^\tchain {name} {{\n.*?^\t}}\n", "", text, flags=re.MULTILINE | re.DOTALL)


def filtered(text: str, rng: random.Random) -> str:
    """Keep the lines with a word, as `grep` does."""
    word = rng.choice(["KUBE-SERVICES", "10.96.0", "shop/web", "KUBE-SEP", "dport", "vmap", "goto"])
    return "".join(line for line in text.splitlines(keepends=True) if word in line)


@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.parametrize("cut", [lines, tail, chain, filtered], ids=lambda cut: cut.__name__)
def test_a_cut_dump_is_never_silently_wrong(name: str, cut: object) -> None:
    text = (DUMPS / name).read_text()
    right = {to: ends(asked(text, to)) for to in FLOWS[name]}
    for seed in range(CUTS):
        part = cut(text, random.Random(seed))  # type: ignore[operator]
        try:
            answers = {to: asked(part, to) for to in FLOWS[name]}
        except ValueError:
            # Nothing that is known is left.
            continue
        for to, path in answers.items():
            found = ends(path)
            unknown = any(fate is Fate.UNKNOWN for fate, *_ in found)
            supposing = any(leaf.end.supposing for leaf in path.leaves())
            kept = {key: share for key, share in found.items() if key[0] is not Fate.UNKNOWN}
            assert found == right[to] or supposing or (unknown and kept.keys() <= right[to].keys()), (
                seed,
                to,
                found,
                right[to],
            )


FILTER = """\
*filter
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
COMMIT
"""
NAT = """\
*nat
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
{chains}-A PREROUTING -j KUBE-SERVICES
-A OUTPUT -j KUBE-SERVICES
-A POSTROUTING -j KUBE-POSTROUTING
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MASQUERADE
{rules}COMMIT
"""


def nat(rules: str) -> str:
    names = dict.fromkeys(("KUBE-POSTROUTING", "KUBE-SERVICES"))
    names |= dict.fromkeys(name for pair in re.findall(r"-A (\S+)|-j (KUBE-\S+)", rules) for name in pair if name)
    return NAT.format(chains="".join(f":{name} - [0:0]\n" for name in names), rules=rules) + FILTER


NFT = """\
table ip kube-proxy {{
	set cluster-ips {{
		type ipv4_addr
		elements = {{ 10.96.0.20 }}
	}}

	map no-endpoint-services {{
		type ipv4_addr . inet_proto . inet_service : verdict
	}}

	map firewall-ips {{
		type ipv4_addr . inet_proto . inet_service : verdict
	}}

	map service-ips {{
		type ipv4_addr . inet_proto . inet_service : verdict
{elements}	}}

	chain filter-forward {{
		type filter hook forward priority filter; policy accept;
		ct state new jump service-endpoints-check
		ct state new jump cluster-ips-check
	}}

	chain nat-prerouting {{
		type nat hook prerouting priority dstnat; policy accept;
		jump services
	}}

	chain services {{
		ip daddr . meta l4proto . th dport vmap @service-ips
	}}

	chain service-endpoints-check {{
		ip daddr . meta l4proto . th dport vmap @no-endpoint-services
	}}

	chain cluster-ips-check {{
		ip daddr @cluster-ips reject
	}}
{service}}}
"""
SERVICE = """
	chain service-AAAAAAAA-shop/web/tcp/http {
		meta l4proto tcp dnat ip to numgen random mod 1 map { 0 : 10.244.1.5 . 8080 }
	}
"""
BALANCER = """\
-A KUBE-SERVICES -d 192.0.2.7/32 -p tcp -m comment --comment "shop/web:http loadbalancer IP" -m tcp --dport 80 -j KUBE-FW-W
-A KUBE-FW-W -s 10.0.0.0/8 -m comment --comment "shop/web:http loadbalancer IP" -j KUBE-EXT-W
-A KUBE-FW-W -m comment --comment "other traffic to shop/web:http will be dropped by KUBE-PROXY-FIREWALL"
-A KUBE-EXT-W -m comment --comment "masquerade traffic for shop/web:http external destinations" -j KUBE-MARK-MASQ
-A KUBE-EXT-W -j KUBE-SVC-W
-A KUBE-SVC-W -m comment --comment "shop/web:http -> 10.244.1.5:8080" -j KUBE-SEP-W
-A KUBE-SEP-W -s 10.244.1.5/32 -m comment --comment "shop/web:http" -j KUBE-MARK-MASQ
-A KUBE-SEP-W -p tcp -m comment --comment "shop/web:http" -m tcp -j DNAT --to-destination 10.244.1.5:8080
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
"""
CLUSTER_IPS = """\
-A KUBE-SERVICES -d 10.96.0.20/32 -p tcp -m comment --comment "shop/web:http cluster IP" -m tcp --dport 80 -j KUBE-SVC-W
-A KUBE-SERVICES -d 10.96.0.21/32 -p tcp -m comment --comment "shop/db:sql cluster IP" -m tcp --dport 80 -j KUBE-SVC-D
-A KUBE-SVC-D ! -s 10.244.0.0/16 -d 10.96.0.21/32 -p tcp -m comment --comment "shop/db:sql cluster IP" -m tcp --dport 80 -j KUBE-MARK-MASQ
-A KUBE-SVC-D -m comment --comment "shop/db:sql -> 10.244.1.9:8080" -j KUBE-SEP-D
-A KUBE-SVC-W -m comment --comment "shop/web:http -> 10.244.1.5:8080" -j KUBE-SEP-W
-A KUBE-SEP-D -s 10.244.1.9/32 -m comment --comment "shop/db:sql" -j KUBE-MARK-MASQ
-A KUBE-SEP-D -p tcp -m comment --comment "shop/db:sql" -m tcp -j DNAT --to-destination 10.244.1.9:8080
-A KUBE-SEP-W -s 10.244.1.5/32 -m comment --comment "shop/web:http" -j KUBE-MARK-MASQ
-A KUBE-SEP-W -p tcp -m comment --comment "shop/web:http" -m tcp -j DNAT --to-destination 10.244.1.5:8080
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
"""
TWO_ENDPOINTS = CLUSTER_IPS.replace(' -> 10.244.1.9:8080" -j KUBE-SEP-D', ' -> 10.244.1.9:8080" -j KUBE-SEP-W').replace(
    "-A KUBE-SEP-D", "-A KUBE-SEP-W"
)
LISTED = """\
Chain PREROUTING (policy ACCEPT)
target     prot opt source               destination
KUBE-SERVICES  all  --  0.0.0.0/0            0.0.0.0/0

Chain INPUT (policy ACCEPT)
target     prot opt source               destination

Chain OUTPUT (policy ACCEPT)
target     prot opt source               destination
KUBE-SERVICES  all  --  0.0.0.0/0            0.0.0.0/0

Chain POSTROUTING (policy ACCEPT)
target     prot opt source               destination

Chain KUBE-EXT-W (2 references)
target     prot opt source               destination
KUBE-SVC-W  all  --  0.0.0.0/0            0.0.0.0/0

Chain KUBE-SERVICES (2 references)
target     prot opt source               destination
KUBE-EXT-W  tcp  --  0.0.0.0/0            192.0.2.7            tcp dpt:80
"""
ELEMENTS = "\t\telements = { 10.96.0.20 . tcp . 80 : goto service-AAAAAAAA-shop/web/tcp/http }\n"
DECLARED = nat("").replace("-A OUTPUT", ":KUBE-SVC-X - [0:0]\n-A OUTPUT")
FIREWALL = nat(BALANCER).replace(
    ":OUTPUT ACCEPT [0:0]\nCOMMIT",
    ":OUTPUT ACCEPT [0:0]\n:KUBE-PROXY-FIREWALL - [0:0]\n-A INPUT -j KUBE-PROXY-FIREWALL\n-A FORWARD -j KUBE-PROXY-FIREWALL\n-A OUTPUT -j KUBE-PROXY-FIREWALL\nCOMMIT",
)


@pytest.mark.parametrize(
    ("text", "to", "reason"),
    [
        (DECLARED, "10.96.0.20:80", "no rule of the input calls chain KUBE-SVC-X of table nat"),
        (NFT.format(elements="", service=SERVICE), "10.96.0.20:80", "no rule of the input calls chain service-AAAAAAAA-shop/web/tcp/http"),
        (NFT.format(elements="", service=""), "10.96.0.20:80", "the maps of table kube-proxy lack the cluster IP 10.96.0.20"),
        (NFT.format(elements=ELEMENTS.replace(" }\n", ",\n"), service=SERVICE), "10.96.0.20:80", "the text is cut here"),
        (FIREWALL, "192.0.2.7:80", "chain KUBE-FW-W of table nat sends the packet nowhere"),
        (nat(CLUSTER_IPS), "10.96.0.20:80", "the rule that marks packets for this address and port is missing"),
        (LISTED, "192.0.2.8:80", "2 rules of table nat call chain KUBE-EXT-W, and the input has 1 of them"),
        (nat(TWO_ENDPOINTS), "10.96.0.21:80", "chain KUBE-SEP-W of table nat has a rule of another chain"),
    ],
)  # fmt: skip
def test_a_line_that_others_show_to_be_missing(text: str, to: str, reason: str) -> None:
    reasons = [leaf.end.reason for leaf in asked(text, to).leaves() if leaf.end.fate is Fate.UNKNOWN]
    assert any(reason in each for each in reasons)


def test_a_listed_chain_without_its_first_line_is_no_part_of_the_one_before() -> None:
    lines = LISTED.replace("\nChain KUBE-SERVICES (2 references)\n", "").splitlines()
    start = lines.index("Chain KUBE-EXT-W (2 references)")
    found = ChainListing(lines, start, IPFamily.IPV4)
    assert [rule.rule.target for rule in found.rules] == ["KUBE-SVC-W", ""]
    assert not found.whole


def test_rules_that_fit_together_lack_nothing() -> None:
    whole = NFT.format(elements=ELEMENTS, service=SERVICE)
    assert ends(asked(whole, "10.96.0.20:80")) == {(Fate.LEAVES, "10.244.1.5", 8080, False): 1.0}
    assert ends(asked(whole, "10.96.0.20:81")) == {(Fate.REJECTED, "", 0, False): 1.0}
    # kube-proxy empties a chain before it deletes it.
    stale = whole.replace(
        SERVICE, SERVICE + SERVICE.replace("AAAAAAAA", "BBBBBBBB").replace(SERVICE.splitlines()[2] + "\n", "")
    )
    assert ends(asked(stale, "10.96.0.20:81")) == {(Fate.REJECTED, "", 0, False): 1.0}


def test_a_jump_that_a_copied_text_lacks_is_not_certain_to_be_missing() -> None:
    text = nat(CLUSTER_IPS).replace("-A PREROUTING -j KUBE-SERVICES\n", "")
    view = view_of_files([("rules.txt", text)])
    path = travel(
        KnownCluster(views=(view,), snapshot=Snapshot(), node_ips=OWN),
        TraceRequest(source="198.51.100.7", destination="10.96.0.20:80", iif="eth0"),
    )
    found = {each.cause.id: each.certain for each in find(path, {view.name: view})}
    assert found["chain-not-called"] is False
