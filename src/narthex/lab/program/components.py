"""The components of a lab process, created in the order of their dependencies."""

from __future__ import annotations

import os
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from narthex.lab.api.api import ApiHandler
from narthex.lab.api.registry import Registry
from narthex.lab.api.store import ObjectStore
from narthex.lab.containers.container import Containers
from narthex.lab.containers.forks import ForkServer
from narthex.lab.controllers.controller_manager import lab_controllers
from narthex.lab.controllers.node_lifecycle import LEASES, NODE_GRACE_SECONDS
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
from narthex.lab.program.controller_loop import ControllerLoop
from narthex.lab.program.manifests import ManifestApplier
from narthex.lab.program.network import PodNetwork
from narthex.lab.program.nodes import NodeProcesses
from narthex.lab.program.shared_registry import SharedRegistry
from narthex.lab.program.state import LabError, StateDirectory
from narthex.lab.server.database import ObjectDatabase, UnreadableDatabase
from narthex.lab.topology import LabNode

_HEARTBEATS_PER_GRACE = 4


class LabComponents(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a lab process runs."""

    directory: StateDirectory
    nodes: tuple[LabNode, ...]
    registry: SharedRegistry
    api: ApiHandler
    persistence: LabPersistence | None
    """None for a lab without `--keep`."""
    manifests: ManifestApplier
    controllers: ControllerLoop
    heartbeats: NodeHeartbeats
    static_pods: StaticPods
    node_processes: NodeProcesses
    events: EventRecorder
    pods: PodDependencies
    kubelet: Kubelet
    api_server: LabApiServer


def build_components(
    directory: StateDirectory,
    source: Path,
    nodes: tuple[LabNode, ...],
    mode: str,
    overlay: str,
    images: Images,
    forks: ForkServer,
) -> LabComponents:
    """Create the components without starting any. Raises LabError if kept objects cannot be read."""
    store = ObjectStore()
    persistence = LabPersistence(directory) if directory.kept.is_dir() else None
    if persistence is not None:
        persistence.load(store)
    registry = SharedRegistry(Registry(lambda: datetime.now(UTC), os.urandom, admit=admission(), store=store))
    with registry.held() as unlocked:
        api = ApiHandler(unlocked)
    applied = persistence.applied if persistence is not None else None
    node_processes = NodeProcesses(directory, nodes, mode, overlay, forks)
    containers = Containers(forks)
    events = EventRecorder(registry)
    pods = PodDependencies(
        registry=registry,
        network=PodNetwork(directory, nodes),
        files=PodFiles(directory, registry),
        images=images,
        echo=EchoServer(),
        containers=containers,
        record_event=events,
        is_released=EndpointDrain(registry, node_processes.synced),
        prober=Prober(containers),
    )
    kubelet = Kubelet(nodes, registry, pods)
    return LabComponents(
        directory=directory,
        nodes=nodes,
        registry=registry,
        api=api,
        persistence=persistence,
        manifests=ManifestApplier(source, registry, api, tuple(node.name for node in nodes), applied),
        controllers=ControllerLoop(registry, lab_controllers()),
        heartbeats=NodeHeartbeats(
            nodes, registry, interval=NODE_GRACE_SECONDS / _HEARTBEATS_PER_GRACE, lease_seconds=int(NODE_GRACE_SECONDS)
        ),
        static_pods=StaticPods(nodes, registry),
        node_processes=node_processes,
        events=events,
        pods=pods,
        kubelet=kubelet,
        api_server=LabApiServer(directory, registry, api, PodAccess(kubelet, pods)),
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
