"""The components of a lab process, created in the order of their dependencies."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from narthex.lab import cluster, topology
from narthex.lab.api.api import ApiHandler
from narthex.lab.api.registry import Registry
from narthex.lab.api.store import ObjectStore
from narthex.lab.containers.container import Containers
from narthex.lab.containers.forks import ForkServer
from narthex.lab.controllers.controller_manager import ControllerManager, lab_controllers
from narthex.lab.controllers.ingress.controller import IngressController
from narthex.lab.controllers.node_lifecycle import EXTERNAL_NODE_GRACE_SECONDS, LEASES, NODE_GRACE_SECONDS
from narthex.lab.controllers.service.admission import admission
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
from narthex.lab.kubelet.program.volumes import PodFiles
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
from narthex.lab.server.kubelet import PORT as KUBELET_PORT
from narthex.lab.server.kubelet import KubeletServer
from narthex.lab.topology import LabNode

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
    ingress_controller: ControllerLoop | None
    """None for a lab with its own controllers, which include that of Ingresses."""
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
    remote = None
    persistence = LabPersistence(directory) if directory.kept.is_dir() else None
    api: ApiHandler | RemoteApi
    if options.control_plane is None:
        registry, api = _own_objects(persistence)
    else:
        fabric = topology.fabric_namespace(directory.name)
        remote = RemoteObjects(fabric, str(directory.node_kubeconfig), cluster.custom_resource_definitions())
        registry, api = remote.shared, remote.api
    node_processes = NodeProcesses(directory, nodes, options, forks)
    containers = Containers(forks)
    events = EventRecorder(registry)
    pods = PodDependencies(
        registry=registry,
        network=PodNetwork(directory, nodes),
        files=PodFiles(directory, registry, remote.registry.token if remote is not None else None),
        images=images,
        echo=EchoServer(),
        containers=containers,
        record_event=events,
        is_released=EndpointDrain(registry, node_processes.synced),
        prober=Prober(containers),
    )
    kubelet = Kubelet(nodes, registry, pods)
    access = PodAccess(kubelet, pods)
    grace = NODE_GRACE_SECONDS if remote is None else EXTERNAL_NODE_GRACE_SECONDS
    api_server: LabApiServer | ControlPlane
    if remote is None or options.control_plane is None:
        assert isinstance(api, ApiHandler)
        api_server = LabApiServer(directory, registry, api, access)
    else:
        api_server = ControlPlane(directory, options.control_plane, nodes, remote.connect, progress)
    return LabComponents(
        directory=directory,
        nodes=nodes,
        registry=registry,
        api=api,
        persistence=persistence,
        manifests=ManifestApplier(
            options.source,
            registry,
            api,
            tuple(node.name for node in nodes),
            persistence.applied if persistence is not None else None,
        ),
        controllers=ControllerLoop(registry, lab_controllers()) if remote is None else ExternalControllers(registry),
        heartbeats=NodeHeartbeats(
            nodes,
            registry,
            interval=grace / _HEARTBEATS_PER_GRACE,
            lease_seconds=int(grace),
            kubelet_port=0 if remote is None else KUBELET_PORT,
            returned=kubelet.refresh,
        ),
        static_pods=StaticPods(nodes, registry),
        node_processes=node_processes,
        events=events,
        pods=pods,
        kubelet=kubelet,
        api_server=api_server,
        kubelet_api=None if remote is None else KubeletServer(access),
        ingress=LabIngress(directory.name, registry, access),
        ingress_controller=None
        if remote is None
        else ControllerLoop(registry, ControllerManager([IngressController()])),
    )


def _own_objects(persistence: LabPersistence | None) -> tuple[SharedRegistry, ApiHandler]:
    """Return the objects of the lab's own API server, with those that were kept. Raises LabError."""
    store = ObjectStore()
    if persistence is not None:
        persistence.load(store)
    registry = SharedRegistry(Registry(lambda: datetime.now(UTC), os.urandom, admit=admission(), store=store))
    with registry.held() as unlocked:
        return registry, ApiHandler(unlocked)


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
