"""Persistence of a lab started with `--keep`: the API's objects and the applied manifests."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from narthex.lab.api.registry import Registry
from narthex.lab.api.store import ObjectStore
from narthex.lab.kubelet.node_status import LEASES
from narthex.lab.program.shared_registry import SharedRegistry
from narthex.lab.program.state import LabError, StateDirectory
from narthex.lab.server.database import ObjectDatabase, UnreadableDatabase


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
