"""The process that is a lab while it runs: it makes the network and the pods, starts the proxies, and keeps the
cluster as the user's manifests want it.

One thread owns everything. Others only tell it that something happened: a manifest changed, somebody asks for a
scale. The echo server has a thread of its own.
"""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

import narthex
from narthex.apps.lab.ask import HEALTH_PORT, METRICS_PORT, healthy, synced_since
from narthex.apps.lab.echo import EchoServer
from narthex.apps.lab.pods import PodRunner, make_network
from narthex.apps.lab.report import describe
from narthex.apps.lab.state import LabError, LabState, ProxyRecord, StateDirectory
from narthex.host import netns
from narthex.host.links import LinkError
from narthex.host.processes import identify
from narthex.lab import controllers, topology
from narthex.lab.controllers import Cluster
from narthex.lab.encode import manifest_list
from narthex.lab.workloads import Scale
from narthex.model.names import NamespacedName
from narthex.sources.manifests import ManifestSource
from narthex.state.store import Store

TERMINATION_SECONDS = 0.5
"""A pod that goes away answers this long, while the proxies learn of it."""
_RETRY_SECONDS = 1.0
_ERROR_PAUSE_SECONDS = 0.2
_FIRST_SYNC_SECONDS = 30.0
_SYNC_SECONDS = 10.0
_POLL_SECONDS = 0.01


class LabProcess:
    """One lab. `start` makes it, `run` keeps it."""

    def __init__(self, state: StateDirectory, source: Path, nodes: int, mode: str) -> None:
        self._directory = state
        self._source = ManifestSource(source)
        self._store = Store()
        self._scales: dict[NamespacedName, Scale] = {}
        self._echo = EchoServer()
        members = topology.nodes(state.name, nodes)
        self._cluster = Cluster(nodes=members)
        self._runner = PodRunner(state.name, members, self._echo)
        self._proxies: dict[str, subprocess.Popen[bytes]] = {}
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
            source=str(source),
            since=_now(),
            controller=own,
            nodes=members,
            outside=topology.outside_namespace(state.name),
        )

    def start(self) -> None:
        """Everything, up to the first sync of every proxy. Raises LabError, LinkError or OSError."""
        self._directory.write(self.state)
        make_network(self._directory.name, self._cluster.nodes)
        threading.Thread(target=self._echo.serve, name="echo", daemon=True).start()
        self._turn()
        # Last, so that what they first read is complete and their first sync is the one to wait for.
        self._start_proxies()
        self._await_first_sync()
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

    # One turn: what is wanted, what there is, what the proxies read.

    def _turn(self) -> None:
        for event in self._source.scan():
            self._store.apply(event)
        wanted = self._store.snapshot
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
        for pod in self._cluster.pods:
            if pod.placed and not pod.pod.ready and not pod.terminating:
                try:
                    self._runner.start(pod)
                except (OSError, LinkError) as error:
                    self._pod_problems[pod.key] = str(error)
                    self._retry_at = time.monotonic() + _RETRY_SECONDS
                else:
                    self._pod_problems.pop(pod.key, None)
                    running = msgspec.structs.replace(pod.pod, ready=True, phase="Running")
                    self._cluster = controllers.with_pod(self._cluster, msgspec.structs.replace(pod, pod=running))

    def _remove_pods(self) -> None:
        now = time.monotonic()
        leaving = [pod for pod in self._cluster.pods if pod.terminating]
        for pod in leaving:
            # Nobody uses a pod that never was ready, so it may go at once.
            self._gone_at.setdefault(pod.key, now + TERMINATION_SECONDS if pod.pod.ready else now)
        due = [pod for pod in leaving if self._gone_at[pod.key] <= now]
        for pod in due:
            self._runner.stop(pod)
            del self._gone_at[pod.key]
            self._pod_problems.pop(pod.key, None)
        self._cluster = controllers.without_pods(self._cluster, frozenset(pod.key for pod in due))
        if due:
            # A replacement may have waited for the name or the room.
            self._retry_at = now

    def _next_due(self) -> float | None:
        """Seconds until a turn is due by itself; None: only when something happens."""
        due = [*self._gone_at.values(), *([self._retry_at] if self._retry_at is not None else [])]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _settle(self) -> None:
        """Return when no pod comes or goes and all proxies that run have written the present."""
        deadline = time.monotonic() + _SYNC_SECONDS
        while self._gone_at and time.monotonic() < deadline:
            time.sleep(self._next_due() or 0.0)
            self._turn()
        waiting = [node for node in self._cluster.nodes if self._proxies[node.name].poll() is None]
        while waiting := [node for node in waiting if not synced_since(node.namespace, self._written_at)]:
            if time.monotonic() > deadline:
                raise LabError(
                    f"the proxy of {waiting[0].name} has not taken the change in; the end of its log:\n"
                    f"{self._last_words(waiting[0].name)}"
                )
            time.sleep(_POLL_SECONDS)

    def _scale(self, namespace: str, name: str, replicas: int) -> dict[str, Any]:
        key = NamespacedName(namespace, name)
        deployment = self._store.snapshot.deployments.get(key)
        if deployment is None:
            others = ", ".join(str(key) for key in sorted(self._store.snapshot.deployments)) or "none"
            return {"error": f"there is no Deployment {key} in this lab; there are: {others}"}
        self._scales[key] = Scale(replicas=replicas, manifest=deployment.replicas)
        return {}

    # Proxies.

    def _start_proxies(self) -> None:
        config = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": self.state.mode,
            "clusterCIDR": ",".join(topology.CLUSTER_CIDRS),
            "detectLocalMode": "ClusterCIDR",
            # The table's size is the machine's alone, and no namespace may change it.
            "conntrack": {"maxPerCore": 0},
            "healthzBindAddress": f"127.0.0.1:{HEALTH_PORT}",
            "metricsBindAddress": f"127.0.0.1:{METRICS_PORT}",
        }
        self._directory.proxy_config.write_bytes(msgspec.json.format(msgspec.json.encode(config)))
        records = []
        for node in self._cluster.nodes:
            argv = [
                *(sys.executable, "-P", "-m", "narthex", "proxy"),
                *("--manifests", str(self._directory.manifests)),
                *("--hostname-override", node.name),
                *("--proxy-mode", self.state.mode),
                *("--config", str(self._directory.proxy_config)),
            ]
            with (self._directory.logs / f"{node.name}.log").open("wb") as log, netns.entered(node.namespace):
                process = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", env=_environment(os.environ)
                )
            self._proxies[node.name] = process
            identity = identify(process.pid)
            if identity is not None:
                records.append(ProxyRecord(node=node.name, process=identity))
        self.state = msgspec.structs.replace(self.state, proxies=tuple(records))
        self._publish()

    def _await_first_sync(self) -> None:
        deadline = time.monotonic() + _FIRST_SYNC_SECONDS
        waiting = list(self._cluster.nodes)
        while waiting := [node for node in waiting if not healthy(node.namespace)]:
            for node in waiting:
                if self._proxies[node.name].poll() is not None:
                    raise LabError(f"the proxy of {node.name} ended:\n{self._last_words(node.name)}")
            if time.monotonic() > deadline:
                name = waiting[0].name
                raise LabError(
                    f"the proxy of {name} is not ready after {_FIRST_SYNC_SECONDS:.0f} s:\n{self._last_words(name)}"
                )
            time.sleep(_POLL_SECONDS)

    def _last_words(self, node: str) -> str:
        log = (self._directory.logs / f"{node}.log").read_text(errors="replace")
        return "\n".join(log.splitlines()[-10:]) or "(it said nothing)"

    # What others see, and how they ask.

    def _publish(self) -> None:
        for process in self._proxies.values():
            process.poll()
        self.state = describe(
            self.state,
            self._store.snapshot,
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


def _environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """So that a proxy finds the same package that this process runs from, installed or not."""
    package_home = str(Path(narthex.__file__).parent.parent)
    others = [path for path in inherited.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**inherited, "PYTHONPATH": os.pathsep.join([package_home, *others])}


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
