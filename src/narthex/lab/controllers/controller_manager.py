"""The controller manager: routes changes to controllers, collects and executes their writes.

    manager = lab_controllers()
    run_until_stable(manager, registry, now)

Each controller reconciles single keys. A key becomes due when an object that affects it changes, at a time the controller
asked for, and after a write that failed. Results depend only on the history of the registry and on the times passed in, so
`narthex lab replay` can repeat a recorded history exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple, Protocol

from narthex.lab.api.errors import StatusError
from narthex.lab.api.registry import Registry
from narthex.lab.controllers.cluster_state import ClusterState, ObjectChange
from narthex.lab.controllers.cronjob import CronJobController
from narthex.lab.controllers.daemonset import DaemonSetController
from narthex.lab.controllers.deployment.controller import DeploymentController
from narthex.lab.controllers.endpoints import EndpointsController, EndpointSliceMirroringController
from narthex.lab.controllers.endpointslice.controller import EndpointSliceController
from narthex.lab.controllers.endpointslice.pod_endpoints import PodEndpoints
from narthex.lab.controllers.events import EventTtlController
from narthex.lab.controllers.garbage_collector import GarbageCollector
from narthex.lab.controllers.ingress.controller import IngressController
from narthex.lab.controllers.job import JobController
from narthex.lab.controllers.namespace_objects import NamespaceObjectsController
from narthex.lab.controllers.node_lifecycle import NodeLifecycleController
from narthex.lab.controllers.objects import (
    CreateObject,
    DeleteObject,
    ObjectKey,
    ReconcileResult,
    RequeueAt,
    UpdateObject,
    Write,
    key_of,
)
from narthex.lab.controllers.replicaset import ReplicaSetController
from narthex.lab.controllers.scheduler import Scheduler
from narthex.lab.controllers.service.balancer_finalizer import BalancerFinalizerController
from narthex.lab.controllers.service.cidrs import ServiceCIDRController
from narthex.lab.controllers.statefulset import StatefulSetController
from narthex.model.backoff import Backoff

_BACKOFF = Backoff(0.25, 30.0)
_MALFORMED_OBJECT_ERRORS = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""Exceptions that reading a malformed object raises."""


class WorkItem(NamedTuple):
    """A key that a controller reconciles."""

    controller: str
    key: ObjectKey


class Controller(Protocol):
    """A control loop for one kind of object. It may keep only counters and observed times between calls."""

    name: str
    kinds: frozenset[str]
    """Kinds whose changes affect the controller; empty: all."""

    def affected_keys(self, change: ObjectChange, state: ClusterState, /) -> Iterable[ObjectKey]:
        """Return the keys to reconcile after a change."""

    def reconcile(self, key: ObjectKey, state: ClusterState, now: datetime, /) -> Iterable[ReconcileResult]:
        """Return the writes that a key needs now. Its object may no longer exist."""


class ControllerManager:
    """The controllers of one cluster with their queues of due keys."""

    def __init__(self, controllers: Sequence[Controller]) -> None:
        self._controllers = tuple(controllers)
        followed = [each.kinds for each in self._controllers]
        self._state = ClusterState(frozenset().union(*followed) if all(followed) else ())
        self._by_kind: dict[str, tuple[Controller, ...]] = {}
        self._queue: dict[str, set[ObjectKey]] = {each.name: set() for each in self._controllers}
        self._delayed: dict[WorkItem, datetime] = {}
        self._failures: dict[WorkItem, int] = {}
        self.problems: dict[WorkItem, str] = {}
        """Current errors of reading and writing objects, as sentences."""

    def reconcile_due(self, registry: Registry, now: datetime) -> Sequence[tuple[WorkItem, Write]]:
        """Reconcile all keys that are due and return their writes. Without any, nothing is due before `next_due`."""
        for change in self._state.sync(registry):
            for controller in self._watchers(change.kind):
                self._enqueue(controller, change, now)
        for work in [work for work, at in self._delayed.items() if at <= now]:
            del self._delayed[work]
            self._queue[work.controller].add(work.key)
        writes: list[tuple[WorkItem, Write]] = []
        for controller in self._controllers:
            keys = sorted(self._queue[controller.name])
            self._queue[controller.name].clear()
            for key in keys:
                work = WorkItem(controller.name, key)
                writes += ((work, write) for write in self._reconcile(controller, work, now))
        return writes

    def _watchers(self, kind: str) -> tuple[Controller, ...]:
        if kind not in self._by_kind:
            self._by_kind[kind] = tuple(each for each in self._controllers if not each.kinds or kind in each.kinds)
        return self._by_kind[kind]

    def _enqueue(self, controller: Controller, change: ObjectChange, now: datetime) -> None:
        try:
            self._queue[controller.name].update(controller.affected_keys(change, self._state))
        except _MALFORMED_OBJECT_ERRORS:
            # Reconciling the key reports the error.
            self._enqueue_at(WorkItem(controller.name, change.key), now)

    def _reconcile(self, controller: Controller, work: WorkItem, now: datetime) -> list[Write]:
        # The reconciliation sets a new time if it needs one.
        self._delayed.pop(work, None)
        writes: list[Write] = []
        try:
            for answer in controller.reconcile(work.key, self._state, now):
                if isinstance(answer, RequeueAt):
                    self._enqueue_at(work, answer.at)
                else:
                    writes.append(answer)
        except _MALFORMED_OBJECT_ERRORS as error:
            # One malformed object must not stop the others.
            self.problems[work] = f"{controller.name} cannot read {work.key}: {type(error).__name__}: {error}"
            self._enqueue_at(work, now + timedelta(seconds=_BACKOFF.longest))
            return []
        self.problems.pop(work, None)
        return writes

    def execute(self, registry: Registry, work: WorkItem, write: Write, now: datetime) -> None:
        """Execute a write and requeue its key if it fails: at once after a conflict, otherwise with exponential backoff."""
        try:
            _execute(registry, write)
        except StatusError as fault:
            event_dropped = isinstance(write, CreateObject) and write.kind == "Event"
            already_deleted = fault.code == 404 and not isinstance(write, CreateObject)
            if event_dropped or already_deleted:
                return
            if fault.reason == "Conflict":
                # The object has a newer version.
                self._queue[work.controller].add(work.key)
                return
            self.problems[work] = f"{work.controller} could not write {_describe(write)}: {fault.message}"
            count = self._failures[work] = self._failures.get(work, 0) + 1
            self._enqueue_at(work, now + timedelta(seconds=_BACKOFF.delay(count)))
        else:
            self._failures.pop(work, None)

    def next_due(self, registry: Registry, now: datetime) -> float | None:
        """Return the seconds until a key is due without further changes; 0 means now, None never."""
        if registry.version != self._state.version or any(self._queue.values()):
            return 0.0
        return max(0.0, (min(self._delayed.values()) - now).total_seconds()) if self._delayed else None

    def _enqueue_at(self, work: WorkItem, at: datetime) -> None:
        self._delayed[work] = min(at, self._delayed.get(work, at))


_MAX_ROUNDS = 10_000
"""Rounds at one point in time after which two controllers must be undoing each other's writes."""


def lab_controllers() -> ControllerManager:
    """Return the controllers of a lab in the order in which they run."""
    endpoints = PodEndpoints()
    return ControllerManager(
        [
            NamespaceObjectsController(),
            DeploymentController(),
            ReplicaSetController(),
            DaemonSetController(),
            StatefulSetController(),
            CronJobController(),
            JobController(),
            Scheduler(),
            EndpointSliceController(endpoints),
            EndpointsController(endpoints),
            EndpointSliceMirroringController(),
            IngressController(),
            BalancerFinalizerController(),
            ServiceCIDRController(),
            NodeLifecycleController(),
            GarbageCollector(),
            EventTtlController(),
        ]
    )


def run_until_stable(manager: ControllerManager, registry: Registry, now: datetime) -> None:
    """Reconcile and execute writes until no key is due at `now`.

    Failed writes are listed in `manager.problems` and retried later. The caller holds the registry's lock.
    """
    for _ in range(_MAX_ROUNDS):
        writes = manager.reconcile_due(registry, now)
        if not writes:
            return
        for work, write in writes:
            manager.execute(registry, work, write, now)
    raise RuntimeError(f"the controllers do not become stable; the last writes were {writes[:3]}")


def _execute(registry: Registry, write: Write) -> None:
    if isinstance(write, CreateObject):
        registry.create(write.kind, write.obj)
    elif isinstance(write, UpdateObject):
        registry.update(write.kind, write.obj, subresource=write.subresource)
    else:
        registry.delete(write.kind, *write.key, grace=write.grace)


def _describe(write: Write) -> str:
    return f"{write.kind} {write.key if isinstance(write, DeleteObject) else key_of(write.obj)}"
