"""What the results of probes come to, in made-up time."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narthex.lab.kubelet.probes import (
    ExecAction,
    HttpGetAction,
    ProbeState,
    TcpSocketAction,
    UnsupportedAction,
    is_http_success,
    probes_of,
)

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds):
    return START + timedelta(seconds=seconds)


def container(**probes):
    return {"name": "web", "ports": [{"name": "http", "containerPort": 8080}], **probes}


def action(**given):
    (probe,) = probes_of(container(readinessProbe=given))
    return probe.action


def judged(results, **given):
    """Whether it is ready after each result of its readiness probe."""
    (probe,) = probes_of(container(readinessProbe={"tcpSocket": {"port": 80}, **given}))
    state = ProbeState((probe,), START)
    seen = []
    for index, ok in enumerate(results):
        state.record_result(probe, ok, at(index))
        seen.append(state.ready)
    return seen


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ({"httpGet": {"port": 80}}, HttpGetAction(host="", port=80, path="/", scheme="http")),
        (
            {
                "httpGet": {
                    "port": "http",
                    "path": "healthz",
                    "scheme": "HTTPS",
                    "host": "192.0.2.1",
                    "httpHeaders": [{"name": "X-A", "value": "b"}],
                }
            },
            HttpGetAction(host="192.0.2.1", port=8080, path="/healthz", scheme="https", headers=(("X-A", "b"),)),
        ),
        ({"tcpSocket": {"port": "8080"}}, TcpSocketAction(host="", port=8080)),
        ({"exec": {"command": ["test", "-e", "/x"]}}, ExecAction(command=("test", "-e", "/x"))),
        ({"tcpSocket": {"port": "gone"}}, UnsupportedAction(why="the container has no port 'gone'")),
        ({"tcpSocket": {"port": 70000}}, UnsupportedAction(why="the container has no port 70000")),
    ],
)
def test_what_a_probe_does(given_, expected):
    assert action(**given_) == expected


def test_grpc_is_refused_in_words():
    found = action(grpc={"port": 80})
    assert isinstance(found, UnsupportedAction)
    assert "gRPC" in found.why


def test_defaults_are_upstreams():
    (probe,) = probes_of(container(livenessProbe={"tcpSocket": {"port": 80}}))
    assert (probe.initial_delay, probe.period, probe.timeout, probe.successes, probe.failures) == (0, 10, 1, 1, 3)


@pytest.mark.parametrize(
    ("status", "ok"), [(199, False), (200, True), (302, True), (399, True), (400, False), (500, False)]
)
def test_statuses(status, ok):
    assert is_http_success(status) is ok


@pytest.mark.parametrize(
    ("results", "settings", "expected"),
    [
        ([True], {}, [True]),
        ([False, True], {}, [False, True]),
        ([True, False, False, False], {}, [True, True, True, False]),
        ([True, False, False, True, False, False], {}, [True] * 6),
        ([True, False], {"failureThreshold": 1}, [True, False]),
        (
            [True, True, False, True, True],
            {"successThreshold": 2, "failureThreshold": 1},
            [False, True, False, False, True],
        ),
    ],
)
def test_readiness_by_thresholds(results, settings, expected):
    assert judged(results, **settings) == expected


def test_without_probes_it_is_ready_and_nothing_is_due():
    state = ProbeState((), START)
    assert (state.ready, state.started, state.next_due()) == (True, True, None)


def test_delay_and_period():
    (probe,) = probes_of(
        container(readinessProbe={"tcpSocket": {"port": 80}, "initialDelaySeconds": 5, "periodSeconds": 3})
    )
    state = ProbeState((probe,), START)
    assert state.due(at(4)) == ()
    assert state.due(at(5)) == (probe,)
    state.mark_started(probe, at(5))
    assert state.due(at(6)) == ()
    state.record_result(probe, True, at(6))
    assert state.next_due() == at(9)


def test_nothing_else_is_asked_before_it_has_started():
    probes = probes_of(
        container(**{f"{name}Probe": {"tcpSocket": {"port": 80}} for name in ("startup", "liveness", "readiness")})
    )
    state = ProbeState(probes, START)
    (startup,) = state.due(START)
    assert (startup.purpose, state.started, state.ready) == ("startup", False, False)
    state.record_result(startup, True, at(1))
    assert state.started
    assert [probe.purpose for probe in state.due(at(1))] == ["liveness", "readiness"]


@pytest.mark.parametrize("purpose", ["startup", "liveness"])
def test_failing_often_enough_asks_for_a_restart(purpose):
    (probe,) = probes_of(container(**{f"{purpose}Probe": {"tcpSocket": {"port": 80}, "failureThreshold": 2}}))
    state = ProbeState((probe,), START)
    state.record_result(probe, False, at(1))
    assert state.to_restart is None
    state.record_result(probe, False, at(2))
    assert state.to_restart is probe
    assert state.next_due() is None
    assert probe.failure_message("no answer") == f"{purpose.capitalize()} probe failed: no answer"


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 4), st.integers(1, 4))
def test_readiness_changes_with_the_last_results_only(results, successes, failures):
    seen = judged(results, successThreshold=successes, failureThreshold=failures)
    for end in range(1, len(results) + 1):
        if results[:end][-successes:] == [True] * successes and end >= successes:
            assert seen[end - 1]
        elif results[:end][-failures:] == [False] * failures and end >= failures:
            assert not seen[end - 1]
        else:
            assert seen[end - 1] == (seen[end - 2] if end > 1 else False)


def test_a_readiness_probe_that_came_too_early_is_repeated_soon():
    """Only within the first period, and only until the container was ready once."""
    (probe,) = probes_of(container(readinessProbe={"tcpSocket": {"port": 80}, "initialDelaySeconds": 5}))
    state = ProbeState((probe,), START)
    for second, ok, due in (
        (5, False, 6),
        (6, False, 7),
        (14, False, 15),
        (15, False, 25),
        (25, True, 35),
        (35, False, 45),
    ):
        state.record_result(probe, ok, at(second))
        assert state.next_due() == at(due)
    (slow,) = probes_of(container(livenessProbe={"tcpSocket": {"port": 80}}))
    state = ProbeState((slow,), START)
    state.record_result(slow, False, at(0))
    assert state.next_due() == at(10)
