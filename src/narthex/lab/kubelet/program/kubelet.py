"""The kubelets of all nodes of a lab: pods that the API gives to a node come to life there, and their state goes back.

One thread follows the API; each node has a thread of its own for its pods, so that pods of different nodes are made side
by side (`pod.py` is what happens to one of them).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from narthex.lab.api.errors import ApiFault
from narthex.lab.kubelet.program.containers import PodDependencies
from narthex.lab.kubelet.program.pod import PodLifecycle
from narthex.lab.kubelet.program.work_queue import WorkQueue
from narthex.lab.program.shared_registry import SharedRegistry
from narthex.lab.topology import LabNode
from narthex.model.names import NamespacedName

Object = dict[str, Any]

_WAIT_SECONDS = 0.02


class Kubelet:
    """All pods of a lab. `notice` is safe from any thread."""

    def __init__(self, nodes: Iterable[LabNode], ledger: SharedRegistry, tools: PodDependencies) -> None:
        self._ledger = ledger
        self._tools = tools
        self._nodes = {node.name: node for node in nodes}
        self._workers = {name: WorkQueue(f"kubelet-{name}") for name in self._nodes}
        self._lives: dict[NamespacedName, PodLifecycle] = {}
        self._dead: set[str] = set()
        self._version = 0
        self._news = threading.Event()

    def start(self) -> None:
        """Begin: pods that are in the API already come to life, too."""
        for worker in self._workers.values():
            worker.start()
        with self._ledger.held() as registry:
            self._version = registry.version
            present = registry.list("Pod")
        for pod in present:
            self._give(NamespacedName(pod["metadata"]["namespace"], pod["metadata"]["name"]), pod)
        threading.Thread(target=self._follow, name="kubelet", daemon=True).start()
        self._ledger.listen(self._news.set)

    def lose(self, node: str) -> None:
        """A node is dead: its kubelet does nothing more, and its programs end."""
        self._dead.add(node)
        self._workers[node].stop()
        for life in self.lives():
            if life.pod["spec"].get("nodeName") == node:
                for run in tuple(life.runs.values()):
                    if run.container is not None:
                        run.container.signal(9)

    def crash(self, key: NamespacedName) -> bool:
        """Kill a pod's containers, as a fault of theirs would; False when no living node has it."""
        life = self.life(key)
        if life is None or self.on_dead_node(life):
            return False
        self._workers[life.pod["spec"]["nodeName"]].post(life.crash)
        return True

    def lives(self) -> list[PodLifecycle]:
        """All pods that are not gone. From any thread; what is in them belongs to their workers."""
        return [life for life in tuple(self._lives.values()) if not life.gone]

    def life(self, key: NamespacedName) -> PodLifecycle | None:
        """One pod; None when no node has it."""
        life = self._lives.get(key)
        return None if life is None or life.gone else life

    @property
    def resting(self) -> bool:
        """Nothing is to be done at this moment, as far as this side knows of the API."""
        with self._ledger.held() as registry:
            known = registry.version == self._version
        return known and all(worker.idle for name, worker in self._workers.items() if name not in self._dead)

    def on_dead_node(self, life: PodLifecycle) -> bool:
        """Nobody takes care of it any more."""
        return life.pod["spec"].get("nodeName") in self._dead

    def _follow(self) -> None:
        while True:
            self._news.wait()
            self._news.clear()
            with self._ledger.held() as registry:
                latest: dict[tuple[str, str], Object | None]
                try:
                    changes = registry.changes_since(self._version)
                    latest = {change.key: change.after for change in changes if change.kind == "Pod"}
                except ApiFault:
                    # Too much has happened to be told of: look at all there is.
                    latest = dict.fromkeys(self._lives)
                    for each in registry.list("Pod"):
                        latest[each["metadata"]["namespace"], each["metadata"]["name"]] = each
                version = registry.version
            for key, pod in latest.items():
                self._give(NamespacedName(*key), pod)
            self._version = version

    def _give(self, key: NamespacedName, pod: Object | None) -> None:
        life = self._lives.get(key)
        name = (pod or {}).get("spec", {}).get("nodeName") or (life.pod["spec"].get("nodeName") if life else "")
        worker = self._workers.get(name)
        if worker is not None:
            worker.post(lambda: self._take(worker, key, pod))

    def _take(self, worker: WorkQueue, key: NamespacedName, pod: Object | None) -> None:
        """What the API says of a pod has changed. Called by the worker of its node."""
        life = self._lives.get(key)
        if life is not None and life.gone:
            del self._lives[key]
            life = None
        if life is not None:
            if pod is not None and pod["metadata"]["uid"] == life.uid:
                life.change(pod)
                return
            # It was taken away without its kubelet's word.
            life.end(0.0)
            if pod is not None:
                worker.after(_WAIT_SECONDS, lambda: self._take(worker, key, pod))
            return
        if pod is None or (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            return
        life = PodLifecycle(pod, self._nodes[pod["spec"]["nodeName"]], worker, self._tools)
        self._lives[key] = life
        if pod["metadata"].get("deletionTimestamp"):
            life.end(0.0)
        else:
            life.start()
