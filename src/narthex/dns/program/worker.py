"""One of the processes that answer: it holds the compiled zones, and hears of changes from the server's process.

It ends when the server's end of the socket between them closes, however that comes about.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

from narthex.dns.corefile.settings import ServerBlock
from narthex.dns.dispatcher import Block, Desk, Searcher
from narthex.dns.interfaces import Resolver
from narthex.dns.message.answer import Cluster
from narthex.dns.plugins.external import ExternalZone
from narthex.dns.plugins.query_log import QueryLog
from narthex.dns.program.elsewhere import Elsewhere
from narthex.dns.server.loop import EventLoop
from narthex.dns.server.speech import Count, Counted, Listener, News, Open, Reader, Setup, Told, frame
from narthex.dns.server.tally import Tally
from narthex.dns.server.tcp import TcpServer
from narthex.dns.server.udp import UdpServer
from narthex.dns.zone.zone import Zone
from narthex.linux.privileges import go_first
from narthex.runtime.logs import LOGGER
from narthex.runtime.logs import start_logging as start_log

if TYPE_CHECKING:
    from narthex.dns.program.resolver import BlockResolver

_UDP_BYTES, _TCP_BYTES = 6_000_000, 2_000_000
"""What answers that are kept may take, for each listener. Clients come by one of them, mostly."""


class Worker:
    """Listeners, zones and resolvers of one process."""

    def __init__(self, control: socket.socket) -> None:
        self.loop = EventLoop()
        self._control = control
        self._reader = Reader(control)
        self._tally = Tally(self._forget)
        self._desks: list[Desk] = []
        self._servers: list[UdpServer | TcpServer] = []
        self._zones: dict[int, Zone] = {}
        self._resolvers: dict[int, BlockResolver] = {}
        self._out = bytearray()

    def run(self) -> None:
        """Obey until the server has gone."""
        self._control.setblocking(False)
        self.loop.register(self._control.fileno(), self._told)
        self.loop.run()
        for server in self._servers:
            server.close()
        for resolver in self._resolvers.values():
            resolver.close()
        self.loop.close()

    def _told(self) -> None:
        try:
            for told in self._reader.read():
                self._obey(told)
        except EOFError:
            self.loop.stop()

    def _obey(self, told: Told) -> None:
        if isinstance(told, Setup):
            self._set_up(told)
        elif isinstance(told, News):
            self._zones[told.block].apply(told.change)
            self._forget()
        elif isinstance(told, Open):
            # What is there now stays; nobody need look through it for cycles again.
            gc.freeze()
            gc.enable()
            for resolver in self._resolvers.values():
                resolver.open()
            for server in self._servers:
                server.open()
        else:
            assert isinstance(told, Count)
            resolvers = {number: resolver.take() for number, resolver in self._resolvers.items()}
            self._say(frame(Counted(self._tally.take(), resolvers)))

    def _set_up(self, setup: Setup) -> None:
        elsewhere = Elsewhere(setup.recursion, self._tally, self.loop.now)
        blocks = [self._block(number, block, setup) for number, block in enumerate(setup.blocks)]
        logs = {zone: block.log for block in setup.blocks for zone in block.zones}
        log = QueryLog(logs, LOGGER.info) if any(logs.values()) else None
        desks: dict[tuple[int, ...], Desk] = {}
        for listener in setup.listeners:
            desk = desks.setdefault(listener.blocks, Desk([blocks[number] for number in listener.blocks]))
            self._servers.append(self._server(listener, desk, elsewhere, log))
        self._desks = list(desks.values())

    def _server(
        self, listener: Listener, desk: Desk, elsewhere: Elsewhere, log: QueryLog | None
    ) -> UdpServer | TcpServer:
        sock = socket.socket(fileno=listener.fd)
        if listener.transport == "udp":
            return UdpServer(sock, desk, self._tally, self.loop, elsewhere, _UDP_BYTES, log)
        return TcpServer(sock, desk, self._tally, self.loop, elsewhere, _TCP_BYTES, log)

    def _block(self, number: int, block: ServerBlock, setup: Setup) -> Block:
        cluster = external = None
        if block.kubernetes is not None:
            zone = self._zones[number] = Zone(block.kubernetes.pods)
            balance = block.loadbalance
            cluster = Cluster(
                block.kubernetes,
                zone,
                setup.own,
                turn=balance is not None,
                most=balance.limit if balance is not None else 0,
            )
            if block.external is not None:
                external = ExternalZone(block.external, zone, setup.own, turn=balance is not None)
        resolver = self._resolver(block, setup, number)
        return Block(block.zones, cluster, resolver, self._searcher(block, cluster, number), external)

    def _resolver(self, block: ServerBlock, setup: Setup, number: int) -> Resolver | None:
        if not (block.forwards or block.hosts):
            return None
        # Its libraries take a while to load, and a block of zones alone needs none of them.
        from narthex.dns.program.resolver import BlockResolver

        say = LOGGER.warning
        made = BlockResolver(block, self.loop, setup.probes, setup.own, say, tells_of_files=setup.first)
        self._resolvers[number] = made
        return made

    def _searcher(self, block: ServerBlock, cluster: Cluster | None, number: int) -> Searcher | None:
        if block.autopath is None or cluster is None:
            return None
        from narthex.dns.program.autopath import AutopathResolver, listed

        search = listed(block.autopath, LOGGER.warning)
        inner = self._resolvers.get(number)
        if inner is None:
            return AutopathResolver(block.autopath, cluster, None, search)
        return AutopathResolver(block.autopath, cluster, inner, search, inner.walked)

    def _forget(self) -> None:
        for desk in self._desks:
            desk.changed()
        for server in self._servers:
            server.forget()

    def _say(self, data: bytes) -> None:
        """Write to the server, now or when it reads."""
        self._out += data
        self._write()

    def _write(self) -> None:
        try:
            del self._out[: self._control.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:
            self.loop.stop()
            return
        self.loop.register(self._control.fileno(), self._told, self._write if self._out else None)


def main(argv: list[str]) -> None:
    """The worker's own process: number of the inherited socket."""
    # Whoever stops a whole service stops the server, too; the worker goes when that is gone.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    start_log(sys.stderr)
    # What comes before the first question leaves no garbage that would be worth a look.
    gc.disable()
    # Behind a program that calculates an answer of microseconds waits for milliseconds.
    go_first()
    os.set_inheritable(int(argv[0]), False)
    Worker(socket.socket(fileno=int(argv[0]))).run()


if __name__ == "__main__":
    main(sys.argv[1:])
