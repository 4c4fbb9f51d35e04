"""Causes that cannot be built in a network namespace, and what only a dump shows: found in data made by hand."""

from fractions import Fraction

import msgspec
import pytest

from narthex.model.net import IPFamily
from narthex.model.objects import EndpointPort, EndpointSlice, Node, Service, ServicePort, SliceEndpoint
from narthex.model.store import Snapshot, Store, Synced, Upsert
from narthex.netfilter.ast import Accept, Chain, DropPacket, Hook, Rule, Ruleset, Table
from narthex.netfilter.walk.state import KernelObjects
from narthex.trace.causes.catalogue import CAUSES, CauseFinding
from narthex.trace.causes.find import find
from narthex.trace.follow.routing import RouteQuery, look_up
from narthex.trace.follow.steps import accepted_reply
from narthex.trace.follow.views import (
    FdbEntry,
    Impairment,
    LinkAddress,
    ListeningSocket,
    NextHop,
    NodeLink,
    NodeNeighbour,
    NodeRoute,
    NodeView,
    PolicyRule,
)
from narthex.trace.model import Fate, Header, PacketPath, Party, PathBranch, PathEnd, PathStep, Stage
from narthex.trace.node.network import ConntrackListing
from narthex.trace.node.view import view_of_files
from narthex.trace.program.places import name_not_found
from narthex.trace.program.travel import KnownCluster, TraceRequest, travel

PACKET = Header(source="10.244.1.5", destination="10.96.0.10", protocol="tcp", port=80)


def journey(*steps: PathStep, end: PathEnd) -> PacketPath:
    return PacketPath(
        packet=PACKET,
        source=Party(address="10.244.1.5"), destination=Party(address="10.96.0.10"), start="worker-a",
        tree=PathBranch(steps=steps, end=end),
    )  # fmt: skip


ARRIVED = PathEnd(fate=Fate.DELIVERED, node="worker-a", address="10.244.1.7", port=8080)
STEP = PathStep(stage=Stage.FORWARD, node="worker-a", what="forwarded")


def check(found: list[CauseFinding], *, cause: str, certain: bool = True) -> CauseFinding:
    assert [each.cause.id for each in found] == [cause]
    assert found[0].certain is certain
    assert found[0].cause is CAUSES[cause]
    assert found[0].advice
    return found[0]


@pytest.mark.parametrize(("by", "found"), [("worker-b", True), ("worker-a", False)])
def test_a_reply_to_a_pod_that_does_not_come_back_by_the_node_that_rewrote_the_packet(by: str, found: bool) -> None:
    to = Header(source="10.244.1.5", destination="10.244.1.7", protocol="tcp", port=8080)
    rewriting = PathStep(
        stage=Stage.PREROUTING, node=by, table="nat", chain="KUBE-SEP-A", what="match", verdict="dnat to 10.244.1.7:8080",
        after=to,
    )  # fmt: skip
    answer = Header(source=to.destination, destination=to.source, protocol="tcp")
    asking = msgspec.structs.replace(STEP, chain="others", what="connection has not dnat, accept", verdict="accept")
    lost = accepted_reply(ARRIVED, answer, PACKET)
    back = PathBranch(steps=(PathStep(stage=Stage.POD_LINK, node="worker-a", what="over cni0"),), end=lost)
    end = msgspec.structs.replace(ARRIVED, reply=back)
    other = msgspec.structs.replace(ARRIVED, reply=PathBranch(end=ARRIVED))
    half = Fraction(1, 2)
    path = msgspec.structs.replace(
        journey(STEP, end=end),
        source=Party(address="10.244.1.5", name="pod shop/client"),
        tree=PathBranch(
            steps=(asking,),
            branches=(
                PathBranch(probability=half, steps=(rewriting,), end=other),
                PathBranch(probability=half, steps=(rewriting,), end=end),
            ),
        ),
    )
    causes = find(path, {"worker-a": NodeView(name="worker-a"), "worker-b": NodeView(name="worker-b")})
    assert [(each.cause.id, each.node) for each in causes] == ([("missing-masquerade", by)] if found else [])


@pytest.mark.parametrize(("count", "certain"), [("262144", True), ("250000", False)])
def test_a_full_connection_table(count: str, certain: bool) -> None:
    sysctls = {"net.netfilter.nf_conntrack_count": count, "net.netfilter.nf_conntrack_max": "262144"}
    view = NodeView(name="worker-a", sysctls=sysctls)
    found = check(find(journey(STEP, end=ARRIVED), {"worker-a": view}), cause="conntrack-full", certain=certain)
    assert f"net.netfilter.nf_conntrack_count = {count}" in found.evidence
    assert found.explains is certain


@pytest.mark.parametrize("sysctls", [None, {}, {"net.netfilter.nf_conntrack_count": "1000"}, {
    "net.netfilter.nf_conntrack_count": "x", "net.netfilter.nf_conntrack_max": "0"}, {
    "net.netfilter.nf_conntrack_count": "100", "net.netfilter.nf_conntrack_max": "262144"}])  # fmt: skip
def test_a_table_with_room_or_of_which_nothing_is_known(sysctls: dict[str, str] | None) -> None:
    assert find(journey(STEP, end=ARRIVED), {"worker-a": NodeView(name="worker-a", sysctls=sysctls)}) == []


def test_a_name_that_is_not_there() -> None:
    asked = ["wbe.shop.svc.cluster.local: does not exist"]
    found = name_not_found("wbe", "pod shop/client", asked, ["shop/web", "other/db"], "A Service is NAME.")
    check([found], cause="dns-name")
    assert found.sentence == "pod shop/client finds no address for 'wbe'"
    assert found.advice.endswith("Names that are close: web.shop.")
    other = name_not_found("db", "pod shop/client", [], ["shop/web", "other/db"], "")
    assert "db.other" in other.advice


# ---- overlays --------------------------------------------------------------------------------------------------------


def overlay(mtu: int = 1450, **parts: object) -> NodeView:
    made = {
        "name": "worker-a",
        "links": (
            NodeLink(name="eth0", mtu=1500),
            NodeLink(name="flannel.1", kind="vxlan", mtu=mtu, vxlan_under="eth0", vxlan_local="192.0.2.1"),
        ),
        "addresses": (LinkAddress("192.0.2.1", 24, "eth0"),),
        "routes": (NodeRoute(destination="10.96.0.0/16", hops=(NextHop(link="flannel.1", via="10.244.2.0"),)),),
        "neighbours": (NodeNeighbour("10.244.2.0", "flannel.1", "aa:bb:cc:dd:ee:ff", "PERMANENT"),),
        "fdb": (FdbEntry("aa:bb:cc:dd:ee:ff", "flannel.1", "192.0.2.2"),),
        **parts,
    }
    return NodeView(**made)


AWAY = PathEnd(fate=Fate.LEAVES, node="worker-a", address="10.96.0.10", port=80)


def test_a_whole_overlay() -> None:
    assert find(journey(STEP, end=AWAY), {"worker-a": overlay()}) == []


def test_an_overlay_without_room_for_its_header() -> None:
    check(find(journey(STEP, end=AWAY), {"worker-a": overlay(mtu=1500)}), cause="mtu", certain=False)


def test_an_overlay_that_does_not_know_the_neighbour() -> None:
    check(find(journey(STEP, end=AWAY), {"worker-a": overlay(neighbours=(), fdb=())}), cause="neighbour-missing")


def test_an_overlay_that_does_not_know_the_node() -> None:
    check(find(journey(STEP, end=AWAY), {"worker-a": overlay(fdb=())}), cause="fdb-missing")


def test_what_is_not_known_is_not_missing() -> None:
    for part in ("links", "routes", "neighbours", "fdb", "addresses"):
        assert find(journey(STEP, end=AWAY), {"worker-a": overlay(**{part: None})}) == []


# ---- rules -----------------------------------------------------------------------------------------------------------


class Rules:
    def __init__(self, *tables: Table) -> None:
        self.ruleset = self.assumed = Ruleset(tables)
        self.objects = KernelObjects()
        self.unread = ()
        self.gaps = ()


def dropped(table: str, chain: str, stage: Stage = Stage.FORWARD, rule: str = "-j DROP") -> PacketPath:
    step = PathStep(stage=stage, node="worker-a", family="ip", table=table, chain=chain, rule=rule, verdict="drop")
    return journey(STEP, step, end=PathEnd(fate=Fate.DROPPED, node="worker-a", reason="a rule drops it"))


@pytest.mark.parametrize(
    ("table", "chain", "stage", "cause"),
    [
        ("filter", "FORWARD", Stage.FORWARD, "forward-drop"),
        ("filter", "DOCKER-USER", Stage.FORWARD, "forward-drop"),
        ("filter", "ufw-user-input", Stage.INPUT, "input-drop"),
        ("filter", "cali-tw-cali1234", Stage.FORWARD, "network-policy"),
        ("filter", "KUBE-POD-FW-ABC", Stage.FORWARD, "network-policy"),
        ("kube-network-policies", "forward", Stage.FORWARD, "network-policy"),
        ("firewalld", "filter_FORWARD", Stage.FORWARD, "foreign-table"),
        ("mangle", "PREROUTING", Stage.PREROUTING, "rule-drops"),
        ("raw", "OUTPUT", Stage.OUTPUT, "rule-drops"),
    ],
)
def test_who_drops_it(table: str, chain: str, stage: Stage, cause: str) -> None:
    found = check(find(dropped(table, chain, stage), {"worker-a": NodeView(name="worker-a")}), cause=cause)
    assert any(chain in line for line in found.evidence)


@pytest.mark.parametrize("policy", ["accept", "drop"])
def test_two_iptables_need_rules_in_both(policy: str) -> None:
    def filter_table(policy: str, *rules: Rule) -> Table:
        hook = Hook(type="filter", hook="forward", priority=0, policy=policy)
        chain = Chain(name="FORWARD", rules=rules, hook=hook)
        return Table(family=IPFamily.IPV4, name="filter", chains={"FORWARD": chain})

    rules = Rules(filter_table(policy), filter_table("accept", Rule((Accept(),)), Rule((DropPacket(),))))
    view = NodeView(name="worker-a", rules={IPFamily.IPV4: rules})
    found = find(dropped("filter", "FORWARD"), {"worker-a": view})
    assert ("two-iptables" in [each.cause.id for each in found]) is (policy == "drop")


def test_a_journey_of_which_nothing_else_is_known() -> None:
    assert find(journey(end=PathEnd(fate=Fate.UNKNOWN, reason="nothing is known")), {}) == []
    assert find(journey(end=PathEnd(fate=Fate.LOST, reason="no route")), {}) == []


def endpoint_elsewhere(ready: bool) -> Snapshot:
    """A Service whose only endpoint is on a node that is `ready`, or not."""
    port = ServicePort(name="http", port=80, target_port=8080)
    store = Store()
    for each in (
        Service(namespace="shop", name="web", ports=(port,), selector=(("app", "web"),), cluster_ips=("10.96.0.10",),
                ip_families=(IPFamily.IPV4,)),
        EndpointSlice(
            namespace="shop", name="web-1", service_name="web", family=IPFamily.IPV4,
            ports=(EndpointPort(name="http", port=8080),),
            endpoints=(SliceEndpoint(address="10.244.2.7", node_name="worker-b", ready=ready, serving=ready,
                                     target="web-7"),),
        ),
        Node(name="worker-a", internal_ips=("10.0.0.1",)),
        Node(name="worker-b", internal_ips=("10.0.0.2",), ready=ready),
    ):  # fmt: skip
        store.apply(Upsert(each))
    store.apply(Synced())
    return store.snapshot


REFUSED = PathEnd(fate=Fate.REJECTED, node="worker-a", reason="no endpoints")


def test_a_node_that_is_not_ready_is_behind_missing_endpoints() -> None:
    found = find(journey(STEP, end=REFUSED), {}, endpoint_elsewhere(ready=False))
    assert [each.cause.id for each in found] == ["node-not-ready", "endpoints-not-ready"]
    check(found[:1], cause="node-not-ready")
    assert found[0].node == "worker-b"


def test_a_fault_is_behind_missing_endpoints_of_its_node() -> None:
    fault = Impairment(
        cause="fault-partition", places=frozenset({"worker-b"}), text="partition at worker-b", lost=Fraction(1)
    )
    found = find(journey(STEP, end=REFUSED), {}, endpoint_elsewhere(ready=False), [fault])
    assert [each.cause.id for each in found] == ["fault-partition", "endpoints-not-ready"]
    assert found[0].evidence == ("EndpointSlice web-1: 10.244.2.7 on worker-b is not ready",)


def test_a_delay_is_told_of_though_nothing_is_lost() -> None:
    delay = Impairment(
        cause="fault-delay", places=frozenset({"worker-a"}), text="delay of 50 ms at worker-a", advice="End it."
    )
    found = find(journey(STEP, end=ARRIVED), {}, None, [delay])
    check(found, cause="fault-delay")
    assert not found[0].explains
    elsewhere = msgspec.structs.replace(delay, places=frozenset({"worker-c"}))
    assert find(journey(STEP, end=ARRIVED), {}, None, [elsewhere]) == []


# ---- what a copied text tells ----------------------------------------------------------------------------------------

FLUSHED = """*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:FLANNEL-POSTRTG - [0:0]
-A PREROUTING -s 192.0.2.9/32 -j RETURN
-A POSTROUTING -s 192.0.2.9/32 -j RETURN
COMMIT
*filter
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
-A FORWARD -s 192.0.2.9/32 -j RETURN
COMMIT
"""


def told(text: str, to: str = "192.168.1.11:30080") -> list[CauseFinding]:
    view = view_of_files([("paste.txt", text)])
    known = KnownCluster(views=(view,), snapshot=Snapshot(), node_ips=("192.168.1.11",))
    return find(travel(known, TraceRequest(source="198.51.100.7", destination=to, iif="eth0")), {"": view})


def test_a_chain_that_nothing_calls() -> None:
    (found,) = told(FLUSHED)
    check([found], cause="chain-not-called", certain=found.certain)
    assert "calls FLANNEL-POSTRTG" in found.sentence and not found.explains
    assert told(FLUSHED.replace("COMMIT", "-A POSTROUTING -j FLANNEL-POSTRTG\nCOMMIT", 1)) == []


def test_a_proxy_that_could_not_write_its_rules() -> None:
    line = (
        'E1122 10:11:12.1 1 proxier.go:1564] "Failed to execute iptables-restore" err="exit status 1 (line 12 failed)"'
    )
    found = check(
        told(FLUSHED.replace(":FLANNEL-POSTRTG - [0:0]\n", "") + line), cause="rules-not-loaded", certain=False
    )
    assert found.evidence == (line,)


def test_a_warning_of_the_other_iptables() -> None:
    line = "# Warning: iptables-legacy tables present, use iptables-legacy-save to see them"
    found = check(told(FLUSHED.replace(":FLANNEL-POSTRTG - [0:0]\n", "") + line), cause="two-iptables", certain=False)
    assert "iptables-legacy-save" in found.advice


def test_rules_that_a_tool_could_not_decode() -> None:
    view = view_of_files([("rules.txt", "-A KUBE-NODEPORTS -p tcp -m comment --comment shop/web:http -j KUBE-EXT-W\n")])
    known = KnownCluster(views=(view,), snapshot=Snapshot(), node_ips=("192.168.1.11",))
    path = travel(known, TraceRequest(source="198.51.100.7", destination="192.168.1.11:30080", iif="eth0"))
    found = check(find(path, {view.name: view}), cause="old-iptables", certain=False)
    assert found.explains and "KUBE-NODEPORTS" in found.evidence[0]
    assert path.next_command == "nft list ruleset"


def test_a_forward_policy_without_table_nat() -> None:
    text = FLUSHED[FLUSHED.index("*filter") :].replace(":FORWARD ACCEPT", ":FORWARD DROP")
    text = text.replace("COMMIT", "-A FORWARD -j cali-FORWARD\nCOMMIT")
    found = check(told(text), cause="forward-drop", certain=False)
    assert found.explains and "its policy is DROP" in found.sentence


def test_a_refusal_that_nothing_else_explains_names_its_rule() -> None:
    found = told(FLUSHED.replace("-A FORWARD -s 192.0.2.9/32 -j RETURN", "-A INPUT -p tcp -j REJECT"))
    assert [each.cause.id for each in found if each.explains]


@pytest.mark.parametrize(
    ("policy", "clash"),
    [
        (PolicyRule(family=IPFamily.IPV4, priority=30, table="7", mark=0x1745EC, mask=0xFFFFFFFF), False),
        (PolicyRule(family=IPFamily.IPV4, priority=30, table="7", mark=0x4000, mask=0x4000), True),
        (PolicyRule(family=IPFamily.IPV4, priority=30, table="7", mark=0x4000, mask=0xFFFFFFFF), True),
        (PolicyRule(family=IPFamily.IPV4, priority=30, table="7", mark=0xC000, mask=0xC000), False),
    ],
)
def test_a_mark_of_another_program_clashes_only_if_the_proxys_mark_matches(policy: PolicyRule, clash: bool) -> None:
    found = find(journey(STEP, end=ARRIVED), {"worker-a": NodeView(name="worker-a", policies=(policy,))})
    assert bool(found) is clash


def test_no_cause_is_certain_with_partial_input() -> None:
    text = FLUSHED.replace("-A FORWARD -s 192.0.2.9/32 -j RETURN", "-A FORWARD -j DROP")
    whole = told(text, "203.0.113.5:80")
    part = told(text[text.index("*filter") :], "203.0.113.5:80")
    assert whole[0].cause.id == part[0].cause.id == "forward-drop"
    assert not part[0].certain


def test_a_rule_that_shadows_a_node_port_without_objects() -> None:
    rules = """*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
-A PREROUTING -p tcp -m tcp --dport 30080 -j DNAT --to-destination 172.17.0.2:80
-A PREROUTING -j KUBE-SERVICES
-A OUTPUT -j KUBE-SERVICES
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-NODEPORTS -p tcp -m comment --comment "shop/web:http" -m tcp --dport 30080 -j KUBE-EXT-WEB
COMMIT
"""
    found = next(each for each in told(rules) if each.explains or each.cause.id == "rule-in-the-way")
    assert found.cause.id == "rule-in-the-way" and "KUBE-EXT-WEB" in found.sentence


def test_a_listing_of_routes_may_lack_one() -> None:
    view = NodeView(copied=True, routes=(NodeRoute(destination="10.0.0.0/8", hops=(NextHop(link="eth0"),)),))
    assert look_up(view, RouteQuery(destination="192.0.2.1")).kind == "unknown"
    view.policies = (PolicyRule(family=IPFamily.IPV4, priority=30, table="7", mark=1, mask=1),)
    assert look_up(view, RouteQuery(destination="10.1.2.3")).kind == "unicast"
    assert look_up(view, RouteQuery(destination="10.1.2.3", mark=1)).reason.startswith("routing table 7")


def test_a_cause_of_a_packet_that_arrives_is_a_remark() -> None:
    rules = (
        FLUSHED.replace(":FLANNEL-POSTRTG - [0:0]\n", "")
        + "*mangle\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -j MARK --set-xmark 0x4000/0x4000\n-A PREROUTING -j MARK --set-xmark 0x0/0x4000\nCOMMIT\n"
    )
    for found in told(rules):
        assert (found.cause.id, found.certain, found.explains) == ("mark-clash", False, False)


def test_lines_that_a_terminal_cut_show_no_cause() -> None:
    narrow = FLUSHED.replace(
        "-A POSTROUTING -s 192.0.2.9/32 -j RETURN",
        '-A POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG'[:44],
    )
    assert not [each for each in told(narrow) if each.cause.id in ("chain-not-called", "old-iptables")]


FLOW = "src=10.244.1.5 dst=10.0.0.11 sport=4000 dport=30002"


@pytest.mark.parametrize(
    ("node", "answered_by", "stale"),
    [
        # A node that passes the packet on to another one's node port does not rewrite it.
        ("worker-a", "10.0.0.11 sport=30002", False),
        ("worker-b", "10.0.0.11 sport=30002", True),
        ("worker-b", "10.244.2.9 sport=8081", True),
        # The rules send new flows there too.
        ("worker-b", "10.244.2.7 sport=8081", False),
    ],
)
def test_an_entry_is_old_only_if_the_nodes_rules_send_a_new_flow_elsewhere(
    node: str, answered_by: str, stale: bool
) -> None:
    before = Header(source="10.244.1.5", destination="10.0.0.11", protocol="udp", port=30002)
    after = msgspec.structs.replace(before, destination="10.244.2.7", port=8081)
    steps = (
        PathStep(stage=Stage.FORWARD, node="worker-a", what="forwarded", before=before),
        PathStep(
            stage=Stage.PREROUTING, node="worker-b", table="nat", chain="KUBE-SEP-X", what="dnat to 10.244.2.7:8081",
            verdict="dnat 10.244.2.7:8081", before=before, after=after,
        ),
    )  # fmt: skip
    end = PathEnd(fate=Fate.DELIVERED, node="worker-b", address="10.244.2.7", port=8081)
    path = msgspec.structs.replace(journey(*steps, end=end), packet=before)
    line = f"udp      17 25 {FLOW} src={answered_by.replace(' ', ' dst=10.244.1.5 ')} dport=4000 mark=0 use=1\n"
    views = {node: NodeView(name=node, connections=ConntrackListing(line))}
    assert [each.cause.id for each in find(path, views)] == ["conntrack-stale"] * stale


@pytest.mark.parametrize(("port", "cause"), [(61245, []), (61246, ["not-listening"])])
def test_a_port_on_loopback_is_that_of_the_node_where_the_packet_ends(port: int, cause: list[str]) -> None:
    """All nodes have 127.0.0.1; the first one listens on both ports."""

    def view(name: str, *ports: int) -> NodeView:
        sockets = tuple(ListeningSocket("udp", "127.0.0.1", each, (IPFamily.IPV4,)) for each in ports)
        return NodeView(name=name, addresses=(LinkAddress("127.0.0.1", 8, "lo"),), listeners=sockets)

    views = {"worker-b": view("worker-b", 61245, 61246), "worker-a": view("worker-a", 61245)}
    step = PathStep(stage=Stage.DELIVERY, node="worker-a", what="to a process")
    path = journey(step, end=PathEnd(fate=Fate.DELIVERED, node="worker-a", address="127.0.0.1", port=port))
    path = msgspec.structs.replace(path, packet=msgspec.structs.replace(path.packet, protocol="udp"))
    assert [each.cause.id for each in find(path, views)] == cause
