"""Packet listeners in all namespaces, and endpoints that answer.

A listener is a raw socket. The kernel delivers to it a copy of every packet that reaches its namespace after all rules, with
the addresses that the packet then has. It therefore shows who received the packet and from whom, for TCP, UDP, and SCTP, on
any port, with or without a server. Endpoints also accept connections and answer, so that the return path is tested.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from typing import NamedTuple

import msgspec

from narthex.linux.namespaces import in_namespace
from narthex.model import IPFamily, Protocol, address, family_of
from narthex.testing.kernel.client import ADDRESS_FAMILY, SOCKET_KIND, ProbeClient, first_packet, sctp_packet

_AGAIN = 1.0
"""Seconds until an unanswered packet is sent again; a busy machine may lose one."""
_SETTLE = 0.002
"""Seconds within which a packet inside this kernel must arrive after a refusal was read."""


class Arrival(NamedTuple):
    """The first packet of a connection, where it ended."""

    site: int
    source: str
    destination: str
    port: int


class Call(NamedTuple):
    """A connection to make."""

    namespace: str
    source: str
    destination: str
    port: int
    protocol: Protocol


class ProbeResult(msgspec.Struct, kw_only=True):
    """The result of one connection."""

    arrivals: list[Arrival]
    refusal: str = ""
    """`port unreachable`, `refused` (a TCP reset), or another ICMP error; empty when there was none."""
    answered: bool = False
    """The client heard from whom it called."""


class PacketListeners:
    """Listens in all namespaces of a world, and lets endpoints answer."""

    def __init__(self, families: Iterable[IPFamily], protocols: Iterable[Protocol]) -> None:
        self._kinds = [(family, protocol) for family in families for protocol in protocols]
        self._stack = ExitStack()
        self._epoll = self._stack.enter_context(select.epoll())
        self._on_event: dict[int, Callable[[], None]] = {}
        self._heard: list[tuple[Arrival, int, bytes]] = []
        """First packets: where each arrived, its source port, and its nonce."""
        self._carried: dict[bytes, set[tuple[str, int, str, int]]] = {}
        """Nonces that came as TCP data: source, source port, destination, and port of their connections."""
        self._accepted: set[socket.socket] = set()
        self._calling = 0
        self._answering: set[tuple[str, int, Protocol]] = set()
        self.passed_by: frozenset[tuple[int, Protocol, int]] = frozenset()
        """Site, protocol and port where a relay takes what arrives and passes it on: no end of anything."""

    def __enter__(self) -> PacketListeners:
        return self

    def __exit__(self, *_: object) -> None:
        for taken in self._accepted:
            taken.close()
        self._stack.close()

    def open(self, site: int, namespace: str) -> None:
        """Listen in a namespace."""
        with in_namespace(namespace):
            for family, protocol in self._kinds:
                ear = self._socket(family, socket.SOCK_RAW, protocol)
                if family is IPFamily.IPV6:
                    ear.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
                self._watch(ear, lambda ear=ear, protocol=protocol: self._hear(ear, protocol, site))  # type: ignore[misc]

    def answer(self, namespace: str, endpoint: str, port: int, protocol: Protocol) -> None:
        """Let an endpoint take connections and answer them."""
        family = family_of(endpoint)
        if (family, protocol) not in self._kinds or (endpoint, port, protocol) in self._answering:
            return
        with in_namespace(namespace):
            server = self._socket(family, SOCKET_KIND[protocol], protocol)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((endpoint, 0 if protocol is Protocol.SCTP else port))
        if protocol is Protocol.TCP:
            server.listen(1024)
            self._watch(server, lambda: self._accept(server))
        elif protocol is Protocol.UDP:
            self._watch(server, lambda: _echo(server))
        else:
            self._watch(server, lambda: _acknowledge(server, family, port))
        self._answering.add((endpoint, port, protocol))

    def answers(self, endpoint: str, port: int, protocol: Protocol) -> bool:
        """Return True if a server answers at this endpoint."""
        return (endpoint, port, protocol) in self._answering

    def connect(self, call: Call, patience: float) -> ProbeResult:
        """Open one new connection, and observe it for at most `patience` seconds.

        Raises WitnessError if it cannot be sent.
        """
        with ExitStack() as stack:
            client = self._send(call, stack)
            deadline = time.monotonic() + patience
            again = time.monotonic() + _AGAIN
            excused = False
            while True:
                result = self._result(client)
                now = time.monotonic()
                left = deadline - now
                if left <= 0 or self._settled(client, result):
                    return result
                if client.refusal and not result.arrivals:
                    # The refusal may be read before the packet's arrival, though it never happens before it.
                    self._listen(_SETTLE)
                    result = self._result(client)
                    if excused or result.arrivals or not client.excuse():
                        return result
                    excused = True
                    continue
                if now >= again and not result.arrivals:
                    client.send_again()
                    again = now + _AGAIN
                self._listen(min(left, max(again - now, 0.0)) if not result.arrivals else left)

    def silent(self, calls: Iterable[Call], patience: float) -> bool:
        """Open several connections at once, and return True if none causes any packet within `patience` seconds.

        Raises WitnessError if one cannot be sent.
        """
        with ExitStack() as stack:
            clients = [self._send(call, stack) for call in calls]
            deadline = time.monotonic() + patience
            while not self._heard and not any(client.refusal or client.answered for client in clients):
                left = deadline - time.monotonic()
                if left <= 0:
                    return True
                self._listen(left)
            return False

    def _send(self, call: Call, stack: ExitStack) -> ProbeClient:
        """Let a client send, and watch it until the stack closes. The first client of a stack clears earlier observations."""
        if not self._calling:
            self._listen(0)
            self._heard.clear()
            self._carried.clear()
        with in_namespace(call.namespace):
            client = ProbeClient(call.source, call.destination, call.port, call.protocol)
        number = client.socket.fileno()
        self._calling += 1
        self._on_event[number] = client.look
        self._epoll.register(number, client.events)

        def hang_up() -> None:
            """Stop watching the client and close its socket."""
            self._calling -= 1
            del self._on_event[number]
            client.socket.close()

        stack.callback(hang_up)
        client.send()
        return client

    def _result(self, client: ProbeClient) -> ProbeResult:
        mine = [
            arrival
            for arrival, port, nonce in self._heard
            if client.sent(nonce) or self._relayed(client, arrival, port)
        ]
        return ProbeResult(arrivals=mine, refusal=client.refusal, answered=client.answered)

    def _relayed(self, client: ProbeClient, arrival: Arrival, source_port: int) -> bool:
        """Return True if a relay made this connection for the client.

        The client's nonce arrived on it as data. Where no server answers, no data can arrive, and the first packet has to do.
        """
        if not self.passed_by or client.protocol is not Protocol.TCP:
            return False
        connection = (arrival.source, source_port, arrival.destination, arrival.port)
        if any(client.sent(nonce) and connection in places for nonce, places in self._carried.items()):
            return True
        return not self.answers(arrival.destination, arrival.port, client.protocol)

    def _settled(self, client: ProbeClient, result: ProbeResult) -> bool:
        """Return True if there is nothing more to wait for: the packet arrived, and its answer came or cannot come."""
        if not result.arrivals:
            return False
        last = result.arrivals[-1]
        to_itself = last.source == last.destination
        return client.answered or to_itself or not self.answers(last.destination, last.port, client.protocol)

    def _listen(self, timeout: float) -> None:
        """Handle what is there; wait for the first event, not for more."""
        for number, _ in self._epoll.poll(timeout):
            handler = self._on_event.get(number)
            if handler is not None:
                handler()

    def _socket(self, family: IPFamily, kind: int, protocol: Protocol) -> socket.socket:
        made = socket.socket(ADDRESS_FAMILY[family], kind, protocol.number)
        made.setblocking(False)
        return self._stack.enter_context(made)

    def _watch(self, watched: socket.socket, handler: Callable[[], None]) -> None:
        self._epoll.register(watched, select.EPOLLIN)
        self._on_event[watched.fileno()] = handler

    def _hear(self, ear: socket.socket, protocol: Protocol, site: int) -> None:
        for data, ancillary, peer in _packets(ear):
            if ear.family == socket.AF_INET:
                head = (data[0] & 15) * 4
                source, destination = socket.inet_ntoa(data[12:16]), socket.inet_ntoa(data[16:20])
                data = data[head:]
            else:
                source = address(peer[0].partition("%")[0])
                destination = address(socket.inet_ntop(socket.AF_INET6, ancillary[0][2][:16]))
            source_port, port = int.from_bytes(data[:2], "big"), int.from_bytes(data[2:4], "big")
            if (site, protocol, port) in self.passed_by:
                continue
            nonce = first_packet(data, protocol)
            if nonce is not None:
                self._heard.append((Arrival(site, source, destination, port), source_port, nonce))
            elif self.passed_by and protocol is Protocol.TCP and len(data) > 20:
                carried = data[(data[12] >> 4) * 4 :]
                if len(carried) == 4:
                    self._carried.setdefault(carried, set()).add((source, source_port, destination, port))

    def _accept(self, server: socket.socket) -> None:
        """Take connections, and close each when its client has sent something or is gone."""
        while True:
            try:
                taken, _ = server.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue
            taken.setblocking(False)
            self._accepted.add(taken)
            self._watch(taken, lambda taken=taken: self._close(taken))  # type: ignore[misc]

    def _close(self, taken: socket.socket) -> None:
        with suppress(OSError):
            taken.recv(64)
        del self._on_event[taken.fileno()]
        self._accepted.discard(taken)
        taken.close()


def _packets(ear: socket.socket) -> Iterable[tuple[bytes, list[tuple[int, int, bytes]], tuple[str, int]]]:
    while True:
        try:
            data, ancillary, _, peer = ear.recvmsg(4096, 256)
        except BlockingIOError:
            return
        yield data, ancillary, peer


def _echo(server: socket.socket) -> None:
    while True:
        try:
            data, peer = server.recvfrom(4096)
            server.sendto(data[::-1], peer)
        except BlockingIOError:
            return
        except OSError:
            # An ICMP error about an earlier answer: its client is gone.
            continue


def _acknowledge(server: socket.socket, family: IPFamily, port: int) -> None:
    for data, _, peer in _packets(server):
        segment = data[(data[0] & 15) * 4 :] if family is IPFamily.IPV4 else data
        tag = first_packet(segment, Protocol.SCTP)
        if tag is None or int.from_bytes(segment[2:4], "big") != port:
            continue
        number = int.from_bytes(tag, "big")
        reply = sctp_packet(port, int.from_bytes(segment[:2], "big"), number, 2, number)
        server.sendto(reply, (peer[0], 0))


class Tap:
    """Records what reaches the node's interfaces before any rule, to prove that rules caused a silence."""

    def __init__(self, namespace: str) -> None:
        with in_namespace(namespace):
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0003))
        self._socket.setblocking(False)

    def __enter__(self) -> Tap:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def take(self) -> set[tuple[str, str, str]]:
        """Return source, destination, and interface of all packets that arrived since the last call."""
        seen = set()
        for data, name in self._frames():
            start, size, kind = (12, 4, socket.AF_INET) if data[0] >> 4 == 4 else (8, 16, socket.AF_INET6)
            source, destination = data[start : start + size], data[start + size : start + 2 * size]
            if len(destination) == size:
                seen.add((address(socket.inet_ntop(kind, source)), address(socket.inet_ntop(kind, destination)), name))
        return seen

    def _frames(self) -> Iterable[tuple[bytes, str]]:
        while True:
            try:
                data, where = self._socket.recvfrom(128)
            except BlockingIOError:
                return
            if where[2] != socket.PACKET_OUTGOING:
                yield data, where[0]
