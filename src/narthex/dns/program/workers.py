"""The worker processes of a server: starts them, sends them zones, collects their counts, and replaces those that die."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping, Sequence

import msgspec

from narthex.dns.corefile.settings import ServerBlock
from narthex.dns.program.listeners import ListenAddress, open_sockets
from narthex.dns.program.worker_protocol import (
    CountsReport,
    CountsRequest,
    DnsListener,
    StartServing,
    WorkerSetup,
    ZoneUpdate,
)
from narthex.dns.server.counters import AnswerCounts, ResolverCounts, sum_of
from narthex.dns.zone.changes import ZoneChange
from narthex.linux.module_process import ModuleProcess
from narthex.runtime.logs import LOGGER

_MESSAGE_TIMEOUT = 20.0
"""Seconds that a worker has to receive or send a message; a slower one is replaced."""
_MODULE = "narthex.dns.program.worker"
_REPORTS = msgspec.msgpack.Decoder(CountsReport)
_Sockets = tuple[socket.socket, ...]
"""The sockets of one address, by transport."""
CurrentZones = Callable[[], dict[int, ZoneChange]]
"""Returns the whole zones by server block, for a new worker."""


class _Process(ModuleProcess):
    """One worker. Its sockets belong to the main process, so that queries waiting in them survive it."""

    def __init__(self, setup: WorkerSetup, sockets: Sequence[socket.socket]) -> None:
        super().__init__(_MODULE, timeout=_MESSAGE_TIMEOUT, keep=[sock.fileno() for sock in sockets])
        self._lock = threading.Lock()
        self.send(setup)

    def send(self, *messages: msgspec.Struct) -> None:
        """Send messages to the worker; wait while a report of another thread is under way."""
        with self._lock:
            super().send(*messages)

    def report(self) -> CountsReport:
        """Request the worker's counts and wait for them."""
        with self._lock:
            super().send(CountsRequest())
            return self.receive(_REPORTS)

    def stop(self) -> None:
        """Close the channel and wait at most 2 seconds for the worker to end."""
        self.close(2.0)


class WorkerPool:
    """All workers of one Corefile."""

    def __init__(
        self,
        blocks: Sequence[ServerBlock],
        listen: Sequence[ListenAddress],
        number: int,
        setup: WorkerSetup,
        zones: CurrentZones,
        before: WorkerPool | None = None,
    ) -> None:
        """Open the sockets; no worker is started yet.

        Args:
            blocks: Server blocks of the Corefile.
            listen: Addresses to listen on.
            number: Number of workers.
            setup: Setup of all workers, without the listeners.
            zones: Returns the whole zones for a new worker.
            before: Workers of the previous Corefile. Their counts continue, and their sockets are shared if the addresses
                are the same, so that no query is lost.

        Raises:
            ListenError: An address cannot be listened on.
        """
        self.listen = tuple(listen)
        self._zones = zones
        self._sockets: list[dict[str, _Sockets]] = []
        self._setups: list[WorkerSetup] = []
        self._processes: list[_Process | None] = [None] * number
        self._lock = threading.Lock()
        self._opened = False
        self._counts = AnswerCounts() if before is None else before.counts()[0]
        self._resolvers: dict[int, ResolverCounts] = {}
        self.restarts: int = 0 if before is None else before.restarts
        same = before is not None and _ports(listen) == _ports(before.listen)
        sockets = before._sockets if before is not None and same else []
        try:
            for index in range(number):
                shared = sockets[index] if index < len(sockets) else {}
                self._prepare(blocks, msgspec.structs.replace(setup, first=index == 0), shared)
        except BaseException:
            self.close()
            raise

    def _prepare(self, blocks: Sequence[ServerBlock], setup: WorkerSetup, shared: Mapping[str, _Sockets]) -> None:
        sockets: dict[str, _Sockets] = {}
        self._sockets.append(sockets)
        listeners = []
        for each in self.listen:
            name = f"{each.address} {each.port}"
            before = shared.get(name)
            sockets[name] = open_sockets(each) if before is None else tuple(sock.dup() for sock in before)
            listeners += [
                DnsListener(sock.fileno(), transport, each.blocks)
                for sock, transport in zip(sockets[name], each.transports, strict=False)
            ]
        self._setups.append(msgspec.structs.replace(setup, blocks=tuple(blocks), listeners=tuple(listeners)))

    def start(self) -> None:
        """Start the processes, which answer after `open`. Raises OSError."""
        for index in range(len(self._processes)):
            self._start(index)

    def open(self) -> None:
        """Make the workers start to answer."""
        with self._lock:
            self._opened = True
            self._send_all(StartServing())

    def update(self, changes: dict[int, ZoneChange]) -> None:
        """Send changes of zones by server block. The next `check` replaces a worker that does not receive them."""
        with self._lock:
            self._send_all(*(ZoneUpdate(block, change) for block, change in changes.items()))

    def check(self) -> None:
        """Replace workers that have died."""
        for index, process in enumerate(self._processes):
            if process is not None and process.alive:
                continue
            if process is not None:
                LOGGER.error(
                    "DNS worker (process %d) ended with status %s; a new one starts", process.pid, process.status
                )
                process.stop()
                self.restarts += 1
            try:
                self._start(index)
            except OSError as error:
                LOGGER.error("a DNS worker cannot be started: %s; retrying", error)

    @property
    def pids(self) -> list[int]:
        """Process IDs of the running workers."""
        return [process.pid for process in self._processes if process is not None and process.alive]

    def counts(self) -> tuple[AnswerCounts, dict[int, ResolverCounts]]:
        """Return the sums of all workers, and those of plugin chains by server block. May be called from any thread."""
        for process in tuple(self._processes):
            if process is None or not process.alive:
                continue
            try:
                taken = process.report()
            except (OSError, EOFError) as error:
                # A late report would be taken for the next one, so the worker is replaced by `check`.
                LOGGER.error("DNS worker (process %d) does not report its counts: %s", process.pid, error)
                process.stop()
                continue
            with self._lock:
                self._counts = sum_of(self._counts, taken.counts)
                for number, chain in taken.resolvers.items():
                    self._resolvers.setdefault(number, ResolverCounts()).merge(chain)
        return self._counts, self._resolvers

    def close(self) -> None:
        """Stop all workers and close the sockets."""
        for process in self._processes:
            if process is not None:
                process.stop()
        self._processes = [None] * len(self._processes)
        for sock in (sock for sockets in self._sockets for each in sockets.values() for sock in each):
            sock.close()

    def _start(self, index: int) -> None:
        with self._lock:
            process = self._processes[index] = _Process(
                self._setups[index], [sock for pair in self._sockets[index].values() for sock in pair]
            )
            zones = self._zones()
            try:
                process.send(
                    *(ZoneUpdate(block, change) for block, change in zones.items()),
                    *([StartServing()] if self._opened else []),
                )
            except OSError as error:
                LOGGER.error("DNS worker (process %d) does not receive its zones: %s", process.pid, error)

    def _send_all(self, *messages: msgspec.Struct) -> None:
        for process in self._processes:
            if process is None:
                continue
            try:
                process.send(*messages)
            except OSError as error:
                LOGGER.error("DNS worker (process %d) does not receive changes: %s", process.pid, error)
                process.stop()


def _ports(listen: Sequence[ListenAddress]) -> list[tuple[str, int, str]]:
    return [(each.address, each.port, each.protocol) for each in listen]
