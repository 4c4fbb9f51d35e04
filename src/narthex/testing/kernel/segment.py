"""Nodes with announcers and a client on one Ethernet segment, in network namespaces with real links.

Each node holds the announced addresses on its loopback link, where its kernel does not answer ARP for them, and runs a server
on UDP port 7 that returns the name of the node. The node that answers a client is the one that answered ARP or Neighbor
Discovery.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from narthex.lab.program.node_client import METRICS_PORT, get
from narthex.linux.links import ip_batch, set_sysctls
from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace, namespace_exists
from narthex.linux.run import run
from narthex.testing.load import EchoEndpoints, until

VIP, VIP_SIX = "192.0.2.200", "2001:db8::200"
CLIENT = "client"
KEY = "a key for tests only"
LINK = "lan0"
_PORT = 7
_ECHO_SECONDS = 5.0


class EthernetSegment:
    """The segment, as a context manager; its files are in a directory."""

    def __init__(self, directory: Path, prefix: str, nodes: Sequence[str] = ("a", "b", "c")) -> None:
        """Describe a segment whose namespaces have names with this prefix."""
        self.directory = directory
        self.manifests = directory / "manifests"
        self.prefix = f"{prefix}{os.getpid()}"
        self.nodes = {name: number for number, name in enumerate(nodes, 1)}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._servers = EchoEndpoints()
        self._serving = contextlib.ExitStack()

    def ns(self, name: str) -> str:
        """Return the name of the namespace of a node, of the client, or of the switch (`link`)."""
        return f"{self.prefix}-{name}"

    def __enter__(self) -> EthernetSegment:
        self.manifests.mkdir()
        (self.directory / "key").write_text(KEY + "\n")
        try:
            self._serving.enter_context(self._servers)
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.processes):
            self.kill(name)
        self._serving.close()
        for name in ("link", CLIENT, *self.nodes):
            if namespace_exists(self.ns(name)):
                delete_namespace(self.ns(name))

    def _build(self) -> None:
        create_namespace(self.ns("link"))
        ip_batch(self.ns("link"), ["link add br0 type bridge mcast_snooping 0", "link set br0 up"])
        for name, number in {**self.nodes, CLIENT: 99}.items():
            inside = self.ns(name)
            create_namespace(inside)
            ip_batch(
                self.ns("link"),
                [f"link add to-{name} type veth peer name {LINK} netns {inside}", f"link set to-{name} master br0 up"],
            )
            own = [f"addr add 192.0.2.{number}/24 dev {LINK}", f"addr add 2001:db8::{number:x}/64 dev {LINK} nodad"]
            # A link's own address would be settled after two seconds only.
            kept = {f"net/ipv6/conf/{LINK}/accept_dad": "0", f"net/ipv6/conf/{LINK}/keep_addr_on_down": "1"}
            set_sysctls(inside, kept)
            ip_batch(inside, [*own, f"link set {LINK} up"])
            if name != CLIENT:
                set_sysctls(inside, {"net/ipv4/conf/all/arp_ignore": "1", "net/ipv4/conf/all/arp_announce": "2"})
                ip_batch(inside, [f"addr add {VIP}/32 dev lo", f"addr add {VIP_SIX}/128 dev lo nodad"])
                for address in (VIP, VIP_SIX):
                    self._servers.answer_datagrams(inside, address, _PORT, name)
        for name in self.nodes:
            self.put(node(name, f"192.0.2.{self.nodes[name]}"))
        self.put(pool("lan", "192.0.2.192/28", "2001:db8::200/124"))
        self.put(service("web", VIP, VIP_SIX), endpoints("web", *self.nodes))

    def put(self, *objects: Mapping[str, Any]) -> None:
        """Write objects, each into a file of its own."""
        for each in objects:
            path = self.manifests / f"{each['kind']}-{each['metadata']['name']}.json".lower()
            fresh = path.with_suffix(".fresh")
            fresh.write_text(json.dumps(each))
            fresh.rename(path)

    def start(self, *names: str, origin: Sequence[str] = ()) -> None:
        """Start announcers. `origin` holds options for another source of objects than the manifests."""
        for name in names or self.nodes:
            argv = [sys.executable, "-m", "narthex", "node", "--no-proxy", "--announcer", "--hostname-override", name]
            argv += ["--announcer-key-file", str(self.directory / "key")]
            argv += origin or ("--manifests", str(self.manifests))
            with in_namespace(self.ns(name)), (self.directory / f"log-{name}").open("ab") as log:
                self.processes[name] = subprocess.Popen(argv, stdout=log, stderr=log)

    def ready(self, *names: str) -> None:
        """Wait until these announcers know each other and have started to decide."""
        names = names or tuple(self.processes)

        def done(name: str) -> bool:
            """Return True if an announcer reports all its peers as alive, holds addresses, and has stopped listening."""
            state = self.state(name)
            alive = {each["node"] for each in state.get("peers", ()) if each["state"] == "alive"}
            return alive >= {*names} - {name} and not state.get("listening", True) and bool(state["addresses"])

        for name in names:
            until(lambda name=name: done(name), f"announcer on {name}", also=self.logs)  # type: ignore[misc]

    def steady(self, *names: str) -> None:
        """Wait until no announcer waits any more, and one holds all addresses."""
        self.ready(*names)
        for name in names or tuple(self.processes):
            until(lambda name=name: not self.state(name)["standingBack"], f"{name} to be steady", also=self.logs)  # type: ignore[misc]
        until(lambda: len(self.holders()) == 1, "one holder", also=self.logs)

    def kill(self, name: str) -> None:
        """Kill an announcer with SIGKILL."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def end(self, name: str) -> int:
        """Stop an announcer with SIGTERM, and return its exit status."""
        process = self.processes.pop(name)
        process.send_signal(signal.SIGTERM)
        return process.wait(30)

    def cut(self, name: str, *, up: bool = False) -> None:
        """Disconnect a node from the switch, or connect it again."""
        ip_batch(self.ns("link"), [f"link set to-{name} {'up' if up else 'down'}"])

    def state(self, name: str) -> dict[str, Any]:
        """Return the status of an announcer, or an empty mapping if it does not answer."""
        try:
            found = json.loads(self._http(name, "/announcer"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) and "addresses" in found else {}

    def metrics(self, name: str) -> str:
        """Return the metrics of an announcer."""
        return self._http(name, "/metrics")

    def _http(self, name: str, path: str) -> str:
        return get(self.ns(name), METRICS_PORT, path, 5.0)[1].decode()

    def address(self, name: str, address: str = VIP) -> dict[str, Any]:
        """Return what an announcer reports about an address."""
        found = (each for each in self.state(name).get("addresses", ()) if each["address"] == address)
        return next(found, {})

    def holders(self, address: str = VIP) -> list[str]:
        """Return the nodes whose announcers report that they answer for an address."""
        return [name for name in self.processes if self.address(name, address).get("answers")]

    def logs(self) -> str:
        """Return the ends of all logs."""
        found = sorted(self.directory.glob("log-*"))
        return "\n".join(f"{path.name}:\n{path.read_text()[-4000:]}" for path in found)

    def ask(self, address: str = VIP, *, fresh: bool = True, seconds: float = _ECHO_SECONDS) -> str:
        """Return the node that answers at an address, or an empty text if there is no answer in time.

        With `fresh`, the client's kernel first has to resolve the address. The datagram is sent again each second, since the neighbor
        tables that many tests share may lose one.
        """
        if fresh:
            self.forget(address)
        deadline = time.monotonic() + seconds
        with self.client(address) as sock:
            while (rest := deadline - time.monotonic()) > 0:
                sock.settimeout(min(rest, 1.0))
                try:
                    sock.send(b"?")
                    return sock.recv(100).decode()
                except TimeoutError:
                    continue
                except OSError:
                    # The kernel has given up looking; it looks again.
                    time.sleep(min(rest, 0.01))
        return ""

    def forget(self, address: str = VIP) -> None:
        """Remove an address from the client's neighbor table."""
        words = ["ip", "neigh", "flush", "to", address, "dev", LINK]
        run(words, namespace=self.ns(CLIENT))

    @contextlib.contextmanager
    def client(self, address: str = VIP) -> Iterator[socket.socket]:
        """Open a socket of the client that is connected to an address."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with in_namespace(self.ns(CLIENT)):
            sock = socket.socket(family, socket.SOCK_DGRAM)
        with sock:
            sock.connect((address, _PORT))
            yield sock


class RequestStream:
    """Sends requests of the client one after the other in a thread, and records the answers."""

    def __init__(
        self,
        segment: EthernetSegment,
        address: str = VIP,
        *,
        pause: float = 0.01,
        fresh: bool = False,
        wait: float = 0.0,
    ) -> None:
        """Prepare a stream.

        With `fresh`, the client's kernel resolves the address for each request. `wait` limits the seconds for each answer; 0 means long
        enough for an answer, with or without resolution.
        """
        self._segment = segment
        self._address = address
        self._pause = pause
        self._fresh = fresh
        self._wait = wait or (_ECHO_SECONDS if fresh else 0.02)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.seen: list[tuple[float, str, float]] = []
        """When each was sent, on the monotonic clock, which node answered (empty when none did), and when."""

    def __enter__(self) -> RequestStream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            sent = time.monotonic()
            name = self._segment.ask(self._address, fresh=self._fresh, seconds=self._wait)
            self.seen.append((sent, name, time.monotonic()))
            self._stop.wait(self._pause)

    def first_answer_after(self, moment: float, by: Sequence[str]) -> float | None:
        """Return the seconds from a moment to the first answer by one of these nodes to a later request."""
        return next((came - moment for sent, name, came in self.seen if sent >= moment and name in by), None)


def node(name: str, address: str, **fields: Any) -> dict[str, Any]:
    """Return a Node manifest."""
    status = {"addresses": [{"type": "InternalIP", "address": address}]}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, **fields}, "spec": {}, "status": status}


def pool(name: str, *addresses: str) -> dict[str, Any]:
    """Return an IPAddressPool manifest."""
    meta = {"name": name, "namespace": "metallb-system"}
    spec = {"addresses": list(addresses)}
    return {"apiVersion": "metallb.io/v1beta1", "kind": "IPAddressPool", "metadata": meta, "spec": spec}


def service(name: str, *addresses: str, **spec: Any) -> dict[str, Any]:
    """Return the manifest of a Service whose status holds these addresses."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "shop"},
        "spec": {"type": "LoadBalancer", "clusterIP": "10.96.0.9", "clusterIPs": ["10.96.0.9"], "ipFamilies": ["IPv4"],
                 "ports": [{"port": _PORT, "protocol": "UDP"}], **spec},
        "status": {"loadBalancer": {"ingress": [{"ip": each, "ipMode": "VIP"} for each in addresses]}},
    }  # fmt: skip


def endpoints(name: str, *nodes: str) -> dict[str, Any]:
    """Return an EndpointSlice manifest with one endpoint on each of these nodes."""
    ends = [
        {"addresses": [f"10.244.{place}.2"], "conditions": {"ready": True}, "nodeName": each}
        for place, each in enumerate(nodes)
    ]
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": f"{name}-1", "namespace": "shop", "labels": {"kubernetes.io/service-name": name}},
        "addressType": "IPv4",
        "endpoints": ends,
        "ports": [{"port": _PORT, "protocol": "UDP"}],
    }
