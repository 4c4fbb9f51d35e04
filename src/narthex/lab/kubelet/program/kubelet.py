"""The kubelets of all nodes: start the pods that are bound to a node and report their status.

One thread follows the API; each node has a thread for its pods, so that pods of different nodes start in parallel. `pod.py`
implements the lifecycle of one pod.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from narthex.lab.api.errors import StatusError
from narthex.lab.controllers.objects import Object, ObjectKey, is_pod_finished, is_terminating, key_of, uid_of
from narthex.lab.kubelet.program.containers import PodDependencies
from narthex.lab.kubelet.program.pod import PodLifecycle
from narthex.lab.kubelet.program.work_queue import WorkQueue
from narthex.lab.kubelet.static_pods import is_mirror
from narthex.lab.program.shared_registry import SharedRegistry
from narthex.lab.topology import LabNode

_REPLACE_SECONDS = 0.02


class Kubelet:
    """All pods of a lab."""

    def __init__(self, nodes: Iterable[LabNode], registry: SharedRegistry, deps: PodDependencies) -> None:
        self._registry = registry
        self._deps = deps
        self._nodes = {node.name: node for node in nodes}
        self._workers = {name: WorkQueue(f"kubelet-{name}") for name in self._nodes}
        self._pods: dict[ObjectKey, PodLifecycle] = {}
        self._dead: set[str] = set()
        self._version = 0
        self._wake = threading.Event()

    def start(self) -> None:
        """Start all pods in the API, and follow changes."""
        for worker in self._workers.values():
            worker.start()
        with self._registry.held() as registry:
            self._version = registry.version
            present = registry.list("Pod")
        for pod in present:
            self._dispatch(key_of(pod), pod)
        threading.Thread(target=self._follow, name="kubelet", daemon=True).start()
        self._registry.listen(self._wake.set)

    def kill_node(self, node: str) -> None:
        """Stop the kubelet of a dead node and kill its programs."""
        self._dead.add(node)
        self._workers[node].stop()
        for lifecycle in self.pods():
            if lifecycle.pod["spec"].get("nodeName") == node:
                for run in tuple(lifecycle.runs.values()):
                    if run.container is not None:
                        run.container.signal(9)

    def refresh(self, node: str) -> None:
        """Write the status of all pods of a node that differs from the API's."""
        for lifecycle in self.pods():
            if lifecycle.pod["spec"].get("nodeName") == node:
                self._workers[node].post(lifecycle.write_status)

    def crash(self, key: ObjectKey) -> bool:
        """Kill a pod's containers; return False if no running node has the pod."""
        lifecycle = self.pod(key)
        if lifecycle is None or self.on_dead_node(lifecycle):
            return False
        self._workers[lifecycle.pod["spec"]["nodeName"]].post(lifecycle.crash)
        return True

    def pods(self) -> list[PodLifecycle]:
        """Return all pods that are not finished. Safe from any thread; their content belongs to the threads of their nodes."""
        return [lifecycle for lifecycle in tuple(self._pods.values()) if not lifecycle.finished]

    def pod(self, key: ObjectKey) -> PodLifecycle | None:
        """Return a pod, None if no node has it."""
        lifecycle = self._pods.get(key)
        return None if lifecycle is None or lifecycle.finished else lifecycle

    def node_namespace(self, name: str) -> str:
        """Return the network namespace of a node. Raises StatusError if it is dead or unknown."""
        if name not in self._nodes or name in self._dead:
            raise StatusError(503, "ServiceUnavailable", f"node {name} does not answer")
        return self._nodes[name].namespace

    @property
    def idle(self) -> bool:
        """True if all changes of the API are handled."""
        with self._registry.held() as registry:
            known = registry.version == self._version
        return known and all(worker.idle for name, worker in self._workers.items() if name not in self._dead)

    def on_dead_node(self, lifecycle: PodLifecycle) -> bool:
        """Return True if the pod's node is dead."""
        return lifecycle.pod["spec"].get("nodeName") in self._dead

    def _follow(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            with self._registry.held() as registry:
                latest: dict[ObjectKey, Object | None]
                try:
                    changes = registry.changes_since(self._version)
                    latest = {ObjectKey(*change.key): change.after for change in changes if change.kind == "Pod"}
                except StatusError:
                    # The changes are no longer kept: compare all pods.
                    latest = dict.fromkeys(self._pods)
                    latest |= {key_of(each): each for each in registry.list("Pod")}
                version = registry.version
            for key, pod in latest.items():
                self._dispatch(key, pod)
            self._version = version

    def _dispatch(self, key: ObjectKey, pod: Object | None) -> None:
        lifecycle = self._pods.get(key)
        name = (pod or {}).get("spec", {}).get("nodeName") or (
            lifecycle.pod["spec"].get("nodeName") if lifecycle else ""
        )
        worker = self._workers.get(name)
        if worker is not None and not is_mirror(pod or {}):
            worker.post(lambda: self._update_pod(worker, key, pod))

    def _update_pod(self, worker: WorkQueue, key: ObjectKey, pod: Object | None) -> None:
        """Handle a changed or deleted pod object in the thread of its node."""
        lifecycle = self._pods.get(key)
        if lifecycle is not None and lifecycle.finished:
            del self._pods[key]
            lifecycle = None
        if lifecycle is not None:
            if pod is not None and uid_of(pod) == lifecycle.uid:
                lifecycle.update(pod)
                return
            # The pod was deleted without confirmation by its kubelet.
            lifecycle.terminate(0.0)
            if pod is not None:
                worker.after(_REPLACE_SECONDS, lambda: self._update_pod(worker, key, pod))
            return
        # A pod of the same name may have followed one of this node, without a node so far.
        if pod is None or is_pod_finished(pod) or not pod["spec"].get("nodeName"):
            return
        lifecycle = PodLifecycle(pod, self._nodes[pod["spec"]["nodeName"]], worker, self._deps)
        self._pods[key] = lifecycle
        if is_terminating(pod):
            lifecycle.terminate(0.0)
        else:
            lifecycle.start()
