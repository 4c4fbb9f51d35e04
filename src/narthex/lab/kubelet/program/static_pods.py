"""Keeps the mirror pods of all nodes in the API."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Sequence

from narthex.lab.api.errors import StatusError
from narthex.lab.api.registry import Registry
from narthex.lab.cluster import SYSTEM_NAMESPACE
from narthex.lab.controllers.objects import Object, is_terminating, status_of
from narthex.lab.kubelet.static_pods import PROGRAMS, is_mirror, mirror_name, mirror_pods, mirror_status
from narthex.lab.program.shared_registry import SharedRegistry
from narthex.lab.topology import LabNode
from narthex.model import NamespacedName


class StaticPods:
    """The mirror pods of a lab. `run` belongs to one thread."""

    def __init__(self, nodes: Iterable[LabNode], registry: SharedRegistry) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._registry = registry
        self._changed = threading.Event()
        self._version = 0

    def wake(self) -> None:
        """Look for mirror pods that are missing. Safe from any thread."""
        self._changed.set()

    @property
    def keys(self) -> set[NamespacedName]:
        """Namespaces and names of the mirror pods."""
        return {NamespacedName(SYSTEM_NAMESPACE, mirror_name(each, node)) for each in PROGRAMS for node in self._nodes}

    def run(self) -> None:
        """Create mirror pods again after they were deleted, until the process ends."""
        while True:
            self._changed.wait()
            self._changed.clear()
            with self._registry.held() as registry:
                try:
                    changes = [each for each in registry.changes_since(self._version) if each.kind == "Pod"]
                    ended = any(_is_ended_mirror(each.before or {}, each.after) for each in changes)
                except StatusError:
                    # The changes are no longer kept.
                    ended = True
                self._version = registry.version
            if ended:
                self.register()

    def register(self) -> None:
        """Create the mirror pods that do not exist, in place of those that are being deleted."""
        with self._registry.held() as registry:
            for name, node in self._nodes.items():
                owner = registry.get("Node", "", name)
                for pod in mirror_pods(owner) if owner is not None else ():
                    # The namespace may be ending, or a policy may forbid the pod.
                    with contextlib.suppress(StatusError):
                        _mirror(registry, pod, node.addresses)


def _is_ended_mirror(before: Object, after: Object | None) -> bool:
    return (after is None and is_mirror(before)) or (after is not None and is_mirror(after) and is_terminating(after))


def _mirror(registry: Registry, pod: Object, addresses: Sequence[str]) -> None:
    namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    held = registry.get("Pod", namespace, name)
    if held is not None and is_terminating(held):
        held = registry.delete("Pod", namespace, name, grace=0)
    if held is None:
        held = registry.create("Pod", pod)
    if status_of(held).get("phase") != "Running":
        status = mirror_status(held, addresses, registry.stamp())
        registry.update("Pod", {**held, "status": status}, subresource="status")
