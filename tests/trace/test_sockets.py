"""Socket load balancing on a path: maps as JSON in bundles, and connections that lead to endpoints before rules see them."""

from fractions import Fraction
from socket import inet_aton

import msgspec
import pytest

from narthex.model import IPFamily, Protocol, Snapshot
from narthex.proxy.backends.sockets.document import PinnedSockets, SocketDocument, socket_document
from narthex.proxy.backends.sockets.layout import SLOT_KEY, pool_number
from narthex.proxy.backends.sockets.rows import SocketRows
from narthex.proxy.backends.sockets.walk import SimulatedSocket, SimulatedSockets
from narthex.proxy.plan.balancing import LOAD_BALANCING, shares_of_two
from narthex.proxy.plan.ir import Scope
from narthex.proxy.plan.sockets import LeftToRules
from narthex.testing.build import NODE, endpoint, endpoint_slice, plan, service
from narthex.trace.follow.views import LinkAddress, NodeLink, NodeView
from narthex.trace.model import Fate, Stage
from narthex.trace.node.layout import FAILED, SOCKETS_FILE, BundleManifest, PartStatus
from narthex.trace.node.view import view_of_bundle
from narthex.trace.program.places import AddressOwner
from narthex.trace.program.travel import KnownCluster, TraceRequest, travel
from narthex.trace.reports.check import CheckReport
from narthex.trace.reports.counting import count, rows
from narthex.trace.reports.difference import differences
from narthex.trace.reports.socket_check import with_sockets

A, B, POD = "10.64.1.5", "10.64.2.7", "10.64.1.200"
VIP, EMPTY, STICKY = "10.110.0.1", "10.110.0.2", "10.110.0.3"
LOCAL, EXTERNAL, LEAST = "10.110.0.4", "203.0.113.7", "10.110.0.6"


ENDS = endpoint(A, NODE), endpoint(B, "worker-b")
PLAN = plan(
    service("shop/web", VIP, external_ips=(EXTERNAL,)),
    endpoint_slice("shop/web", *ENDS),
    service("shop/empty", EMPTY),
    service("shop/sticky", STICKY, affinity_seconds=60),
    endpoint_slice("shop/sticky", *ENDS),
    service("shop/local", LOCAL, internal_policy_local=True),
    endpoint_slice("shop/local", *ENDS),
)


def simulated(*plans):
    """The maps after some plans, as the programs find them."""
    sockets, rows = SimulatedSockets(), SocketRows(IPFamily.IPV4)
    for each in plans or (PLAN,):
        sockets.apply(IPFamily.IPV4, rows.advance(each))
    return sockets


@pytest.fixture(scope="module")
def sockets():
    return simulated()


@pytest.fixture(scope="module")
def document(sockets):
    return socket_document(sockets.pinned(IPFamily.IPV4))


@pytest.mark.parametrize("in_node", [False, True], ids=["pod", "node"])
def test_the_document_says_what_the_programs_do(sockets, document, in_node):
    """The interpreter, which runs the programs over the same maps, is the witness."""
    assert document.frontend(VIP, 80, "tcp") and document.frontend(EMPTY, 80, "TCP")
    for front in document.frontends:
        action = front.node if in_node else front.pods
        sender = SimulatedSocket(in_node=in_node, protocol=Protocol(front.protocol))
        answers = {sockets.connect(sender, front.address, front.port, draw) for draw in range(12)}
        if action == "reject":
            assert all(answer.refused for answer in answers)
            continue
        assert not any(answer.refused for answer in answers)
        found = {(answer.address, answer.port) for answer in answers}
        expected = {"cluster": front.cluster, "local": front.local, "rules": [(front.address, front.port)]}[action]
        assert found == set(expected)


def test_what_the_maps_do_not_have_is_left_to_rules(document):
    for address in (STICKY, "10.110.0.9"):
        front = document.frontend(address, 80, "tcp")
        assert front is None or (front.pods, front.node) == ("rules", "rules")
    assert document.frontend(LOCAL, 80, "tcp").local == ((A, 80),)


def test_a_bundle_has_the_maps_as_json(document):
    text = msgspec.json.encode(document).decode()
    table = BundleManifest(node=NODE, writer="")
    assert view_of_bundle({SOCKETS_FILE: text}, table, "").sockets == document
    assert view_of_bundle({}, table, "").sockets is None
    broken = view_of_bundle({SOCKETS_FILE: '{"kind": "sockets", "version": 7}'}, table, "")
    assert broken.sockets is None
    assert SOCKETS_FILE in broken.absent["sockets"]


def test_maps_that_a_script_could_not_read_are_unknown():
    why = "this node balances sockets, and a script cannot read its maps"
    table = BundleManifest(node=NODE, writer="", parts=(PartStatus(path=SOCKETS_FILE, status=FAILED, remark=why),))
    view = view_of_bundle({}, table, "")
    assert view.absent["sockets"] == why
    found = path(None, POD, f"{VIP}:80", absent={"sockets": why})
    assert all(step.unknown for _, steps in socket_steps(found) for step in steps)
    assert socket_steps(found)


def path(document, source, destination, absent=None):
    view = NodeView(name=NODE, rules={}, sockets=document, absent=absent or {})
    sender = AddressOwner(kind="pod", name="shop/client", addresses=(POD,), node=NODE)
    known = KnownCluster(views=(view,), snapshot=Snapshot(), pods=(sender,))
    return travel(known, TraceRequest(source=source, destination=destination))


def socket_steps(found):
    return [(leaf.end, [step for step in leaf.steps if step.stage is Stage.SOCKET]) for leaf in found.leaves()]


def test_a_pods_connection_leads_to_each_endpoint(document):
    found = socket_steps(path(document, POD, f"{VIP}:80"))
    assert {end.address for end, _ in found} == {A, B}
    for end, (step,) in found:
        assert step.probability == Fraction(1, 2)
        assert (step.before.destination, step.after.destination) == (VIP, end.address)
        assert step.verdict == f"connect {end.address}:80"


def test_a_service_without_endpoints_refuses_at_once(document):
    ((end, (step,)),) = socket_steps(path(document, POD, f"{EMPTY}:80"))
    assert end.fate is Fate.REJECTED
    assert "refused at once" in end.reason
    assert step.verdict == "reject"


@pytest.mark.parametrize("source", ["outside", "198.51.100.7"])
def test_packets_of_others_meet_no_program(document, source):
    assert all(not steps for _, steps in socket_steps(path(document, source, f"{VIP}:80")))


def test_what_is_left_to_the_rules_has_no_socket_step(document):
    assert all(not steps for _, steps in socket_steps(path(document, POD, f"{STICKY}:80")))


def test_without_maps_nothing_changes():
    assert all(not steps for _, steps in socket_steps(path(None, POD, f"{VIP}:80")))
    assert all(not steps for _, steps in socket_steps(path(SocketDocument(), POD, f"{VIP}:80")))


def least_connections(connections):
    """The maps of a Service port with the least connections, after so many connections to each endpoint."""
    held = service("shop/least", LEAST, annotations=((LOAD_BALANCING, "least-connections"),))
    ends = [endpoint(address) for address in (A, B, POD)]
    sockets = SimulatedSockets()
    sockets.apply(IPFamily.IPV4, SocketRows(IPFamily.IPV4).advance(plan(held, endpoint_slice("shop/least", *ends))))
    pinned = sockets.pinned(IPFamily.IPV4)
    (front,) = socket_document(pinned).frontends
    opens = {
        front.number.to_bytes(4, "little") + inet_aton(address) + (80).to_bytes(2, "big") + bytes(2): count
        for address, count in connections.items()
    }
    return socket_document(msgspec.structs.replace(pinned, opens={IPFamily.IPV4: opens}))


@pytest.mark.row("29.21")
def test_of_two_endpoints_the_probabilities_follow_from_the_counts_of_now():
    found = socket_steps(path(least_connections({A: 3, B: 3, POD: 9}), POD, f"{LEAST}:80"))
    # The one with the most is chosen in no case, and the others are equal.
    assert {end.address: steps[0].probability for end, steps in found} == {A: Fraction(1, 2), B: Fraction(1, 2)}
    assert "of two of 3 endpoints the one with fewer open connections; probabilities as of now" in found[0][1][0].what
    found = socket_steps(path(least_connections({A: 3, B: 1, POD: 9}), POD, f"{LEAST}:80"))
    assert {end.address: steps[0].probability for end, steps in found} == {A: Fraction(1, 3), B: Fraction(2, 3)}


def test_shares_of_two():
    assert shares_of_two([5]) == (1,)
    assert shares_of_two([2, 2]) == (Fraction(1, 2), Fraction(1, 2))
    assert shares_of_two([0, 1]) == (1, 0)
    assert sum(shares_of_two([4, 4, 1, 0, 9])) == 1


@pytest.mark.row("29.20")
def test_ejected_endpoints_are_named_where_the_service_port_had_them():
    sockets = simulated()
    for draw in range(2):
        sockets.connect(SimulatedSocket(), VIP, 80, draw)
    watched = {
        inet_aton(A) + (80).to_bytes(2, "big") + bytes(2): 2,
        inet_aton(B) + (80).to_bytes(2, "big") + bytes(2): 1,
    }
    pinned = msgspec.structs.replace(sockets.pinned(IPFamily.IPV4), watched={IPFamily.IPV4: watched})
    document = socket_document(pinned)
    assert document.ejected == ((A, 80),)
    found = socket_steps(path(document, POD, f"{VIP}:80"))
    assert all(f"; not {A}:80, ejected since connections failed" in steps[0].what for _, steps in found)
    others = socket_steps(path(document, POD, f"{LOCAL}:80"))
    assert others and not any("ejected" in steps[0].what for _, steps in others)
    # `check` does not miss it, and misses others.
    front = document.frontend(VIP, 80, "TCP")
    without = changed(document, VIP, cluster=tuple(each for each in front.cluster if each[0] != A))
    assert checked(without).findings == ()
    assert checked(msgspec.structs.replace(without, ejected=())).findings != ()


def test_programs_that_are_not_attached_change_nothing(document):
    assert socket_steps(path(document, POD, f"{VIP}:80"))[0][1]
    detached = msgspec.structs.replace(document, hooks=("connect6",))
    assert all(not steps for _, steps in socket_steps(path(detached, POD, f"{VIP}:80")))


# ---- check ---------------------------------------------------------------------------------------------------------


def checked(document, **view):
    """What `check` finds in the maps, with nothing known of the rules."""
    report = CheckReport(node=NODE, family="IPv4", frontends=0, endpoints=0)
    return with_sockets(report, PLAN, NodeView(name=NODE, sockets=document, **view))


def test_maps_of_the_plan_are_right(document):
    assert checked(document).findings == () and checked(None).findings == ()


def changed(document, address, **fields):
    fronts = (
        msgspec.structs.replace(each, **fields) if each.address == address else each for each in document.frontends
    )
    return msgspec.structs.replace(document, frontends=tuple(fronts))


FAULTS = {
    "an endpoint is missing": ({"cluster": ((A, 80),)}, "missing", f"are never sent to its endpoint {B}:80"),
    "an endpoint is stale": (
        {"cluster": ((A, 80), (B, 80), ("10.64.9.9", 80))},
        "stale",
        "are sent to 10.64.9.9:80, which is not among its endpoints",
    ),
    "another port": ({"cluster": ((A, 80), (B, 81))}, "stale", f"are sent to {B}:81, which is not"),
    "an endpoint twice": ({"cluster": ((A, 80), (A, 80), (B, 80))}, "wrong share", f"sent to {A}:80 2 times as often"),
    "a slot without an endpoint": (
        {"empty": 1},
        "wrong share",
        "left to the rules when they draw one of 1 empty slots",
    ),
    "left to the rules": ({"pods": "rules"}, "missing", "are left to the rules, and are to be sent to endpoints"),
    "refused": ({"node": "reject"}, "wrong answer", "are refused, and are to be sent to endpoints of the cluster"),
    "another pool": ({"pods": "local", "local": ((A, 80),)}, "wrong answer", "are sent to endpoints of this node"),
    "a source that is not masqueraded": (
        {"unbound_only": False},
        "wrong answer",
        "only if they have no source address",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_map_is_a_finding(document, fault):
    fields, kind, said = FAULTS[fault]
    assert document.frontend(VIP, 80, "tcp").unbound_only
    found = checked(changed(document, VIP, **fields)).findings

    assert [each for each in found if each.kind.value == kind and said in each.said], found
    assert {each.service for each in found} == {"shop/web:http"} or {each.service for each in found} == {"shop/web"}


def test_what_the_rules_decide_must_not_be_in_the_maps(document):
    sticky = msgspec.structs.replace(document.frontend(VIP, 80, "TCP"), address=STICKY)
    wrong = msgspec.structs.replace(document, frontends=(*document.frontends, sticky))
    (pods, *_) = checked(wrong).findings
    assert pods.kind.value == "wrong answer" and LeftToRules.AFFINITY.words in pods.said


def test_a_frontend_of_no_service_is_a_finding(document):
    foreign = msgspec.structs.replace(document.frontend(VIP, 80, "TCP"), address="10.110.9.9")
    (found,) = checked(msgspec.structs.replace(document, frontends=(*document.frontends, foreign))).findings
    assert (found.kind.value, found.frontend) == ("extra", "10.110.9.9:80/tcp")


def test_a_program_that_is_not_attached_is_a_finding(document):
    some = tuple(each for each in document.hooks if each not in ("connect4", "recvmsg4", "connect6"))
    (found,) = checked(msgspec.structs.replace(document, hooks=some)).findings
    assert found.said.startswith("no program of socket load balancing is attached to connect4, recvmsg4")


def test_maps_that_cannot_be_read_leave_it_undecided():
    report = checked(None, absent={"sockets": "no permission"})
    assert report.unknown == ("maps of socket load balancing: no permission",) and report.status == 2


def test_slots_in_the_kernel_that_are_gone_or_wrong(document):
    """What `check` is told comes from the bytes of the maps."""
    sockets = simulated()
    rows = sockets.rows(IPFamily.IPV4)
    number = document.frontend(VIP, 80, "TCP").number
    key = SLOT_KEY.pack(1, pool_number(number, Scope.CLUSTER))
    without = {each: value for each, value in rows.slots.items() if each != key}
    other = {**rows.slots, key: rows.slots[key][:3] + b"\xfe" + rows.slots[key][4:]}
    kinds = []
    for slots in (without, other):
        pinned = PinnedSockets(rows={IPFamily.IPV4: msgspec.structs.replace(rows, slots=slots)})
        kinds.append({each.kind.value for each in checked(socket_document(pinned)).findings})
    assert kinds == [{"missing", "wrong share"}, {"missing", "stale"}]


# ---- diff ----------------------------------------------------------------------------------------------------------


def compared(before, after, **absent):
    one = NodeView(name=NODE, origin="before", sockets=before)
    return differences(one, NodeView(name=NODE, origin="after", sockets=after, absent=absent))


def test_equal_maps_do_not_differ(document):
    assert compared(document, document).found == () and compared(None, None).found == ()


def test_a_changed_pool_and_an_answer_are_differences(document):
    other = changed(changed(document, VIP, cluster=((A, 80),)), EMPTY, pods="rules")
    found = [(each.part, each.what, each.before, each.after) for each in compared(document, other).found]

    assert ("sockets", f"{VIP}:80/tcp from a pod", f"1/2 to {A}:80, 1/2 to {B}:80", f"1 to {A}:80") in found
    assert ("sockets", f"{EMPTY}:80/tcp from a pod", "refused", "") in found
    node = f"{VIP}:80/tcp from the node"
    suffix = " (without a source address)"
    assert ("sockets", node, f"1/2 to {A}:80, 1/2 to {B}:80{suffix}", f"1 to {A}:80{suffix}") in found
    assert len(found) == 3


def test_programs_and_the_option_are_differences(document):
    (hooks,) = compared(document, msgspec.structs.replace(document, hooks=("connect4",))).found
    assert (hooks.what, hooks.after) == ("attached programs", "connect4")
    (option,) = compared(None, document).found
    assert (option.what, option.before, option.after) == ("socket load balancing", "", "on")
    unknown = compared(document, None, sockets="no permission")
    assert unknown.found == () and "sockets: unknown in after: no permission" in unknown.unknown


def of_node(name, network, document):
    link = NodeLink(index=1, name="cni0", kind="bridge")
    held = LinkAddress(link="cni0", address=f"{network}.1", prefix=24)
    return NodeView(name=name, links=(link,), addresses=(held,), sockets=document)


def test_local_pools_of_two_nodes_are_folded(document):
    """Each node has its own pods."""
    other = changed(document, LOCAL, local=((B, 80),))
    one, two = of_node("worker-a", "10.64.1", document), of_node("worker-b", "10.64.2", other)
    assert {each.part for each in differences(one, two, folded=False).found} == {"sockets", "addresses"}
    found = differences(one, two)
    assert found.found == () and {each.part for each in found.folded} == {"sockets", "addresses"}


# ---- top -----------------------------------------------------------------------------------------------------------


def test_counters_are_those_of_all_frontends_of_a_service_port():
    sockets = simulated()
    for number, draw in enumerate((0, 0, 1)):
        sockets.connect(SimulatedSocket(cookie=number), VIP, 80, draw)
    sockets.connect(SimulatedSocket(cookie=9, in_node=True), EXTERNAL, 80, 0)
    made = socket_document(sockets.pinned(IPFamily.IPV4))

    reading = count((), "", "", None, {(VIP, "tcp", 80): "shop/web:http"}, made)
    assert reading.source == "counters of socket load balancing" and not reading.sampled
    held = {(row.service, row.endpoint): row.connections for row in rows(reading, None, 0)}
    assert held == {("shop/web:http", ""): 4, ("shop/web:http", f"{A}:80"): 3, ("shop/web:http", f"{B}:80"): 1}
    nameless = {row.service for row in rows(count((), "", "", None, {}, made), None, 0)}
    assert nameless <= {f"{VIP}:80/tcp", f"{EXTERNAL}:80/tcp"} and len(nameless) == 1


NFT = f"""
	map services {{
		elements = {{ {VIP} . tcp . 80 counter packets 5 bytes 300 : goto pick-2 }}
	}}
	map endpoints {{
		elements = {{ {VIP} . tcp . 80 . 0 counter packets 5 bytes 300 : {A} . 80 }}
	}}
"""


def test_counters_of_rules_and_sockets_are_added():
    sockets = simulated()
    sockets.connect(SimulatedSocket(), VIP, 80, 0)
    names = {(VIP, "tcp", 80): "shop/web:http"}
    reading = count((), NFT, "", None, names, socket_document(sockets.pinned(IPFamily.IPV4)))

    assert reading.source == "counters of nftables elements and of socket load balancing"
    held = {(row.service, row.endpoint): row.connections for row in rows(reading, None, 0)}
    assert held["shop/web:http", ""] == 6
    assert sum(count for (_, end), count in held.items() if end) == 6
