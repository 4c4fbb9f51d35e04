"""The relay: listens on ports, and connects each client to one of the port's endpoints.

It uses one asyncio loop and one thread for one IP family. The owner of the loop sends it orders. A port keeps its
socket, its round robin state, and its open connections when its endpoints change.
"""

from __future__ import annotations

import asyncio
import errno
import random
import resource
import socket
from collections.abc import Callable

from narthex.proxy.relay.choice import Affinity, Turns
from narthex.proxy.relay.tcp import RelayShared, TcpListener
from narthex.proxy.relay.udp import UdpListener
from narthex.proxy.relay.wire import Key, PortFailure, RelayAnswer, RelayCounts, RelayOrder, RelayPort, RelayTable

ANY = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}
UDP_IDLE_SECONDS = 30.0
"""As in connection tracking for UDP (net.netfilter.nf_conntrack_udp_timeout)."""
SWEEP_SECONDS = 1.0
RESERVED_FILES = 64
"""Open files of the process itself; listeners are counted separately."""
FILES_EACH = 2
"""Open files of a TCP connection; pipes are counted separately."""


class Relay:
    """All ports of one family. Created and used in the thread of the loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        family: int,
        *,
        mark: int = 0,
        host: str = "",
        udp_idle_seconds: float = UDP_IDLE_SECONDS,
        rng: random.Random | None = None,
        now: Callable[[], float] | None = None,
    ) -> None:
        """Create a relay without ports.

        Args:
            loop: The event loop.
            family: AF_INET or AF_INET6.
            mark: Packet mark of the relay's own connections; 0: none.
            host: Address to listen on; empty: any.
            udp_idle_seconds: Idle time after which a UDP client is forgotten.
            rng: Source of randomness.
            now: Clock of affinity and idle times; None: the loop's.
        """
        self._shared = RelayShared(loop, family, mark, now or loop.time)
        self._host = host or ANY[socket.AddressFamily(family)]
        self._udp_idle_seconds = udp_idle_seconds
        self._rng = rng or random.Random()
        self._listeners: dict[Key, TcpListener | UdpListener] = {}
        self._entries: dict[Key, RelayPort] = {}
        self._affinities: dict[tuple[str, ...], Affinity] = {}
        self._sweeper = loop.call_later(SWEEP_SECONDS, self._sweep)
        self._limit()

    @property
    def counts(self) -> RelayCounts:
        """Counters since the start."""
        return self._shared.counts

    @property
    def table(self) -> RelayTable:
        """The ports in service."""
        return RelayTable(tuple(self._entries.values()), self.counts)

    def port_of(self, key: Key) -> int:
        """Return the port in use, which differs from the requested one if that was 0."""
        return self._listeners[key].port

    def obey(self, order: RelayOrder) -> RelayAnswer:
        """Execute an order. Ports that cannot be opened are named in the answer; everything else is done."""
        if order.mark is not None:
            self._shared.mark = order.mark
        if order.forget:
            self.stop_all()
        failed = [problem for entry in order.listen if (problem := self._listen(entry)) is not None]
        for key in order.close:
            self._close(key)
        self._forget_unused()
        self._limit()
        return RelayAnswer(self._shared.counts, tuple(failed))

    def stop_all(self) -> None:
        """End all connections, close all ports, and forget all clients."""
        for listener in self._listeners.values():
            listener.abort()
        self._listeners.clear()
        self._entries.clear()
        self._affinities.clear()

    def close(self) -> None:
        """Stop permanently."""
        self.stop_all()
        self._sweeper.cancel()
        self._shared.pipes.close()

    def _listen(self, entry: RelayPort) -> PortFailure | None:
        listener = self._listeners.get(entry.key)
        before = self._entries.get(entry.key)
        if listener is None:
            turns = Turns(entry.endpoints, self._rng.shuffle)
            try:
                listener = self._new(entry, turns)
            except OSError as error:
                return PortFailure(entry.protocol, entry.port, error.errno == errno.EADDRINUSE, str(error))
            self._listeners[entry.key] = listener
        elif before is not None and before.endpoints != entry.endpoints:
            listener.use(entry.endpoints)
        listener.affinity = self._affinity(entry)
        self._entries[entry.key] = entry
        return None

    def _new(self, entry: RelayPort, turns: Turns) -> TcpListener | UdpListener:
        if entry.protocol == "tcp":
            return TcpListener(self._shared, self._host, entry.port, turns)
        return UdpListener(self._shared, self._host, entry.port, turns, self._udp_idle_seconds)

    def _affinity(self, entry: RelayPort) -> Affinity | None:
        """Return the session affinity of the Service; clients stay known if only the time changes."""
        if entry.affinity_seconds is None:
            return None
        memory = self._affinities.setdefault((*entry.service, entry.protocol), Affinity(entry.affinity_seconds))
        memory.seconds = entry.affinity_seconds
        return memory

    def _close(self, key: Key) -> None:
        listener = self._listeners.pop(key, None)
        self._entries.pop(key, None)
        if listener is not None:
            listener.close()

    def _forget_unused(self) -> None:
        entries = self._entries.values()
        used = {(*entry.service, entry.protocol) for entry in entries if entry.affinity_seconds is not None}
        for service in self._affinities.keys() - used:
            del self._affinities[service]

    def _limit(self) -> None:
        """Limit connections to the available files: beyond the limit clients wait instead of failing midway."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        spare = files - RESERVED_FILES - len(self._listeners)
        self._shared.most_open = max(1, spare // FILES_EACH - spare // 8)

    def _sweep(self) -> None:
        now = self._shared.now()
        for listener in self._listeners.values():
            if isinstance(listener, UdpListener):
                listener.sweep(now)
        for memory in self._affinities.values():
            memory.sweep(now)
        self._sweeper = self._shared.loop.call_later(SWEEP_SECONDS, self._sweep)
