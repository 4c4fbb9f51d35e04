"""What harms the node of a soak: kills, flushes by foreign hands, and floods."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

from tests.proxy.kernel.small_cluster import CLIENTS, CROWD, OUTSIDE
from tests.soak.gates import Findings, FlushWindow
from tests.soak.world import CHECK_PORT, UDP_PORT, VOID_PORT, SoakCluster, SoakLoad, node_address

from narthex.linux.namespaces import in_namespace
from narthex.linux.run import run
from narthex.testing.load import ClientRoute, OpenConnection

TRY_SECONDS = 0.3
"""Patience of one attempt while rules are missing. Longer ones would not notice when they are back."""
FLUSHES = {
    "nftables": (
        ("nft", "flush", "ruleset"),
        ("nft", "delete", "table", "ip", "narthex"),
        ("nft", "flush", "chain", "ip", "narthex", "nat-prerouting"),
        ("nft", "flush", "map", "ip6", "narthex", "endpoints"),
    ),
    "iptables": (
        ("nft", "flush", "ruleset"),
        ("iptables", "-t", "nat", "-F"),
        ("iptables", "-t", "nat", "-F", "KUBE-SERVICES"),
        ("ip6tables", "-t", "nat", "-F"),
    ),
}
PROBES = 20
HEALTHZ_PORT = 10256


def kill(cluster: SoakCluster, found: Findings) -> None:
    """kill -9 the proxy, and start it again."""
    found.did("kill")
    cluster.kill()
    cluster.run_proxy()


def flush(cluster: SoakCluster, load: SoakLoad, found: Findings, command: tuple[str, ...]) -> None:
    """Flush rules as another program does, and note the time until every route works again."""
    found.did("flush")
    window = FlushWindow(command=" ".join(command), began=time.monotonic())
    found.windows.append(window)
    try:
        run(command, namespace=cluster.world.node)
        for route in load.routes:
            cluster.wait(lambda: _works(route), f"{route.label} after {window.command}")  # noqa: B023
    finally:
        window.ended = time.monotonic()


def _works(route: ClientRoute) -> bool:
    try:
        line = OpenConnection(route, TRY_SECONDS)
    except OSError:
        return False
    line.close()
    return True


def udp_flood(cluster: SoakCluster, found: Findings, count: int) -> None:
    """Datagrams to a node port, each from a port of its own: as many conntrack entries."""
    found.did("UDP flood")
    for number, sock in enumerate(_sockets(cluster, socket.SOCK_DGRAM, count)):
        with sock, suppress(OSError):
            sock.bind((CROWD[number % len(CROWD)], 0))
            sock.sendto(b"flood", (node_address(), UDP_PORT))


def syn_flood(cluster: SoakCluster, found: Findings, count: int) -> None:
    """Connections that are given up at once, to endpoints that never answer."""
    found.did("SYN flood")
    for number, sock in enumerate(_sockets(cluster, socket.SOCK_STREAM, count)):
        with sock, suppress(OSError):
            sock.bind((CROWD[number % len(CROWD)], 0))
            sock.connect_ex((node_address(), VOID_PORT))


def silent_flood(cluster: SoakCluster, found: Findings, count: int) -> None:
    """Connections to health ports on which nobody says anything; probes beside them are answered."""
    found.did("silent connections")
    with ExitStack() as opened:
        for port in (HEALTHZ_PORT, CHECK_PORT):
            for number, sock in enumerate(_sockets(cluster, socket.SOCK_STREAM, count)):
                opened.enter_context(sock)
                sock.settimeout(TRY_SECONDS)
                with suppress(OSError):
                    sock.bind((CROWD[number % len(CROWD)], 0))
                    sock.connect((node_address(), port))
        for _ in range(PROBES):
            for port in (HEALTHZ_PORT, CHECK_PORT):
                found.probes += 1
                answer = _probe(cluster, port)
                if not answer.startswith("HTTP/1.1 200 "):
                    found.lost_probes.append(f"port {port}: {answer}")


def _probe(cluster: SoakCluster, port: int) -> str:
    """The first line of an answer, or why there was none."""
    (sock,) = _sockets(cluster, socket.SOCK_STREAM, 1)
    with sock:
        sock.settimeout(20.0)
        try:
            sock.bind((OUTSIDE[4], 0))
            sock.connect((node_address(), port))
            sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")
            answer = b"".join(iter(lambda: sock.recv(65536), b""))
        except OSError as error:
            return f"{type(error).__name__}: {error}"
    return answer.partition(b"\r\n")[0].decode()


def _sockets(cluster: SoakCluster, kind: socket.SocketKind, count: int) -> Iterator[socket.socket]:
    """Sockets of clients outside, one after the other, that do not wait."""
    for _ in range(count):
        with in_namespace(cluster.world.namespace(CLIENTS)):
            sock = socket.socket(socket.AF_INET, kind)
        sock.setblocking(False)
        yield sock
