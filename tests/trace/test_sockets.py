"""Socket load balancing on a path: maps as JSON in bundles, and connections that lead to endpoints before rules see them."""

from fractions import Fraction

import msgspec
import pytest

from narthex.model import IPFamily, Protocol, Snapshot
from narthex.proxy.backends.sockets.document import SocketDocument, socket_document
from narthex.proxy.backends.sockets.rows import SocketRows
from narthex.proxy.backends.sockets.walk import SimulatedSocket, SimulatedSockets
from narthex.testing.build import NODE, endpoint, endpoint_slice, plan, service
from narthex.trace.follow.views import NodeView
from narthex.trace.model import Fate, Stage
from narthex.trace.node.layout import FAILED, SOCKETS_FILE, BundleManifest, PartStatus
from narthex.trace.node.view import view_of_bundle
from narthex.trace.program.places import AddressOwner
from narthex.trace.program.travel import KnownCluster, TraceRequest, travel

A, B, POD = "10.64.1.5", "10.64.2.7", "10.64.1.200"
VIP, EMPTY, STICKY = "10.110.0.1", "10.110.0.2", "10.110.0.3"
LOCAL = "10.110.0.4"


def simulated():
    """The maps of some Services, as the programs leave them."""
    ends = endpoint(A, NODE), endpoint(B, "worker-b")
    made = plan(
        service("shop/web", VIP),
        endpoint_slice("shop/web", *ends),
        service("shop/empty", EMPTY),
        service("shop/sticky", STICKY, affinity_seconds=60),
        endpoint_slice("shop/sticky", *ends),
        service("shop/local", LOCAL, internal_policy_local=True),
        endpoint_slice("shop/local", *ends),
    )
    sockets = SimulatedSockets()
    sockets.apply(IPFamily.IPV4, SocketRows(IPFamily.IPV4).advance(made))
    return sockets


@pytest.fixture(scope="module")
def sockets():
    return simulated()


@pytest.fixture(scope="module")
def document(sockets):
    return socket_document({IPFamily.IPV4: sockets.rows(IPFamily.IPV4)})


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
