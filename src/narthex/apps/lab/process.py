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
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from narthex.apps.lab.echo import EchoServer
from narthex.apps.lab.nodes import Nodes
from narthex.apps.lab.pods import PodRunner, make_network
from narthex.apps.lab.report import describe
from narthex.apps.lab.state import LabError, LabState, StateDirectory
from narthex.cni.errors import CniError
from narthex.host.links import LinkError
from narthex.host.processes import identify
from narthex.lab import controllers, topology
from narthex.lab.cluster_dns import with_dns
from narthex.lab.controllers import Cluster
from narthex.lab.encode import manifest_list
from narthex.lab.pod_network import NONE
from narthex.lab.workloads import LabPod, Scale
from narthex.model.names import NamespacedName
from narthex.sources.manifests import ManifestSource
from narthex.state.store import Snapshot, Store

_Done = TypeVar("_Done")

TERMINATION_SECONDS = 0.5
"""A pod that goes away answers this long, while the nodes learn of it."""
_RETRY_SECONDS = 1.0
_ERROR_PAUSE_SECONDS = 0.2
_SETTLE_SECONDS = 10.0
_AT_ONCE = 4
"""So many nodes' pods are made at once: a plugin waits for the kernel now and then."""


class LabProcess:
    """One lab. `start` makes it, `run` keeps it."""

    def __init__(self, state: StateDirectory, source: Path, nodes: int, mode: str, overlay: str) -> None:
        self._directory = state
        self._source = ManifestSource(source)
        self._store = Store()
        self._scales: dict[NamespacedName, Scale] = {}
        self._echo = EchoServer()
        members = topology.nodes(state.name, nodes)
        self._cluster = Cluster(nodes=members)
        self._runner = PodRunner(state, members, self._echo)
        self._nodes = Nodes(state, members, mode, overlay)
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
        # Without an overlay they have nothing to read before all pods are there, so their first sync is the one to wait for.
        self.state = msgspec.structs.replace(self.state, processes=self._nodes.start())
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
        self._turn()
        if request is not None and "error" not in answer:
            self._settle()
        return answer

    @property
    def _wanted(self) -> Snapshot:
        """What the user wants, and what every cluster has."""
        return with_dns(self._store.snapshot, self._cluster.nodes)

    # One turn: what is wanted, what there is, what the nodes read.

    def _turn(self) -> None:
        for event in self._source.scan():
            self._store.apply(event)
        wanted = self._wanted
        self._cluster = controllers.reconcile(wanted, self._scales, self._cluster, _now())
        self._retry_at = None
        self._start_pods()
        self._remove_pods()
        content = manifest_list(controllers.objects(wanted, self._cluster))
        if content != self._written:
            self._written, self._written_at = content, time.time()
            self._directory.write_manifests(content)
        self._publish()

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
        due = [*self._gone_at.values(), *([self._retry_at] if self._retry_at is not None else [])]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _settle(self) -> None:
        """Return when no pod comes or goes and all nodes that run have written the present."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while self._gone_at and time.monotonic() < deadline:
            time.sleep(self._next_due() or 0.0)
            self._turn()
        self._nodes.await_sync(self._written_at)

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


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
