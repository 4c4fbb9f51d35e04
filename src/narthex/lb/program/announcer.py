"""The announcer as a part of a node: sockets, the loop around `Announcer`, status, and metrics.

Works in the network namespace of the thread that calls `run`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from narthex.kube.origin import Origin
from narthex.kube.resources import of_an_announcer
from narthex.kube.source import KubeSource
from narthex.lb.heartbeat import HeartbeatTimes, Membership
from narthex.lb.kernel.heartbeats import HeartbeatSockets
from narthex.lb.kernel.links import LinkChanges
from narthex.lb.kernel.packets import RawLinkTransport
from narthex.lb.program import announcer_status
from narthex.lb.program.announcer_loop import RESCAN_SECONDS, AnnouncerLoop
from narthex.lb.program.announcing import Announcer
from narthex.lb.program.conditions import ConditionWriter
from narthex.lb.program.files import HeartbeatKeyError, PoolsFile, read_keys
from narthex.linux.clock import SystemClock
from narthex.runtime.configuration.values import AnnouncerConfiguration
from narthex.runtime.feed import EventFeed
from narthex.runtime.http.messages import HttpResponse
from narthex.runtime.logs import LOGGER
from narthex.runtime.process import StartError
from narthex.runtime.reconciler import Reconciler
from narthex.runtime.status import StatusPaths

if TYPE_CHECKING:
    from prometheus_client.core import Metric

PATH = "/announcer"
"""Path of its state on the status port."""
_LATE = 3 * RESCAN_SECONDS
"""Seconds without an iteration after which the part is unhealthy."""


def origin_of(origin: Origin, *, pools: bool) -> Origin:
    """Return the source of an announcer's objects: the proxy's directory, or separate watches on the same API server.

    `pools` is True if the pools are custom resources.
    """
    if origin.access is None:
        return origin
    return origin._replace(source=KubeSource(origin.access, of_an_announcer(pools=pools)))


class AnnouncerPart:
    """One run of the announcer."""

    def __init__(
        self,
        node_name: str,
        configuration: AnnouncerConfiguration,
        origin: Origin,
        status: StatusPaths | None = None,
        times: HeartbeatTimes | None = None,
    ) -> None:
        """Configure the announcer.

        `origin` has the objects, and the API server for conditions; `status` the ports that expose its state.
        """
        self._node = node_name
        self._configuration = configuration
        self._origin = origin
        self._status = status
        self._times = times or HeartbeatTimes()
        self._clock = SystemClock()
        self._reconciler = Reconciler(self._clock)
        self._lock = threading.Lock()
        self._announcing: Announcer | None = None
        self._loop: AnnouncerLoop | None = None

    @property
    def healthy(self) -> bool:
        """True if the loop is running and the objects are synced."""
        announcing, loop = self._announcing, self._loop
        if announcing is None or loop is None:
            return False
        return announcing.snapshot.synced and time.monotonic() - loop.turned < _LATE

    def stop(self) -> None:
        """End `run` after other nodes have taken over its addresses."""
        self._reconciler.stop()

    def state(self) -> dict[str, Any]:
        """Return the current state as data (`docs/reference/announcer.md`)."""
        with self._lock:
            if self._announcing is None:
                return {"node": self._node, "running": False}
            return announcer_status.state(self._announcing, time.monotonic())

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics for prometheus-client."""
        with self._lock:
            return tuple(announcer_status.metrics(self._announcing)) if self._announcing else ()

    def run(self) -> None:
        """Announce addresses until `stop`. Raises StartError."""
        with ExitStack() as stack:
            try:
                keys = read_keys(self._configuration.key_file)
                heartbeats = HeartbeatSockets(self._configuration.port)
                stack.callback(heartbeats.close)
                transport = RawLinkTransport(self._configuration.exclude_interfaces, _Once().warn)
                stack.callback(transport.close)
                changes = LinkChanges()
                stack.callback(changes.close)
            except HeartbeatKeyError as error:
                raise StartError(str(error)) from error
            except OSError as error:
                why = f"the announcer cannot open its sockets: {error.strerror or error}"
                raise StartError(f"{why}; it needs root (CAP_NET_RAW), and its UDP port for itself") from error
            now = time.monotonic()
            run = int.from_bytes(os.urandom(8)) | 1
            membership = Membership(self._node, run, keys, now, self._times)
            announcing = Announcer(
                self._node,
                membership,
                transport,
                heartbeats.send,
                ignore_exclude_label=self._configuration.ignore_exclude_label,
            )
            feed = EventFeed(self._origin.source)
            pools = PoolsFile(Path(self._configuration.pools_file)) if self._configuration.pools_file else None
            writer = None
            if self._origin.access is not None:
                writer = ConditionWriter(self._origin.access)
                stack.enter_context(writer.running())
            if self._status is not None:
                self._status.offer(
                    PATH, lambda: HttpResponse(200, msgspec.json.encode(self.state()), "application/json")
                )
                stack.callback(self._status.withdraw, PATH)
            stack.enter_context(feed.running(self._reconciler.wake))
            loop = AnnouncerLoop(
                announcing, transport, heartbeats, changes, feed,
                lock=self._lock, clock=self._clock, key_file=self._configuration.key_file, pools=pools, conditions=writer,
            )  # fmt: skip
            with self._lock:
                self._announcing, self._loop = announcing, loop
            stack.callback(self._forget)
            loop.run(self._reconciler)

    def _forget(self) -> None:
        with self._lock:
            self._announcing = self._loop = None


class _Once:
    """Logs each warning once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def warn(self, what: str) -> None:
        """Log a warning unless it was logged before."""
        if what not in self._said and len(self._said) < 1000:
            self._said.add(what)
            LOGGER.warning("announcer: %s", what)
