"""Hands a relayed TCP connection over to the kernel, which then rewrites its packets; the relay has no part in it any more.

To copy a stream through a process costs twice the processor time of a direct connection, and to redirect it between two
sockets with BPF (sockmap) three times; see benchmarks/userspace_relay.py and ADR 0018. Packets whose addresses, ports, and
sequence numbers are rewritten cost what any forwarded packet costs. So for a connection with bulk data, the relay

1. treats further data as lost, delivers everything that it has, and waits for the acknowledgements (milliseconds),
2. replaces both tracked connections by one with the difference of the sequence numbers, and
3. closes both sockets without a packet.

The peers send again what was lost, and this time it arrives at the other one. A window, an end, or a reset is from then on
that of the peer itself. Such a connection outlives the relay.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from narthex.linux.addresses import own_addresses
from narthex.linux.conntrack import ConntrackTable
from narthex.linux.tcp_state import (
    TcpTraits,
    is_at_rest,
    leave_repair,
    pause_input,
    resume_input,
    sequence_numbers,
    tcp_traits,
)
from narthex.model import IPFamily
from narthex.model.values import address_text
from narthex.netfilter.netlink.conntrack import JoinedConnection, TcpSide

REST_SECONDS = 0.5
"""Longest wait for the acknowledgements. A peer that does not read is in no hurry."""
POLL_SECONDS = 0.001

_ORIGINAL_DESTINATION = 80
"""SO_ORIGINAL_DST and IP6T_SO_ORIGINAL_DST."""
_FORWARDING = {
    socket.AF_INET: "/proc/sys/net/ipv4/ip_forward",
    socket.AF_INET6: "/proc/sys/net/ipv6/conf/all/forwarding",
}
_EXAMPLES = {
    socket.AF_INET: [f"192.0.2.{number}" for number in range(1, 5)],
    socket.AF_INET6: [f"2001:db8::{number}" for number in range(1, 5)],
}
"""Addresses for documentation (RFC 5737, RFC 3849), to ask the kernel whether it can join connections."""


class HandoverRefused(Exception):
    """The relay keeps a connection; the text says why."""

    def __init__(self, reason: str, again: bool = False) -> None:
        super().__init__(reason)
        self.again = again
        """It may be different later."""


class Handover:
    """Hands over connections of one IP family, in the network namespace of the process. Belongs to one event loop."""

    def __init__(self, family: int) -> None:
        self._address_family = socket.AddressFamily(family)
        self._family = IPFamily.IPV6 if family == socket.AF_INET6 else IPFamily.IPV4
        self._table: ConntrackTable | None = None
        self._unable = ""
        """Why this kernel cannot do it."""

    async def take(self, client: socket.socket, endpoint: socket.socket, idle: Callable[[], bool]) -> None:
        """Hand over a connection; both sockets can then be closed without a packet.

        `idle` returns True while the relay holds no data of the connection; it raises HandoverRefused if the connection
        has ended. Raises HandoverRefused if the relay keeps the connection, and OSError if it is lost.
        """
        try:
            sides = self._sides(client, endpoint)
        except OSError as error:
            raise HandoverRefused(f"the kernel does not describe a connection: {error.strerror}") from error
        try:
            pause_input(client)
            pause_input(endpoint)
            await self._rest(client, endpoint, idle)
            self._join(client, endpoint, sides)
        except BaseException:
            for sock in (client, endpoint):
                # A filter that is not there, or a socket that was closed meanwhile.
                with contextlib.suppress(OSError):
                    resume_input(sock)
            raise

    def _sides(self, client: socket.socket, endpoint: socket.socket) -> tuple[TcpSide, TcpSide, TcpSide, TcpSide]:
        """Return client, destination, relay, and endpoint. Raises HandoverRefused if the kernel cannot connect them."""
        self._check_kernel()
        sides = (
            client.getpeername()[:2],
            self._destination(client),
            endpoint.getsockname()[:2],
            endpoint.getpeername()[:2],
        )
        own = {each.address for each in own_addresses()}
        if sides[0][0] in own or sides[3][0] in own:
            raise HandoverRefused("the client or the endpoint is on this node itself")
        reason = mismatch(tcp_traits(client), tcp_traits(endpoint))
        if reason:
            raise HandoverRefused(reason)
        return sides

    def _check_kernel(self) -> None:
        """Raise HandoverRefused unless the kernel forwards packets and can join connections."""
        if not Path(_FORWARDING[self._address_family]).read_text().startswith("1"):
            raise HandoverRefused(
                f"the node does not forward {self._family.label} packets ({_FORWARDING[self._address_family]})"
            )
        if self._table is None and not self._unable:
            table = ConntrackTable()
            client, destination, relay, endpoint = ((address, 1) for address in _EXAMPLES[self._address_family])
            try:
                table.join(self._family, JoinedConnection(client, destination, relay, endpoint, 1, 1))
                table.forget(self._family, client, destination)
                self._table = table
            except OSError as error:
                self._unable = f"the kernel's connection tracking cannot join connections: {error.strerror}"
        if self._unable:
            raise HandoverRefused(self._unable)

    def _destination(self, client: socket.socket) -> TcpSide:
        """Return where the client connected to, before any rule changed it."""
        try:
            if self._family is IPFamily.IPV4:
                found = client.getsockopt(socket.IPPROTO_IP, _ORIGINAL_DESTINATION, 16)
                return address_text(found[4:8]), struct.unpack_from(">H", found, 2)[0]
            found = client.getsockopt(socket.IPPROTO_IPV6, _ORIGINAL_DESTINATION, 28)
            return address_text(found[8:24]), struct.unpack_from(">H", found, 2)[0]
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOPROTOOPT):
                raise HandoverRefused("the connection is not tracked") from error
            raise

    @staticmethod
    async def _rest(client: socket.socket, endpoint: socket.socket, idle: Callable[[], bool]) -> None:
        """Wait until nothing is under way. Raises HandoverRefused."""
        try:
            async with asyncio.timeout(REST_SECONDS):
                # What had passed the filter before is in the socket by the second look.
                for _ in range(2):
                    await asyncio.sleep(POLL_SECONDS)
                    while not (idle() and is_at_rest(client) and is_at_rest(endpoint)):
                        await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise HandoverRefused("a side does not acknowledge what it was sent", again=True) from None

    def _join(
        self, client: socket.socket, endpoint: socket.socket, sides: tuple[TcpSide, TcpSide, TcpSide, TcpSide]
    ) -> None:
        """Let the kernel rewrite packets from now on. Raises OSError if the connection is lost."""
        assert self._table is not None
        client_received, client_sent = sequence_numbers(client)
        endpoint_received, endpoint_sent = sequence_numbers(endpoint)
        if not (tcp_traits(client).established and tcp_traits(endpoint).established):
            for sock in (client, endpoint):
                leave_repair(sock)
            raise HandoverRefused("a side has ended the connection")
        towards_endpoint = endpoint_sent - client_received & 0xFFFFFFFF
        towards_client = client_sent - endpoint_received & 0xFFFFFFFF
        try:
            self._table.join(self._family, JoinedConnection(*sides, towards_endpoint, towards_client))
        except OSError:
            for sock in (client, endpoint):
                leave_repair(sock)
            raise


def mismatch(client: TcpTraits, endpoint: TcpTraits) -> str:
    """Return why the packets of one connection mean something else in the other one; empty if they don't."""
    if not (client.established and endpoint.established):
        return "a side has ended the connection"
    if client.timestamps or endpoint.timestamps:
        return "a connection has TCP timestamps"
    if client.selective != endpoint.selective:
        return "only one side uses selective acknowledgements"
    if client.peer_scale != endpoint.own_scale or endpoint.peer_scale != client.own_scale:
        return "the two sides scale their windows differently"
    if client.announced_segment > endpoint.segment or endpoint.announced_segment > client.segment:
        return "one side sends larger segments than the other one accepts"
    return ""
