"""The programs of socket load balancing, for cgroup hooks at connect, sendmsg, recvmsg, and getpeername.

A program that finds nothing to do, or misses a row, returns 1 and has changed nothing: the connection then meets the
rules of the mode. Offsets are those of `struct bpf_sock_addr` and `struct bpf_sock` in linux/bpf.h.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator

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
    LoadMemory,
    Operation,
    ProgramKind,
    Register,
    Statement,
    StoreMemory,
    Width,
)
from narthex.model import IPFamily, Protocol
from narthex.proxy.backends.sockets.layout import (
    LEAST_CONNECTIONS,
    PROTOCOL_NUMBERS,
    UNBOUND,
    Action,
    FamilyMaps,
    MapsByFamily,
)
from narthex.proxy.backends.sockets.open_connections import ChoiceOfTwo
from narthex.proxy.backends.sockets.pieces import R0, R1, R2, R3, R6, R7, R8, R9, R10
from narthex.proxy.backends.sockets.pieces import find_peer as _find_peer
from narthex.proxy.backends.sockets.pieces import lookup as _lookup
from narthex.proxy.backends.sockets.pieces import move as _move
from narthex.proxy.backends.sockets.pieces import update as _update

USER_IP4, USER_IP6, USER_PORT, PROTOCOL, SOURCE_IP4, SOURCE_IP6, SOCKET = 4, 8, 24, 36, 40, 44, 64
CONTEXT_SIZE = 72
"""Bytes of `struct bpf_sock_addr`."""
SOCKET_IP4, SOCKET_IP6 = 24, 28
MAPPED_PREFIX = 0xFFFF0000
"""The third word of an IPv4-mapped address, as a little-endian machine loads it."""
ALLOW, REFUSE = 1, 0

CONNECT = {IPFamily.IPV4: AttachKind.CONNECT4, IPFamily.IPV6: AttachKind.CONNECT6}
SENDMSG = {IPFamily.IPV4: AttachKind.SENDMSG4, IPFamily.IPV6: AttachKind.SENDMSG6}
RECVMSG = {IPFamily.IPV4: AttachKind.RECVMSG4, IPFamily.IPV6: AttachKind.RECVMSG6}
GETPEERNAME = {IPFamily.IPV4: AttachKind.GETPEERNAME4, IPFamily.IPV6: AttachKind.GETPEERNAME6}


def programs(maps: MapsByFamily, node_cookie: int) -> tuple[BpfProgramSpec, ...]:
    """Return all programs for the maps of both families and the cookie of the node's network namespace."""
    made = []
    for family in IPFamily:
        made.append(_program(CONNECT[family], family, _forward_statements(maps, family, node_cookie, sendmsg=False)))
        made.append(_program(SENDMSG[family], family, _forward_statements(maps, family, node_cookie, sendmsg=True)))
        made += [
            _program(attach[family], family, _backward_statements(maps, family, streams=attach is GETPEERNAME))
            for attach in (RECVMSG, GETPEERNAME)
        ]
    return tuple(made)


def _program(attach: AttachKind, family: IPFamily, statements: Iterator[Statement]) -> BpfProgramSpec:
    del family
    name = f"nx_{attach.name.lower()}"
    return BpfProgramSpec(name=name, kind=ProgramKind.CGROUP_SOCK_ADDR, attach=attach, statements=tuple(statements))


# ---- towards an endpoint -----------------------------------------------------------------------------------------


def _forward_statements(
    maps: MapsByFamily, family: IPFamily, node_cookie: int, *, sendmsg: bool
) -> Iterator[Statement]:
    yield _move(R6, R1)
    if family is IPFamily.IPV4:
        yield from _Forward(maps[IPFamily.IPV4], "v4", USER_IP4, node_cookie, sendmsg=sendmsg).statements()
    else:
        if not sendmsg:
            # The kernel runs sendmsg4 for IPv4-mapped destinations.
            yield from _unless_mapped("v6")
            mapped = _Forward(maps[IPFamily.IPV4], "mapped", USER_IP6 + 12, node_cookie, sendmsg=False)
            yield from mapped.statements()
            yield Label("v6")
        yield from _Forward(maps[IPFamily.IPV6], "plain", USER_IP6, node_cookie, sendmsg=sendmsg).statements()
    yield from (Label("pass"), _move(R0, ALLOW), Exit())
    yield from (
        Label("refuse"),
        _move(R1, -errno.ECONNREFUSED),
        CallHelper(Helper.SET_RETVAL),
        _move(R0, REFUSE),
        Exit(),
    )


def _unless_mapped(label: str) -> Iterator[Statement]:
    """Go to the label if the destination is no IPv4-mapped address (RFC 4291, 2.5.5.2)."""
    yield LoadMemory(Width.WORD, R2, R6, USER_IP6)
    yield JumpIf(Condition.NE, R2, 0, label)
    yield LoadMemory(Width.WORD, R2, R6, USER_IP6 + 4)
    yield JumpIf(Condition.NE, R2, 0, label)
    yield LoadMemory(Width.WORD, R2, R6, USER_IP6 + 8)
    yield LoadConstant(R3, MAPPED_PREFIX)
    yield JumpIf(Condition.NE, R2, R3, label)


class _Forward:
    """The part of a program that looks for a frontend in the maps of one family, and goes on to an endpoint.

    On the stack, below R10, with `place` bytes for an address and a port:
    """

    def __init__(self, maps: FamilyMaps, label: str, address: int, node_cookie: int, *, sendmsg: bool) -> None:
        self._maps = maps
        self._label = label
        self._address = address
        """Offset of the destination in the context."""
        self._cookie = node_cookie
        self._sendmsg = sendmsg
        self._words = maps.place_size // 4
        place = (maps.place_size + 7) // 8 * 8
        self._front = -place
        """The frontend: address, port, protocol, 0."""
        self._slot = self._front - 8
        """Key of the slot: index and number of the pool."""
        self._count = self._slot - 8 - place
        """Key of the counter: number of the Service port, endpoint."""
        self._origin = self._count - 8 - place
        """Key of the origin: cookie, endpoint."""
        self._flow = self._origin - 8 - place
        """Key of the flow: cookie, frontend."""
        self._value = self._flow - 16 - place
        """A value to store."""
        self._endpoint = self._value - place
        """The endpoint that was chosen. Programs never read it from the map again, since its memory may be reused."""

    def statements(self) -> Iterator[Statement]:
        """Yield the instructions; they end at the labels `pass` and `refuse`."""
        yield from self._find_frontend()
        yield from self._decide()
        if self._sendmsg:
            yield from self._known_flow()
        yield from self._choose()
        if self._sendmsg:
            yield from self._remember_flow()
        yield Label(self._name("count"))
        yield from self._add_to_counter()
        if self._sendmsg:
            yield Label(self._name("again"))
        yield from self._remember_frontend()
        yield from self._rewrite()
        yield from (_move(R0, ALLOW), Exit())
        yield from self._least_connections()

    def _name(self, name: str) -> str:
        return f"{self._label}-{name}"

    def _find_frontend(self) -> Iterator[Statement]:
        """R9 = number of the Service port, R7 = action for the sender."""
        yield LoadMemory(Width.WORD, R2, R6, PROTOCOL)
        tcp, udp = PROTOCOL_NUMBERS.values()
        yield JumpIf(Condition.EQ, R2, udp if self._sendmsg else tcp, self._name("protocol"))
        yield JumpIf(Condition.NE, R2, udp, "pass")
        yield Label(self._name("protocol"))
        yield StoreMemory(Width.HALF, R10, self._front + self._maps.place_size - 2, R2)
        yield LoadMemory(Width.WORD, R2, R6, USER_PORT)
        yield StoreMemory(Width.HALF, R10, self._front + self._maps.place_size - 4, R2)
        for word in range(self._words - 1):
            yield LoadMemory(Width.WORD, R2, R6, self._address + 4 * word)
            yield StoreMemory(Width.WORD, R10, self._front + 4 * word, R2)
        yield from _lookup(self._maps.frontends, self._front)
        yield JumpIf(Condition.EQ, R0, 0, "pass")
        # One access, since the element may be replaced meanwhile.
        yield LoadMemory(Width.DOUBLE, R9, R0, 0)
        yield _move(R7, R9)
        yield Compute(Operation.AND, R7, 0xFF)
        yield _move(R8, R9)
        yield Compute(Operation.RSH, R8, 8)
        yield Compute(Operation.AND, R8, 0xFF)
        yield Compute(Operation.RSH, R9, 32)
        yield _move(R1, R6)
        yield CallHelper(Helper.NETNS_COOKIE)
        yield LoadConstant(R1, self._cookie)
        yield JumpIf(Condition.NE, R0, R1, self._name("sender"))
        yield _move(R7, R8)
        yield Label(self._name("sender"))

    def _decide(self) -> Iterator[Statement]:
        """R8 = number of the pool, also in the key of the slot."""
        yield JumpIf(Condition.EQ, R7, Action.LEAVE, "pass")
        yield JumpIf(Condition.EQ, R7, Action.REJECT, "refuse")
        yield JumpIf(Condition.LT, R7, Action.CLUSTER_UNBOUND, self._name("any-source"))
        yield JumpIf(Condition.GE, R7, LEAST_CONNECTIONS, self._name("least"))
        yield Label(self._name("unbound"))
        yield from self._leave_bound()
        yield Compute(Operation.SUB, R7, UNBOUND)
        yield Label(self._name("any-source"))
        yield from self._name_pool()

    def _name_pool(self) -> Iterator[Statement]:
        yield _move(R8, R9)
        yield Compute(Operation.LSH, R8, 1)
        yield Compute(Operation.ADD, R8, R7)
        yield Compute(Operation.SUB, R8, int(Action.CLUSTER))
        yield StoreMemory(Width.WORD, R10, self._slot + 4, R8)

    def _leave_bound(self) -> Iterator[Statement]:
        """Leave a socket with a source address to the rules."""
        four = self._words == 2
        if self._sendmsg:
            # The source may also be given with the message (IP_PKTINFO).
            for word in range(self._words - 1):
                yield LoadMemory(Width.WORD, R2, R6, (SOURCE_IP4 if four else SOURCE_IP6) + 4 * word)
                yield JumpIf(Condition.NE, R2, 0, "pass")
        yield LoadMemory(Width.DOUBLE, R1, R6, SOCKET)
        for word in range(self._words - 1):
            yield LoadMemory(Width.WORD, R2, R1, (SOCKET_IP4 if four else SOCKET_IP6) + 4 * word)
            yield JumpIf(Condition.NE, R2, 0, "pass")

    def _known_flow(self) -> Iterator[Statement]:
        """Go on with the endpoint that the socket last sent to, if it still has its slot. Afterwards R9 is as before."""
        yield from self._cookie_key(self._flow, self._front)
        yield from _lookup(self._maps.flows, self._flow)
        yield JumpIf(Condition.EQ, R0, 0, self._name("fresh"))
        yield LoadMemory(Width.WORD, R2, R0, self._maps.place_size)
        yield JumpIf(Condition.NE, R2, R8, self._name("fresh"))
        yield LoadMemory(Width.WORD, R2, R0, self._maps.place_size + 4)
        yield StoreMemory(Width.WORD, R10, self._slot, R2)
        yield _move(R7, R0)
        # Slots behind the count are not used, whatever they have.
        yield from self._pool_count()
        yield JumpIf(Condition.EQ, R0, 0, self._name("fresh"))
        yield LoadMemory(Width.WORD, R1, R0, 0)
        yield LoadMemory(Width.WORD, R2, R10, self._slot)
        yield JumpIf(Condition.GE, R2, R1, self._name("fresh"))
        yield from self._copy_endpoint("same", self._name("fresh"))
        for word in range(self._words):
            yield LoadMemory(Width.WORD, R1, R10, self._endpoint + 4 * word)
            yield LoadMemory(Width.WORD, R2, R7, 4 * word)
            yield JumpIf(Condition.NE, R1, R2, self._name("fresh"))
        yield JumpAlways(self._name("again"))
        yield Label(self._name("fresh"))

    def _pool_count(self) -> Iterator[Statement]:
        yield from _lookup(self._maps.pools, self._slot + 4)

    def _choose(self) -> Iterator[Statement]:
        """Choose a slot at random, and copy its endpoint."""
        yield from self._pool_count()
        yield JumpIf(Condition.EQ, R0, 0, "pass")
        yield LoadMemory(Width.WORD, R7, R0, 0)
        yield JumpIf(Condition.EQ, R7, 0, "pass")
        yield CallHelper(Helper.RANDOM)
        yield Compute(Operation.MOD, R0, R7, wide=False)
        yield StoreMemory(Width.WORD, R10, self._slot, R0)
        yield from self._copy_endpoint("chosen", "pass")

    def _copy_endpoint(self, label: str, otherwise: str) -> Iterator[Statement]:
        """Copy the value of the slot to the stack.

        The kernel may use the memory of a replaced element at once for another one. If the slot still has the same
        element after the copy, the copy is the slot's; otherwise it is tried once more.
        """
        for _ in range(2):
            yield from _lookup(self._maps.slots, self._slot)
            yield JumpIf(Condition.EQ, R0, 0, otherwise)
            yield _move(R8, R0)
            for word in range(self._words):
                yield LoadMemory(Width.WORD, R2, R0, 4 * word)
                yield StoreMemory(Width.WORD, R10, self._endpoint + 4 * word, R2)
            yield from _lookup(self._maps.slots, self._slot)
            yield JumpIf(Condition.EQ, R0, R8, self._name(label))
        yield JumpAlways(otherwise)
        yield Label(self._name(label))

    def _least_connections(self) -> Iterator[Statement]:
        """Choose the one of two endpoints with fewer open connections, apart from the path of other Service ports."""
        yield Label(self._name("least"))
        yield Compute(Operation.SUB, R7, LEAST_CONNECTIONS)
        if self._sendmsg:
            # A socket that is not connected has no end by which it could be counted.
            yield JumpIf(Condition.LT, R7, Action.CLUSTER_UNBOUND, self._name("any-source"))
            yield JumpAlways(self._name("unbound"))
            return
        yield JumpIf(Condition.LT, R7, Action.CLUSTER_UNBOUND, self._name("least-any-source"))
        yield from self._leave_bound()
        yield Compute(Operation.SUB, R7, UNBOUND)
        yield Label(self._name("least-any-source"))
        yield from self._name_pool()
        yield from self._pool_count()
        yield JumpIf(Condition.EQ, R0, 0, "pass")
        yield LoadMemory(Width.WORD, R7, R0, 0)
        yield JumpIf(Condition.EQ, R7, 0, "pass")
        choice = ChoiceOfTwo(
            self._maps, self._label, self._copy_endpoint, slot=self._slot, endpoint=self._endpoint, cookie=self._origin,
            first=self._flow, chosen=self._count, value=self._value,
        )  # fmt: skip
        yield from choice.statements("pass")
        yield JumpAlways(self._name("count"))

    def _remember_flow(self) -> Iterator[Statement]:
        yield from self._copy(R10, self._value, self._endpoint)
        size = self._maps.place_size
        for offset in (0, 4):
            yield LoadMemory(Width.WORD, R2, R10, self._slot + 4 - offset)
            yield StoreMemory(Width.WORD, R10, self._value + size + offset, R2)
        yield from _update(self._maps.flows, self._flow, self._value)

    def _add_to_counter(self) -> Iterator[Statement]:
        yield StoreMemory(Width.WORD, R10, self._count, R9)
        yield from self._copy(R10, self._count + 4, self._endpoint)
        yield from _lookup(self._maps.counts, self._count)
        yield JumpIf(Condition.EQ, R0, 0, self._name("first"))
        yield _move(R1, 1)
        yield AtomicAdd(Width.DOUBLE, R0, 0, R1)
        yield JumpAlways(self._name("counted"))
        yield Label(self._name("first"))
        yield StoreMemory(Width.DOUBLE, R10, self._value, 1)
        yield from _update(self._maps.counts, self._count, self._value)
        yield Label(self._name("counted"))

    def _remember_frontend(self) -> Iterator[Statement]:
        """Remember the frontend, so that programs which ask for the peer learn its address."""
        yield _move(R1, R6)
        yield CallHelper(Helper.SOCKET_COOKIE)
        if not self._sendmsg:
            yield LoadMemory(Width.WORD, R2, R6, PROTOCOL)
            yield JumpIf(Condition.EQ, R2, PROTOCOL_NUMBERS[Protocol.UDP], self._name("datagrams"))
            yield from self._remember_peer()
            yield JumpAlways(self._name("known"))
            yield Label(self._name("datagrams"))
        yield StoreMemory(Width.DOUBLE, R10, self._origin, R0)
        yield from self._copy(R10, self._origin + 8, self._endpoint)
        if self._sendmsg:
            yield from _lookup(self._maps.origins, self._origin)
            yield JumpIf(Condition.NE, R0, 0, self._name("known"))
        yield from _update(self._maps.origins, self._origin, self._front)
        yield Label(self._name("known"))

    def _remember_peer(self) -> Iterator[Statement]:
        """Write the frontend of a TCP socket, whose cookie is in R0, in the place of an older socket's.

        Without a cookie, the place belongs to no socket while it is written.
        """
        yield _move(R8, R0)
        yield from _find_peer(self._maps.peers, self._slot, R8)
        yield JumpIf(Condition.EQ, R0, 0, self._name("known"))
        yield StoreMemory(Width.DOUBLE, R0, 0, 0)
        yield from self._copy(R0, 8, self._endpoint)
        yield from self._copy(R0, 8 + self._maps.place_size, self._front)
        yield StoreMemory(Width.DOUBLE, R0, 0, R8)

    def _copy(self, base: Register, offset: int, place: int) -> Iterator[Statement]:
        """Copy an address and a port from the stack."""
        for word in range(self._words):
            yield LoadMemory(Width.WORD, R2, R10, place + 4 * word)
            yield StoreMemory(Width.WORD, base, offset + 4 * word, R2)

    def _rewrite(self) -> Iterator[Statement]:
        for word in range(self._words - 1):
            yield LoadMemory(Width.WORD, R2, R10, self._endpoint + 4 * word)
            yield StoreMemory(Width.WORD, R6, self._address + 4 * word, R2)
        yield LoadMemory(Width.HALF, R2, R10, self._endpoint + self._maps.place_size - 4)
        yield StoreMemory(Width.WORD, R6, USER_PORT, R2)

    def _cookie_key(self, key: int, place: int) -> Iterator[Statement]:
        yield _move(R1, R6)
        yield CallHelper(Helper.SOCKET_COOKIE)
        yield StoreMemory(Width.DOUBLE, R10, key, R0)
        yield from self._copy(R10, key + 8, place)


# ---- back to the frontend ------------------------------------------------------------------------------------------


def _backward_statements(maps: MapsByFamily, family: IPFamily, *, streams: bool) -> Iterator[Statement]:
    """`streams`: the hook concerns TCP sockets, too."""
    yield _move(R6, R1)
    if family is IPFamily.IPV4:
        yield from _Backward(maps[IPFamily.IPV4], "v4", USER_IP4).statements(streams=streams)
    else:
        yield from _unless_mapped("v6")
        yield from _Backward(maps[IPFamily.IPV4], "mapped", USER_IP6 + 12).statements(streams=streams)
        yield Label("v6")
        yield from _Backward(maps[IPFamily.IPV6], "plain", USER_IP6).statements(streams=streams)
    yield from (Label("pass"), _move(R0, ALLOW), Exit())


class _Backward:
    """The part of a program that looks for the frontend of a socket in the maps of one family."""

    def __init__(self, maps: FamilyMaps, label: str, address: int) -> None:
        self._maps = maps
        self._label = label
        self._address = address
        """Offset of the endpoint in the context, which the frontend replaces."""
        self._words = maps.place_size // 4
        self._key = -(8 + (maps.place_size + 7) // 8 * 8)
        """Key of the origin: cookie, endpoint."""
        self._index = self._key - 8
        """Key of the peer."""

    def statements(self, *, streams: bool) -> Iterator[Statement]:
        """Yield the instructions; they end at the label `pass`."""
        yield _move(R1, R6)
        yield CallHelper(Helper.SOCKET_COOKIE)
        yield _move(R8, R0)
        yield StoreMemory(Width.DOUBLE, R10, self._key, R8)
        for word in range(self._words - 1):
            yield LoadMemory(Width.WORD, R2, R6, self._address + 4 * word)
            yield StoreMemory(Width.WORD, R10, self._key + 8 + 4 * word, R2)
        yield LoadMemory(Width.WORD, R2, R6, USER_PORT)
        yield Compute(Operation.AND, R2, 0xFFFF)
        yield StoreMemory(Width.WORD, R10, self._key + 8 + 4 * (self._words - 1), R2)
        if streams:
            yield LoadMemory(Width.WORD, R2, R6, PROTOCOL)
            yield JumpIf(Condition.EQ, R2, PROTOCOL_NUMBERS[Protocol.UDP], f"{self._label}-datagrams")
            yield from self._of_peer()
            yield Label(f"{self._label}-datagrams")
        yield from _lookup(self._maps.origins, self._key)
        yield JumpIf(Condition.EQ, R0, 0, "pass")
        yield from self._rewrite(0)

    def _of_peer(self) -> Iterator[Statement]:
        """Take the frontend of a TCP socket, if the place is its own and the peer the endpoint that was chosen."""
        yield from _find_peer(self._maps.peers, self._index, R8)
        yield JumpIf(Condition.EQ, R0, 0, "pass")
        yield LoadMemory(Width.DOUBLE, R1, R0, 0)
        yield JumpIf(Condition.NE, R1, R8, "pass")
        for word in range(self._words):
            yield LoadMemory(Width.WORD, R1, R0, 8 + 4 * word)
            yield LoadMemory(Width.WORD, R2, R10, self._key + 8 + 4 * word)
            yield JumpIf(Condition.NE, R1, R2, "pass")
        yield from self._rewrite(8 + self._maps.place_size)

    def _rewrite(self, frontend: int) -> Iterator[Statement]:
        """Replace the address and the port by those at an offset of the value in R0."""
        for word in range(self._words - 1):
            yield LoadMemory(Width.WORD, R2, R0, frontend + 4 * word)
            yield StoreMemory(Width.WORD, R6, self._address + 4 * word, R2)
        yield LoadMemory(Width.HALF, R2, R0, frontend + self._maps.place_size - 4)
        yield StoreMemory(Width.WORD, R6, USER_PORT, R2)
        yield _move(R0, ALLOW)
        yield Exit()
