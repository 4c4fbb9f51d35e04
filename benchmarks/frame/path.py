"""Client, node and endpoints, each in a network namespace; all ways between them lead through the node.

The client is 198.51.100.7, the endpoints are in 10.64.2.0/24, beyond the node's other link. `Endpoints` serves there: on BULK
it sends without end, on SHORT it says a word and closes.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.linux.run import run

from .cluster import store_with_last, sync_of

CALLER, NODE, FAR = (f"nxbench-{os.getpid()}-{name}" for name in ("call", "node", "far"))
ENDPOINTS = ["10.64.2.10", "10.64.2.11"]
BULK, SHORT = 8080, 8081
CHUNK = 1 << 20


class Endpoints(threading.Thread):
    """Serves in a namespace: on BULK it sends without end, on SHORT it says a word and closes."""

    def __init__(self, namespace: str) -> None:
        super().__init__(daemon=True)
        self._selector = selectors.DefaultSelector()
        self._ended = False
        with in_namespace(namespace):
            for address in ENDPOINTS:
                for port in (BULK, SHORT):
                    server = socket.create_server((address, port), backlog=4096)
                    server.setblocking(False)
                    self._selector.register(server, selectors.EVENT_READ, port)

    def run(self) -> None:
        while not self._ended:
            for key, _ in self._selector.select(0.2):
                server: socket.socket = key.fileobj  # type: ignore[assignment]
                for _ in range(64):
                    try:
                        taken, _ = server.accept()
                    except OSError:
                        break
                    if key.data == BULK:
                        threading.Thread(target=self._pour, args=(taken,), daemon=True).start()
                    else:
                        taken.send(b"word")
                        taken.close()

    def _pour(self, taken: socket.socket) -> None:
        block = bytes(CHUNK)
        taken.setblocking(True)
        with taken:
            try:
                while not self._ended:
                    taken.sendall(block)
            except OSError:
                return

    def end(self) -> None:
        self._ended = True


@contextmanager
def world() -> Iterator[None]:
    """Client, node and endpoints, each in a namespace; all ways lead through the node."""
    for name in (CALLER, NODE, FAR):
        create_namespace(name)
    try:
        for name, link, net in ((CALLER, "in0", "198.51.100"), (FAR, "out0", "10.64.2")):
            run(["ip", "link", "add", link, "netns", NODE, "type", "veth", "peer", "name", "eth0", "netns", name])
            ip(NODE, f"addr add {net}.1/24 dev {link}", f"link set {link} up")
            ip(name, f"addr add {net}.7/24 dev eth0", "link set eth0 up", f"route add default via {net}.1")
        ip(FAR, *(f"addr add {address}/24 dev eth0" for address in ENDPOINTS))
        run(["sysctl", "-qw", "net.ipv4.ip_forward=1"], namespace=NODE)
        yield
    finally:
        for name in (CALLER, NODE, FAR):
            delete_namespace(name)


def ip(namespace: str, *commands: str) -> None:
    for command in commands:
        run(["ip", *command.split()], namespace=namespace)


def connect(where: tuple[str, int]) -> socket.socket:
    with in_namespace(CALLER):
        sock = socket.socket()
    sock.settimeout(10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.connect(where)
    return sock


def bulk(where: tuple[str, int], megabytes: int) -> float:
    """Megabytes per second of one stream."""
    with connect(where) as sock:
        buffer = memoryview(bytearray(CHUNK))
        sock.recv_into(buffer)
        left, start = megabytes << 20, time.perf_counter()
        while left > 0:
            left -= sock.recv_into(buffer)
        return megabytes / (time.perf_counter() - start)


@contextmanager
def leading(mode: str, services: int, port: int) -> Iterator[None]:
    """The world, with a mode's rules on the node: so many Services, of which LAST leads to this port of the first endpoint."""
    with world():
        ends = Endpoints(FAR)
        ends.start()
        sync, target = sync_of(mode, NODE)
        with in_namespace(NODE):
            sync.sync(store_with_last(services, ENDPOINTS[0], port).snapshot, None)
        yield
        ends.end()
        ends.join()
        if mode == "userspace":
            target.clean()
        if hasattr(target, "close"):
            target.close()
