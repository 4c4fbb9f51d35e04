"""Inputs, steps, timeouts, and counters of the watch protocol. Pure."""

from __future__ import annotations

import msgspec

from narthex.model.backoff import Backoff
from narthex.model.store import Event


class WatchTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts and periods of a watch, in seconds."""

    backoff: Backoff = Backoff(0.4, 30.0, jitter=1.0)
    """Between a failure and the next request."""
    steady: float = 10.0
    """A watch of this duration resets the backoff."""
    list_silence: float = 60.0
    """Idle timeout of a list and of a watch's first response."""
    stream_silence: float = 15.0
    """Idle timeout of a WatchList request: a server that never ends the initial events may not support it."""
    watch: float = 300.0
    """The requested duration of a watch is between this and twice this; a new watch follows at once."""
    watch_grace: float = 30.0
    """A watch that is still open this long after its requested end is considered half closed."""
    bookmark_silence: float = 150.0
    """So is a silent watch whose server has sent bookmarks before, which come once a minute."""
    relist: float = 900.0
    """Period of full lists, which find what a lost watch missed."""
    relist_objects: int = 1000
    """The period applies to this many objects and grows in proportion."""


WATCH_TIMES = WatchTimes()


class WatchRequest(msgspec.Struct, frozen=True):
    """A GET request to send. It replaces the running request of this list."""

    path: str
    query: tuple[tuple[str, str], ...]
    lines: bool
    """The response is a stream of lines, not a single body."""


class ResponseOpened(msgspec.Struct, frozen=True):
    """The response started with status 200."""


class BytesReceived(msgspec.Struct, frozen=True):
    """Part of the response arrived. Complete lines of a stream also come as LinesReceived."""


class ResponseBody(msgspec.Struct, frozen=True):
    """The complete response to a list request."""

    data: bytes


class LinesReceived(msgspec.Struct, frozen=True):
    """One or more complete lines of a watch."""

    data: bytes


class StreamEnded(msgspec.Struct, frozen=True):
    """The connection ended or failed; an incomplete line is discarded."""

    reason: str = ""
    """Empty if the server completed the response."""


class RequestRefused(msgspec.Struct, frozen=True):
    """A response with a status other than 200."""

    code: int
    body: bytes = b""
    retry_after: float | None = None
    """Seconds."""


class DeadlineReached(msgspec.Struct, frozen=True):
    """`wake_at` has passed, as it has at the start. The driver aborted the running request."""


WatchInput = (
    ResponseOpened | BytesReceived | ResponseBody | LinesReceived | StreamEnded | RequestRefused | DeadlineReached
)


class WatchStep(msgspec.Struct, frozen=True):
    """The reaction to an input."""

    events: tuple[Event, ...] = ()
    request: WatchRequest | None = None
    over: bool = False
    """Abort the running request. Without a new request, wait until `wake_at`."""


class WatchCounts(msgspec.Struct):
    """Counters of one watch since the start."""

    heard: int = 0
    """Parts of responses, of any kind."""
    events: int = 0
    """Objects added, changed, or deleted."""
    bookmarks: int = 0
    lists: int = 0
    """Complete lists, including those of WatchList."""
    watches: int = 0
    failures: dict[str, int] = {}
    """By status code, or `garbled`, `silent`, `lost`, `expired`, or `older`."""
