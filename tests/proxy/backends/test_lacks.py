"""When rules that were read from a kernel lack some of ours, and when others merely stand in their place."""

import pytest
from immutables import Map

from narthex.netfilter.ast import Chain, Table
from narthex.proxy.backends.base import lacks


@pytest.mark.parametrize(
    ("have", "want", "answer"),
    [
        ({}, {}, False),
        ({"a": 1}, {"a": 2}, False),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        ({"b": 1}, {"a": 1}, True),
        (Map(), Map({"a": ()}), True),
        ({"a": ("y",)}, {"a": ("x",)}, False),
        ({"a": ("x",)}, {"a": ("x", "y")}, True),
        ({"a": "x"}, {"a": "xyz"}, False),
        (frozenset("ab"), frozenset("b"), False),
        (frozenset("a"), frozenset("b"), True),
        (Chain(name="a"), Chain(name="b"), False),
        (Table(family=None, name="t"), Table(family=None, name="t", chains={"a": Chain(name="a")}), True),
    ],
)
def test_what_counts_as_missing(have, want, answer):
    assert lacks(have, want) is answer
