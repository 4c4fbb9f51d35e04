"""A request for load balancing that has no effect is reported once, in the log and as an Event of its Service."""

import logging

import msgspec
import pytest

from narthex.kube.events import event_object
from narthex.model.objects import NamespacedName
from narthex.proxy.backends.iptables.backend import IptablesBackend
from narthex.proxy.plan.balancing import LOAD_BALANCING, balancing_problem
from narthex.proxy.program.report import BalancingReporter
from narthex.testing.build import service, snapshot

WEB = NamespacedName("shop", "web")


def web(value):
    held = service("shop/web", "10.110.0.5", uid="u-1")
    return msgspec.structs.replace(held, annotations=((LOAD_BALANCING, value),)) if value else held


@pytest.fixture
def events():
    return []


@pytest.fixture
def reporter(events):
    return BalancingReporter(lambda one: balancing_problem(one, "iptables", IptablesBackend.deviations), events.append)


@pytest.mark.row("29.19")
def test_each_problem_is_reported_once_and_its_end_too(reporter, events, caplog):
    caplog.set_level(logging.INFO, "narthex")
    for value in ("maglef", "maglef", "maglev", "", "least-connections"):
        reporter.update(snapshot(web(value)), {WEB})
    reporter.update(snapshot(), {WEB})
    assert [each.note.split(": ", 1)[0] for each in events] == ["Service shop/web"] * 3
    assert [text in each.note for text, each in zip(("maglef", "maglev", "least-"), events, strict=True)] == [True] * 3
    assert len(caplog.messages) == 5 and all("shop/web" in text for text in caplog.messages)


def test_the_event_is_a_warning_about_the_service(reporter, events):
    reporter.update(snapshot(web("ring")), {WEB})
    body = event_object(events[0], 1e9, "worker-a")
    assert (body["type"], body["reason"]) == ("Warning", "LoadBalancingNotApplied")
    assert body["regarding"] == {
        "kind": "Service",
        "namespace": "shop",
        "name": "web",
        "uid": "u-1",
        "apiVersion": "v1",
    }
    assert body["metadata"]["namespace"] == "shop"
    assert "use random, least-connections, or maglev" in body["note"]


def test_other_services_are_left_alone(reporter, events):
    reporter.update(snapshot(web("")), {WEB, NamespacedName("shop", "gone")})
    assert events == []
