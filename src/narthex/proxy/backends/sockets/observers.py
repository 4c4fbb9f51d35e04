"""The program that observes how TCP connections to endpoints begin, for passive ejection (hook `sock_ops` of a cgroup).

It reports to a ring buffer, and only what may change a decision, so that a node without failures reports nothing:

* Each failure of a socket that a connect program sent to an endpoint: the first SYN was not answered in time, or was refused by a
  reset. The endpoint is then watched. Until the process has taken them in, at most 64 failures of an endpoint are reported.
* The first connection to a watched endpoint that is made; the endpoint is then no longer watched.
* The start of the next connection to an endpoint that is on trial.

A refusal by ICMP, and a client that gives up before the first retransmission, look the same from here, and are not reported.
Offsets and operations are those of `struct bpf_sock_ops` in linux/bpf.h.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from socket import AF_INET, AF_INET6, inet_ntop

from narthex.bpf import (
    AtomicAdd,
    AttachKind,
    BpfProgramSpec,
    CallHelper,
    Compute,
    Condition,
    Exit,
    Helper,
    JumpAlways,
    JumpIf,
    Label,
    LoadConstant,
    LoadMap,
    LoadMemory,
    MapKind,
    MapSpec,
    Operation,
    ProgramKind,
    Statement,
    StoreMemory,
    Width,
)
from narthex.model import IPFamily
from narthex.proxy.backends.sockets.layout import ADDRESS_SIZES, FamilyMaps, MapsByFamily, WatchFlag
from narthex.proxy.backends.sockets.pieces import (
    R0,
    R1,
    R2,
    R3,
    R4,
    R6,
    R7,
    R8,
    R10,
    delete,
    find_peer,
    lookup,
    move,
    update,
)
from narthex.proxy.backends.sockets.programs import MAPPED_PREFIX
from narthex.proxy.plan.ejection import ConnectEvent, ConnectObservation

OPERATION, FIRST_ARGUMENT, SECOND_ARGUMENT, FAMILY = 0, 4, 8, 20
REMOTE_IP4, REMOTE_IP6, REMOTE_PORT = 24, 32, 64
CALLBACK_FLAGS, STATE, TOTAL_RETRANSMITS, SEGMENTS_IN = 84, 88, 136, 140
OBSERVER_CONTEXT_SIZE = 184
"""Bytes of `struct bpf_sock_ops`, as far as it is used."""
RETRANSMIT_CALLBACK, STATE_CALLBACK = 1, 4
"""Flags of a socket: call the program when a retransmission timer expires, and when the state changes."""
SYN_SENT, CLOSED = 2, 7

MOST_REPORTED = 64
"""Failures of one endpoint that are reported until the process takes them in."""


class ObservedOperation(IntEnum):
    """When the kernel calls the program."""

    CONNECT = 3
    ESTABLISHED = 4
    RETRANSMIT_TIMEOUT = 8
    STATE_CHANGE = 10


RING = MapSpec(name="nx_observed", kind=MapKind.RINGBUF, key_size=0, value_size=0, max_entries=1 << 16)
"""Reports on their way to the process. If it is full, reports are lost, and the process knows that some may be."""

_REPORT = struct.Struct("=QQHH16s2s2x")
"""Nanoseconds of the monotonic clock, cookie of the network namespace, event, family, address, port (network order)."""
_EVENTS = {ConnectEvent.STARTED: 1, ConnectEvent.CONNECTED: 2, ConnectEvent.FAILED: 3}
_BY_NUMBER = {number: event for event, number in _EVENTS.items()}


def observation_of(report: bytes) -> tuple[IPFamily, ConnectObservation]:
    """Return what a report of the ring buffer says."""
    time, namespace, event, family, address, port = _REPORT.unpack(report)
    ip = IPFamily.IPV4 if family == AF_INET else IPFamily.IPV6
    place = inet_ntop(family, address[: ADDRESS_SIZES[ip]]), int.from_bytes(port, "big")
    return ip, ConnectObservation(time / 1e9, place, f"netns {namespace}", _BY_NUMBER[event])


def observer_program(maps: MapsByFamily) -> BpfProgramSpec:
    """Return the program for the maps of both families."""
    return BpfProgramSpec(
        name="nx_observe",
        kind=ProgramKind.SOCK_OPS,
        attach=AttachKind.CGROUP_SOCK_OPS,
        statements=tuple(_statements(maps)),
    )


def _statements(maps: MapsByFamily) -> Iterator[Statement]:
    yield move(R6, R1)
    yield from _event()
    yield LoadMemory(Width.WORD, R2, R6, FAMILY)
    yield JumpIf(Condition.EQ, R2, int(AF_INET), "v4")
    yield JumpIf(Condition.NE, R2, int(AF_INET6), "end")
    for word in range(2):
        yield LoadMemory(Width.WORD, R2, R6, REMOTE_IP6 + 4 * word)
        yield JumpIf(Condition.NE, R2, 0, "v6")
    yield LoadMemory(Width.WORD, R2, R6, REMOTE_IP6 + 8)
    yield LoadConstant(R3, MAPPED_PREFIX)
    yield JumpIf(Condition.NE, R2, R3, "v6")
    # A socket with IPv4-mapped addresses has its IPv4 address here, too.
    yield Label("v4")
    yield from _Observer(maps[IPFamily.IPV4], int(AF_INET), REMOTE_IP4).statements()
    yield Label("v6")
    yield from _Observer(maps[IPFamily.IPV6], int(AF_INET6), REMOTE_IP6).statements()
    yield from (Label("end"), move(R0, 1), Exit())


def _event() -> Iterator[Statement]:
    """R7 = number of the event."""
    yield LoadMemory(Width.WORD, R2, R6, OPERATION)
    yield move(R7, _EVENTS[ConnectEvent.STARTED])
    yield JumpIf(Condition.EQ, R2, ObservedOperation.CONNECT, "event")
    yield move(R7, _EVENTS[ConnectEvent.CONNECTED])
    yield JumpIf(Condition.EQ, R2, ObservedOperation.ESTABLISHED, "event")
    yield move(R7, _EVENTS[ConnectEvent.FAILED])
    yield JumpIf(Condition.EQ, R2, ObservedOperation.RETRANSMIT_TIMEOUT, "timeout")
    yield JumpIf(Condition.NE, R2, ObservedOperation.STATE_CHANGE, "end")
    # Refused: a segment arrived, and the connection ended. A failure that was reported as a timeout has retransmissions.
    for offset, value in ((FIRST_ARGUMENT, SYN_SENT), (SECOND_ARGUMENT, CLOSED), (TOTAL_RETRANSMITS, 0)):
        yield LoadMemory(Width.WORD, R2, R6, offset)
        yield JumpIf(Condition.NE, R2, value, "end")
    yield LoadMemory(Width.WORD, R2, R6, SEGMENTS_IN)
    yield JumpIf(Condition.EQ, R2, 0, "end")
    yield JumpAlways("event")
    yield Label("timeout")
    # The argument is the number of earlier retransmissions.
    for offset, value in ((STATE, SYN_SENT), (FIRST_ARGUMENT, 0)):
        yield LoadMemory(Width.WORD, R2, R6, offset)
        yield JumpIf(Condition.NE, R2, value, "end")
    yield Label("event")


class _Observer:
    """The part for the maps of one family; it ends at the label `end`."""

    def __init__(self, maps: FamilyMaps, family: int, address: int) -> None:
        self._maps = maps
        self._family = family
        self._address = address
        self._words = maps.place_size // 4
        self._place = -(maps.place_size + 7) // 8 * 8
        """The endpoint, as the maps have it."""
        self._value = self._place - 8
        self._report = self._value - _REPORT.size

    def _name(self, name: str) -> str:
        return f"{name}{self._family}"

    def statements(self) -> Iterator[Statement]:
        """Yield the instructions, with the number of the event in R7."""
        yield from self._store_endpoint()
        yield JumpIf(Condition.EQ, R7, _EVENTS[ConnectEvent.CONNECTED], self._name("connected"))
        yield from self._leave_others()
        yield JumpIf(Condition.EQ, R7, _EVENTS[ConnectEvent.FAILED], self._name("failed"))
        yield from self._started()
        yield Label(self._name("connected"))
        yield from self._connected()
        yield Label(self._name("failed"))
        yield from self._failed()
        yield Label(self._name("report"))
        yield from self._write_report()
        yield JumpAlways("end")

    def _store_endpoint(self) -> Iterator[Statement]:
        for word in range(self._words - 1):
            yield LoadMemory(Width.WORD, R2, R6, self._address + 4 * word)
            yield StoreMemory(Width.WORD, R10, self._place + 4 * word, R2)
        # In network order, in the upper half.
        yield LoadMemory(Width.WORD, R2, R6, REMOTE_PORT)
        yield Compute(Operation.RSH, R2, 16)
        yield StoreMemory(Width.WORD, R10, self._place + 4 * (self._words - 1), R2)

    def _leave_others(self) -> Iterator[Statement]:
        """Go to the end unless a connect program sent the socket to this endpoint."""
        yield move(R1, R6)
        yield CallHelper(Helper.SOCKET_COOKIE)
        yield move(R8, R0)
        yield from find_peer(self._maps.peers, self._value, R8)
        yield JumpIf(Condition.EQ, R0, 0, "end")
        yield LoadMemory(Width.DOUBLE, R1, R0, 0)
        yield JumpIf(Condition.NE, R1, R8, "end")
        for word in range(self._words):
            yield LoadMemory(Width.WORD, R1, R0, 8 + 4 * word)
            yield LoadMemory(Width.WORD, R2, R10, self._place + 4 * word)
            yield JumpIf(Condition.NE, R1, R2, "end")

    def _started(self) -> Iterator[Statement]:
        """Ask for the calls that show a failure; report the start to an endpoint on trial."""
        yield LoadMemory(Width.WORD, R2, R6, CALLBACK_FLAGS)
        yield Compute(Operation.OR, R2, RETRANSMIT_CALLBACK | STATE_CALLBACK)
        yield move(R1, R6)
        yield CallHelper(Helper.SOCK_OPS_CB_FLAGS)
        yield from lookup(self._maps.watched, self._place)
        yield JumpIf(Condition.EQ, R0, 0, "end")
        yield LoadMemory(Width.WORD, R2, R0, 4)
        yield move(R3, R2)
        yield Compute(Operation.AND, R3, int(WatchFlag.ON_TRIAL))
        yield JumpIf(Condition.EQ, R3, 0, "end")
        yield Compute(Operation.XOR, R2, int(WatchFlag.ON_TRIAL))
        yield StoreMemory(Width.WORD, R0, 4, R2)
        yield JumpAlways(self._name("report"))

    def _connected(self) -> Iterator[Statement]:
        """Report the first connection to a watched endpoint that is made."""
        yield from lookup(self._maps.watched, self._place)
        yield JumpIf(Condition.EQ, R0, 0, "end")
        yield from self._leave_others()
        yield from delete(self._maps.watched, self._place)
        yield JumpAlways(self._name("report"))

    def _failed(self) -> Iterator[Statement]:
        """Watch the endpoint; report the failure unless many wait."""
        yield from lookup(self._maps.watched, self._place)
        yield JumpIf(Condition.EQ, R0, 0, self._name("first"))
        yield LoadMemory(Width.WORD, R2, R0, 0)
        yield JumpIf(Condition.GE, R2, MOST_REPORTED, "end")
        yield move(R1, 1)
        yield AtomicAdd(Width.WORD, R0, 0, R1)
        yield JumpAlways(self._name("report"))
        yield Label(self._name("first"))
        yield StoreMemory(Width.WORD, R10, self._value, 1)
        yield StoreMemory(Width.WORD, R10, self._value + 4, 0)
        yield from update(self._maps.watched, self._place, self._value)

    def _write_report(self) -> Iterator[Statement]:
        yield CallHelper(Helper.KTIME_NS)
        yield StoreMemory(Width.DOUBLE, R10, self._report, R0)
        yield move(R1, R6)
        yield CallHelper(Helper.NETNS_COOKIE)
        yield StoreMemory(Width.DOUBLE, R10, self._report + 8, R0)
        yield StoreMemory(Width.HALF, R10, self._report + 16, R7)
        yield StoreMemory(Width.HALF, R10, self._report + 18, self._family)
        for word in range(5):
            if word < self._words - 1:
                yield LoadMemory(Width.WORD, R8, R10, self._place + 4 * word)
            elif word < 4:
                yield move(R8, 0)
            else:
                yield LoadMemory(Width.WORD, R8, R10, self._place + 4 * (self._words - 1))
            yield StoreMemory(Width.WORD, R10, self._report + 20 + 4 * word, R8)
        yield LoadMap(R1, RING.name)
        yield move(R2, R10)
        yield Compute(Operation.ADD, R2, self._report)
        yield move(R3, _REPORT.size)
        yield move(R4, 0)
        yield CallHelper(Helper.RINGBUF_OUTPUT)
