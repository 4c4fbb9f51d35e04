"""An announcer's turns with links and beats that are made up, and what it tells Kubernetes and people."""

import contextlib
import json

import msgspec
import pytest

from narthex.kube.access import Access
from narthex.lb import l2, why
from narthex.lb.election import ElectionInput, NodeAnnouncerState, elect
from narthex.lb.heartbeat import Membership
from narthex.lb.kernel.packets import HostLink
from narthex.lb.program.announcer import metrics, status
from narthex.lb.program.announcing import Announcer
from narthex.lb.program.files import HeartbeatKeyError, read_keys
from narthex.lb.program.inspection import WhyError, why_service
from narthex.lb.program.status_writes import ConditionWriter
from narthex.lb.service_status import ServiceCondition
from narthex.model.objects import IPAddressPool, L2Advertisement, NamespacedName
from narthex.model.store import Synced, Upsert
from narthex.proxy.plan.planner import NodeConfig
from narthex.testing.apiserver import FaultyApiServer
from narthex.testing.build import endpoint, endpoint_slice, node, service, snapshot
from narthex.testing.kernel.segment import endpoints as slice_manifest
from narthex.testing.kernel.segment import node as node_manifest
from narthex.testing.kernel.segment import pool as pool_manifest
from narthex.testing.kernel.segment import service as service_manifest
from narthex.testing.load import until
from narthex.trace.program.inputs import NodeInputs
from narthex.trace.program.places import OwnerIndex, ask, question
from narthex.trace.program.rules_trace import answer
from narthex.trace.render.text import text

IP, SIX = "192.0.2.200", "2001:db8::200"
OWN, CLIENT, STRANGER = (bytes((2, 0, 0, 0, 0, last)) for last in (1, 2, 3))
POOL = IPAddressPool(name="lan", namespace="x", addresses=("192.0.2.192/28", "2001:db8::/64"))


class Air:
    """Links that are made up; what is sent is kept."""

    def __init__(self, *names):
        self.links = {}
        self.next = [
            HostLink(name=name, index=place, mac=OWN, link_local="fe80::1") for place, name in enumerate(names, 1)
        ]
        self.waiting = []
        self.sent = []
        self.heard = None

    def rescan(self):
        before, self.links = self.links, {link.name: link for link in self.next}
        return before != self.links

    def listen_for(self, addresses, answered):
        self.heard = addresses, answered

    def frames(self):
        while self.waiting:
            yield self.waiting.pop(0)

    def send(self, name, frames):
        self.sent += [(name, frame) for frame in frames]
        return len(frames)

    def receive_frame(self, frame, name="lan0"):
        self.waiting.append((self.links[name], frame))


class Alone:
    """An announcer that hears no other, in made-up time."""

    def __init__(self, *objects, names=("lan0",)):
        self.now = 100.0
        self.air = Air(*names)
        self.member = Membership("a", 1, (b"k" * 32,), self.now)
        self.announcing = Announcer("a", self.member, self.air, lambda *_: None)
        self.announcing.rescan_links(self.now)
        self.apply_events(node("a"), node("b", internal_ips=("192.0.2.2",)), *(objects or OBJECTS))
        self.announcing.apply_events([Synced()])
        self.turn(0.7)

    def apply_events(self, *objects):
        self.announcing.apply_events([Upsert(each) for each in objects])

    def turn(self, seconds=0.0):
        self.now += seconds
        self.announcing.turn(self.now)
        self.announcing.answer(self.now)

    def state(self, address=IP):
        said = json.loads(msgspec.json.encode(status(self.announcing, self.now)))
        return next(each for each in said["addresses"] if each["address"] == address)


def balancer(*ips, **fields):
    return service("shop/web", "10.110.0.1", type="LoadBalancer", balancers=ips, **fields)


OBJECTS = POOL, balancer(IP, SIX), endpoint_slice("shop/web", endpoint("10.64.1.5", node="b"))


def asked(address=IP, to=b"\xff" * 6):
    frame = l2.probe(address, CLIENT, "fe80::2")
    return to + frame[6:] if address == IP else frame


def test_nothing_is_said_while_it_listens():
    made = Alone.__new__(Alone)
    made.now, made.air = 0.0, Air("lan0")
    made.announcing = Announcer("a", Membership("a", 1, (b"k" * 32,), 0.0), made.air, lambda *_: None)
    made.announcing.rescan_links(0.0)
    made.apply_events(node("a"), *OBJECTS)
    made.announcing.apply_events([Synced()])
    made.air.receive_frame(asked())
    made.turn(0.5)
    assert made.air.sent == [] and not made.announcing.ownership.held
    made.turn(0.2)
    assert set(made.announcing.ownership.held) == {IP, SIX}


def test_it_announces_at_once_answers_and_counts():
    made = Alone()
    assert [name for name, _ in made.air.sent] == ["lan0"] * 3
    assert made.air.heard == (frozenset((IP, SIX)), {"lan0": frozenset((IP, SIX))})
    made.air.sent.clear()
    made.air.receive_frame(asked())
    made.air.receive_frame(asked(SIX))
    made.air.receive_frame(asked(to=STRANGER))
    made.air.receive_frame(asked("192.0.2.77"))
    made.turn()
    assert len(made.air.sent) == 2 and {l2.read(frame)[0].address for _, frame in made.air.sent} == {IP, SIX}
    said = made.state()
    assert (said["requests"], said["responses"], said["gratuitous"], said["answers"]) == (1, 1, 2, True)
    assert said["lastRequest"]["mac"] == l2.mac_text(CLIENT) and said["holders"] == ["a"]
    seen = status(made.announcing, made.now).by_address[IP]
    assert seen.observation.last_request.startswith("by 02:00:")
    numbers = {sample.name: sample for family in metrics(made.announcing) for sample in family.samples}
    assert numbers["metallb_layer2_responses_sent"].value == 1
    assert numbers["metallb_speaker_announced"].labels["service"] == "shop/web"


def test_only_the_links_of_the_advertisement_are_used():
    made = Alone(*OBJECTS, L2Advertisement(name="one", interfaces=("lan1",)), names=("lan0", "lan1"))
    assert {name for name, _ in made.air.sent} == {"lan1"}
    made.air.sent.clear()
    made.air.receive_frame(asked(), "lan0")
    made.turn()
    assert made.air.sent == []


def test_a_service_that_goes_is_not_answered_for():
    made = Alone()
    made.apply_events(balancer())
    made.turn()
    made.air.sent.clear()
    made.air.receive_frame(asked())
    made.turn(2)
    assert made.air.sent == [] and made.announcing.decisions == {}


def test_a_strangers_claim_is_kept_and_met_with_an_announcement_now_and_then():
    made = Alone()
    made.air.sent.clear()
    for seconds, defences in ((0.1, 1), (0.1, 1), (10.5, 2)):
        made.air.receive_frame(l2.gratuitous(IP, STRANGER, "")[0])
        made.turn(seconds)
        claims = [
            each for _, frame in made.air.sent for each in l2.read(frame) if each.kind is l2.NeighborMessageKind.CLAIMS
        ]
        assert sum(each.address == IP for each in claims) >= 2 * defences
    (found,) = made.state()["foreign"]
    assert (found["mac"], found["node"], found["times"]) == (l2.mac_text(STRANGER), "", 3)
    told = made.announcing.conditions(made.now)[NamespacedName("shop", "web")]
    assert told.holds and told.reason == "AlsoAnsweredByOthers" and l2.mac_text(STRANGER) in told.message
    made.turn(301)
    assert made.state()["foreign"] == []


def test_own_frames_and_claims_to_what_is_not_held_are_no_news():
    made = Alone()
    for frame in (*l2.gratuitous(IP, OWN, ""), l2.gratuitous("192.0.2.77", STRANGER, "")[0], asked()):
        made.air.receive_frame(frame)
    made.turn()
    assert made.state()["foreign"] == []


def test_after_standing_still_it_begins_anew_and_says_nothing_of_what_waited():
    made = Alone()
    made.air.sent.clear()
    made.air.receive_frame(asked())
    made.now += 5
    made.announcing.resume_after_stall(made.now, 5.0)
    made.turn()
    assert made.air.sent == [] and not made.announcing.ownership.held
    made.turn(0.7)
    assert set(made.announcing.ownership.held) == {IP, SIX}


def test_pools_of_a_file_take_the_place_of_objects():
    made = Alone(*OBJECTS[1:])
    assert made.state()["nodes"][0]["reason"] == "AddressInNoPool"
    made.announcing.use_pools((POOL,), ())
    made.turn()
    assert made.state()["answers"]


def test_what_kubernetes_is_told():
    made = Alone()
    (key, told), = made.announcing.conditions(made.now).items()  # fmt: skip
    assert str(key) == "shop/web" and told.holds and told.reason == "Announces"
    assert told.message.startswith(f"{IP} by a, {SIX} by a; no L2Advertisement selects pool lan")
    made.apply_events(endpoint_slice("shop/web"))
    made.turn()
    told = made.announcing.conditions(made.now)[key]
    assert (told.holds, told.reason) == (False, "NoEndpoint")
    assert told.message.startswith(f"no node answers for {IP}: no endpoint of shop/web can serve")
    made.announcing.leave()
    assert made.announcing.conditions(made.now) == {}


def test_it_leaves_when_nobody_is_there_to_take_over():
    made = Alone()
    made.announcing.leave()
    made.turn()
    assert made.announcing.finished


CONDITION = ServiceCondition(type=why.CONDITION, holds=True, reason="Announces", message="192.0.2.200 by a")
WEB = NamespacedName("shop", "web")


@contextlib.contextmanager
def writing(server):
    writer = ConditionWriter(Access(master=server.url), settle=0.0)
    with writer.running():
        yield writer


def stored(server):
    raw = server.do(lambda data: data.get("Service", ("shop", "web"))).raw
    return {each["type"]: each for each in raw["status"].get("conditions", ())}


def verbs(server):
    return [seen.method for seen in server.requests if "/services/web" in seen.path]


def test_a_condition_is_written_once_and_again_only_when_it_differs():
    with FaultyApiServer() as server:
        other = {
            "type": "other/One",
            "status": "True",
            "reason": "R",
            "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        raw = service_manifest("web", IP)
        raw["status"]["conditions"] = [other]
        server.put_raw("Service", raw)
        with writing(server) as writer:
            writer.want({WEB: CONDITION}, {WEB})
            until(lambda: why.CONDITION in stored(server), "the condition")
        first = stored(server)[why.CONDITION]
        assert (first["status"], first["reason"], first["message"]) == ("True", "Announces", CONDITION.message)
        assert stored(server)["other/One"] == other
        # Another run reads, and has nothing to write.
        with writing(server) as writer:
            writer.want({WEB: CONDITION}, {WEB})
            until(lambda: verbs(server).count("GET") >= 2, "the look")
            assert verbs(server).count("PATCH") == 1
            said = ServiceCondition(type=why.CONDITION, holds=True, reason="AlsoAnsweredByOthers", message="m")
            writer.want({WEB: said, NamespacedName("shop", "gone"): said}, {WEB})
            until(lambda: stored(server)[why.CONDITION]["reason"] == "AlsoAnsweredByOthers", "the change")
            # What holds has held since then.
            assert stored(server)[why.CONDITION]["lastTransitionTime"] == first["lastTransitionTime"]


def test_a_condition_goes_with_the_type_and_stays_when_another_node_writes_it():
    for announced, removed in (((), True), ((WEB,), False)):
        with FaultyApiServer() as server:
            server.put_raw("Service", service_manifest("web", IP))
            with writing(server) as writer:
                writer.want({WEB: CONDITION}, {WEB})
                until(lambda: why.CONDITION in stored(server), "the condition")
                writer.want({}, announced)
                if removed:
                    until(lambda: why.CONDITION not in stored(server), "the removal")
                else:
                    # The writer takes the conditions in order: with this one, it has seen the absence of the other.
                    server.put_raw("Service", service_manifest("zoo", IP))
                    writer.want({NamespacedName("shop", "zoo"): CONDITION}, (WEB, NamespacedName("shop", "zoo")))
                    until(lambda: [each for each in server.requests if "zoo" in each.path], "the other Service")
                    assert why.CONDITION in stored(server)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (None, "No such file"),
        ("", "holds no key"),
        ("short\n", "holds a key of 5 characters"),
        ("a key that is long enough\nshort\n", "holds a key of 5 characters"),
    ],
)
def test_keys_that_cannot_be_used(tmp_path, lines, said):
    path = tmp_path / "key"
    if lines is not None:
        path.write_text(lines)
    with pytest.raises(HeartbeatKeyError, match=said):
        read_keys(str(path))


def test_keys(tmp_path):
    path = tmp_path / "key"
    path.write_text("the first key that signs\n\n  the second one, which may\n")
    assert read_keys(str(path)) == (b"the first key that signs", b"the second one, which may")
    with pytest.raises(HeartbeatKeyError, match="--announcer-key-file"):
        read_keys("")


def manifests(path, *objects):
    for place, each in enumerate(objects):
        (path / f"{place}.json").write_text(json.dumps(each))
    return path


def test_why_by_the_objects_alone(tmp_path):
    where = manifests(
        tmp_path,
        node_manifest("a", "192.0.2.1"),
        node_manifest("b", "192.0.2.2"),
        pool_manifest("lan", "192.0.2.192/28"),
        service_manifest("web", IP, externalTrafficPolicy="Local"),
        slice_manifest("web", "a"),
        service_manifest("none"),
    )
    said = why_service("web", manifests=where, status_port=0)
    assert [(each.node, each.announces, each.reason) for each in said.addresses[0].nodes] == [
        ("a", True, "Announces"),
        ("b", False, "NoLocalEndpoint"),
    ]
    assert f"  {IP} (pool lan): the elected node is a" in why.lines(said)
    assert "its status has no address" in why_service("shop/none", manifests=where, status_port=0).notes[0]
    with pytest.raises(WhyError, match="there is no Service shop/nothing"):
        why_service("shop/nothing", manifests=where, status_port=0)


def test_a_trace_from_outside_names_the_node_that_answers():
    objects = (*OBJECTS, node("a"), node("b", internal_ips=("192.0.2.2",)))
    given = snapshot(*objects)
    first, second = elect(
        ElectionInput(snapshot=given, announcers={"a": NodeAnnouncerState(), "b": NodeAnnouncerState()})
    )[IP].order
    for here, more in ((first, ""), (second, f", so packets come to {first} and not to {second}")):
        inputs = NodeInputs(snapshot=given, config=NodeConfig(node_name=here), mode="nftables")
        places = OwnerIndex(given)
        source, target, wanted = ask(places, "outside", f"{IP}:80")
        asked_ = question(places, source, target, wanted, inputs, inputs.host, None)
        explained = answer(asked_, inputs, inputs.host)
        assert explained.announced[0] == f"{first} answers for {IP}{more}"
        assert "on the link  " in text(explained) and f"{first}: Announces" in text(explained)
