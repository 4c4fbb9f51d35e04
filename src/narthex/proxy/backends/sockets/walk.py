"""What the programs do to a socket, found by interpreting them over the rows of a plan.

This is a witness: it runs the same instructions that the kernel runs, over the same bytes.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import repeat
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton

import msgspec

from narthex.bpf import AttachKind, Environment, MapModel, assemble, run_program
from narthex.model import IPFamily, Protocol, family_of
from narthex.proxy.backends.sockets.document import PinnedSockets
from narthex.proxy.backends.sockets.layout import COUNT, OPEN_COUNT, PROTOCOL_NUMBERS, Capacity, family_maps
from narthex.proxy.backends.sockets.open_connections import release_program
from narthex.proxy.backends.sockets.programs import (
    CONNECT,
    CONTEXT_SIZE,
    GETPEERNAME,
    PROTOCOL,
    RECVMSG,
    SENDMSG,
    SOCKET,
    SOCKET_IP4,
    SOCKET_IP6,
    USER_IP4,
    USER_IP6,
    USER_PORT,
    programs,
)
from narthex.proxy.backends.sockets.rows import KernelRows, SocketChanges, split

NODE_COOKIE, POD_COOKIE = 1, 2
_SOCKET_SIZE = 80


class SimulatedSocket(msgspec.Struct, frozen=True, kw_only=True):
    """A socket as the programs see it."""

    protocol: Protocol = Protocol.TCP
    in_node: bool = False
    """It is in the node's network namespace."""
    source: str = ""
    """Address to which it is bound; empty: none."""
    cookie: int = 1
    mapped: bool = False
    """An IPv6 socket that uses IPv4-mapped addresses."""


class SocketAnswer(msgspec.Struct, frozen=True):
    """What a hook makes of an address."""

    address: str
    port: int
    refused: bool = False
    """The system call fails with ECONNREFUSED."""


class SimulatedSockets:
    """The maps of both families as the interpreter has them, and the programs of all hooks."""

    def __init__(self, capacity: Capacity | None = None) -> None:
        held = capacity or Capacity(services=64, frontends=256, slots=1024, sockets=64)
        self._layout = {family: family_maps(family, held) for family in IPFamily}
        self._maps = {spec.name: MapModel(spec) for maps in self._layout.values() for spec in maps.all}
        names = list(self._maps)
        numbers = {name: number for number, name in enumerate(names)}
        self._code = {spec.attach: assemble(spec.statements, numbers) for spec in programs(self._layout, NODE_COOKIE)}
        self._release = [assemble(release_program(maps).statements, numbers) for maps in self._layout.values()]

    def apply(self, family: IPFamily, changes: SocketChanges) -> int:
        """Write changes as the Target does; return the number of writes. Raises ValueError if a map is full."""
        maps = self._layout[family]
        parts = (maps.slots, changes.slots), (maps.pools, changes.pools), (maps.frontends, changes.frontends)
        writes = 0
        for spec, part in parts:
            keys, values = split(part.keys, spec.key_size), split(part.values, spec.value_size)
            for key, value in zip(keys, values, strict=True):
                if self._maps[spec.name].update(key, value):
                    raise ValueError(f"map {spec.name} refuses {key.hex()}")
                writes += 1
        for spec, part in reversed(parts):
            for key in part.deleted:
                if self._maps[spec.name].delete(key):
                    raise ValueError(f"map {spec.name} has no {key.hex()}")
                writes += 1
        return writes

    def rows(self, family: IPFamily) -> KernelRows:
        """Return the rows of a family."""
        maps = self._layout[family]
        counts = {
            int.from_bytes(key, "little"): count
            for key, value in self._maps[maps.pools.name].items()
            if (count := COUNT.unpack(value)[0])
        }
        return KernelRows(
            frontends=dict(self._maps[maps.frontends.name].items()),
            counts=counts,
            slots=dict(self._maps[maps.slots.name].items()),
        )

    def counters(self, family: IPFamily) -> Mapping[bytes, int]:
        """Return the connections by the key of their counter."""
        table = self._maps[self._layout[family].counts.name]
        return {key: int.from_bytes(value, "little") for key, value in table.items()}

    def pinned(self, *families: IPFamily) -> PinnedSockets:
        """Return what a process would find pinned for these families."""
        return PinnedSockets(
            rows={family: self.rows(family) for family in families},
            connections={family: self.counters(family) for family in families},
            opens={family: self.open_connections(family) for family in families},
            hooks=tuple(sorted(attach.name.lower() for attach in self._code)),
        )

    def open_connections(self, family: IPFamily) -> Mapping[bytes, int]:
        """Return the sockets that are counted, by Service port and endpoint."""
        table = self._maps[self._layout[family].opens.name]
        return {key: OPEN_COUNT.unpack(value)[0] for key, value in table.items()}

    def connect(
        self, sock: SimulatedSocket, address: str, port: int, choice: int | Sequence[int] = 0, *, stays: bool = False
    ) -> SocketAnswer:
        """Return where a socket connects, which then ends, unless it stays open.

        `choice` has the random numbers that the program draws; one number is drawn each time.
        """
        answer = self._run(CONNECT, sock, address, port, choice)
        if not stays:
            self.end(sock)
        return answer

    def end(self, sock: SimulatedSocket) -> None:
        """Close a socket."""
        for code in self._release:
            run_program(
                code, bytearray(_SOCKET_SIZE), list(self._maps.values()), Environment(socket_cookie=sock.cookie)
            )

    def send(self, sock: SimulatedSocket, address: str, port: int, choice: int = 0) -> SocketAnswer:
        """Return where a datagram of a socket that is not connected goes."""
        return self._run(SENDMSG, sock, address, port, choice)

    def receive(self, sock: SimulatedSocket, address: str, port: int) -> SocketAnswer:
        """Return from where a datagram seems to come."""
        return self._run(RECVMSG, sock, address, port)

    def peer_name(self, sock: SimulatedSocket, address: str, port: int) -> SocketAnswer:
        """Return to whom a socket seems to be connected."""
        return self._run(GETPEERNAME, sock, address, port)

    def _run(
        self,
        hook: Mapping[IPFamily, AttachKind],
        sock: SimulatedSocket,
        address: str,
        port: int,
        choice: int | Sequence[int] = 0,
    ) -> SocketAnswer:
        family = IPFamily.IPV6 if sock.mapped else family_of(address)
        context = bytearray(CONTEXT_SIZE)
        start = USER_IP4 if family is IPFamily.IPV4 else USER_IP6
        packed = _packed(address)
        if sock.mapped:
            packed = bytes(10) + b"\xff\xff" + packed
        context[start : start + len(packed)] = packed
        context[USER_PORT : USER_PORT + 2] = port.to_bytes(2, "big")
        struct.pack_into("=I", context, PROTOCOL, PROTOCOL_NUMBERS.get(sock.protocol, sock.protocol.number))
        bound = bytearray(_SOCKET_SIZE)
        if sock.source:
            source = _packed(sock.source)
            offset = SOCKET_IP4 if len(source) == 4 else SOCKET_IP6
            bound[offset : offset + len(source)] = source
        drawn = repeat(choice) if isinstance(choice, int) else iter(choice)
        environment = Environment(
            netns_cookie=NODE_COOKIE if sock.in_node else POD_COOKIE,
            socket_cookie=sock.cookie,
            random=partial(next, drawn),
        )
        verdict = run_program(
            self._code[hook[family]], context, list(self._maps.values()), environment, {SOCKET: bound}
        )
        if not verdict:
            return SocketAnswer(address, port, refused=environment.retval == -errno.ECONNREFUSED)
        found = bytes(context[start : start + len(packed)])
        if sock.mapped:
            found = found[12:]
        kind = AF_INET if len(found) == 4 else AF_INET6
        return SocketAnswer(inet_ntop(kind, found), int.from_bytes(context[USER_PORT : USER_PORT + 2], "big"))


def _packed(address: str) -> bytes:
    return inet_pton(AF_INET6 if ":" in address else AF_INET, address)
