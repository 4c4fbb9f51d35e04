"""Events: what they look like to the API, and that nobody waits for them."""

import logging
import threading

import pytest

from narthex.kube.events import (
    EventWriter,
    LogOnlyRecorder,
    cannot_check,
    cannot_serve,
    event_object,
    ipvs_deprecated,
    starting,
)
from narthex.model.objects import NamespacedName
from narthex.testing.fakes import FakeClock


class Server:
    """Takes Events, or refuses the first few."""

    def __init__(self, refusals=0):
        self.refusals = refusals
        self.taken = []
        self.asked = 0
        self.came = threading.Event()

    def create_event(self, namespace, event):
        self.asked += 1
        if self.refusals:
            self.refusals -= 1
            raise RuntimeError("status 403: no")
        self.taken.append((namespace, event))
        self.came.set()


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, "narthex")
    return caplog


@pytest.mark.row("26.4")
def test_an_event_as_the_api_takes_it():
    made = event_object(starting("worker-a"), 1000000000.25, "worker-a")
    assert made == {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": "worker-a.de0b6b3b64ab280", "namespace": "default"},
        "eventTime": "2001-09-09T01:46:40.250000Z",
        "type": "Normal",
        "reason": "Starting",
        "action": "StartKubeProxy",
        "note": "",
        "regarding": {"kind": "Node", "name": "worker-a", "uid": "worker-a", "apiVersion": "v1"},
        "reportingController": "kube-proxy",
        "reportingInstance": "kube-proxy-worker-a",
    }


@pytest.mark.row("26.4", "24.13", "16.7")
@pytest.mark.parametrize(
    ("happening", "kind", "reason", "namespace"),
    [
        (cannot_serve("a", "health", "taken"), "Node", "FailedToStartProxierHealthcheck", "default"),
        (cannot_serve("a", "metrics", "taken"), "Node", "FailedToStartMetricServer", "default"),
        (ipvs_deprecated("a"), "Node", "IPVSDeprecation", "default"),
        (cannot_check(NamespacedName("shop", "web"), "taken"), "Service", "FailedToStartServiceHealthcheck", "shop"),
    ],
)
def test_each_has_kube_proxys_words(happening, kind, reason, namespace):
    made = event_object(happening, 1.0, "a")
    assert (made["regarding"]["kind"], made["reason"], made["type"]) == (kind, reason, "Warning")
    assert made["metadata"]["namespace"] == namespace
    assert made["note"]


def test_a_note_is_as_long_as_the_api_takes():
    made = event_object(cannot_serve("a", "health", "é" * 2000), 1.0, "a")
    assert len(made["note"].encode()) <= 1024


def test_they_are_written_in_order_by_a_thread_of_its_own():
    server = Server()
    writer = EventWriter(server, "a", FakeClock())
    with writer.running():
        writer.record(starting("a"))
        writer.record(ipvs_deprecated("a"))
    assert [event["reason"] for _, event in server.taken] == ["Starting", "IPVSDeprecation"]


def test_what_was_told_before_and_at_the_end_is_written():
    """A process that ends because of a taken port says so."""
    server = Server()
    writer = EventWriter(server, "a", FakeClock())
    writer.record(starting("a"))
    with pytest.raises(RuntimeError, match="taken"), writer.running():
        writer.record(cannot_serve("a", "health", "taken"))
        raise RuntimeError("taken")
    assert len(server.taken) == 2


def test_a_refusal_is_said_and_ends_nothing(log):
    server = Server(refusals=1)
    writer = EventWriter(server, "a", FakeClock())
    with writer.running():
        writer.record(starting("a"))
        writer.record(ipvs_deprecated("a"))
    assert [event["reason"] for _, event in server.taken] == ["IPVSDeprecation"]
    assert "the event Starting could not be written: status 403: no" in log.text


def test_it_is_tried_again(monkeypatch):
    monkeypatch.setattr("narthex.kube.events._AGAIN_SECONDS", 0.01)
    server = Server(refusals=2)
    writer = EventWriter(server, "a", FakeClock())
    with writer.running():
        writer.record(starting("a"))
        assert server.came.wait(20)
    assert server.asked == 3


def test_a_server_that_hangs_holds_nobody_up(log):
    release = threading.Event()

    class Hanging:
        def create_event(self, _namespace, _event):
            release.wait(60)

    writer = EventWriter(Hanging(), "a", FakeClock())
    with writer.running(seconds=0.05):
        for _ in range(200):
            writer.record(starting("a"))
    assert "the event Starting is dropped: 100 are queued already" in log.text
    release.set()


def test_without_a_server_they_are_debug_lines(log):
    log.set_level(logging.DEBUG, "narthex")
    LogOnlyRecorder().record(cannot_serve("a", "health", "taken"))
    assert "FailedToStartProxierHealthcheck: taken" in log.text
