"""A worker process: answers queries from the zones that the main process sends it.

It ends when the main process closes its end of the socket between them, in whatever way.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from narthex.dns.corefile.settings import ServerBlock, TlsServerSettings
from narthex.dns.plugins.autopath import AutopathPlugin
from narthex.dns.plugins.k8s_external import K8sExternalPlugin
from narthex.dns.plugins.kubernetes import KubernetesPlugin
from narthex.dns.plugins.log import QueryLog
from narthex.dns.plugins.transfer import TransferPlugin
from narthex.dns.program.worker_protocol import (
    CountsReport,
    CountsRequest,
    DnsListener,
    MessageReader,
    StartServing,
    WorkerMessage,
    WorkerSetup,
    ZoneUpdate,
)
from narthex.dns.server.counters import AnswerCounter
from narthex.dns.server.dispatcher import BlockPlugins, Dispatcher, Recursion, ServerContext, let_look_up, with_filters
from narthex.dns.server.event_loop import EventLoop
from narthex.dns.server.resolv_conf import autopath_search_list
from narthex.dns.server.tcp import TcpServer
from narthex.dns.server.udp import UdpServer
from narthex.dns.zone.zone import Zone
from narthex.linux.memory import return_freed_memory
from narthex.linux.module_process import frame
from narthex.linux.privileges import go_first
from narthex.runtime.connection_slots import ConnectionSlots
from narthex.runtime.logs import LOGGER, LimitedLog, start_logging

if TYPE_CHECKING:
    from narthex.dns.server.plugin_chain import PluginChain

_ERROR_LINES, _ERROR_SECONDS = 20, 60.0
"""Lines about errors of filters in a period."""
_UDP_CACHE_BYTES, _TCP_CACHE_BYTES = 6_000_000, 2_000_000
"""Bounds of the packet caches of each listener; most clients use only one of the listeners."""


class DnsWorker:
    """Listeners, zones, and plugin chains of a process."""

    def __init__(self, control: socket.socket) -> None:
        self.loop = EventLoop()
        self._control = control
        self._reader = MessageReader(control)
        self._counter = AnswerCounter(self._forget)
        self._dispatchers: list[Dispatcher] = []
        self._servers: list[UdpServer | TcpServer] = []
        self._zones: dict[int, Zone] = {}
        self._chains: dict[int, PluginChain] = {}
        self._out = bytearray()
        self._errors = LimitedLog(LOGGER.error, self._later, _ERROR_LINES, _ERROR_SECONDS)
        """Errors of filters: any client can cause them."""

    def _later(self, seconds: float, callback: Callable[[], None]) -> None:
        self.loop.at(self.loop.now() + seconds, callback)

    def run(self) -> None:
        """Process messages and queries until the main process has ended."""
        self._control.setblocking(False)
        self.loop.register(self._control.fileno(), self._readable)
        self.loop.run()
        for server in self._servers:
            server.close()
        for chain in self._chains.values():
            chain.close()
        self.loop.close()

    def _readable(self) -> None:
        try:
            for message in self._reader.read():
                self._handle(message)
        except EOFError:
            self.loop.stop()

    def _handle(self, message: WorkerMessage) -> None:
        if isinstance(message, WorkerSetup):
            self._set_up(message)
        elif isinstance(message, ZoneUpdate):
            self._zones[message.block].apply(message.change)
            self._forget()
        elif isinstance(message, StartServing):
            # The initial data stays, so the garbage collector need not traverse it.
            gc.freeze()
            gc.enable()
            for chain in self._chains.values():
                chain.open()
            for server in self._servers:
                server.open()
        else:
            assert isinstance(message, CountsRequest)
            resolvers = {number: chain.take() for number, chain in self._chains.items()}
            self._send(frame(CountsReport(self._counter.take(), resolvers)))

    def _set_up(self, setup: WorkerSetup) -> None:
        recursion = Recursion(setup.recursion, self._counter, self.loop.now)
        blocks = [self._block_plugins(number, block, setup, recursion) for number, block in enumerate(setup.blocks)]
        logs = {zone: block.log for block in setup.blocks for zone in block.zones}
        log = QueryLog(logs, LOGGER.info) if any(logs.values()) else None
        contexts: dict[tuple[int, ...], ServerContext] = {}
        slots: ConnectionSlots[Any] = ConnectionSlots()
        for listener in setup.listeners:
            if listener.blocks not in contexts:
                here = [blocks[number] for number in listener.blocks]
                dispatcher = Dispatcher(here)
                let_look_up(here, dispatcher, recursion)
                contexts[listener.blocks] = ServerContext(dispatcher, self._counter, self.loop, recursion, log, slots)
            settings = setup.blocks[listener.blocks[0]].tls
            self._servers.append(_server(listener, contexts[listener.blocks], settings))
        self._dispatchers = [context.dispatcher for context in contexts.values()]

    def _block_plugins(self, number: int, block: ServerBlock, setup: WorkerSetup, recursion: Recursion) -> BlockPlugins:
        kubernetes = external = autopath = None
        chain = self._plugin_chain(block, setup, number)
        if block.kubernetes is not None:
            zone = self._zones[number] = Zone(block.kubernetes.pods, zonal=block.kubernetes.zonal)
            rotate = block.loadbalance is not None
            max_answers = block.loadbalance.limit if block.loadbalance is not None else 0
            kubernetes = KubernetesPlugin(block.kubernetes, zone, setup.own, rotate=rotate, max_answers=max_answers)
            if block.external is not None:
                external = K8sExternalPlugin(block.external, zone, setup.own, rotate=rotate)
            if block.autopath is not None:
                search = autopath_search_list(block.autopath, LOGGER.warning)
                count = chain.count_autopath if chain is not None else lambda: None
                autopath = AutopathPlugin(block.autopath, kubernetes, chain, search, count)
        transfer = TransferPlugin(block.transfer, kubernetes) if block.transfer and kubernetes is not None else None
        plugins = BlockPlugins(
            block.zones, kubernetes, chain, autopath, external, transfer=transfer, bufsize=block.bufsize
        )
        return with_filters(plugins, block, recursion, self._errors.write)

    def _plugin_chain(self, block: ServerBlock, setup: WorkerSetup, number: int) -> PluginChain | None:
        if not (block.forwards or block.hosts):
            return None
        # Imports libraries that are slow to load, and unnecessary for a server block with zones only.
        from narthex.dns.server.plugin_chain import PluginChain

        chain = PluginChain(block, self.loop, setup.probes, setup.own, LOGGER.warning, reports_files=setup.first)
        self._chains[number] = chain
        return chain

    def _forget(self) -> None:
        for dispatcher in self._dispatchers:
            dispatcher.nxdomain.clear()
        for server in self._servers:
            server.forget()

    def _send(self, data: bytes) -> None:
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
        self.loop.register(self._control.fileno(), self._readable, self._write if self._out else None)


def _server(listener: DnsListener, context: ServerContext, settings: TlsServerSettings | None) -> UdpServer | TcpServer:
    """Return the server of a listener."""
    sock = socket.socket(fileno=listener.fd)
    if listener.transport == "udp":
        return UdpServer(sock, context, _UDP_CACHE_BYTES)
    if listener.transport == "tcp":
        return TcpServer(sock, context, _TCP_CACHE_BYTES)
    # Imports ssl, which is slow to load.
    from narthex.dns.server.https import HttpsServer, http_protocols
    from narthex.dns.server.tls import TlsServer, server_tls_context

    if listener.transport == "https":
        tls = None if settings is None else server_tls_context(settings, http_protocols())
        return HttpsServer(sock, context, _TCP_CACHE_BYTES, tls)
    assert settings is not None
    return TlsServer(sock, context, _TCP_CACHE_BYTES, server_tls_context(settings))


def main(argv: list[str]) -> None:
    """Run a worker. The argument is the number of the inherited socket to the main process."""
    # A signal to the whole process group also reaches the main process, whose end ends the worker.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return_freed_memory()
    start_logging(sys.stderr)
    # The initial data leaves no garbage to collect.
    gc.disable()
    # Without priority, an answer of microseconds waits for milliseconds behind processes that compute.
    go_first()
    os.set_inheritable(int(argv[0]), False)
    DnsWorker(socket.socket(fileno=int(argv[0]))).run()


if __name__ == "__main__":
    main(sys.argv[1:])
