"""The process that is a lab while it runs: a small cluster in one process, and what it has on the machine.

    ledger.py        the API's objects (`lab/api`), the one lock around them, those who want to know of changes
    applying.py      the user's manifests, applied to the API and followed
    controlling.py   the controllers (`lab/control`) at work
    kubelet.py       pods that have a node come to life: pod.py, network.py, image.py, pod_files.py, probing.py, release.py
    heart.py         the nodes' registration and heartbeats
    nodes.py         the nodes' own processes (`narthex node`), which follow the API over the network between them
    serving.py       the API's sockets, certificate, token and kubeconfigs
    inside.py, pod_access.py    programs in pods: `lab exec`, and logs and exec for the API
    troubles.py     faults on request, and the record of what happens: faults.py, recorder.py
    report.py        all of it in the words of the state file

This module makes them and holds them together: its own thread takes in manifests, gives load balancers their addresses
and writes the state file; questions of other processes come by a socket (`control.py`).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from narthex.kube.manifests import ManifestSource
from narthex.lab import cluster, topology
from narthex.lab.api.api import Api
from narthex.lab.api.registry import Registry
from narthex.lab.api.requests import Request, Whole
from narthex.lab.api.store import Store
from narthex.lab.containers.container import Containers
from narthex.lab.containers.forks import Forks
from narthex.lab.controllers.controller_manager import NODE_GRACE_SECONDS, lab_controllers
from narthex.lab.controllers.service.admission import admission
from narthex.lab.encode import encode
from narthex.lab.kubelet.program.containers import PodDependencies
from narthex.lab.kubelet.program.echo import EchoServer
from narthex.lab.kubelet.program.endpoint_drain import EndpointDrain
from narthex.lab.kubelet.program.event_recorder import EventRecorder
from narthex.lab.kubelet.program.heartbeat import NodeHeartbeats
from narthex.lab.kubelet.program.kubelet import Kubelet
from narthex.lab.kubelet.program.pod_access import PodAccess
from narthex.lab.kubelet.program.prober import Prober
from narthex.lab.kubelet.program.volumes import PodFiles
from narthex.lab.pod_network import NONE
from narthex.lab.program import api_server as serving
from narthex.lab.program.controlling import ControllerLoop
from narthex.lab.program.fault_injector import FaultRequests
from narthex.lab.program.load_balancers import LoadBalancerAddresses
from narthex.lab.program.manifests import ManifestApplier
from narthex.lab.program.network import PodNetwork, make_network, wire
from narthex.lab.program.nodes import NodeProcesses
from narthex.lab.program.persistence import LabPersistence
from narthex.lab.program.report import describe_state
from narthex.lab.program.shared_registry import RegistrySnapshot, SharedRegistry
from narthex.lab.program.state import LabError, LabState, ScaleRecord, StateDirectory
from narthex.linux.processes import identify
from narthex.model.names import NamespacedName
from narthex.model.objects import IPAddressPool, Pod
from narthex.model.problem import Problem
from narthex.model.store import Snapshot

Object = dict[str, Any]

_RETRY_SECONDS = 0.5
_ERROR_PAUSE_SECONDS = 0.2
_GATHER_SECONDS = 0.05
"""Changes closer together than this are reported together."""
_SETTLE_SECONDS = 50.0
_FIRST_SECONDS = 180.0
"""A hundred pods on a machine that is busy otherwise."""
_POLL_SECONDS = 0.01
_RESTS = 5.0
"""After a look it rests so many times as long as the look took."""
_RULES_SECONDS = 5.0
"""A change that means nothing to the nodes' rules is waited for no longer than this."""
_BEATS = 4
"""Heartbeats of a node until the cluster would take it for dead."""


class LabProcess:
    """One lab. `start` makes it, `run` keeps it."""

    def __init__(
        self,
        state: StateDirectory,
        source: Path,
        nodes: int,
        mode: str,
        overlay: str,
        pools: Sequence[str],
        forks: Forks,
    ) -> None:
        """`pools`: ranges of addresses for load balancers, besides the pools among the manifests. `forks` knows the jobs of
        containers and nodes."""
        self._directory = state
        self.nodes = topology.nodes(state.name, nodes)
        self._pools = _pools(pools, self.nodes)
        self._forks = forks
        store = Store()
        self._keeping = LabPersistence(state) if state.kept.is_dir() else None
        if self._keeping is not None:
            self._keeping.load(store)
        self.ledger = SharedRegistry(Registry(lambda: datetime.now(UTC), os.urandom, admit=admission(), store=store))
        with self.ledger.held() as registry:
            self.api = Api(registry)
        applied = self._keeping.applied if self._keeping is not None else None
        self.applying = ManifestApplier(source, self.ledger, self.api, tuple(node.name for node in self.nodes), applied)
        self.controlling = ControllerLoop(self.ledger, lab_controllers())
        self.hearts = NodeHeartbeats(
            self.nodes, self.ledger, every=NODE_GRACE_SECONDS / _BEATS, lasts=int(NODE_GRACE_SECONDS)
        )
        self._echo = EchoServer()
        self._containers = Containers(forks)
        self._telling = EventRecorder(self.ledger)
        self._network = PodNetwork(state, self.nodes)
        self._node_processes = NodeProcesses(state, self.nodes, mode, overlay, forks)
        tools = PodDependencies(
            ledger=self.ledger,
            network=self._network,
            files=PodFiles(state, self.ledger),
            echo=self._echo,
            containers=self._containers,
            tell=self._telling,
            released=EndpointDrain(self.ledger, self._node_processes.synced),
            prober=Prober(self._containers),
        )
        self.kubelet = Kubelet(self.nodes, self.ledger, tools)
        access = PodAccess(self.kubelet, tools)
        self.serving = serving.LabApiServer(state, self.ledger, self.api, access)
        self._mirror = RegistrySnapshot()
        self._published: LabState | None = None
        self.troubles = FaultRequests(self)
        self._turning = threading.RLock()
        self._news = threading.Event()
        self._balancing = LoadBalancerAddresses(state.name, self.nodes, self.request)
        own, forking = identify(os.getpid()), identify(forks.pid)
        if own is None:
            raise LabError("this process cannot be found in /proc")
        self.state = LabState(
            name=state.name,
            mode=mode,
            overlay=overlay,
            source=str(source),
            since=_now(),
            controller=own,
            forks=forking,
            nodes=self.nodes,
            outside=topology.outside_namespace(state.name),
            kept=self._keeping is not None,
        )

    def start(self) -> None:
        """Everything, up to the first sync of every node. Raises LabError, LinkError or OSError."""
        self._directory.write(self.state)
        certificate = _beside(self.serving.make_certificate)
        make_network(self._directory.name, self.nodes, self.state.overlay)
        self._network.install()
        certificate()
        server = self.serving.start()
        self.state = msgspec.structs.replace(self.state, server=server)
        self._fill()
        self.applying.turn()
        balancing = bool(self._snapshot().address_pools)
        processes = self._node_processes.start(announce=balancing)
        self.state = msgspec.structs.replace(self.state, processes=processes, balancing=balancing)
        self._directory.write(self.state)
        self._thread("echo", self._echo.serve)
        self._thread("containers", self._containers.watch)
        self._thread("controllers", self.controlling.run)
        self._thread("hearts", self.hearts.beat)
        if self.state.overlay != NONE:
            self._node_processes.await_overlay()
        self._node_processes.await_agents()
        self.kubelet.start()
        self.turn()
        self._node_processes.await_first()
        self.state = msgspec.structs.replace(self.state, processes=self._node_processes.records)
        self.settle(_FIRST_SECONDS)
        self._thread("events", self._telling.write)
        self._thread("faults", self.troubles.faults.run)
        self._thread("watch", self._watch)
        self.ledger.listen(self._news.set)
        self.state = msgspec.structs.replace(self.state, running=True)
        self.publish()

    def run(self) -> None:
        """Follow the manifests, until the process is killed: `lab down` clears up."""
        while True:
            self._news.wait(_RETRY_SECONDS if self.applying.pending else None)
            self._news.clear()
            began = time.monotonic()
            try:
                self.turn()
                self.publish()
                time.sleep(_RESTS * (time.monotonic() - began))
            except Exception as error:
                kind = "" if isinstance(error, LabError) else f"{type(error).__name__}: "
                print(f"{_now()} {kind}{error}", file=sys.stderr, flush=True)
                # What is due stays due; without a pause this would turn as fast as it can.
                time.sleep(_ERROR_PAUSE_SECONDS)
            time.sleep(_GATHER_SECONDS)

    def _thread(self, name: str, work: Callable[[], object]) -> None:
        threading.Thread(target=work, name=name, daemon=True).start()

    def _watch(self) -> None:
        """Ring whenever the manifests change. With a source of its own, because one must not be used by two threads;
        its first scan is news to it, so a change from before the watch began rings too."""
        for _ in ManifestSource(self.state.source).changes(threading.Event()):
            self._news.set()

    # What there is from the begin.

    def _fill(self) -> None:
        with self.ledger.held() as registry:
            if self._keeping is not None:
                self._keeping.begin_again(registry, {node.name for node in self.nodes})
            for name in cluster.NAMESPACES:
                _create(registry, "Namespace", cluster.namespace(name))
            _create(registry, "ServiceCIDR", cluster.service_cidr())
            for definition in cluster.custom_resource_definitions():
                _create(registry, "CustomResourceDefinition", definition)
            for obj in (*cluster.api_service(), *cluster.dns_service(self.nodes)):
                _create(registry, obj["kind"], obj)
            for pool in self._pools:
                if registry.get("Namespace", "", pool.namespace) is None:
                    registry.create("Namespace", cluster.namespace(pool.namespace))
                _create(registry, "IPAddressPool.metallb.io", encode(pool))
        self.hearts.register()
        if self._keeping is not None:
            self._keeping.follow(self.ledger)

    def close(self) -> None:
        """Write what is to outlive this process."""
        if self._keeping is not None:
            self._keeping.close()

    # One turn: manifests, load balancers.

    def turn(self) -> None:
        """Take in the manifests and what follows from them here. Raises what the machine says of its network."""
        with self._turning:
            self.applying.turn()
            self._give_way_to_users_dns()
            self._balancing.turn(self._snapshot(), balancing=self.state.balancing)

    def _snapshot(self) -> Snapshot:
        with self._turning, self.ledger.held() as registry:
            return self._mirror.follow(registry)

    def _give_way_to_users_dns(self) -> None:
        """The lab's own slices of the DNS lead nowhere that a user's Service of that name wants to go."""
        with self.ledger.held() as registry:
            service = registry.get("Service", *cluster.DNS_SERVICE)
            if service is None or not (service.get("spec") or {}).get("selector"):
                return
            for each in cluster.dns_service(self.nodes)[1:]:
                if registry.get("EndpointSlice", cluster.DNS_SERVICE.namespace, each["metadata"]["name"]) is not None:
                    registry.delete("EndpointSlice", cluster.DNS_SERVICE.namespace, each["metadata"]["name"])

    def request(self, method: str, path: str, body: Object, content_type: str = "application/json") -> Object:
        """A request to the API. Raises LabError with what it says."""
        asked = Request(method, path, {}, {"content-type": content_type}, msgspec.json.encode(body))
        with self.ledger.held():
            answer = self.api.answer(asked)
        said: Object = msgspec.json.decode(answer.body) if isinstance(answer, Whole) else {}
        if isinstance(answer, Whole) and answer.status >= 300:
            raise LabError(str(said.get("message") or f"{method} {path}: {answer.status}"))
        return said

    # When all is in force.

    def settle(self, patience: float = _SETTLE_SECONDS) -> None:
        """Return when the manifests are taken in, no pod comes or goes, the cluster knows of every dead node, and all nodes
        that run have written the present. Raises LabError."""
        self.turn()
        deadline = time.monotonic() + patience
        calm = 0
        # Twice: what one has done another may have to look at.
        while calm < 2 and time.monotonic() < deadline:
            began = time.monotonic()
            calm = calm + 1 if self._calm() else 0
            time.sleep(_POLL_SECONDS + _RESTS * (time.monotonic() - began) if not calm else 0.0)
        self.turn()
        self._await_rules(deadline)
        if self.state.balancing:
            from narthex.lab.program.load_balancer_addresses import answered_addresses

            self._node_processes.await_answers(answered_addresses(self._snapshot().services.values()))

    def _calm(self) -> bool:
        return self.controlling.resting and self.kubelet.resting and not self._awaited()

    def _awaited(self) -> bool:
        """Something is on its way by itself."""
        with self.ledger.held() as registry:
            for pod in registry.list("Pod"):
                life = self.kubelet.life(NamespacedName(pod["metadata"]["namespace"], pod["metadata"]["name"]))
                if life is None or self.kubelet.on_dead_node(life) or life.problem:
                    continue
                if pod["metadata"].get("deletionTimestamp") or life.starting:
                    return True
            return any(
                condition.get("status") == "True"
                for name in self.state.killed
                for condition in ((registry.get("Node", "", name) or {}).get("status") or {}).get("conditions") or ()
                if condition.get("type") == "Ready"
            )

    def _await_rules(self, deadline: float) -> None:
        moment = self.ledger.rules_at
        patience = time.monotonic() + _RULES_SECONDS
        while time.monotonic() < min(deadline, patience):
            if self._node_processes.synced(moment):
                return
            time.sleep(_POLL_SECONDS)

    # What is asked for.

    def scale(self, namespace: str, name: str, replicas: int) -> None:
        """Give a Deployment another number of pods. Raises LabError."""
        with self.ledger.held() as registry:
            held = registry.get("Deployment", namespace, name)
            others = [
                f"{each['metadata']['namespace']}/{each['metadata']['name']}" for each in registry.list("Deployment")
            ]
        if held is None:
            known = ", ".join(sorted(others)) or "none"
            raise LabError(f"there is no Deployment {namespace}/{name} in this lab; there are: {known}")
        path = f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}/scale"
        self.request("PATCH", path, {"spec": {"replicas": replicas}}, "application/merge-patch+json")

    def kill(self, node: str) -> None:
        """Let a node die: its process and its pods' programs are killed, and its cable is dead. Raises LabError."""
        found = next((each for each in self.nodes if each.name == node), None)
        if found is None:
            names = ", ".join(each.name for each in self.nodes)
            raise LabError(f"there is no node {node!r}; there are: {names}")
        if node in self.state.killed:
            raise LabError(f"{node} is dead already")
        wire(topology.wire_dead(self.state.name, found))
        self._node_processes.kill(node)
        self.hearts.stop(node)
        self.kubelet.lose(node)
        with self._turning:
            self.state = msgspec.structs.replace(self.state, killed=(*self.state.killed, node))

    def restart(self, node: str) -> None:
        """Let a node's process die; a supervisor starts another one. Raises LabError."""
        if node not in {each.name for each in self.nodes} or node in self.state.killed:
            raise LabError(f"there is no node {node!r} that lives")
        with self._turning:
            began = self._node_processes.restart(node)
            others = [each for each in self.state.processes if each.node != node]
            self.state = msgspec.structs.replace(self.state, processes=(*others, *began))

    def publish(self) -> None:
        """Write the state file anew, if something in it is new."""
        with self._turning:
            snapshot = self._snapshot()
            made = describe_state(
                self.state,
                snapshot,
                scales=self._scales(snapshot),
                problems=(
                    *self.applying.problems,
                    *self._balancing.problems,
                    *map(_unwritten, self.controlling.problems),
                ),
                network_namespace=self._namespace,
                lives=self.kubelet.lives(),
                waiting=self._waiting(),
            )
            made = msgspec.structs.replace(made, faults=self.troubles.faults.present)
            self.state = made
            if made != self._published:
                self._directory.write(made)
                self._published = made

    def _namespace(self, pod: Pod) -> str:
        spec = {"nodeName": pod.spec.node_name, "hostNetwork": pod.spec.host_network}
        return self._network.namespace({"metadata": {"namespace": pod.namespace, "name": pod.name}, "spec": spec})

    def _waiting(self) -> dict[NamespacedName, str]:
        """What the scheduler says of pods that have no node."""
        with self.ledger.held() as registry:
            return {
                NamespacedName(pod["metadata"]["namespace"], pod["metadata"]["name"]): str(each.get("message") or "")
                for pod in registry.list("Pod")
                if not pod["spec"].get("nodeName")
                for each in (pod.get("status") or {}).get("conditions") or ()
                if each["type"] == "PodScheduled" and each.get("status") == "False"
            }

    def _scales(self, snapshot: Snapshot) -> list[ScaleRecord]:
        """Deployments of the user's files with another number of replicas than the files have."""
        found = []
        for key, deployment in sorted(snapshot.deployments.items()):
            written = self.applying.wanted("Deployment", key)
            asked = (written.raw.get("spec") or {}).get("replicas", 1) if written is not None else deployment.replicas
            if asked != deployment.replicas:
                found.append(ScaleRecord(namespace=key.namespace, name=key.name, replicas=deployment.replicas))
        return found


def _create(registry: Registry, kind: str, obj: Object) -> None:
    meta = obj["metadata"]
    if registry.get(kind, meta.get("namespace", ""), meta["name"]) is None:
        registry.create(kind, obj)


def _beside(work: Callable[[], None]) -> Callable[[], None]:
    """Begin a work in a thread of its own; what is returned waits for its end, and raises what it has raised."""
    failed: list[BaseException] = []

    def do() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=do, daemon=True)
    thread.start()

    def join() -> None:
        thread.join()
        if failed:
            raise failed[0]

    return join


def _pools(ranges: Sequence[str], members: Sequence[topology.LabNode]) -> tuple[IPAddressPool, ...]:
    if not ranges:
        return ()
    from narthex.lab.program.load_balancer_addresses import pools_of

    return pools_of(ranges, members)


def _unwritten(message: str) -> Problem:
    return Problem(message=message)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
