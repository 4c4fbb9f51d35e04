"""Turns, memory of clients, and endpoints that rest; without sockets."""

import pytest

from narthex.proxy.relay.choice import AVOIDED_SECONDS, Affinity, Turns

A, B, C = ("10.64.1.1", 80), ("10.64.1.2", 80), ("10.64.1.3", 80)


def keep(order):
    """A shuffle that changes nothing."""


def firsts(turns, count, now=0.0):
    return [next(turns.candidates(now)) for _ in range(count)]


@pytest.mark.row("25.3")
def test_each_in_turn():
    assert firsts(Turns([A, B, C], keep), 7) == [A, B, C, A, B, C, A]


@pytest.mark.row("25.3")
def test_another_set_is_shuffled_anew_and_the_same_set_is_not():
    shuffles = []
    turns = Turns([A, B, C], lambda order: shuffles.append(list(order)))
    turns.use([C, B, A])
    assert shuffles == [[A, B, C]]
    turns.use([A, B])
    assert shuffles == [[A, B, C], [A, B]]
    assert turns.places == {A, B}


@pytest.mark.row("25.4")
def test_all_others_come_after_the_first():
    turns = Turns([A, B, C], keep)
    assert list(turns.candidates(0.0)) == [A, B, C]
    assert list(turns.candidates(0.0)) == [B, C, A]


@pytest.mark.row("25.4")
def test_who_could_not_be_reached_comes_last_for_a_while():
    turns = Turns([A, B, C], keep)
    turns.failed(A, now=10.0)
    assert list(turns.candidates(10.1)) == [B, C, A]
    assert list(turns.candidates(10.0 + AVOIDED_SECONDS)) == [B, C, A]
    assert list(turns.candidates(10.0 + AVOIDED_SECONDS)) == [C, A, B]
    turns.failed(B, now=20.0)
    turns.reached(B)
    assert next(turns.candidates(20.1)) == A
    assert next(turns.candidates(20.1)) == B


def test_who_leaves_while_others_are_tried_is_not_tried():
    turns = Turns([A, B, C], keep)
    trying = turns.candidates(0.0)
    assert next(trying) == A
    turns.use([A, C])
    assert list(trying) == [C]


def test_the_remembered_one_comes_first_and_takes_nobodys_turn():
    turns = Turns([A, B, C], keep)
    assert next(turns.candidates(0.0, first=C)) == C
    assert firsts(turns, 3) == [A, B, C]


@pytest.mark.row("25.5")
def test_a_client_is_remembered_while_it_returns_in_time():
    memory = Affinity(10.0)
    memory.touch("10.64.1.200", B, now=0.0)
    assert memory.remembered("10.64.1.200", [A, B], now=9.9) == B
    memory.touch("10.64.1.200", B, now=9.9)
    assert memory.remembered("10.64.1.200", [A, B], now=19.5) == B
    assert memory.remembered("10.64.1.200", [A, B], now=20.0) is None
    assert memory.remembered("10.64.1.201", [A, B], now=0.0) is None


def test_only_among_the_endpoints_that_there_are():
    memory = Affinity(10.0)
    memory.touch("10.64.1.200", B, now=0.0)
    assert memory.remembered("10.64.1.200", [A, C], now=1.0) is None


@pytest.mark.row("25.4")
def test_a_failing_endpoint_is_forgotten():
    memory = Affinity(10.0)
    memory.touch("10.64.1.200", B, now=0.0)
    memory.forget("10.64.1.200", B)
    assert memory.remembered("10.64.1.200", [A, B], now=0.0) is None
    assert len(memory) == 0


def test_what_is_too_old_is_swept():
    memory = Affinity(10.0)
    memory.touch("a", A, now=0.0)
    memory.touch("b", B, now=5.0)
    memory.sweep(now=10.0)
    assert len(memory) == 1
    assert memory.remembered("b", [A, B], now=10.0) == B
