"""The announcer as a part of a node: sockets, a loop around `Announcer`, and what others may ask it.

It works in the network namespace of the thread that calls `run`.
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
from narthex.runtime.feed import Feed
from narthex.runtime.http import Reply
from narthex.runtime.logs import LOGGER
from narthex.runtime.process import StartError
from narthex.runtime.reconciler import Reconciler
from narthex.runtime.status import StatusPaths

if TYPE_CHECKING:
    from prometheus_client.core import Metric

PATH = "/announcer"
"""Where the status port shows what it does."""
_LATE = 3 * RESCAN_SECONDS
"""A turn may be so long ago before the part counts as stuck."""


def origin_of(origin: Origin, *, pools: bool) -> Origin:
    """Where an announcer's objects come from: the same directory as the proxy's, or lists of its own from the same API
    server. `pools`: they are objects, too."""
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
        """`origin`: where Services, endpoints, Nodes and pools come from, and the API server that is told. `status`: the
        ports where it shows what it does."""
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
        """Whether it takes its turns, and knows the objects."""
        announcing, loop = self._announcing, self._loop
        if announcing is None or loop is None:
            return False
        return announcing.snapshot.synced and time.monotonic() - loop.turned < _LATE

    def stop(self) -> None:
        """End `run`, after others have taken over what it answers for."""
        self._reconciler.stop()

    def state(self) -> dict[str, Any]:
        """What it does now, as data (`docs/reference/announcer.md`)."""
        with self._lock:
            if self._announcing is None:
                return {"node": self._node, "running": False}
            return announcer_status.state(self._announcing, time.monotonic())

    def collect(self) -> Iterable[Metric]:
        """For prometheus-client."""
        with self._lock:
            return tuple(announcer_status.metrics(self._announcing)) if self._announcing else ()

    def run(self) -> None:
        """Announce until `stop`. Raises StartError."""
        with ExitStack() as stack:
            try:
                keys = read_keys(self._configuration.key_file)
                beats = HeartbeatSockets(self._configuration.port)
                stack.callback(beats.close)
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
                beats.send,
                ignore_exclude_label=self._configuration.ignore_exclude_label,
            )
            feed = Feed(self._origin.source)
            pools = PoolsFile(Path(self._configuration.pools_file)) if self._configuration.pools_file else None
            writer = None
            if self._origin.access is not None:
                writer = ConditionWriter(self._origin.access)
                stack.enter_context(writer.running())
            if self._status is not None:
                self._status.offer(PATH, lambda: Reply(200, msgspec.json.encode(self.state()), "application/json"))
                stack.callback(self._status.withdraw, PATH)
            stack.enter_context(feed.running(self._reconciler.wake))
            loop = AnnouncerLoop(
                announcing, transport, beats, changes, feed,
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
    """Says each thing once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def warn(self, what: str) -> None:
        if what not in self._said and len(self._said) < 1000:
            self._said.add(what)
            LOGGER.warning("announcer: %s", what)
