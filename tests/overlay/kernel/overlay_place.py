"""Nodes on one link, with pods behind a bridge on each, and an overlay between them; all in namespaces."""

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from narthex.kube.messages import prepare_decoders
from narthex.linux.links import ip_batch
from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace, namespace_names
from narthex.linux.run import run
from narthex.overlay.program.loop import OverlaySettings
from narthex.overlay.program.part import OverlayPart, directory_origin
from narthex.testing.load import until

_numbers = itertools.count()
NODES = ("a", "b", "c")
PODS = 4
WAIT = 60.0
DONT_FRAGMENT = {socket.AF_INET: (socket.IPPROTO_IP, 10, 2), socket.AF_INET6: (socket.IPPROTO_IPV6, 23, 2)}
OVERHEAD = {socket.AF_INET: 28, socket.AF_INET6: 48}


def manifest(
    name: str, number: int, six: bool = False, annotations: dict[str, str] | None = None, ip: str | None = None
) -> dict[str, Any]:
    cidrs = [f"10.244.{number}.0/24", *([f"fd44:{number}::/64"] if six else [])]
    ips = [ip or f"192.0.2.{number}", *([f"fd02::{number}"] if six else [])]
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "annotations": annotations or {}},
        "spec": {"podCIDR": cidrs[0], "podCIDRs": cidrs},
        "status": {"addresses": [{"type": "InternalIP", "address": one} for one in ips]},
    }


class OverlayPlace:
    """Namespaces for nodes and pods, and a directory of Nodes. `conf` is net-conf.json."""

    def __init__(
        self, directory: Path, nodes: Sequence[str] = NODES, pods: int = PODS, six: bool = False, **conf: Any
    ) -> None:
        self.prefix = f"nxo{os.getpid()}x{next(_numbers)}"
        self.nodes = {name: number for number, name in enumerate(nodes, 1)}
        self.pods = pods
        self.six = six
        self.directory = directory
        self.manifests = directory / "manifests"
        self.conf = directory / "net-conf.json"
        networks: dict[str, object] = {"Network": "10.244.0.0/16"}
        if six:
            networks |= {"EnableIPv6": True, "IPv6Network": "fd44::/16"}
        self.write_conf(**{**networks, **conf})
        self._parts: dict[str, Any] = {}
        self._sockets: dict[Any, socket.socket] = {}

    def write_conf(self, **conf: Any) -> None:
        self.conf.write_text(json.dumps(conf))

    def __enter__(self) -> "OverlayPlace":
        # Several overlays read objects in this process.
        prepare_decoders()
        self.manifests.mkdir()
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._parts):
            self.end(name)
        for sock in self._sockets.values():
            sock.close()
        for name in namespace_names():
            if name == self.prefix or name.startswith(f"{self.prefix}-"):
                delete_namespace(name)

    def ns(self, name: str) -> str:
        """The namespace of a node ("a") or a pod ("a1")."""
        return f"{self.prefix}-{name}"

    def _build(self) -> None:
        create_namespace(self.ns("link"))
        ip_batch(self.ns("link"), ["link add br0 type bridge", "link set br0 up"])
        for name, number in self.nodes.items():
            self.put(manifest(name, number, self.six))
            self._build_node(name, number)

    def _build_node(self, name: str, number: int) -> None:
        node = self.ns(name)
        create_namespace(node)
        ip_batch(
            self.ns("link"),
            [f"link add to-{name} type veth peer name eth0 netns {node}", f"link set to-{name} master br0 up"],
        )
        commands = [f"addr add 192.0.2.{number}/24 dev eth0", "link set eth0 up", "route add default via 192.0.2.254"]
        commands += ["link add cni0 type bridge", f"addr add 10.244.{number}.1/24 dev cni0", "link set cni0 up"]
        if self.six:
            commands += [f"addr add fd02::{number}/64 dev eth0 nodad", f"addr add fd44:{number}::1/64 dev cni0 nodad"]
        ip_batch(node, commands)
        for pod in range(1, self.pods + 1):
            inside = self.ns(f"{name}{pod}")
            create_namespace(inside)
            ip_batch(
                node,
                [f"link add veth{pod} type veth peer name eth0 netns {inside}", f"link set veth{pod} master cni0 up"],
            )
            mtu = 1430 if self.six else 1450
            commands = [f"addr add 10.244.{number}.{pod + 1}/24 dev eth0", f"link set eth0 mtu {mtu} up"]
            commands.append(f"route add default via 10.244.{number}.1")
            if self.six:
                commands += [
                    f"addr add fd44:{number}::{pod + 1}/64 dev eth0 nodad",
                    f"route add default via fd44:{number}::1",
                ]
            ip_batch(inside, commands)

    def put(self, node: dict[str, Any]) -> None:
        """Write a Node."""
        (self.manifests / f"{node['metadata']['name']}.json").write_text(json.dumps(node))

    def settings(self, name: str, **more: Any) -> OverlaySettings:
        (self.directory / name).mkdir(exist_ok=True)
        usual = {"net_conf": str(self.conf), "subnet_file": str(self.directory / name / "subnet.env")}
        return OverlaySettings(node=name, **{**usual, **more})

    def start(self, *names: str, origin: Any = None, **more: Any) -> "OverlayPlace":
        """Run overlays, each in a thread inside its node; wait until they are ready."""
        for name in names or self.nodes:
            self.begin(name, origin, **more)
        for name in names or self.nodes:
            part = self.part(name)
            until(lambda part=part: part.ready, f"overlay on {name}", WAIT, lambda part=part: str(part.metrics.state()))  # type: ignore[misc]
        return self

    def begin(self, name: str, origin: Any = None, **more: Any) -> OverlayPart:
        """Run an overlay."""
        part = OverlayPart(self.settings(name, **more), origin or directory_origin(self.manifests))
        thread = threading.Thread(target=self._run, args=(name, part), daemon=True)
        self._parts[name] = part, thread
        thread.start()
        return part

    def _run(self, name: str, part: OverlayPart) -> None:
        with in_namespace(self.ns(name)):
            part.run()

    def part(self, name: str) -> Any:
        return self._parts[name][0]

    def end(self, name: str) -> None:
        part, thread = self._parts.pop(name)
        part.stop()
        thread.join(WAIT)
        assert not thread.is_alive()

    @contextlib.contextmanager
    def process(self, name: str, *argv: str) -> Iterator[Any]:
        """A command on a node as a process; `narthex overlay` when no other is given."""
        own = (
            "overlay",
            "--node",
            name,
            "--net-config-path",
            self.conf,
            "--subnet-file",
            self.directory / f"{name}.env",
        )
        command: list[Any] = [sys.executable, "-m", "narthex", *(argv or own), "--manifests", self.manifests]
        with in_namespace(self.ns(name)):
            running = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True)
        try:
            yield running
        finally:
            running.send_signal(signal.SIGKILL)
            running.communicate()

    def ip(self, name: str, words: str) -> list[str]:
        """What `ip WORDS` prints on a node, by line."""
        return [line.rstrip() for line in run(["ip", *words.split()], namespace=self.ns(name)).splitlines()]

    def fdb(self, name: str) -> list[str]:
        """What `bridge fdb` prints of entries that lead to other machines."""
        return [
            line.rstrip() for line in run(["bridge", "fdb"], namespace=self.ns(name)).splitlines() if " dst " in line
        ]

    def address(self, name: str, pod: int, family: socket.AddressFamily = socket.AF_INET) -> str:
        number = self.nodes[name]
        return f"10.244.{number}.{pod + 1}" if family == socket.AF_INET else f"fd44:{number}::{pod + 1}"

    def udp(self, name: str, pod: int, family: socket.AddressFamily = socket.AF_INET) -> socket.socket:
        """A UDP socket in a pod, port 7, whose packets may not be fragmented."""
        key = name, pod, family
        if key not in self._sockets:
            with in_namespace(self.ns(f"{name}{pod}")):
                sock = socket.socket(family, socket.SOCK_DGRAM)
            sock.setsockopt(*DONT_FRAGMENT[family])
            sock.bind((self.address(name, pod, family), 7))
            sock.setblocking(False)
            self._sockets[key] = sock
        return self._sockets[key]

    @contextlib.contextmanager
    def requests(self, per_second: float = 500.0) -> Iterator["Requests"]:
        """Requests between the first pods of all nodes, in each direction, while the block runs."""
        made = Requests([(self.udp(name, 1), self.address(name, 1)) for name in self.nodes], per_second)
        thread = threading.Thread(target=made.run, daemon=True)
        thread.start()
        try:
            yield made
        finally:
            made.stopping = True
            thread.join(WAIT)
            assert not thread.is_alive()

    def reach(
        self,
        size: int = 1450,
        family: socket.AddressFamily = socket.AF_INET,
        seconds: float = 20.0,
        nodes: Sequence[str] | None = None,
    ) -> Any:
        """Pairs of pods between which no packet of this size, IP header included, got through within a time."""
        pods = [(name, pod) for name in nodes or self.nodes for pod in range(1, self.pods + 1)]
        socks = {self.udp(*pod, family): pod for pod in pods}
        missing = {(one, other) for one in pods for other in pods if one != other}
        by_address = {self.address(*pod, family): pod for pod in pods}
        payload = bytes(size - OVERHEAD[family])

        def once() -> bool:
            for one, other in sorted(missing):
                try:
                    self.udp(*one, family).sendto(payload, (self.address(*other, family), 7))
                except OSError:
                    continue
            while ready := select.select(list(socks), [], [], 0.05)[0]:
                for sock in ready:
                    try:
                        data, sender = sock.recvfrom(65536)
                    except BlockingIOError:
                        # What came had a wrong checksum.
                        continue
                    if len(data) == len(payload):
                        missing.discard((by_address[sender[0]], socks[sock]))
            return not missing

        deadline = time.monotonic() + seconds
        while not once() and time.monotonic() < deadline:
            pass
        return missing


class Requests:
    """Datagrams between pods, each of which the other pod answers."""

    def __init__(self, ends: Sequence[tuple[socket.socket, str]], per_second: float) -> None:
        self.sent = 0
        self.stopping = False
        self._ends = ends
        self._rest = 1 / per_second
        self._missing: dict[int, float] = {}

    def run(self) -> None:
        pairs = itertools.cycle(itertools.permutations(range(len(self._ends)), 2))
        due = time.monotonic()
        while not self.stopping:
            one, other = next(pairs)
            self._missing[self.sent] = time.monotonic()
            self._ends[one][0].sendto(b"? %d" % self.sent, (self._ends[other][1], 7))
            self.sent += 1
            due = max(due + self._rest, time.monotonic() - 1)
            self._answer(due - time.monotonic())
        end = time.monotonic() + WAIT
        while self._missing and time.monotonic() < end:
            self._answer(1.0)
            if min(self._missing.values(), default=end) < time.monotonic() - WAIT / 2:
                break

    def _answer(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while True:
            ready = select.select([sock for sock, _ in self._ends], [], [], max(0.0, end - time.monotonic()))[0]
            for sock in ready:
                data, sender = sock.recvfrom(100)
                if data.startswith(b"? "):
                    sock.sendto(b"!" + data[1:], sender)
                else:
                    self._missing.pop(int(data[2:]), None)
            if not ready and time.monotonic() >= end:
                return

    def lost(self) -> int:
        """Requests without an answer."""
        return len(self._missing)
