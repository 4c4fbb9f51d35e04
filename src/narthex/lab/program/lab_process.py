"""The process of a running lab: a small cluster, and its network on this machine.

`components.py` creates the parts:

    shared_registry.py   the API's objects (`lab/api`), their lock, and change notifications
    manifests.py         applies the user's manifests to the API
    controller_loop.py   runs the controllers (`lab/controllers`)
    kubelet.py           runs pods (`lab/kubelet/program`) on the network of `network.py`
    heartbeat.py         registers the nodes and renews their Leases
    nodes.py             the nodes' processes (`narthex node`), which follow the API over the lab's network
    api_server.py        the API's sockets, certificate, token, and kubeconfigs
    ingress.py           the load balancer for Ingresses
    fault_injector.py    faults on request

This module starts them. Its own thread applies manifests, assigns load balancer addresses, and writes the state file
(`report.py`). Commands of other processes arrive on a socket (`control_socket.py`).
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import yaml  # type: ignore[import-untyped]

from narthex.kube.manifests import ManifestSource
from narthex.kube.messages import prepare_decoders
from narthex.lab import cluster, topology
from narthex.lab.api.requests import ApiRequest, ApiResponse
from narthex.lab.controllers.namespace_objects import SERVICE_ACCOUNT, root_ca
from narthex.lab.controllers.node_lifecycle import NOT_READY
from narthex.lab.encode import encode
from narthex.lab.kubelet.program.images import Images
from narthex.lab.program.components import LabComponents, build_components
from narthex.lab.program.control_plane import ControlPlane
from narthex.lab.program.controller_loop import ControllerLoop
from narthex.lab.program.fault_injector import FaultRequests
from narthex.lab.program.network import make_network, wire
from narthex.lab.program.options import LabOptions
from narthex.lab.program.report import describe_state
from narthex.lab.program.shared_registry import RegistrySnapshot
from narthex.lab.program.state import LabError, LabState, ObjectGone, StateDirectory
from narthex.lab.topology import NONE, LabNode
from narthex.lb.released import ReleasedAddresses
from narthex.linux.forks import ForkServer
from narthex.linux.processes import identify_process
from narthex.model import IPAddressPool, NamespacedName, Problem, Snapshot
from narthex.model.backoff import Backoff
from narthex.runtime.reconciler import Reconciler, Throttle

Object = dict[str, Any]

_RETRY_SECONDS = 0.5
_BACKOFF = Backoff(0.2, 0.2)
_THROTTLE = Throttle(share=5.0, least=0.05, longest=60.0)
"""Changes that come together are reported together, and reports take at most a sixth of the time."""
_SETTLE_SECONDS = 50.0
_FIRST_SECONDS = 180.0
"""Enough for a hundred pods on a busy machine."""
_RETRIED_SECONDS = 10.0
"""Time for which objects that another control plane refuses are tried again: a pod needs the account of its namespace first."""
_APPLY_SECONDS = 0.2
_POLL_SECONDS = 0.01
_POLL_SHARE = 5.0
"""Time between two polls, as a multiple of the duration of a poll."""
_RULES_SECONDS = 5.0
"""Maximum time to wait for proxies: a change may not affect their rules."""


class LabProcess:
    """One lab. `start` brings it up, `run` operates it."""

    def __init__(
        self,
        directory: StateDirectory,
        options: LabOptions,
        images: Images,
        forks: ForkServer,
        progress: Callable[[str], object],
    ) -> None:
        """Create the lab's components.

        Args:
            directory: The lab's files. The caller holds its lock.
            options: What the lab is to be.
            images: What images stand for.
            forks: The fork server, which knows the jobs of containers and nodes.
            progress: Called with sentences that tell how far a long start is.
        """
        prepare_decoders()
        members = topology.nodes(directory.name, options.nodes)
        self.parts: LabComponents = build_components(directory, options, members, images, forks, progress)
        self._pools = _pools(options.pools, members)
        self._snapshot = RegistrySnapshot()
        self._lock = threading.RLock()
        """Guards `state` and the load balancers' addresses."""
        self._reconciler = Reconciler(throttle=_THROTTLE, backoff=_BACKOFF)
        self._load_balancers = LoadBalancerAddresses(directory.name, members, self.request)
        self._published: LabState | None = None
        self._corefile = cluster.corefile()
        self.state = _initial_state(self.parts, options, forks)
        self.faults = FaultRequests(
            self.parts, lambda: self.state, publish=self.publish, kill_node=self.kill, restart_node=self.restart
        )

    def start(self) -> None:
        """Start everything and wait for the first sync of every node. Raises LabError, LinkError, or OSError."""
        parts = self.parts
        parts.directory.write(self.state)
        with ThreadPoolExecutor(1) as background:
            certificate = background.submit(parts.api_server.make_certificate)
            make_network(parts.directory.name, parts.nodes, self.state.overlay)
            parts.pods.network.install()
        certificate.result()
        self._set_state(server=parts.api_server.start())
        self._create_initial_objects()
        parts.manifests.apply_changes()
        balancing = bool(self._read_objects().address_pools)
        self._set_state(processes=parts.node_processes.start(announce=balancing), balancing=balancing)
        parts.directory.write(self.state)
        self._thread("echo", parts.pods.echo.serve)
        self._thread("containers", parts.pods.containers.watch)
        if isinstance(parts.controllers, ControllerLoop):
            self._thread("controllers", parts.controllers.run)
        self._thread("kube-proxies", parts.node_processes.supervise)
        if isinstance(parts.api_server, ControlPlane):
            self._thread("control-plane", parts.api_server.run)
        self._thread("heartbeats", parts.heartbeats.run)
        if self.state.overlay != NONE:
            parts.node_processes.await_overlay()
        parts.node_processes.await_agents()
        parts.kubelet.start()
        if parts.kubelet_api is not None:
            parts.kubelet_api.start()
        parts.registry.listen(parts.static_pods.wake)
        self._thread("static-pods", parts.static_pods.run)
        self._thread("ingress", parts.ingress.run)
        if parts.provider_controllers is not None:
            self._thread("provider-controllers", parts.provider_controllers.run)
        self.apply()
        parts.node_processes.await_first_sync()
        self._set_state(processes=parts.node_processes.records)
        self.settle(_FIRST_SECONDS)
        self._thread("events", parts.events.run)
        self._thread("faults", self.faults.injector.run)
        self._thread("manifests", self._watch_manifests)
        parts.registry.listen(self._reconciler.wake)
        self._set_state(running=True)
        self.publish()

    def run(self) -> None:
        """Follow the manifests until the process is killed; `lab down` cleans up."""
        self._reconciler.run(self._reconcile)

    def _reconcile(self) -> float:
        self.apply()
        self.publish()
        return _RETRY_SECONDS if self.parts.manifests.pending else math.inf

    def _thread(self, name: str, work: Callable[[], object]) -> None:
        threading.Thread(target=work, name=name, daemon=True).start()

    def _watch_manifests(self) -> None:
        """Wake the loop whenever the manifests change.

        Uses a ManifestSource of its own, since a source belongs to one thread. Its first scan reports all files, so a change
        made before the watch began wakes the loop too.
        """
        for _ in ManifestSource(self.state.source).changes(threading.Event()):
            self._reconciler.wake()

    def _set_state(self, **values: Any) -> None:
        with self._lock:
            self.state = msgspec.structs.replace(self.state, **values)

    def _create_initial_objects(self) -> None:
        persistence = self.parts.persistence
        with self.parts.registry.held() as registry:
            if persistence is not None:
                persistence.reset_objects(registry, {node.name for node in self.parts.nodes})
            for obj in (*([] if self.parts.external else self._control_plane_objects()), *self._system_objects()):
                registry.ensure(obj["kind"], obj)
                if obj["kind"] == "ConfigMap":
                    # Those of an earlier lab have its certificate and mode.
                    registry.update("ConfigMap", obj)
            for pool in self._pools:
                registry.ensure("Namespace", cluster.namespace(pool.namespace))
                registry.ensure("IPAddressPool.metallb.io", encode(pool))
        self.parts.heartbeats.register()
        self._await_controllers()
        self.parts.static_pods.register()
        if persistence is not None:
            persistence.follow(self.parts.registry)

    def _await_controllers(self) -> None:
        """Wait until another control plane accepts pods, and sees that the nodes are ready, so that the first pods spread over them."""
        deadline = time.monotonic() + _RETRIED_SECONDS
        while self.parts.external and time.monotonic() < deadline:
            with self.parts.registry.held() as registry:
                taints = [each for node in registry.list("Node") for each in node["spec"].get("taints") or ()]
                account = registry.get("ServiceAccount", "default", SERVICE_ACCOUNT)
            if account is not None and not any(taint["key"] == NOT_READY for taint in taints):
                return
            time.sleep(_APPLY_SECONDS)

    def _control_plane_objects(self) -> list[Object]:
        """Return what an external control plane has of its own."""
        return [
            *map(cluster.namespace, cluster.NAMESPACES),
            cluster.service_cidr(),
            *cluster.custom_resource_definitions(),
            *cluster.api_service(),
            root_ca(cluster.SYSTEM_NAMESPACE, self.parts.directory.certificate.read_text()),
        ]

    def _system_objects(self) -> list[Object]:
        """Return what clusters have for their own components."""
        parts = self.parts
        proxy: str = yaml.safe_dump(parts.node_processes.proxy_configuration(announce=False), sort_keys=False)
        return [
            *cluster.dns_service(parts.nodes),
            cluster.config_map("kube-proxy-config", {"config": proxy}),
            cluster.config_map(cluster.DNS_CONFIG.name, {cluster.COREFILE: cluster.corefile()}),
        ]

    def close(self) -> None:
        """Write what outlives this process."""
        if self.parts.persistence is not None:
            self.parts.persistence.close()

    def apply(self) -> None:
        """Apply changed manifests and assign load balancer addresses. Raises errors of the network's configuration."""
        with self._lock:
            self.parts.manifests.apply_changes()
            self._yield_to_user_dns()
            self._mount_corefile()
            self._load_balancers.reconcile(self._read_objects(), balancing=self.state.balancing)

    def _read_objects(self) -> Snapshot:
        with self._lock, self.parts.registry.held() as registry:
            return self._snapshot.sync(registry)

    def _yield_to_user_dns(self) -> None:
        """Delete the lab's own slices and Endpoints of the DNS Service if the user's Service of that name selects pods."""
        with self.parts.registry.held() as registry:
            service = registry.get("Service", *cluster.DNS_SERVICE)
            if service is None or not (service.get("spec") or {}).get("selector"):
                return
            for each in cluster.dns_service(self.parts.nodes)[1:]:
                held = registry.get(each["kind"], cluster.DNS_SERVICE.namespace, each["metadata"]["name"])
                # The Endpoints of the user's Service have the same name, but other labels.
                if held is not None and held["metadata"].get("labels") == each["metadata"]["labels"]:
                    registry.delete(each["kind"], cluster.DNS_SERVICE.namespace, each["metadata"]["name"])

    def _mount_corefile(self) -> None:
        """Give the nodes the Corefile of the ConfigMap."""
        with self.parts.registry.held() as registry:
            found = registry.get("ConfigMap", *cluster.DNS_CONFIG) or {}
        text = (found.get("data") or {}).get(cluster.COREFILE)
        if text and text != self._corefile:
            self._corefile = text
            self.parts.node_processes.serve_corefile(text)

    def request(self, method: str, path: str, body: Object, content_type: str = "application/json") -> Object:
        """Send a request to the API. Raises LabError with its error message, ObjectGone for 404."""
        request = ApiRequest(method, path, {}, {"content-type": content_type}, msgspec.json.encode(body))
        with self.parts.registry.held():
            response = self.parts.api.answer(request)
        content: Object = msgspec.json.decode(response.body) if isinstance(response, ApiResponse) else {}
        if isinstance(response, ApiResponse) and response.status >= 300:
            kind = ObjectGone if response.status == 404 else LabError
            raise kind(str(content.get("message") or f"{method} {path}: {response.status}"))
        return content

    def settle(self, timeout: float = _SETTLE_SECONDS) -> None:
        """Wait until manifests, pods, dead nodes, and the rules of all running nodes reflect the present state.

        Returns at the latest after `timeout` seconds. Raises LabError.
        """
        self.apply()
        deadline = time.monotonic() + timeout
        while self.parts.manifests.settling and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            self.apply()
        retried_until = time.monotonic() + _RETRIED_SECONDS if self.parts.external else 0.0
        while self.parts.manifests.pending and time.monotonic() < min(retried_until, deadline):
            time.sleep(_APPLY_SECONDS)
            self.apply()
        idle_polls = 0
        # Twice, since the work of one component may create work for another.
        while idle_polls < 2 and time.monotonic() < deadline:
            started = time.monotonic()
            idle_polls = idle_polls + 1 if self._is_idle() else 0
            time.sleep(_POLL_SECONDS + _POLL_SHARE * (time.monotonic() - started) if not idle_polls else 0.0)
        self.apply()
        self._await_rules(deadline)
        if self.state.balancing:
            from narthex.lab.program.load_balancer_addresses import answered_addresses

            services = self._read_objects().services.values()
            self.parts.node_processes.await_answers(answered_addresses(services))

    def _is_idle(self) -> bool:
        return self.parts.controllers.idle and self.parts.kubelet.idle and not self._has_transitions()

    def _has_transitions(self) -> bool:
        """Return True while a pod starts or ends, or a dead node still counts as ready."""
        kubelet = self.parts.kubelet
        with self.parts.registry.held() as registry:
            for obj in registry.list("Pod"):
                pod = kubelet.pod(NamespacedName(obj["metadata"]["namespace"], obj["metadata"]["name"]))
                if pod is None or kubelet.on_dead_node(pod) or pod.problem:
                    continue
                if obj["metadata"].get("deletionTimestamp") or pod.starting:
                    return True
            return any(
                condition.get("status") == "True"
                for name in self.state.killed
                for condition in ((registry.get("Node", "", name) or {}).get("status") or {}).get("conditions") or ()
                if condition.get("type") == "Ready"
            )

    def _await_rules(self, deadline: float) -> None:
        since = self.parts.registry.rules_changed_at
        deadline = min(deadline, time.monotonic() + _RULES_SECONDS)
        while time.monotonic() < deadline:
            if self.parts.node_processes.synced(since):
                return
            time.sleep(_POLL_SECONDS)

    def scale(self, namespace: str, name: str, replicas: int) -> None:
        """Set the number of replicas of a Deployment. Raises LabError."""
        with self.parts.registry.held() as registry:
            found = registry.get("Deployment", namespace, name)
            others = [
                f"{each['metadata']['namespace']}/{each['metadata']['name']}" for each in registry.list("Deployment")
            ]
        if found is None:
            known = ", ".join(sorted(others)) or "none"
            raise LabError(f"there is no Deployment {namespace}/{name} in this lab; there are: {known}")
        path = f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}/scale"
        self.request("PATCH", path, {"spec": {"replicas": replicas}}, "application/merge-patch+json")

    def kill(self, node: str) -> None:
        """Kill a node: its process, the programs of its pods, and its link to the network. Raises LabError."""
        found = next((each for each in self.parts.nodes if each.name == node), None)
        if found is None:
            names = ", ".join(each.name for each in self.parts.nodes)
            raise LabError(f"there is no node {node!r}; there are: {names}")
        if node in self.state.killed:
            raise LabError(f"{node} is already dead")
        wire(topology.wire_dead(self.state.name, found))
        self.parts.node_processes.kill(node)
        self.parts.heartbeats.stop(node)
        self.parts.kubelet.kill_node(node)
        with self._lock:
            self._set_state(killed=(*self.state.killed, node))

    def restart(self, node: str, *, proxy: bool = False) -> None:
        """Kill a node's process, or its `proxy`, and start a new one, as a supervisor would. Raises LabError."""
        if node not in {each.name for each in self.parts.nodes} or node in self.state.killed:
            raise LabError(f"there is no running node {node!r}")
        with self._lock:
            if proxy:
                self.parts.node_processes.restart_proxy(node)
            else:
                self.parts.node_processes.restart(node)
            self._set_state(processes=self.parts.node_processes.records)

    def publish(self) -> None:
        """Write the state file if the state has changed."""
        with self._lock:
            problems = (
                *self.parts.manifests.problems,
                *self._load_balancers.problems,
                *(Problem(message=message) for message in self.parts.controllers.problems),
                *(Problem(message=message) for message in self.parts.api_server.problems),
                *(Problem(message=message) for message in self.parts.node_processes.proxy_problems),
            )
            self.state = describe_state(
                self.state, self.parts, self._read_objects(), problems, self.faults.injector.active
            )
            if self.state != self._published:
                self.parts.directory.write(self.state)
                self._published = self.state


def _initial_state(parts: LabComponents, options: LabOptions, forks: ForkServer) -> LabState:
    own = identify_process(os.getpid())
    if own is None:
        raise LabError("this process cannot be found in /proc")
    return LabState(
        name=parts.directory.name,
        mode=options.mode,
        overlay=options.overlay,
        socket_load_balancing=options.socket_load_balancing,
        control_plane=str(options.control_plane or ""),
        kube_proxy=str(options.kube_proxy or ""),
        source=str(options.source or parts.directory.input),
        since=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        controller=own,
        forks=identify_process(forks.pid),
        nodes=parts.nodes,
        outside=topology.outside_namespace(parts.directory.name),
        kept=parts.persistence is not None,
    )


def _pools(ranges: Sequence[str], members: Sequence[topology.LabNode]) -> tuple[IPAddressPool, ...]:
    if not ranges:
        return ()
    from narthex.lab.program.load_balancer_addresses import pools_of

    return pools_of(ranges, members)


MERGE = "application/merge-patch+json"

Send = Callable[[str, str, dict[str, Any], str], object]
"""Sends a request to the API: method, path, body, content type. Raises ObjectGone."""


class LoadBalancerAddresses:
    """Keeps routes and Services in line with the address pools. Used by one thread at a time."""

    def __init__(self, lab: str, nodes: Sequence[LabNode], send: Send) -> None:
        self._lab = lab
        self._nodes = nodes
        self._send = send
        self._networks: tuple[str, ...] = ()
        self._released = ReleasedAddresses()
        self.problems: tuple[Problem, ...] = ()
        """Rejected pools and Services."""

    def reconcile(self, snapshot: Snapshot, *, balancing: bool) -> None:
        """Allocate addresses and configure their networks.

        `balancing` is True if the nodes run announcers. Raises errors of the network's configuration.
        """
        if not snapshot.address_pools:
            self.problems = ()
            return
        if not balancing:
            self.problems = tuple(map(_not_announced, snapshot.address_pools.values()))
            return
        # Imported only by labs with a pool.
        from narthex.lab.program import load_balancer_addresses as balancers

        held_back = self._released.observe(snapshot.services.values(), time.monotonic())
        allocation = balancers.allocate_addresses(snapshot, self._nodes, held_back)
        if allocation.networks != self._networks:
            current, desired = set(self._networks), set(allocation.networks)
            for wiring in topology.wire_balancers(self._lab, sorted(current - desired), sorted(desired - current)):
                wire(wiring)
            self._networks = allocation.networks
        for service in allocation.changed.values():
            # A Service that was deleted since the snapshot needs no address.
            with contextlib.suppress(ObjectGone):
                for path, patch in balancers.patches(service):
                    self._send("PATCH", path, patch, MERGE)
        self.problems = allocation.problems


def _not_announced(pool: IPAddressPool) -> Problem:
    message = "was added while the nodes run without announcers, so it is not used: restart the lab with it"
    return Problem(origin=pool.origin, object=f"IPAddressPool {pool.key}", message=message, severity="warning")
