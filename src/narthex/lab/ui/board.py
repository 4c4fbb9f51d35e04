"""The current state of the page: one thread follows the objects, another one counts connections."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from narthex.model import EndpointSlice, Event, NamespacedName, Node, Pod, Problem, Service, Slices, Snapshot, Store
from narthex.model import Protocol as Transport

ConnectionCounts = dict[str, int]
"""New connections by Service (`shop/web`) since the start of the nodes' proxies."""

COUNT_SECONDS = 1.0
_COALESCE_SECONDS = 0.2
"""Changes are drawn together when they come closer than this."""
_AGAIN_SECONDS = 2.0


class Source(Protocol):
    """Objects as events: manifests or an API server."""

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Objects that could not be decoded."""

    def scan(self) -> list[Event]:
        """Return all objects as events."""

    def changes(self, stop: threading.Event) -> Iterator[list[Event]]:
        """Yield later events, until `stop` is set."""


class Board:
    """The current state. Its methods are thread-safe; `begin` and `end` are called once."""

    def __init__(
        self,
        title: str,
        source: Source,
        count: Callable[[], ConnectionCounts | None] | None = None,
        faults: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """Create a board.

        `count` asks the nodes for connections and returns None if none can be asked; `faults` returns what is known to be broken.
        """
        self._title = title
        self._source = source
        self._count = count
        self._faults = faults
        self._store = Store()
        self._lock = threading.Lock()
        self._turn = 0
        self._messages: dict[str, tuple[int, bytes]] = {}
        """By kind of event: when it was put up, and its JSON."""
        self.stop = threading.Event()
        self._threads = [threading.Thread(target=self._follow, name="picture", daemon=True)]
        if count is not None:
            self._threads.append(threading.Thread(target=self._count_on, name="counts", daemon=True))

    def begin(self) -> None:
        """Start to follow the objects."""
        self._draw()
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """End the threads and all streams of events."""
        self.stop.set()

    @property
    def snapshot(self) -> Snapshot:
        """The current objects."""
        return self._store.snapshot

    def news(self, since: int) -> tuple[int, Sequence[tuple[str, bytes]]]:
        """Return the current turn, and kind and JSON of each message that is newer than turn `since`."""
        with self._lock:
            return self._turn, [(kind, body) for kind, (turn, body) in self._messages.items() if turn > since]

    def _put(self, kind: str, content: object) -> None:
        body = msgspec.json.encode(content)
        with self._lock:
            if kind not in self._messages or self._messages[kind][1] != body:
                self._turn += 1
                self._messages[kind] = (self._turn, body)

    def _draw(self) -> None:
        drawn = picture(self._store.snapshot)
        # A cluster may have many invalid objects; the first ones are enough.
        problems = [str(problem) for problem in self._source.problems[:20]]
        self._put("picture", {"title": self._title, "problems": problems, "counted": self._count is not None, **drawn})

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            self._store.apply(event)
        self._draw()

    def _follow(self) -> None:
        while not self.stop.is_set():
            try:
                self._take(self._source.scan())
                for events in self._source.changes(self.stop):
                    self._take(events)
                    self.stop.wait(_COALESCE_SECONDS)
            except OSError as error:
                self._put("trouble", {"message": f"the objects cannot be followed: {error}"})
            self.stop.wait(_AGAIN_SECONDS)

    def _count_on(self) -> None:
        assert self._count is not None, "only then there is a thread for it"
        while not self.stop.is_set():
            found = self._count()
            self._put("counts", {"known": found is not None, "services": found or {}})
            self._put("faults", self._faults())
            self.stop.wait(COUNT_SECONDS)


Picture = dict[str, Any]
"""`nodes`, `pods`, `services`, `slices`: lists of mappings, sorted by name."""

_MOST_ENDPOINTS = 1000
"""Endpoints of a slice, as in Kubernetes."""


def picture(snapshot: Snapshot) -> Picture:
    """Return the picture of a cluster, including pods that only EndpointSlices name."""
    pods = {key: _pod(pod) for key, pod in snapshot.pods.items()}
    ports: dict[NamespacedName, set[str]] = {}
    for each in (each for slices in snapshot.slices.values() for each in slices.values()):
        for endpoint in each.endpoints:
            if endpoint.target:
                key = NamespacedName(each.namespace, endpoint.target)
                state = "ready" if endpoint.ready else "terminating" if endpoint.terminating else "not ready"
                made = {"node": endpoint.node_name, "addresses": [endpoint.address], "state": state}
                pods.setdefault(key, {"key": str(key), **made})
                ports.setdefault(key, set()).update(_target_ports(each))
    for key, pod in pods.items():
        pod["ports"] = sorted(ports.get(key, ()))
    services = snapshot.services
    open_ports = (port for service in services.values() for port in service.ports if port.node_port)
    node_ports = sorted({_port(port.node_port, port.protocol) for port in open_ports})
    nodes = {node.name: _node(node, node_ports) for node in snapshot.nodes.values()}
    for pod in pods.values():
        if pod["node"] and pod["node"] not in nodes:
            nodes[pod["node"]] = _node(Node(name=pod["node"]), node_ports)
    return {
        "nodes": [nodes[name] for name in sorted(nodes)],
        "pods": [pods[key] for key in sorted(pods)],
        "services": [_service(service, snapshot.slices.get(key)) for key, service in sorted(services.items())],
        "slices": [_slice(each) for _, slices in sorted(snapshot.slices.items()) for _, each in sorted(slices.items())],
    }


def _port(number: int | None, protocol: Transport) -> str:
    return f"{number}/{protocol.lower}"


def _target_ports(each: EndpointSlice) -> list[str]:
    return [_port(port.port, port.protocol) for port in each.ports if port.port]


def _node(node: Node, ports: list[str]) -> dict[str, Any]:
    addresses = [*node.internal_ips, *node.external_ips]
    return {"key": node.name, "ready": node.ready, "addresses": addresses, "ports": ports}


_ENDED = {"Succeeded": "completed", "Failed": "failed"}
"""States of pods that have ended, by their phases."""


def _pod(pod: Pod) -> dict[str, Any]:
    state = "terminating" if pod.deletion_timestamp else "ready" if pod.ready else _ENDED.get(pod.phase, "not ready")
    return {"key": str(pod.key), "node": pod.spec.node_name, "addresses": list(pod.ips), "state": state}


def _service(service: Service, slices: Slices | None) -> dict[str, Any]:
    endpoints = (endpoint for each in (slices or {}).values() for endpoint in each.endpoints)
    ready = {endpoint.target or endpoint.address for endpoint in endpoints if endpoint.ready}
    cluster_ips, balancers = (ip for ip in service.cluster_ips if ip != "None"), (each.ip for each in service.ingress)
    return {
        "key": str(service.key),
        "type": "headless" if service.headless else service.type,
        "addresses": [*cluster_ips, *service.external_ips, *balancers],
        "name": service.external_name,
        "ports": [
            {"name": port.name, "port": _port(port.port, port.protocol), "nodePort": port.node_port}
            for port in service.ports
        ],
        "ready": len(ready),
    }


def _slice(each: EndpointSlice) -> dict[str, Any]:
    return {
        "key": str(each.key),
        "service": str(each.service),
        "family": each.family.label if each.family else "FQDN",
        "ports": _target_ports(each),
        "endpoints": [
            {
                "address": endpoint.address,
                "pod": f"{each.namespace}/{endpoint.target}" if endpoint.target else "",
                "node": endpoint.node_name,
                "ready": endpoint.ready,
                "terminating": endpoint.terminating,
            }
            for endpoint in each.endpoints[:_MOST_ENDPOINTS]
        ],
    }
