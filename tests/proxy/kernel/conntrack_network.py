"""A small cluster whose endpoints answer nothing, and the node's tracked connections by `conntrack -L`."""

import contextlib
import re
import select
import socket
from collections.abc import Callable
from typing import Any

from tests.proxy.kernel.small_cluster import HERE, POD, PORT, THERE, service, slices

from narthex.linux.namespaces import in_namespace
from narthex.linux.run import run

UDP, TCP, SCTP = "UDP", "TCP", "SCTP"
NODE_PORT = 30053
OLD, NEW = (HERE[4][0], HERE[6][0]), (THERE[4][0], THERE[6][0])
FLOW = re.compile(
    r"(?P<protocol>udp|tcp|sctp) .*?src=(?P<source>\S+) dst=(?P<destination>\S+) sport=(?P<sport>\d+) dport=(?P<port>\d+)"
    r".*?src=(?P<end>\S+) dst=\S+ sport=(?P<end_port>\d+) dport=\d+"
)


def objects(
    protocol: str, states: dict[str, str], name: str = "web", number: int = 1, node_port: int = NODE_PORT, **spec: Any
) -> Any:
    """A Service with one port of the protocol, and its slices."""
    web = service(name, number, node_port, **spec)
    web["spec"]["ports"][0]["protocol"] = protocol
    made = slices(states, name)
    for one in made:
        one["ports"][0]["protocol"] = protocol
    return web, *made


class Network:
    """A small cluster whose endpoints answer nothing: it matters where packets arrive."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self._open = contextlib.ExitStack()
        self._servers: dict[Any, Any] = {}

    def close(self) -> None:
        self._open.close()

    def bound(self, site: Any, address: str, kind: int, port: int = 0) -> socket.socket:
        """A bound socket in a site's namespace, None is the node."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with in_namespace(self.world.node if site is None else self.world.namespace(site)):
            made = self._open.enter_context(socket.socket(family, kind))
        made.settimeout(30)
        made.bind((address, port))
        return made

    def serve(self, *addresses: str, port: int = PORT) -> None:
        """Endpoints for UDP and TCP; the kernel accepts connections by itself."""
        for address in addresses:
            site = self.world.layout.homes[address]
            self._servers[self.bound(site, address, socket.SOCK_DGRAM, port)] = address
            self.bound(site, address, socket.SOCK_STREAM, port).listen()

    def client(
        self, site: Any, source: str, destination: str, port: int, kind: int = socket.SOCK_DGRAM
    ) -> socket.socket:
        made = self.bound(site, source, kind)
        made.connect((destination, port))
        return made

    def reached(self, client: socket.socket, patience: float = 30) -> Any:
        """The endpoint at which one packet of the client arrives."""
        client.send(b"hello")
        there, _, _ = select.select(list(self._servers), [], [], patience)
        assert there, f"a packet to {client.getpeername()} arrived nowhere:\n{self.flows(4)}\n{self.cluster.log}"
        (server,) = there
        server.recv(100)
        return self._servers[server]

    def flows(self, version: int, protocol: str = "") -> set[Any]:
        """Tracked connections of the node, without what changes by itself: protocol, zone, both ways."""
        argv = ["conntrack", "-L", "-f", f"ipv{version}", *(["-p", protocol.lower()] if protocol else [])]
        lines = run(argv, namespace=self.world.node).splitlines()
        return {(*found.groups(), "zone" in line) for line in lines if (found := FLOW.search(line))}

    def ends(self, version: int, protocol: str) -> set[Any]:
        """Where connections of a protocol are answered from."""
        return {flow[5] for flow in self.flows(version, protocol)}

    def insert(self, protocol: str, destination: str, port: int, end: str, sport: int, *more: str) -> None:
        """An entry as a connection from the pod leaves it."""
        source = POD[6 if ":" in end else 4]
        state = {TCP: ["--state", "ESTABLISHED"], SCTP: ["--state", "ESTABLISHED"], UDP: []}[protocol]
        if protocol == SCTP:
            state += ["--orig-vtag", "1", "--reply-vtag", "2"]
        argv = ["conntrack", "-I", "-p", protocol.lower(), "-s", source, "-d", destination, "--sport", str(sport)]
        argv += ["--dport", str(port), "-r", end, "-q", source, "--reply-port-src", str(PORT)]
        argv += ["--reply-port-dst", str(sport), "-t", "600", *state, *more]
        run(argv, namespace=self.world.node)

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        self.cluster.wait(condition, what)
