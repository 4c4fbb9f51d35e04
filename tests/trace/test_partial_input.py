"""Rules that lack a part: the trace takes what kube-proxy always writes to be there, says so, and never guesses."""

import pytest

from narthex.model.store import Snapshot
from narthex.trace.model import Fate, PacketPath
from narthex.trace.node.view import view_of_files
from narthex.trace.program.travel import KnownCluster, TraceRequest, travel

NAT = """\
*nat
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KUBE-EXT-WEB - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-SEP-A - [0:0]
:KUBE-SEP-B - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-WEB - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-EXT-WEB -m comment --comment "masquerade traffic for shop/web:http external destinations" -j KUBE-MARK-MASQ
-A KUBE-EXT-WEB -j KUBE-SVC-WEB
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-NODEPORTS -p tcp -m comment --comment "shop/web:http" -m tcp --dport 30080 -j KUBE-EXT-WEB
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
-A KUBE-SEP-A -s 10.244.1.5/32 -m comment --comment "shop/web:http" -j KUBE-MARK-MASQ
-A KUBE-SEP-A -p tcp -m comment --comment "shop/web:http" -m tcp -j DNAT --to-destination 10.244.1.5:8080
-A KUBE-SEP-B -s 10.244.2.6/32 -m comment --comment "shop/web:http" -j KUBE-MARK-MASQ
-A KUBE-SEP-B -p tcp -m comment --comment "shop/web:http" -m tcp -j DNAT --to-destination 10.244.2.6:8080
-A KUBE-SERVICES -d 10.96.0.20/32 -p tcp -m comment --comment "shop/web:http cluster IP" -m tcp --dport 80 -j KUBE-SVC-WEB
-A KUBE-SERVICES -m comment --comment "kubernetes service nodeports" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-SVC-WEB ! -s 10.244.0.0/16 -d 10.96.0.20/32 -p tcp -m comment --comment "shop/web:http cluster IP" -m tcp --dport 80 -j KUBE-MARK-MASQ
-A KUBE-SVC-WEB -m comment --comment "shop/web:http -> 10.244.1.5:8080" -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-A
-A KUBE-SVC-WEB -m comment --comment "shop/web:http -> 10.244.2.6:8080" -j KUBE-SEP-B
COMMIT
"""
FILTER = """\
*filter
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-SERVICES - [0:0]
-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-SERVICES -d 10.96.0.30/32 -p tcp -m comment --comment "shop/idle:http has no endpoints" -m tcp --dport 80 -j REJECT --reject-with icmp-port-unreachable
COMMIT
"""
NODE = "192.168.1.11"


def trace(
    text: str,
    to: str = "10.96.0.20:80",
    *,
    source: str = "198.51.100.7",
    own: tuple[str, ...] = (NODE,),
    iif: str = "eth0",
) -> PacketPath:
    known = KnownCluster(views=(view_of_files([("rules.txt", text)]),), snapshot=Snapshot(), node_ips=own)
    return travel(known, TraceRequest(source=source, destination=to, iif=iif))


def without(text: str, *words: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not any(word in line for word in words))


def ends(path: PacketPath) -> set[tuple[Fate, str, bool]]:
    return {(leaf.end.fate, leaf.end.address, leaf.end.masqueraded) for leaf in path.leaves()}


BOTH = {(Fate.LEAVES, "10.244.1.5", True), (Fate.LEAVES, "10.244.2.6", True)}


def test_complete_rules_suppose_nothing() -> None:
    path = trace(NAT + FILTER)
    assert ends(path) == BOTH
    assert {leaf.end.supposing for leaf in path.leaves()} == {()}


def test_a_match_that_is_not_understood_in_rules_that_nothing_calls() -> None:
    text = """*nat
:KUBE-SERVICES - [0:0]
-A KUBE-SERVICES -m foo --bar -d 10.96.0.1/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-X
COMMIT
"""
    (leaf,) = trace(text, "10.96.0.1:80").leaves()
    assert leaf.end.fate is Fate.UNKNOWN and "not understood: -m foo --bar" in leaf.end.reason
    assert any("nothing in the input calls KUBE-SERVICES" in each for each in leaf.end.supposing)
    assert any(part.part == "table filter" for part in trace(text, "10.96.0.1:80").missing)


@pytest.mark.parametrize(
    ("text", "assumed"),
    [
        ("\n".join(NAT.splitlines()[17:-1]), "nothing in the input calls KUBE-SERVICES"),
        (without(NAT, "KUBE-MARK-MASQ - ", "-A KUBE-MARK-MASQ") + FILTER, "chain KUBE-MARK-MASQ of table nat is not in the input"),
        (without(NAT, "-A KUBE-MARK-MASQ") + FILTER, "chain KUBE-MARK-MASQ of table nat has no rule"),
        (without(NAT, "POSTROUTING ") + FILTER, "chain KUBE-POSTROUTING of table nat is not in the input"),
        (NAT, "table filter of iptables is not in the input"),
        (NAT + without(FILTER, ":KUBE-FORWARD", "-A KUBE-FORWARD"), "chain KUBE-FORWARD of table filter is not in the input; it is assumed to return"),
    ],
)  # fmt: skip
def test_what_kube_proxy_always_writes_is_taken_to_be_there(text: str, assumed: str) -> None:
    path = trace(text)
    assert ends(path) == BOTH
    assert all(any(assumed in each for each in leaf.end.supposing) for leaf in path.leaves())
    assert path.next_command


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (without(NAT, "-A PREROUTING") + FILTER, "does not call KUBE-SERVICES in prerouting"),
        (without(NAT, "web:http -> 10.244.2.6") + FILTER, "has 1 endpoints, with probabilities of another number"),
        (without(NAT, "DNAT --to-destination 10.244.1.5") + FILTER, "chain KUBE-SEP-A of table nat has no rule that rewrites"),
        (without(NAT, ":KUBE-SVC-WEB", "-A KUBE-SVC-WEB") + FILTER, "chain KUBE-SVC-WEB of table nat is not in the input"),
        (FILTER, "table nat of iptables is not in the input"),
    ],
)  # fmt: skip
def test_what_contradicts_the_structure_decides_nothing(text: str, reason: str) -> None:
    found = [leaf.end for leaf in trace(text).leaves() if leaf.end.fate is Fate.UNKNOWN]
    assert found and any(reason in end.reason for end in found)


def test_a_bundle_is_taken_at_its_word() -> None:
    from narthex.model.net import IPFamily
    from narthex.trace.node.view import RulesByFamily

    rules = RulesByFamily(texts=[("rules/iptables.txt", without(NAT, "-A PREROUTING"))])[IPFamily.IPV4]
    assert not rules.assumed.copied


def test_a_refusal_in_the_input_holds_without_the_other_table() -> None:
    (leaf,) = trace(FILTER, "10.96.0.30:80").leaves()
    assert leaf.end.fate is Fate.REJECTED
    assert leaf.end.supposing == ("table nat of iptables is not in the input; it is assumed not to act on the packet",)


def test_a_packet_that_a_missing_table_may_refuse() -> None:
    (leaf,) = trace(NAT, "10.96.0.30:80").leaves()
    assert (leaf.end.fate, leaf.end.reason) == (Fate.UNKNOWN, "table filter of iptables is not in the input")
    assert [each.fate for each in leaf.end.may] == [Fate.LEAVES]
    assert trace(NAT, "10.96.0.30:80").next_command == "iptables-save -t filter"


def test_both_answers_where_the_output_link_decides() -> None:
    rules = FILTER.replace(":FORWARD ACCEPT", ":FORWARD DROP").replace(
        "-A KUBE-FORWARD", "-A FORWARD -o cni0 -j ACCEPT\n-A KUBE-FORWARD", 1
    )
    path = trace(NAT + rules, source="10.244.3.9")
    assert {leaf.end.fate for leaf in path.leaves()} == {Fate.UNKNOWN}
    may = {(each.when, each.fate) for leaf in path.leaves() for each in leaf.end.may}
    assert may == {("it leaves by cni0", Fate.LEAVES), ("it leaves by another interface", Fate.DROPPED)}
    assert path.next_command == "ip route show table all"


def test_links_that_do_not_matter_are_not_asked_for() -> None:
    rules = NAT.replace("-A POSTROUTING", "-A POSTROUTING -o docker0 -d 172.17.0.9 -j MASQUERADE\n-A POSTROUTING", 1)
    assert ends(trace(rules + FILTER)) == BOTH


def test_both_answers_where_the_nodes_addresses_decide() -> None:
    path = trace(NAT + FILTER, f"{NODE}:30080", own=())
    (leaf,) = path.leaves()
    assert leaf.end.fate is Fate.UNKNOWN
    assert {(each.when, each.fate, each.address) for each in leaf.end.may} == {
        (f"{NODE} is an address of this node", Fate.LEAVES, "10.244.1.5"),
        (f"{NODE} is an address of this node", Fate.LEAVES, "10.244.2.6"),
        ("it is not", Fate.LEAVES, NODE),
    }
    assert path.next_command == "ip addr"
    assert ends(trace(NAT + FILTER, f"{NODE}:30080")) == BOTH


LOCAL = """\
-A KUBE-EXT-WEB -s 10.244.0.0/16 -m comment --comment "pod traffic for shop/web:http external destinations" -j KUBE-SVC-WEB
-A KUBE-EXT-WEB -m comment --comment "masquerade LOCAL traffic for shop/web:http external destinations" -m addrtype --src-type LOCAL -j KUBE-MARK-MASQ
-A KUBE-EXT-WEB -m comment --comment "route LOCAL traffic for shop/web:http external destinations" -m addrtype --src-type LOCAL -j KUBE-SVC-WEB
-A KUBE-EXT-WEB -j KUBE-SVL-WEB
-A KUBE-SVL-WEB -m comment --comment "shop/web:http -> 10.244.1.5:8080" -j KUBE-SEP-A
-A KUBE-SERVICES -d 192.0.2.7/32 -p tcp -m comment --comment "shop/web:http loadbalancer IP" -m tcp --dport 80 -j KUBE-EXT-WEB
"""
OF_LOCAL_POLICY = without(NAT, "-A KUBE-EXT-WEB").replace("-A KUBE-MARK-MASQ", LOCAL + "-A KUBE-MARK-MASQ", 1) + FILTER


def test_both_answers_where_the_node_may_have_sent_the_packet() -> None:
    path = trace(OF_LOCAL_POLICY, "192.0.2.7:80", source="192.168.1.11", own=(), iif="")
    assert ends(path) == {(Fate.LEAVES, "10.244.1.5", False)}
    (leaf,) = path.leaves()
    assert leaf.end.supposing == ("192.168.1.11 is assumed not to be an address of this node",)
    when = "192.168.1.11 is an address of this node"
    assert {(each.when, each.address, each.masqueraded) for each in leaf.end.may} == {
        (when, "10.244.1.5", True),
        (when, "10.244.2.6", True),
    }
    assert path.next_command == "ip addr"
    # A pod, and a client of which the input says that it is outside, have not been on the node.
    assert not any(
        leaf.end.supposing
        for leaf in trace(OF_LOCAL_POLICY, "192.0.2.7:80", source="10.244.3.9", own=(), iif="").leaves()
    )
    assert not any(
        leaf.end.supposing for leaf in trace(OF_LOCAL_POLICY, "192.0.2.7:80", source="192.168.1.12", iif="").leaves()
    )


def test_the_address_of_node_ports_is_the_nodes_own() -> None:
    text = OF_LOCAL_POLICY.replace(
        "-m addrtype --dst-type LOCAL -j KUBE-NODEPORTS", "-d 192.168.1.11/32 -j KUBE-NODEPORTS"
    )
    path = trace(text, "192.0.2.7:80", source="192.168.1.11", own=(), iif="")
    assert ends(path) == {(Fate.LEAVES, "10.244.1.5", True), (Fate.LEAVES, "10.244.2.6", True)}
