"""Requests for other ways to select endpoints: the annotation, its effect on the plan, and what is wrong with it."""

import msgspec
import pytest

from narthex.proxy.plan.balancing import LOAD_BALANCING, balancing_of, balancing_problem
from narthex.proxy.plan.ir import Balancing, Deviation
from narthex.proxy.plan.show import table
from narthex.testing.build import plan, service


def annotated(value, **fields):
    return msgspec.structs.replace(service("shop/web", "10.110.0.5", **fields), annotations=((LOAD_BALANCING, value),))


@pytest.mark.parametrize("value, expected", [(each.value, each) for each in Balancing] + [("Maglev", Balancing.RANDOM)])
def test_the_annotation_decides(value, expected):
    held = annotated(value)
    assert balancing_of(held) is expected
    made = plan(held)
    assert {each.balancing for each in made.services.values()} == {expected}
    assert (f"load balancing: {value}" in table(made)) is (expected is not Balancing.RANDOM)


def test_without_it_endpoints_are_random():
    assert balancing_of(service("shop/web")) is Balancing.RANDOM
    assert balancing_problem(service("shop/web"), "nftables", frozenset()) == ""


@pytest.mark.parametrize("value", ["random", "maglev", "least-connections"])
def test_what_a_mode_can_do_is_no_problem(value):
    assert balancing_problem(annotated(value), "nftables", frozenset({Deviation.HASH_OF_THE_KERNEL})) == ""


def test_an_unknown_value_is_named_with_those_that_are_allowed():
    said = balancing_problem(annotated("ring\x1b[31m"), "nftables", frozenset())
    assert "\x1b" not in said
    assert said.endswith("use random, least-connections, or maglev")
    assert LOAD_BALANCING in said


def test_session_affinity_takes_precedence():
    held = msgspec.structs.replace(annotated("maglev"), affinity_seconds=60)
    assert balancing_of(held) is Balancing.RANDOM
    assert "session affinity is ClientIP" in balancing_problem(held, "nftables", frozenset())


@pytest.mark.parametrize(
    "value, deviation",
    [("maglev", Deviation.NO_CONSISTENT_HASHING), ("least-connections", Deviation.NO_LEAST_CONNECTIONS)],
)
def test_what_a_mode_cannot_do_is_a_problem(value, deviation):
    assert value in balancing_problem(annotated(value), "iptables", frozenset({deviation}))
    others = frozenset(Deviation) - {deviation}
    assert balancing_problem(annotated(value), "iptables", others) == ""
