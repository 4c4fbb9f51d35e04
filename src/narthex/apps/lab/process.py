"""The process that is a lab while it runs: it makes the network and the pods, starts the nodes' processes, and keeps the
cluster as the user's manifests want it.

One thread owns everything. Others only tell it that something happened: a manifest changed, somebody asks for a
scale. It has threads of its own make pods of different nodes side by side. The echo server has one, too.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from narthex.apps.lab.echo import EchoServer
from narthex.apps.lab.nodes import Nodes
from narthex.apps.lab.pods import PodRunner, make_network, wire
from narthex.apps.lab.report import describe
from narthex.apps.lab.state import LabError, LabState, StateDirectory
from narthex.cni.errors import CniError
from narthex.host.links import LinkError
from narthex.host.processes import identify
from narthex.lab import controllers, topology
from narthex.lab.cluster_dns import with_dns
from narthex.lab.controllers import Cluster, with_pools
from narthex.lab.encode import manifest_list
from narthex.lab.pod_network import NONE
from narthex.lab.topology import LabNode
from narthex.lab.workloads import LabPod, Scale
from narthex.model.names import NamespacedName
from narthex.model.objects import IPAddressPool, Service
from narthex.model.problem import Problem
from narthex.sources.manifests import ManifestSource
from narthex.state.store import Snapshot, Store

_Done = TypeVar("_Done")

TERMINATION_SECONDS = 0.5
"""A pod that goes away answers this long, while the nodes learn of it."""
_RETRY_SECONDS = 1.0
_ERROR_PAUSE_SECONDS = 0.2
_SETTLE_SECONDS = 10.0
LOST_SECONDS = 2.0
"""So long after a node's death the cluster learns of it, where Kubernetes takes 40 s (`node-monitor-grace-period`)."""
_AT_ONCE = 4
"""So many nodes' pods are made at once: a plugin waits for the kernel now and then."""


class LabProcess:
    """One lab. `start` makes it, `run` keeps it."""

    def __init__(
        self, state: StateDirectory, source: Path, nodes: int, mode: str, overlay: str, pools: Sequence[str] = ()
    ) -> None:
        """`pools`: ranges of addresses for load balancers, besides the pools among the manifests."""
        self._directory = state
        self._source = ManifestSource(source)
        self._store = Store()
        self._scales: dict[NamespacedName, Scale] = {}
        self._echo = EchoServer()
        members = topology.nodes(state.name, nodes)
        self._cluster = Cluster(nodes=members)
        self._runner = PodRunner(state, members, self._echo)
        self._nodes = Nodes(state, members, mode, overlay)
        self._pools = _pools(pools, members)
        self._pool_networks: tuple[str, ...] = ()
        """Of load balancers, as the network has them."""
        self._dead_until: dict[str, float] = {}
        """Nodes that have died, and when the cluster learns of it."""
        self._pod_problems: dict[NamespacedName, str] = {}
        self._gone_at: dict[NamespacedName, float] = {}
        self._retry_at: float | None = None
        self._written = b""
        self._written_at = 0.0
        self._requests: queue.Queue[_Request | None] = queue.Queue()
        own = identify(os.getpid())
        assert own is not None, "this process runs"
        self.state = LabState(
            name=state.name,
            mode=mode,
            overlay=overlay,
            source=str(source),
            since=_now(),
            controller=own,
            nodes=members,
            outside=topology.outside_namespace(state.name),
        )

    def start(self) -> None:
        """Everything, up to the first sync of every node. Raises LabError, LinkError or OSError."""
        self._directory.write(self.state)
        make_network(self._directory.name, self._cluster.nodes, self.state.overlay)
        self._runner.install()
        self._scan()
        balancing = bool(self._wanted.address_pools)
        # Without an overlay they have nothing to read before all pods are there, so their first sync is the one to wait for.
        processes = self._nodes.start(announce=balancing)
        self.state = msgspec.structs.replace(self.state, processes=processes, balancing=balancing)
        self._directory.write(self.state)
        threading.Thread(target=self._echo.serve, name="echo", daemon=True).start()
        if self.state.overlay != NONE:
            self._directory.write_manifests(manifest_list(controllers.objects(Store().snapshot, self._cluster)))
            self._nodes.await_overlay()
        self._nodes.await_agents()
        self._turn()
        self._nodes.await_first()
        if self.state.overlay != NONE:
            self._nodes.await_sync(self._written_at)
        self._await_answers()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        self._listen()
        self.state = msgspec.structs.replace(self.state, running=True)
        self._publish()

    def run(self) -> None:
        """Follow the manifests and serve requests, until the process is killed: `lab down` clears up."""
        while True:
            try:
                request = self._requests.get(timeout=self._next_due())
            except queue.Empty:
                request = None
            try:
                answer = self._serve(request)
            except Exception as error:
                kind = "" if isinstance(error, LabError) else f"{type(error).__name__}: "
                answer = {"error": f"{kind}{error}"}
                print(f"{_now()} {answer['error']}", file=sys.stderr, flush=True)
                # What is due stays due; without a pause this would turn as fast as it can.
                time.sleep(_ERROR_PAUSE_SECONDS)
            if request is not None:
                request.answer(answer)

    def _serve(self, request: _Request | None) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        if request is not None and "scale" in request.content:
            answer = self._scale(**request.content["scale"])
        if request is not None and "kill" in request.content:
            answer = self._kill(**request.content["kill"])
        self._turn()
        # Who kills a node wants to see what follows, and not wait until it is over.
        if request is not None and "error" not in answer and "kill" not in request.content:
            self._settle()
        return answer

    @property
    def _wanted(self) -> Snapshot:
        """What the user wants, and what every cluster has."""
        return with_pools(with_dns(self._store.snapshot, self._cluster.nodes), self._pools)

    # One turn: what is wanted, what there is, what the nodes read.

    def _scan(self) -> None:
        for event in self._source.scan():
            self._store.apply(event)

    def _turn(self) -> None:
        self._scan()
        wanted, before = self._wanted, self._cluster.services
        self._cluster = controllers.reconcile(wanted, self._scales, self._see_dead(), _now())
        if wanted.address_pools:
            self._cluster = self._balanced(wanted, before)
        self._retry_at = None
        self._start_pods()
        self._remove_pods()
        content = manifest_list(controllers.objects(wanted, self._cluster))
        if content != self._written:
            self._written, self._written_at = content, time.time()
            self._directory.write_manifests(content)
        self._publish()

    def _see_dead(self) -> Cluster:
        """The cluster, which by now knows of the nodes that died a while ago."""
        now = time.monotonic()
        known = frozenset(name for name, moment in self._dead_until.items() if moment <= now)
        for name in known:
            del self._dead_until[name]
        return msgspec.structs.replace(self._cluster, lost=self._cluster.lost | known)

    def _balanced(self, wanted: Snapshot, before: Mapping[NamespacedName, Service]) -> Cluster:
        """The cluster with addresses for its load balancers, after the network leads to them."""
        from narthex.apps.lab import balancers

        problems = self._cluster.problems
        if not self.state.balancing:
            return msgspec.structs.replace(
                self._cluster, problems=(*problems, *map(_too_late, wanted.address_pools.values()))
            )
        made = balancers.balance(wanted, self._cluster, before)
        if made.networks != self._pool_networks:
            have, want = set(self._pool_networks), set(made.networks)
            for wiring in topology.wire_balancers(self.state.name, sorted(have - want), sorted(want - have)):
                wire(wiring)
            self._pool_networks = made.networks
        return msgspec.structs.replace(self._cluster, services=made.services, problems=(*problems, *made.problems))

    def _await_answers(self) -> None:
        if self.state.balancing:
            from narthex.apps.lab.balancers import to_answer

            self._nodes.await_answers(to_answer(self._cluster.services.values()))

    def _start_pods(self) -> None:
        new = [pod for pod in self._cluster.pods if pod.placed and not pod.pod.ready and not pod.terminating]
        for pod, made in self._each(new, self._runner.start):
            if isinstance(made, BaseException):
                self._pod_problems[pod.key] = str(made)
                self._retry_at = time.monotonic() + _RETRY_SECONDS
            else:
                self._pod_problems.pop(pod.key, None)
                running = msgspec.structs.replace(pod.pod, ips=made, ready=True, phase="Running")
                self._cluster = controllers.with_pod(self._cluster, msgspec.structs.replace(pod, pod=running))

    def _remove_pods(self) -> None:
        now = time.monotonic()
        leaving = [pod for pod in self._cluster.pods if pod.terminating]
        for pod in leaving:
            # Nobody uses a pod that never was ready, so it may go at once.
            self._gone_at.setdefault(pod.key, now + TERMINATION_SECONDS if pod.pod.ready else now)
        due = [pod for pod in leaving if self._gone_at[pod.key] <= now]
        for pod, error in self._each(due, self._runner.stop):
            if isinstance(error, BaseException):
                # What the plugins still hold of it they take back by themselves: its namespace is gone.
                print(f"{_now()} Pod {pod.key}: {error}", file=sys.stderr, flush=True)
            del self._gone_at[pod.key]
            self._pod_problems.pop(pod.key, None)
        self._cluster = controllers.without_pods(self._cluster, frozenset(pod.key for pod in due))
        if due:
            # A replacement may have waited for the name or the room.
            self._retry_at = now

    def _each(self, pods: Iterable[LabPod], do: Callable[[LabPod], _Done]) -> list[tuple[LabPod, _Done | Exception]]:
        """Do something with pods, one after the other on each node and with all nodes side by side; what came of it."""
        by_node: dict[str, list[LabPod]] = {}
        for pod in pods:
            by_node.setdefault(pod.pod.spec.node_name, []).append(pod)

        def in_turn(some: list[LabPod]) -> list[tuple[LabPod, _Done | Exception]]:
            return [(pod, _tried(do, pod)) for pod in some]

        if len(by_node) < 2:
            return [each for some in by_node.values() for each in in_turn(some)]
        with ThreadPoolExecutor(min(_AT_ONCE, len(by_node))) as pool:
            return [each for done in pool.map(in_turn, by_node.values()) for each in done]

    def _next_due(self) -> float | None:
        """Seconds until a turn is due by itself; None: only when something happens."""
        due = [
            *self._gone_at.values(),
            *self._dead_until.values(),
            *([self._retry_at] if self._retry_at is not None else []),
        ]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _settle(self) -> None:
        """Return when no pod comes or goes, the cluster knows of every dead node, and all that run have written the present."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while (self._gone_at or self._dead_until) and time.monotonic() < deadline:
            time.sleep(self._next_due() or 0.0)
            self._turn()
        self._nodes.await_sync(self._written_at)
        self._await_answers()

    def _kill(self, node: str) -> dict[str, Any]:
        found = next((each for each in self._cluster.nodes if each.name == node), None)
        if found is None:
            return {
                "error": f"there is no node {node!r}; there are: {', '.join(each.name for each in self._cluster.nodes)}"
            }
        if node in self.state.killed:
            return {"error": f"{node} is dead already"}
        wire(topology.wire_dead(self.state.name, found))
        self._nodes.kill(node)
        self._dead_until[node] = time.monotonic() + LOST_SECONDS
        self.state = msgspec.structs.replace(self.state, killed=(*self.state.killed, node))
        return {}

    def _scale(self, namespace: str, name: str, replicas: int) -> dict[str, Any]:
        key = NamespacedName(namespace, name)
        deployment = self._store.snapshot.deployments.get(key)
        if deployment is None:
            others = ", ".join(str(key) for key in sorted(self._store.snapshot.deployments)) or "none"
            return {"error": f"there is no Deployment {key} in this lab; there are: {others}"}
        self._scales[key] = Scale(replicas=replicas, manifest=deployment.replicas)
        return {}

    # What others see, and how they ask.

    def _publish(self) -> None:
        self._nodes.collect()
        self.state = describe(
            self.state,
            self._wanted,
            self._cluster,
            self._scales,
            problems=(*self._source.problems, *self._cluster.problems),
            pod_problems=self._pod_problems,
            network_namespace=self._runner.network_namespace,
        )
        self._directory.write(self.state)

    def _watch(self) -> None:
        """Ring whenever the manifests change. With a source of its own, because one must not be used by two threads;
        its first scan is news to it, so a change from before the watch began rings too."""
        for _ in ManifestSource(self.state.source).changes(threading.Event()):
            self._requests.put(None)

    def _listen(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(str(self._directory.control))
        sock.listen()
        threading.Thread(target=self._accept, args=(sock,), name="control", daemon=True).start()

    def _accept(self, sock: socket.socket) -> None:
        while True:
            connection, _ = sock.accept()
            threading.Thread(target=self._converse, args=(connection,), name="request", daemon=True).start()

    def _converse(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream:
            request = _Request(msgspec.json.decode(stream.readline()))
            self._requests.put(request)
            connection.sendall(msgspec.json.encode(request.wait()) + b"\n")


class _Request:
    """A question from another process, on its way between two threads."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content
        self._answer: dict[str, Any] = {}
        self._answered = threading.Event()

    def answer(self, content: dict[str, Any]) -> None:
        """Say it; the waiting thread goes on."""
        self._answer = content
        self._answered.set()

    def wait(self) -> dict[str, Any]:
        """What was answered."""
        self._answered.wait()
        return self._answer


def _tried(do: Callable[[LabPod], _Done], pod: LabPod) -> _Done | Exception:
    try:
        return do(pod)
    except (OSError, LinkError, CniError) as error:
        return error


def _pools(ranges: Sequence[str], members: Sequence[LabNode]) -> tuple[IPAddressPool, ...]:
    if not ranges:
        return ()
    from narthex.apps.lab.balancers import pools_of

    return pools_of(ranges, members)


def _too_late(pool: IPAddressPool) -> Problem:
    message = "came when the nodes ran without announcers, so nothing is given from it: take the lab down and bring it up again"
    return Problem(origin=pool.origin, object=f"IPAddressPool {pool.key}", message=message, severity="warning")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
