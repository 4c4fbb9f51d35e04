"""Kubernetes Events (events.k8s.io/v1) with kube-proxy's reasons and texts (rows 26.4, 24.13)."""

from __future__ import annotations

import asyncio
import queue
import threading
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

import msgspec

from narthex.kube.access import Access
from narthex.kube.client import writing
from narthex.linux.background import in_background
from narthex.linux.clock import Clock
from narthex.model import NamespacedName
from narthex.runtime.logs import LOGGER

_MOST_WAITING = 100
"""Events queued for an API server that does not respond; further ones are only logged."""
_ATTEMPTS = 5
_AGAIN_SECONDS = 5.0
_EVENT_SECONDS = 10.0
_END_SECONDS = 5.0
"""Time at the end of a program for Events that are not written yet, such as the reason of this end."""
_LONGEST_NOTE = 1024
"""Bytes; the limit of the API."""
_CONTROLLER = "kube-proxy"
"""The reporting controller. Users search for the name of the program that this one replaces."""


class ClusterEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An occurrence to report about a Node, Service, or other object."""

    kind: str
    object: NamespacedName
    uid: str = ""
    warning: bool = True
    reason: str
    action: str
    note: str = ""
    api_version: str = "v1"


class ClusterEventRecorder(Protocol):
    """A recorder of Events."""

    def record(self, event: ClusterEvent) -> None:
        """Record an event. Never blocks and never raises."""
        ...


class EventCreator(Protocol):
    """An API server that stores Events."""

    def create_event(self, namespace: str, event: dict[str, Any]) -> None:
        """Send a POST request with the event. Raises OSError or RuntimeError if it fails."""
        ...


class LogOnlyRecorder:
    """A recorder for programs without an API server: events go to the debug log."""

    def record(self, event: ClusterEvent) -> None:
        """Log an event."""
        LOGGER.debug("event %s: %s", event.reason, event.note)


class EventPoster:
    """Posts Events, each over a connection of its own, since they are rare.

    For one thread at a time, without an asyncio loop.
    """

    def __init__(self, access: Access) -> None:
        self._access = access

    def create_event(self, namespace: str, event: dict[str, Any]) -> None:
        """Post an event. Raises ApiError if the server did not store it."""
        asyncio.run(self._create(f"/apis/events.k8s.io/v1/namespaces/{namespace}/events", event))

    async def _create(self, path: str, event: dict[str, Any]) -> None:
        async with writing(self._access, _EVENT_SECONDS) as writer:
            await writer.create(path, event)


class EventWriter:
    """A recorder that writes Events from a thread of its own, so that a slow API server delays nothing else."""

    def __init__(
        self,
        creator: EventCreator,
        node_name: str,
        clock: Clock,
        controller: str = _CONTROLLER,
        most_waiting: int = _MOST_WAITING,
    ) -> None:
        """Prepare a recorder. `controller` and `node_name` become the reporting controller and its instance."""
        self._creator = creator
        self._node_name = node_name
        self._controller = controller
        self._clock = clock
        self._waiting: queue.Queue[tuple[ClusterEvent, float] | None] = queue.Queue(most_waiting)
        self._stop = threading.Event()

    def record(self, event: ClusterEvent) -> None:
        """Queue an event."""
        try:
            self._waiting.put_nowait((event, self._clock.wall()))
        except queue.Full:
            LOGGER.warning("the event %s is dropped: %d are queued already", event.reason, self._waiting.maxsize)

    def running(self, seconds: float = _END_SECONDS) -> AbstractContextManager[None]:
        """Write events while the block runs, then retry the queued ones once, for at most `seconds`."""
        return in_background("events", self._run, self._end, patience=seconds)

    def _end(self) -> None:
        self._stop.set()
        # Where the queue is full the API server is away, and the thread ends with the process.
        with suppress(queue.Full):
            self._waiting.put_nowait(None)

    def _run(self) -> None:
        while (one := self._waiting.get()) is not None:
            self._write(*one)

    def _write(self, event: ClusterEvent, wall: float) -> None:
        body = event_object(event, wall, self._node_name, self._controller)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._creator.create_event(body["metadata"]["namespace"], body)
                return
            except (OSError, RuntimeError) as error:
                # A process that ends does not wait for a second attempt.
                if attempt == _ATTEMPTS or self._stop.wait(_AGAIN_SECONDS):
                    LOGGER.warning("the event %s could not be written: %s", event.reason, error)
                    return


def event_object(event: ClusterEvent, wall: float, node_name: str, controller: str = _CONTROLLER) -> dict[str, Any]:
    """Return the Event object for an occurrence at `wall` seconds since the epoch."""
    from datetime import UTC, datetime

    about = event.object
    regarding = {"kind": event.kind, "name": about.name, "uid": event.uid, "apiVersion": event.api_version}
    if about.namespace:
        regarding["namespace"] = about.namespace
    when = datetime.fromtimestamp(wall, UTC)
    note = event.note.encode()[:_LONGEST_NOTE].decode(errors="ignore")
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        # The name must be unique; kube-proxy's are made so, too.
        "metadata": {"name": f"{about.name}.{int(wall * 1e9):x}", "namespace": about.namespace or "default"},
        "eventTime": when.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "type": "Warning" if event.warning else "Normal",
        "reason": event.reason,
        "action": event.action,
        "note": note,
        "regarding": {name: value for name, value in regarding.items() if value},
        "reportingController": controller,
        "reportingInstance": f"{controller}-{node_name}"[:128],
    }


def starting(node_name: str) -> ClusterEvent:
    """Return the event for the start of a node's proxy."""
    return _at_start(node_name, "Starting", warning=False)


def cannot_serve(node_name: str, purpose: str, note: str) -> ClusterEvent:
    """Return the event for a status port that cannot be opened. `purpose` is `health` or `metrics`."""
    reason = {"health": "FailedToStartProxierHealthcheck", "metrics": "FailedToStartMetricServer"}[purpose]
    return _at_start(node_name, reason, note)


def ipvs_deprecated(node_name: str) -> ClusterEvent:
    """Return the warning that Kubernetes deprecates mode ipvs (row 24.13)."""
    note = "mode ipvs is deprecated in Kubernetes and will be removed from kube-proxy; consider nftables"
    return _at_start(node_name, "IPVSDeprecation", note)


def source_problem(node_name: str, reason: str, note: str) -> ClusterEvent:
    """Return the event for a problem of the source of objects."""
    return ClusterEvent(
        kind="Node",
        object=NamespacedName("", node_name),
        uid=node_name,
        reason=reason,
        action="ListAndWatch",
        note=note,
    )


def _at_start(node_name: str, reason: str, note: str = "", *, warning: bool = True) -> ClusterEvent:
    node = NamespacedName("", node_name)
    return ClusterEvent(
        kind="Node", object=node, uid=node_name, warning=warning, reason=reason, action="StartKubeProxy", note=note
    )


def cannot_check(service: NamespacedName, note: str) -> ClusterEvent:
    """Return the event for a health check node port that cannot be opened."""
    reason = "FailedToStartServiceHealthcheck"
    return ClusterEvent(kind="Service", object=service, uid=str(service), reason=reason, action="Listen", note=note)


def balancing_not_applied(service: NamespacedName, uid: str, note: str) -> ClusterEvent:
    """Return the event for a Service whose request for load balancing has no effect on this node (row 29.19)."""
    return ClusterEvent(
        kind="Service", object=service, uid=uid, reason="LoadBalancingNotApplied", action="SelectEndpoints", note=note
    )


def endpoint_ejected(service: NamespacedName, uid: str, note: str) -> ClusterEvent:
    """Return the event for an endpoint of a Service that this node's sockets no longer connect to (row 29.20)."""
    return ClusterEvent(kind="Service", object=service, uid=uid, reason="EndpointEjected", action="Eject", note=note)


def endpoint_returned(service: NamespacedName, uid: str, note: str) -> ClusterEvent:
    """Return the event for an ejected endpoint of a Service to which connections are made again (row 29.20)."""
    return ClusterEvent(
        kind="Service", object=service, uid=uid, warning=False, reason="EndpointReturned", action="Return", note=note
    )


def change_refused(service: NamespacedName, uid: str, note: str) -> ClusterEvent:
    """Return the event for a Service whose changes this node refuses to write, because its rules would be wrong."""
    return ClusterEvent(kind="Service", object=service, uid=uid, reason="ChangesRefused", action="SyncRules", note=note)
