"""One turn of all controllers: what changed wakes who is concerned, and each says what it wants written.

    control = all_controllers()                    # cluster.py
    while writes := control.turn(registry, now):   # settle() there does this
        ...

Each controller looks at single objects (its keys). A change in the view, a moment that has come and a write that was
refused make a key due; nothing else is looked at. Nothing that comes out of a turn depends on anything but the view's
history and the times given, so a recorded history replays alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol

import msgspec

from narthex.lab.api.errors import ApiFault
from narthex.lab.controllers.cluster_state import ClusterState, ObjectChange
from narthex.lab.controllers.deployment.controller import DeploymentController
from narthex.lab.controllers.endpoints import EndpointsController
from narthex.lab.controllers.endpointslice.controller import EndpointSliceController
from narthex.lab.controllers.endpointslice.mirroring import EndpointSliceMirroringController
from narthex.lab.controllers.endpointslice.pod_endpoints import PodEndpoints
from narthex.lab.controllers.events import EventTtlController
from narthex.lab.controllers.garbage_collector import GarbageCollector
from narthex.lab.controllers.interfaces import (
    CreateObject,
    Object,
    ObjectKey,
    ReconcileResult,
    RegistryView,
    RequeueAt,
    UpdateObject,
    WorkItem,
    Write,
    describe_write,
)
from narthex.lab.controllers.node_lifecycle import NodeLifecycleController
from narthex.lab.controllers.replicaset import ReplicaSetController
from narthex.lab.controllers.scheduler import Scheduler
from narthex.lab.controllers.service.cidrs import ServiceCIDRController
from narthex.lab.controllers.settings import LAB, Settings
from narthex.model.backoff import Backoff

_BACKOFF = Backoff(0.25, 30.0)
_MADE_OTHERWISE = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""What reading an object of another shape than Kubernetes' ends in."""


class Controller(Protocol):
    """One kind of care. Its state between turns may be counters and observed times only."""

    name: str
    kinds: frozenset[str]
    """The kinds of objects whose changes concern it; empty: all."""

    def concerned(self, seen: ObjectChange, present: ClusterState) -> Iterable[ObjectKey]:
        """The keys that a change makes due."""

    def look(self, key: ObjectKey, present: ClusterState, now: datetime) -> Iterable[ReconcileResult]:
        """What is to be done for a key, whose object may be gone."""


class ControllerManager:
    """The controllers of one cluster."""

    def __init__(self, controllers: Sequence[Controller]) -> None:
        self._controllers = tuple(controllers)
        self._present = ClusterState()
        self._by_kind: dict[str, tuple[Controller, ...]] = {}
        self._due: dict[str, set[ObjectKey]] = {each.name: set() for each in self._controllers}
        self._later: dict[WorkItem, datetime] = {}
        self._refusals: dict[WorkItem, int] = {}
        self.problems: dict[WorkItem, str] = {}
        """What a controller could not make out or was not allowed to write, in a sentence, for as long as that is so."""

    def turn(self, view: RegistryView, now: datetime) -> Sequence[Write]:
        """What all controllers want written now. Empty: the cluster is as it must be until `next_due`."""
        for seen in self._present.follow(view):
            for controller in self._interested(seen.kind):
                self._wake(controller, seen, now)
        for work in [work for work, at in self._later.items() if at <= now]:
            del self._later[work]
            self._due[work.controller].add(work.key)
        writes: list[Write] = []
        for controller in self._controllers:
            keys = sorted(self._due[controller.name])
            self._due[controller.name].clear()
            for key in keys:
                writes += self._look(controller, key, now)
        return writes

    def _interested(self, kind: str) -> tuple[Controller, ...]:
        found = self._by_kind.get(kind)
        if found is None:
            found = tuple(each for each in self._controllers if not each.kinds or kind in each.kinds)
            self._by_kind[kind] = found
        return found

    def _wake(self, controller: Controller, seen: ObjectChange, now: datetime) -> None:
        try:
            self._due[controller.name].update(controller.concerned(seen, self._present))
        except _MADE_OTHERWISE:
            # The look will say what is wrong with it.
            self._wait(WorkItem(controller.name, seen.key), now)

    def _look(self, controller: Controller, key: ObjectKey, now: datetime) -> list[Write]:
        work = WorkItem(controller.name, key)
        # What is looked at says anew when it wants to be looked at again.
        self._later.pop(work, None)
        writes: list[Write] = []
        try:
            for answer in controller.look(key, self._present, now):
                if isinstance(answer, RequeueAt):
                    self._wait(work, answer.at)
                else:
                    writes.append(msgspec.structs.replace(answer, by=work))
        except _MADE_OTHERWISE as error:
            # One object that nobody understands must not stop the others.
            self.problems[work] = f"{controller.name} cannot make out {key}: {type(error).__name__}: {error}"
            self._wait(work, now + timedelta(seconds=_BACKOFF.longest))
            return []
        self.problems.pop(work, None)
        return writes

    def outdated(self, write: Write) -> None:
        """Tell that a write of the last turn met another version of its object (409 Conflict): it is decided again at once."""
        if write.by is not None:
            self._due[write.by.controller].add(write.by.key)

    def refused(self, write: Write, why: str, now: datetime) -> None:
        """Tell that a write of the last turn was not done: it is decided again after a pause that doubles each time."""
        if write.by is None:
            return
        self.problems[write.by] = f"{write.by.controller} could not write {describe_write(write)}: {why}"
        count = self._refusals[write.by] = self._refusals.get(write.by, 0) + 1
        self._wait(write.by, now + timedelta(seconds=_BACKOFF.delay(count)))

    def done(self, write: Write) -> None:
        """Tell that a write was done, so that the next refusal of its kind counts as the first."""
        if write.by is not None:
            self._refusals.pop(write.by, None)

    def next_due(self, view: RegistryView, now: datetime) -> float | None:
        """Seconds until a turn is due although nothing happens; 0: now; None: never."""
        if view.version != self._present.version or any(self._due.values()):
            return 0.0
        return max(0.0, (min(self._later.values()) - now).total_seconds()) if self._later else None

    def _wait(self, work: WorkItem, at: datetime) -> None:
        self._later[work] = min(at, self._later.get(work, at))


_MOST_TURNS = 10_000
"""A cluster that is not at rest after so many turns at one moment never will be: some two controllers disagree."""


def lab_controllers(settings: Settings = LAB) -> ControllerManager:
    """The controllers of a new lab."""
    endpoints = PodEndpoints()
    return ControllerManager(
        [
            DeploymentController(),
            ReplicaSetController(),
            Scheduler(),
            EndpointSliceController(endpoints),
            EndpointsController(endpoints),
            EndpointSliceMirroringController(),
            ServiceCIDRController(),
            NodeLifecycleController(settings),
            GarbageCollector(),
            EventTtlController(settings),
        ]
    )


class ObjectWriter(RegistryView, Protocol):
    """A view that can be written: `narthex.lab.api.registry.Registry`. Each raises ApiFault."""

    def create(self, kind: str, obj: Object) -> Any:
        """Make an object."""

    def update(self, kind: str, obj: Object, *, subresource: str = "") -> Any:
        """Replace an object."""

    def delete(self, kind: str, namespace: str, name: str, *, grace: int | None = None) -> Any:
        """End an object."""


def run_until_stable(control: ControllerManager, registry: ObjectWriter, now: datetime) -> None:
    """Turn and write until nothing is left to do at this moment. What was refused is in `control.problems`, and tried again
    later. Whoever serves the registry holds its lock meanwhile."""
    for _ in range(_MOST_TURNS):
        writes = control.turn(registry, now)
        if not writes:
            return
        for write in writes:
            try:
                _do(registry, write)
            except ApiFault as fault:
                if isinstance(write, CreateObject) and write.kind == "Event":
                    # It is words only; nothing follows from them.
                    continue
                if fault.code == 404 and not isinstance(write, CreateObject):
                    # What is gone needs nothing any more.
                    continue
                if fault.reason == "Conflict":
                    control.outdated(write)
                else:
                    control.refused(write, fault.message, now)
            else:
                control.done(write)
    raise RuntimeError(f"the controllers do not come to rest; the last of them wanted {writes[:3]}")


def _do(registry: ObjectWriter, write: Write) -> None:
    if isinstance(write, CreateObject):
        registry.create(write.kind, write.obj)
    elif isinstance(write, UpdateObject):
        registry.update(write.kind, write.obj, subresource=write.subresource)
    else:
        registry.delete(write.kind, write.namespace, write.name, grace=write.grace)
