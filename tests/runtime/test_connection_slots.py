"""Which connection leaves when a limit is reached."""

import pytest

from narthex.runtime.connection_slots import ConnectionSlots


@pytest.fixture
def slots():
    return ConnectionSlots()


def add(slots, number, client="a", port="p", limits=(2, 4, 6)):
    one, many, every = limits
    return slots.add(number, {(port, client): one, port: many, "all": every})


def test_the_longest_silence_of_the_same_client_pays_first(slots):
    for number, client in enumerate("bab"):
        assert add(slots, number, client) == []
    assert add(slots, 3, "b") == [0]
    assert add(slots, 4, "b") == [2]
    assert len(slots) == 3


def test_then_that_of_the_port(slots):
    for number, client in enumerate("abcd"):
        assert add(slots, number, client) == []
    slots.note_silent(0)
    assert add(slots, 4, "e") == [1]
    assert add(slots, 5, "e", port="other") == []


def test_then_that_of_the_server(slots):
    for number in range(6):
        assert add(slots, number, str(number), port=str(number)) == []
    assert add(slots, 6, "6", port="6") == [0]
    assert len(slots) == 6


def test_connections_at_work_stay_while_others_are_silent(slots):
    add(slots, 0), add(slots, 1)
    slots.note_working(0)
    assert add(slots, 2) == [1]
    slots.note_working(2)
    assert add(slots, 3) == [0], "all work, so the one that began first leaves"
    slots.note_silent(2)
    assert add(slots, 4) == [3], "its silence is the longer one"


def test_file_descriptors_come_from_silent_connections(slots):
    assert slots.evict("all") is None
    add(slots, 0), add(slots, 1)
    slots.note_working(0)
    assert (slots.evict("all"), slots.evict("all")) == (1, None)


def test_nothing_is_kept_of_removed_connections(slots):
    for number in range(1000):
        add(slots, number, str(number), port=str(number))
    for number in range(1000):
        slots.remove(number)
        slots.note_silent(number), slots.note_working(number)
    assert len(slots) == 0 and not slots._groups
