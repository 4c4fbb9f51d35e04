"""The worker processes, seen from the server's: started, told, asked, and started again when they die."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping, Sequence

import msgspec

from narthex.dns.corefile.settings import ServerBlock
from narthex.dns.program.listeners import Place, open_sockets
from narthex.dns.server.meter import ResolverCounts
from narthex.dns.server.speech import Count, Counted, Listener, News, Open, Setup, frame, receive_counted
from narthex.dns.server.tally import Counts
from narthex.dns.zone.changes import Change
from narthex.linux.run import StartedProgram, TimeoutExpired, start_module
from narthex.runtime.logs import LOGGER

_PATIENCE = 20.0
"""Seconds for a worker to take in or say something. One that is silent for longer is ended."""
_MODULE = "narthex.dns.program.worker"
_Pair = tuple[socket.socket, socket.socket]
"""UDP and TCP."""
State = Callable[[], dict[int, Change]]
"""All that a new worker has to know, by server block."""


class _Process:
    """One worker; its sockets are ours and stay when it dies, with what waits in them."""

    def __init__(self, setup: Setup, sockets: Sequence[socket.socket]) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(_PATIENCE)
        with theirs:
            self._process: StartedProgram[bytes] = start_module(
                _MODULE, str(theirs.fileno()), keep=[theirs.fileno(), *(sock.fileno() for sock in sockets)]
            )
        self._socket = ours
        self._lock = threading.Lock()
        self.tell(setup)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def status(self) -> int | None:
        return self._process.returncode

    def tell(self, *messages: object) -> None:
        """Raises OSError when it has gone."""
        with self._lock:
            self._socket.sendall(b"".join(map(frame, messages)))

    def counted(self) -> Counted:
        """Raises OSError and EOFError."""
        with self._lock:
            self._socket.sendall(frame(Count()))
            return receive_counted(self._socket)

    def end(self) -> None:
        self._socket.close()
        try:
            self._process.wait(2.0)
        except TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Workers:
    """All workers of one configuration. `open` them; `close` ends them and frees the ports."""

    def __init__(
        self,
        blocks: Sequence[ServerBlock],
        found: Sequence[Place],
        number: int,
        setup: Setup,
        state: State,
        before: Workers | None = None,
    ) -> None:
        """`setup` tells all of it but the listeners. What `before` has counted goes on, and where it listens in the same
        places, its sockets are shared, so that no question is lost. Raises ListenError; nothing is started yet."""
        self.places = tuple(found)
        self._state = state
        self._sockets: list[dict[str, _Pair]] = []
        self._setups: list[Setup] = []
        self._processes: list[_Process | None] = [None] * number
        self._lock = threading.Lock()
        self._opened = False
        self._counts = Counts() if before is None else before.counts()[0]
        self._resolvers: dict[int, ResolverCounts] = {}
        self.restarts: int = 0 if before is None else before.restarts
        at = [(place.address, place.port) for place in found]
        shared = before._sockets if before is not None and at == [(p.address, p.port) for p in before.places] else []
        try:
            for index in range(number):
                held = shared[index] if index < len(shared) else {}
                self._prepare(blocks, found, msgspec.structs.replace(setup, first=index == 0), held)
        except BaseException:
            self.close()
            raise

    def _prepare(
        self, blocks: Sequence[ServerBlock], found: Sequence[Place], setup: Setup, held: Mapping[str, _Pair]
    ) -> None:
        pairs: dict[str, _Pair] = {}
        self._sockets.append(pairs)
        listeners = []
        for place in found:
            name = f"{place.address} {place.port}"
            pair = _copied(held[name]) if name in held else open_sockets(place)
            if pair is None:
                continue
            pairs[name] = pair
            listeners.append(Listener(pair[0].fileno(), "udp", place.blocks))
            listeners.append(Listener(pair[1].fileno(), "tcp", place.blocks))
        self._setups.append(msgspec.structs.replace(setup, blocks=tuple(blocks), listeners=tuple(listeners)))

    def start(self) -> None:
        """Start the processes; they answer after `open`. Raises OSError."""
        for index in range(len(self._processes)):
            self._begin(index)

    def open(self) -> None:
        """Answer from now on."""
        with self._lock:
            self._opened = True
            self._tell(Open())

    def tell(self, changes: dict[int, Change]) -> None:
        """Pass changes on. A worker that cannot take them is made anew by the next `look`."""
        with self._lock:
            self._tell(*(News(block, change) for block, change in changes.items()))

    def look(self) -> None:
        """Start again whatever has died."""
        for index, process in enumerate(self._processes):
            if process is not None and process.alive:
                continue
            if process is not None:
                LOGGER.error(
                    "DNS worker (process %d) ended with status %s; a new one starts", process.pid, process.status
                )
                process.end()
                self.restarts += 1
            try:
                self._begin(index)
            except OSError as error:
                LOGGER.error("a DNS worker cannot be started: %s; it is tried again", error)

    @property
    def pids(self) -> list[int]:
        """The processes that run."""
        return [process.pid for process in self._processes if process is not None and process.alive]

    def counts(self) -> tuple[Counts, dict[int, ResolverCounts]]:
        """What all of them have done since the beginning, and their resolvers, by server block. Safe from any thread."""
        for process in tuple(self._processes):
            if process is None or not process.alive:
                continue
            try:
                taken = process.counted()
            except (OSError, EOFError) as error:
                # An answer that is late would be taken for the next one's; `look` makes another worker.
                LOGGER.error("DNS worker (process %d) does not say what it has done: %s", process.pid, error)
                process.end()
                continue
            with self._lock:
                self._counts.merge(taken.counts)
                for number, held in taken.resolvers.items():
                    self._resolvers.setdefault(number, ResolverCounts()).merge(held)
        return self._counts, self._resolvers

    def close(self) -> None:
        """End all."""
        for process in self._processes:
            if process is not None:
                process.end()
        self._processes = [None] * len(self._processes)
        for udp, tcp in (pair for pairs in self._sockets for pair in pairs.values()):
            udp.close()
            tcp.close()

    def _begin(self, index: int) -> None:
        with self._lock:
            process = self._processes[index] = _Process(
                self._setups[index], [sock for pair in self._sockets[index].values() for sock in pair]
            )
            state = self._state()
            try:
                process.tell(
                    *(News(block, change) for block, change in state.items()), *([Open()] if self._opened else [])
                )
            except OSError as error:
                LOGGER.error("DNS worker (process %d) does not listen to what it is told: %s", process.pid, error)

    def _tell(self, *messages: object) -> None:
        for process in self._processes:
            if process is None:
                continue
            try:
                process.tell(*messages)
            except OSError as error:
                LOGGER.error("DNS worker (process %d) does not take changes: %s", process.pid, error)
                process.end()


def _copied(pair: _Pair) -> _Pair:
    return pair[0].dup(), pair[1].dup()
