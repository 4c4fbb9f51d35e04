"""What a watch is told, and what it wants: inputs, steps, times and counts. Pure."""

from __future__ import annotations

import msgspec

from narthex.model.backoff import Backoff
from narthex.model.store import Event


class WatchTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds."""

    backoff: Backoff = Backoff(0.4, 30.0, jitter=1.0)
    """Between a failure and the next request."""
    steady: float = 10.0
    """A watch that lived this long ends the counting of failures."""
    list_silence: float = 60.0
    """A list, and a watch's first answer, from which nothing comes for so long is given up."""
    stream_silence: float = 15.0
    """So is a streaming list: a server that sends no end of it may be one that only watches."""
    watch: float = 300.0
    """A server is asked to end a watch after so long or up to twice that; it is asked again at once."""
    watch_grace: float = 30.0
    """A watch that is still open so long after it should have ended is half closed."""
    bookmark_silence: float = 150.0
    """So is one from a server that has sent bookmarks (they come once a minute) and stays silent for so long."""
    relist: float = 900.0
    """Everything is listed again this often, to find what a lost watch missed..."""
    relist_objects: int = 1000
    """...and more seldom where there is more: so many objects in that time."""


WATCH_TIMES = WatchTimes()


class WatchRequest(msgspec.Struct, frozen=True):
    """To be sent with GET; whatever was running for this list before is over."""

    path: str
    query: tuple[tuple[str, str], ...]
    lines: bool
    """The answer is a stream of lines, not a body."""


class WatchStarted(msgspec.Struct, frozen=True):
    """Begin."""


class ResponseOpened(msgspec.Struct, frozen=True):
    """The answer begins, with status 200."""


class BytesReceived(msgspec.Struct, frozen=True):
    """Some of the answer's bytes came; of a stream they come as Lines, too, when a line is whole."""


class ResponseBody(msgspec.Struct, frozen=True):
    """The whole answer to a list."""

    data: bytes


class LinesReceived(msgspec.Struct, frozen=True):
    """Whole lines of a watch, one or more."""

    data: bytes


class StreamEnded(msgspec.Struct, frozen=True):
    """The connection is over, or could not be made. What was left of a line is worth nothing."""

    reason: str = ""
    """Empty when the server ended the answer in order."""


class RequestRefused(msgspec.Struct, frozen=True):
    """An answer with another status."""

    code: int
    body: bytes = b""
    retry_after: float | None = None
    """Seconds."""


class DeadlineReached(msgspec.Struct, frozen=True):
    """It is `wake_at`. A request that is running was given up."""


WatchInput = (
    WatchStarted
    | ResponseOpened
    | BytesReceived
    | ResponseBody
    | LinesReceived
    | StreamEnded
    | RequestRefused
    | DeadlineReached
)


class WatchStep(msgspec.Struct, frozen=True):
    """What is to be done about an input."""

    events: tuple[Event, ...] = ()
    request: WatchRequest | None = None
    over: bool = False
    """The running request is not wanted any more. Without a new one: wait until `wake_at`."""


class WatchCounts(msgspec.Struct):
    """What has happened since the start."""

    heard: int = 0
    """Pieces of answers, of whatever."""
    events: int = 0
    """Objects added, changed or deleted."""
    bookmarks: int = 0
    lists: int = 0
    """Complete ones, streaming ones among them."""
    watches: int = 0
    failures: dict[str, int] = {}
    """By status code, `garbled`, `silent`, `lost`, `expired` or `older`."""
