"""A node's own annotations and condition on an API server."""

import logging

import pytest

from narthex.kube.access import Access
from narthex.model.net import IPFamily
from narthex.model.objects import Node
from narthex.overlay.annotations import AnnotationKeys, LeaseAttributes, lease_annotations
from narthex.overlay.net_conf import BackendConf
from narthex.overlay.program.annotate import NodeAnnotator, NodeWriter
from narthex.overlay.program.loop import OverlaySettings
from narthex.overlay.program.metrics import OverlayMetrics
from narthex.overlay.program.part import OverlayPart, directory_origin, exposition, routes
from narthex.testing.apiserver import FaultyApiServer
from narthex.testing.load import until

WANTED = lease_annotations(
    AnnotationKeys(), BackendConf(), {IPFamily.IPV4: LeaseAttributes(public_ip="192.0.2.1", mac="02:00:00:00:00:01")}
)


def node(**annotations):
    return Node(name="a", uid="1", annotations=tuple(sorted({"theirs/own": "stays", **annotations}.items())))


class Recorder:
    def __init__(self, failures=0):
        self.bodies = []
        self.failures = failures

    def patch(self, name, body):
        self.bodies.append((name, body))
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the server is away")


def test_annotations_and_condition_are_written_and_others_stay():
    with FaultyApiServer() as server:
        server.put(node())
        announcer = NodeAnnotator(NodeWriter(Access(master=server.url)), condition=True)
        with announcer.running():
            announcer.set_desired(node(), WANTED)

            def stored():
                return server.do(lambda data: data.get("Node", ("", "a"))).raw

            until(lambda: "status" in stored() and stored()["status"].get("conditions"), "the condition")
        assert stored()["metadata"]["annotations"] == {"theirs/own": "stays", **WANTED}
        (condition,) = stored()["status"]["conditions"]
        assert (condition["type"], condition["status"], condition["reason"]) == (
            "NetworkUnavailable",
            "False",
            "FlannelIsUp",
        )
        asked = {(seen.method, seen.path) for seen in server.requests}
        assert asked == {("PATCH", "/api/v1/nodes/a/status")}


def test_only_what_differs_is_written():
    recorder = Recorder()
    announcer = NodeAnnotator(recorder, condition=False)
    with announcer.running():
        announcer.set_desired(node(**WANTED), WANTED)
        announcer.set_desired(node(**{**WANTED, AnnotationKeys().type: "host-gw"}), WANTED)
        until(lambda: recorder.bodies, "a write")
        announcer.set_desired(node(**WANTED), WANTED)
    assert recorder.bodies == [("a", {"metadata": {"annotations": {AnnotationKeys().type: "vxlan"}}})]


def test_a_server_that_is_away_is_asked_again(caplog):
    recorder = Recorder(failures=1)
    announcer = NodeAnnotator(recorder, condition=False)
    with caplog.at_level(logging.ERROR, "narthex"), announcer.running():
        announcer.set_desired(node(), WANTED)
        until(lambda: len(recorder.bodies) > 1, "a second try")
    assert "cannot update node a: the server is away; retrying in 1 s" in caplog.text


def test_what_is_wrong_is_said_once(caplog):
    metrics = OverlayMetrics()
    with caplog.at_level(logging.INFO, "narthex"):
        for _ in range(3):
            metrics.report("no default route", ("node b: no route to it",))
        metrics.report("", ("node b: no route to it",))
        metrics.report("", ())
    assert [record.getMessage() for record in caplog.records] == [
        "overlay: no default route",
        "overlay: node b: no route to it",
        "overlay: all problems are resolved",
    ]


def test_the_port_answers_by_the_last_reconcile(tmp_path):
    part = OverlayPart(OverlaySettings(node="a", subnet_file=str(tmp_path / "env")), directory_origin(tmp_path))
    answers = routes(part)
    assert answers["/healthz"]().status == 200
    reply = answers["/readyz"]()
    assert reply.status == 503
    assert b'"ready":false' in reply.body
    part.metrics.last_reconcile = part._clock.now()
    part.metrics.ready = True
    part.metrics.healed["route"] += 2
    assert answers["/readyz"]().status == 200
    part.metrics.failure = "the pod range is gone"
    assert (answers["/readyz"]().status, part.healthy) == (503, True)
    assert b"the pod range is gone" in answers["/readyz"]().body
    part.metrics.broken = True
    assert not part.healthy
    text = exposition(part.metrics).decode()
    assert 'narthex_overlay_healed_total{kind="route"} 2.0' in text
    assert 'narthex_overlay_healed_total{kind="device"} 0.0' in text
    assert "narthex_overlay_problems 1.0" in text


@pytest.mark.parametrize("given", ["", "/somewhere/else"])
def test_the_file_of_own_routes(given):
    settings = OverlaySettings(node="a", subnet_file="/run/x/subnet.env", routes_file=given)
    assert settings.routes_file == (given or "/run/x/subnet.env.routes")
