"""Ring buffers: reports of a real program arrive in order, and a reader knows when some may be lost."""

import os
import select

import pytest
from tests.bpf_programs import R0, R1, R2, move, socket_program
from tests.cgroup_client import cgroup_client, own_cgroup

from narthex.bpf import (
    AttachKind,
    CallHelper,
    Compute,
    Exit,
    Helper,
    LoadMap,
    LoadMemory,
    MapKind,
    MapSpec,
    Operation,
    Register,
    StoreMemory,
    Width,
)
from narthex.linux.bpf import BpfLink, BpfProgram, BpfRing
from narthex.linux.namespaces import create_namespace, delete_namespace

pytestmark = pytest.mark.kernel

RING = MapSpec(name="nx_ring", kind=MapKind.RINGBUF, key_size=0, value_size=0, max_entries=4096)
R3, R4, R10 = Register.R3, Register.R4, Register.R10
ROOM = 4096 // 24
"""Reports of 12 bytes, with a header of 8, rounded to 8."""

REPORT = socket_program(
    # The port that is asked for, and the first bytes of the time.
    LoadMemory(Width.WORD, R2, R1, 24),
    StoreMemory(Width.WORD, R10, -16, R2),
    CallHelper(Helper.KTIME_NS),
    StoreMemory(Width.DOUBLE, R10, -8, R0),
    LoadMemory(Width.WORD, R2, R10, -8),
    StoreMemory(Width.WORD, R10, -12, R2),
    LoadMemory(Width.WORD, R2, R10, -4),
    StoreMemory(Width.WORD, R10, -8, R2),
    LoadMap(R1, RING.name),
    move(R2, R10),
    Compute(Operation.ADD, R2, -16),
    move(R3, 12),
    move(R4, 0),
    CallHelper(Helper.RINGBUF_OUTPUT),
    move(R0, 1),
    Exit(),
)


@pytest.fixture
def ring():
    made = BpfRing(RING)
    yield made
    made.close()


@pytest.fixture
def client(ring):
    """A client whose connects are reported; nobody listens in its namespace."""
    name = f"nxr-{os.getpid()}"
    create_namespace(name)
    try:
        with own_cgroup() as cgroup:
            program = BpfProgram.load(REPORT, {RING.name: ring.map})
            folder = os.open(cgroup, os.O_RDONLY)
            link = BpfLink.create(program, folder, AttachKind.CONNECT4)
            os.close(folder)
            with cgroup_client(cgroup, name) as made:
                yield made
            link.close()
            program.close()
    finally:
        delete_namespace(name)


def connect(client, times):
    client.ask("burst", "127.0.0.1", 9, count=times, seconds=0.1)


def test_reports_arrive_once_and_in_order(ring, client):
    assert ring.read() == ((), True)
    connect(client, 50)
    reports, complete = ring.read()
    assert complete and len(reports) == 50 and {each[:2] for each in reports} == {b"\0\t"}
    times = [int.from_bytes(each[4:], "little") for each in reports]
    assert times == sorted(times)
    # The buffer begins again at its start meanwhile.
    for _ in range(10):
        connect(client, 40)
        reports, complete = ring.read()
        assert complete and len(reports) == 40 and all(len(each) == 12 for each in reports)


def test_a_buffer_that_was_full_says_so_and_goes_on(ring, client):
    connect(client, ROOM + 50)
    reports, complete = ring.read()
    assert not complete and ROOM - 1 <= len(reports) <= ROOM
    connect(client, 10)
    reports, complete = ring.read()
    assert complete and len(reports) == 10


def test_its_file_is_readable_while_reports_wait(ring, client):
    poll = select.poll()
    poll.register(ring.map.descriptor, select.POLLIN)
    assert poll.poll(0) == []
    connect(client, 1)
    assert poll.poll(30_000)
    ring.read()
    assert poll.poll(0) == []
