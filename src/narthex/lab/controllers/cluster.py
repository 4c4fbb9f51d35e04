"""All controllers of the lab, in the order of their turn, and writing what they want."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Protocol

from narthex.lab.api.errors import ApiFault
from narthex.lab.controllers.deployments import Deployments
from narthex.lab.controllers.endpoint_slices import EndpointSlices
from narthex.lab.controllers.endpoints import Endpoints
from narthex.lab.controllers.endpoints_objects import EndpointsObjects, Mirrors
from narthex.lab.controllers.garbage import GarbageCollector
from narthex.lab.controllers.node_lifecycle import NodeLifecycle
from narthex.lab.controllers.old_events import OldEvents
from narthex.lab.controllers.replicasets import ReplicaSets
from narthex.lab.controllers.scheduler import Scheduler
from narthex.lab.controllers.service_cidrs import ServiceCIDRs
from narthex.lab.controllers.settings import LAB, Settings
from narthex.lab.controllers.turn import Control
from narthex.lab.controllers.view import Create, Object, Update, View, Write

_MOST_TURNS = 10_000
"""A cluster that is not at rest after so many turns at one moment never will be: some two controllers disagree."""


def all_controllers(settings: Settings = LAB) -> Control:
    """The controllers of a new lab."""
    endpoints = Endpoints()
    return Control(
        [
            Deployments(),
            ReplicaSets(),
            Scheduler(),
            EndpointSlices(endpoints),
            EndpointsObjects(endpoints),
            Mirrors(),
            ServiceCIDRs(),
            NodeLifecycle(settings),
            GarbageCollector(),
            OldEvents(settings),
        ]
    )


class Written(View, Protocol):
    """A view that can be written: `narthex.lab.api.registry.Registry`. Each raises ApiFault."""

    def create(self, kind: str, obj: Object) -> Any:
        """Make an object."""

    def update(self, kind: str, obj: Object, *, subresource: str = "") -> Any:
        """Replace an object."""

    def delete(self, kind: str, namespace: str, name: str, *, grace: int | None = None) -> Any:
        """End an object."""


def settle(control: Control, registry: Written, now: datetime) -> None:
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
                if isinstance(write, Create) and write.kind == "Event":
                    # It is words only; nothing follows from them.
                    continue
                if fault.code == 404 and not isinstance(write, Create):
                    # What is gone needs nothing any more.
                    continue
                if fault.reason == "Conflict":
                    control.outdated(write)
                else:
                    control.refused(write, fault.message, now)
            else:
                control.done(write)
    raise RuntimeError(f"the controllers do not come to rest; the last of them wanted {writes[:3]}")


def _do(registry: Written, write: Write) -> None:
    if isinstance(write, Create):
        registry.create(write.kind, write.obj)
    elif isinstance(write, Update):
        registry.update(write.kind, write.obj, subresource=write.subresource)
    else:
        registry.delete(write.kind, write.namespace, write.name, grace=write.grace)
