"""The overlay's loop before there is anything to do: what it says of where its Nodes come from."""

import logging
from typing import Any, cast

import pytest

from narthex.model.problem import Problem
from narthex.overlay.program.loop import Overlay, OverlaySettings
from narthex.overlay.program.metrics import OverlayMetrics
from narthex.testing.fakes import FakeClock


def look(*problems: Problem) -> OverlayMetrics:
    """One look without any Node known."""
    metrics = OverlayMetrics()
    settings = OverlaySettings(node="a")
    kernel = cast(Any, None)
    Overlay(settings, lambda: (), kernel, FakeClock(), metrics, None, lambda: False, lambda: problems).reconcile()
    return metrics


@pytest.mark.parametrize("whose", ["", "API server, /api/v1/nodes", "Node b"])
def test_what_is_wrong_with_the_source_is_said_before_the_first_list(whose, caplog):
    with caplog.at_level(logging.ERROR, "narthex"):
        metrics = look(Problem(object=whose, message="connection refused"))
    assert "connection refused" in caplog.text
    assert metrics.failure == "the list of Nodes is not available yet"
    assert len(metrics.problems) == 1


@pytest.mark.parametrize(
    "problem",
    [Problem(object="Service shop/web", message="no port"), Problem(severity="warning", message="an unknown field")],
)
def test_what_does_not_concern_nodes_is_left_to_others(problem, caplog):
    with caplog.at_level(logging.ERROR, "narthex"):
        assert not look(problem).problems
    assert not caplog.text


@pytest.mark.parametrize("problem", ["", "connection refused"])
def test_the_first_list_resolves_only_a_problem_that_the_log_has(problem, caplog):
    with caplog.at_level(logging.INFO, "narthex"):
        metrics = look(*([Problem(message=problem)] if problem else []))
        metrics.report("", ())
        metrics.report("", ())
    assert caplog.text.count("all problems are resolved") == bool(problem)
