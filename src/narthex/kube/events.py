"""What the cluster is told in Events (events.k8s.io/v1), in kube-proxy's words (rows 26.4, 24.13)."""

from __future__ import annotations

import queue
import threading
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

import msgspec

from narthex.linux.background import in_background
from narthex.linux.clock import Clock
from narthex.model.names import NamespacedName
from narthex.runtime.logs import LOGGER

_MOST_WAITING = 100
"""Events that wait for an API server that does not answer; more are only in the log."""
_ATTEMPTS = 5
_AGAIN_SECONDS = 5.0
_LONGEST_NOTE = 1024
"""Bytes; the API's own limit."""
_CONTROLLER = "kube-proxy"
"""Named as the program whose place this takes, since that is what people look for."""


class ClusterEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something to tell of a Node or a Service."""

    kind: str
    object: NamespacedName
    uid: str = ""
    warning: bool = True
    reason: str
    action: str
    note: str = ""
    api_version: str = "v1"
    """Of the kind."""


class ClusterEventRecorder(Protocol):
    """Whom to tell."""

    def tell(self, happening: ClusterEvent) -> None:
        """Never blocks, never raises."""
        ...


class EventCreator(Protocol):
    """An API server that takes Events."""

    def create_event(self, namespace: str, event: dict[str, Any]) -> None:
        """POST it. Raises OSError or RuntimeError when that did not work."""
        ...


class LogOnlyRecorder:
    """Where there is no API server: the log has all of it anyway."""

    def tell(self, happening: ClusterEvent) -> None:
        LOGGER.debug("event %s: %s", happening.reason, happening.note)


class EventWriter:
    """Writes Events in a thread of its own, so that an API server that is slow or away holds nobody up."""

    def __init__(
        self,
        creator: EventCreator,
        node_name: str,
        clock: Clock,
        controller: str = _CONTROLLER,
        most_waiting: int = _MOST_WAITING,
    ) -> None:
        """`controller` is who tells, and `node_name` which one of them."""
        self._creator = creator
        self._node_name = node_name
        self._controller = controller
        self._clock = clock
        self._waiting: queue.Queue[tuple[ClusterEvent, float] | None] = queue.Queue(most_waiting)
        self._stop = threading.Event()

    def tell(self, happening: ClusterEvent) -> None:
        """Have it written soon."""
        try:
            self._waiting.put_nowait((happening, self._clock.wall()))
        except queue.Full:
            LOGGER.warning("the event %s is not told: %d wait already", happening.reason, self._waiting.maxsize)

    def running(self, seconds: float = 2.0) -> AbstractContextManager[None]:
        """Write while the block lasts. At its end what still waits is tried once more, for so many seconds at most."""
        return in_background("events", self._run, self._end, patience=seconds)

    def _end(self) -> None:
        self._stop.set()
        # Where the queue is full the API server is away, and the thread ends with the process.
        with suppress(queue.Full):
            self._waiting.put_nowait(None)

    def _run(self) -> None:
        while (one := self._waiting.get()) is not None:
            self._write(*one)

    def _write(self, happening: ClusterEvent, wall: float) -> None:
        body = event_object(happening, wall, self._node_name, self._controller)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._creator.create_event(body["metadata"]["namespace"], body)
                return
            except (OSError, RuntimeError) as error:
                # When the process ends nobody waits for a second try.
                if attempt == _ATTEMPTS or self._stop.wait(_AGAIN_SECONDS):
                    LOGGER.warning("the event %s could not be written: %s", happening.reason, error)
                    return


def event_object(happening: ClusterEvent, wall: float, node_name: str, controller: str = _CONTROLLER) -> dict[str, Any]:
    """The Event as the API takes it. `wall`: when it happened, in seconds since the epoch."""
    from datetime import UTC, datetime

    about = happening.object
    regarding = {"kind": happening.kind, "name": about.name, "uid": happening.uid, "apiVersion": happening.api_version}
    if about.namespace:
        regarding["namespace"] = about.namespace
    when = datetime.fromtimestamp(wall, UTC)
    note = happening.note.encode()[:_LONGEST_NOTE].decode(errors="ignore")
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        # The name must be unique; kube-proxy's are made so, too.
        "metadata": {"name": f"{about.name}.{int(wall * 1e9):x}", "namespace": about.namespace or "default"},
        "eventTime": when.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "type": "Warning" if happening.warning else "Normal",
        "reason": happening.reason,
        "action": happening.action,
        "note": note,
        "regarding": {name: value for name, value in regarding.items() if value},
        "reportingController": controller,
        "reportingInstance": f"{controller}-{node_name}"[:128],
    }


def starting(node_name: str) -> ClusterEvent:
    """The proxy of a node starts."""
    return ClusterEvent(
        kind="Node",
        object=NamespacedName("", node_name),
        uid=node_name,
        warning=False,
        reason="Starting",
        action="StartKubeProxy",
    )


def cannot_serve(node_name: str, purpose: str, note: str) -> ClusterEvent:
    """A status port cannot be had, and the process ends for it. `purpose` is `health` or `metrics`."""
    reason = {"health": "FailedToStartProxierHealthcheck", "metrics": "FailedToStartMetricServer"}[purpose]
    node = NamespacedName("", node_name)
    return ClusterEvent(kind="Node", object=node, uid=node_name, reason=reason, action="StartKubeProxy", note=note)


def ipvs_deprecated(node_name: str) -> ClusterEvent:
    """Mode ipvs runs, which Kubernetes is about to drop (row 24.13)."""
    return ClusterEvent(
        kind="Node",
        object=NamespacedName("", node_name),
        uid=node_name,
        reason="IPVSDeprecation",
        action="StartKubeProxy",
        note="mode ipvs is deprecated in Kubernetes and will be removed from kube-proxy; consider nftables",
    )


def cannot_check(service: NamespacedName, note: str) -> ClusterEvent:
    """A health check node port cannot be had."""
    return ClusterEvent(
        kind="Service",
        object=service,
        uid=str(service),
        reason="FailedToStartServiceHealthcheck",
        action="Listen",
        note=note,
    )
