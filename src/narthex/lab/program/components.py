"""The components of a lab process, created in the order of their dependencies."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from narthex.lab import cluster, topology
from narthex.lab.api.api import ApiHandler
from narthex.lab.api.proxy_path import KUBELET_PORT
from narthex.lab.api.registry import Registry
from narthex.lab.api.store import ObjectStore
from narthex.lab.containers.container import Containers
from narthex.lab.controllers.controller_manager import ControllerManager, lab_controllers
from narthex.lab.controllers.ingress.controller import IngressController
from narthex.lab.controllers.node_lifecycle import EXTERNAL_NODE_GRACE_SECONDS, LEASES, NODE_GRACE_SECONDS
from narthex.lab.controllers.service.admission import admission
from narthex.lab.controllers.service.balancer_finalizer import BalancerFinalizerController
from narthex.lab.kubelet.program.containers import PodDependencies
from narthex.lab.kubelet.program.echo import EchoServer
from narthex.lab.kubelet.program.endpoint_drain import EndpointDrain
from narthex.lab.kubelet.program.event_recorder import EventRecorder
from narthex.lab.kubelet.program.heartbeat import NodeHeartbeats
from narthex.lab.kubelet.program.images import Images
from narthex.lab.kubelet.program.kubelet import Kubelet
from narthex.lab.kubelet.program.pod_access import PodAccess
from narthex.lab.kubelet.program.prober import Prober
from narthex.lab.kubelet.program.static_pods import StaticPods
from narthex.lab.kubelet.program.volumes import CreateToken, PodFiles
from narthex.lab.program.api_server import LabApiServer
from narthex.lab.program.control_plane import ControlPlane
from narthex.lab.program.controller_loop import ControllerLoop
from narthex.lab.program.external_controllers import ExternalControllers
from narthex.lab.program.ingress import LabIngress
from narthex.lab.program.manifests import ManifestApplier
from narthex.lab.program.network import PodNetwork
from narthex.lab.program.nodes import NodeProcesses
from narthex.lab.program.options import LabOptions
from narthex.lab.program.remote_registry import RemoteApi, RemoteObjects
from narthex.lab.program.shared_registry import SharedRegistry
from narthex.lab.program.state import LabError, StateDirectory
from narthex.lab.server.database import ObjectDatabase, UnreadableDatabase
from narthex.lab.server.kubelet import KubeletServer
from narthex.lab.topology import LabNode
from narthex.linux.forks import ForkServer

_HEARTBEATS_PER_GRACE = 4


class LabComponents(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a lab process runs."""

    directory: StateDirectory
    nodes: tuple[LabNode, ...]
    registry: SharedRegistry
    api: ApiHandler | RemoteApi
    persistence: LabPersistence | None
    """None for a lab without `--keep`."""
    manifests: ManifestApplier
    controllers: ControllerLoop | ExternalControllers
    heartbeats: NodeHeartbeats
    static_pods: StaticPods
    node_processes: NodeProcesses
    events: EventRecorder
    pods: PodDependencies
    kubelet: Kubelet
    api_server: LabApiServer | ControlPlane
    ingress: LabIngress
    provider_controllers: ControllerLoop | None
    """The controllers that a cluster gets from elsewhere; None for a lab with its own controllers, which include them."""
    kubelet_api: KubeletServer | None
    """None for a lab with its own API server, which reaches containers directly."""

    @property
    def external(self) -> bool:
        """True if the control plane is not the lab's own."""
        return isinstance(self.api_server, ControlPlane)


def build_components(
    directory: StateDirectory,
    options: LabOptions,
    nodes: tuple[LabNode, ...],
    images: Images,
    forks: ForkServer,
    progress: Callable[[str], object],
) -> LabComponents:
    """Create the components without starting any. Raises LabError if kept objects cannot be read."""
    persistence = LabPersistence(directory) if directory.kept.is_dir() else None
    if options.control_plane is None:
        plane = _own_plane(directory, persistence)
    else:
        plane = _external_plane(directory, options.control_plane, nodes, progress)
    registry = plane.registry
    node_processes = NodeProcesses(directory, nodes, options, forks)
    pods = _pod_dependencies(
        directory, nodes, plane, images, Containers(forks), node_processes, in_cgroups=options.socket_load_balancing
    )
    kubelet = Kubelet(nodes, registry, pods)
    access = PodAccess(kubelet, pods)
    applied = persistence.applied if persistence is not None else None
    return LabComponents(
        directory=directory,
        nodes=nodes,
        registry=registry,
        api=plane.api,
        persistence=persistence,
        manifests=ManifestApplier(
            options.source or directory.input, registry, plane.api, tuple(node.name for node in nodes), applied
        ),
        controllers=plane.controllers,
        heartbeats=_heartbeats(nodes, plane, kubelet),
        static_pods=StaticPods(nodes, registry),
        node_processes=node_processes,
        events=pods.record_event,
        pods=pods,
        kubelet=kubelet,
        api_server=plane.serve(access),
        kubelet_api=KubeletServer(directory, nodes, access) if plane.external else None,
        ingress=LabIngress(directory.name, registry, access),
        provider_controllers=ControllerLoop(
            registry, ControllerManager([IngressController(), BalancerFinalizerController()])
        )
        if plane.external
        else None,
    )


def _pod_dependencies(
    directory: StateDirectory,
    nodes: tuple[LabNode, ...],
    plane: _Plane,
    images: Images,
    containers: Containers,
    node_processes: NodeProcesses,
    *,
    in_cgroups: bool,
) -> PodDependencies:
    return PodDependencies(
        registry=plane.registry,
        network=PodNetwork(directory, nodes, in_cgroups=in_cgroups),
        files=PodFiles(directory, plane.registry, plane.create_token),
        images=images,
        echo=EchoServer(),
        containers=containers,
        record_event=EventRecorder(plane.registry),
        is_released=EndpointDrain(plane.registry, node_processes.synced),
        prober=Prober(containers),
    )


def _heartbeats(nodes: tuple[LabNode, ...], plane: _Plane, kubelet: Kubelet) -> NodeHeartbeats:
    return NodeHeartbeats(
        nodes,
        plane.registry,
        interval=plane.grace / _HEARTBEATS_PER_GRACE,
        lease_seconds=int(plane.grace),
        kubelet_port=KUBELET_PORT if plane.external else 0,
        returned=kubelet.refresh,
    )


class _Plane(NamedTuple):
    """What differs between the lab's own control plane and an external one."""

    external: bool
    registry: SharedRegistry
    api: ApiHandler | RemoteApi
    controllers: ControllerLoop | ExternalControllers
    serve: Callable[[PodAccess], LabApiServer | ControlPlane]
    """Creates the API server."""
    create_token: CreateToken | None
    grace: float
    """Seconds without a heartbeat after which a node is unknown."""


def _own_plane(directory: StateDirectory, persistence: LabPersistence | None) -> _Plane:
    """Return the lab's own control plane, with the objects that were kept. Raises LabError."""
    store = ObjectStore()
    if persistence is not None:
        persistence.load(store)
    registry = SharedRegistry(Registry(lambda: datetime.now(UTC), os.urandom, admit=admission(), store=store))
    with registry.held() as unlocked:
        api = ApiHandler(unlocked)
    return _Plane(
        external=False,
        registry=registry,
        api=api,
        controllers=ControllerLoop(registry, lab_controllers()),
        serve=lambda access: LabApiServer(directory, registry, api, access),
        create_token=None,
        grace=NODE_GRACE_SECONDS,
    )


def _external_plane(
    directory: StateDirectory, programs: Path, nodes: tuple[LabNode, ...], progress: Callable[[str], object]
) -> _Plane:
    """Return a control plane of other programs."""
    fabric = topology.fabric_namespace(directory.name)
    remote = RemoteObjects(fabric, str(directory.node_kubeconfig), cluster.custom_resource_definitions())
    return _Plane(
        external=True,
        registry=remote.shared,
        api=remote.api,
        controllers=ExternalControllers(remote.shared),
        serve=lambda _: ControlPlane(directory, programs, nodes, remote.connect, progress),
        create_token=remote.registry.token,
        grace=EXTERNAL_NODE_GRACE_SECONDS,
    )


class LabPersistence:
    """The kept files of one lab."""

    def __init__(self, directory: StateDirectory) -> None:
        """Open the files. Raises LabError if they cannot be read."""
        self._hint = f"`narthex lab down --forget --name {directory.name}` removes them"
        self.applied: Path = directory.applied
        try:
            self._keeper = ObjectDatabase(directory.objects)
        except (UnreadableDatabase, OSError) as error:
            raise LabError(f"the kept objects of this lab are unusable: {error}; {self._hint}") from error

    def load(self, store: ObjectStore) -> None:
        """Load the kept objects into an empty store. Raises LabError."""
        try:
            self._keeper.load(store)
        except UnreadableDatabase as error:
            raise LabError(f"the kept objects of this lab are unusable: {error}; {self._hint}") from error

    def reset_objects(self, registry: Registry, nodes: Collection[str]) -> None:
        """Adapt the loaded objects to a new start: delete missing nodes and terminating pods, and reset the others to Pending."""
        for kind, namespace in (("Node", ""), ("Lease", LEASES)):
            for each in registry.list(kind, namespace):
                if each["metadata"]["name"] not in nodes:
                    registry.delete(kind, namespace, each["metadata"]["name"])
        for pod in registry.list("Pod"):
            meta, status = pod["metadata"], pod.get("status") or {}
            if status.get("phase") in ("Succeeded", "Failed") and pod["spec"].get("nodeName") in nodes:
                continue
            if meta.get("deletionTimestamp") or pod["spec"].get("nodeName") not in (None, "", *nodes):
                registry.delete("Pod", meta["namespace"], meta["name"], grace=0)
                continue
            scheduled = [each for each in status.get("conditions") or () if each["type"] == "PodScheduled"]
            pending = {"phase": "Pending", "conditions": scheduled, "qosClass": status.get("qosClass", "BestEffort")}
            registry.update("Pod", {**pod, "status": pending}, subresource="status")

    def follow(self, shared: SharedRegistry) -> None:
        """Write all changes from now on."""
        with shared.held() as registry:
            self._keeper.follow(registry, shared.lock)
        shared.listen(self._keeper.wake)

    def close(self) -> None:
        """Write pending changes."""
        self._keeper.close()
