"""Messages of the watch protocol: those of the API server, decoded, and those between a `Watch` and its driver. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any, Generic, TypeVar

import msgspec

from narthex.model import Event, wire
from narthex.model.backoff import Backoff
from narthex.model.decode.objects import KINDS, shape_of

INITIAL_EVENTS_END = "k8s.io/initial-events-end"
"""Annotation of the bookmark that ends a streaming list (KEP-3157)."""

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class MalformedResponse(ValueError):
    """The received data is not a message of the Kubernetes API."""


class ListMeta(msgspec.Struct, frozen=True, rename={"next": "continue", "version": "resourceVersion"}):
    """`metadata` of a list."""

    version: str = ""
    next: str | None = None


class ListPage(msgspec.Struct, frozen=True):
    """A list, or one page of it."""

    metadata: ListMeta
    items: list[msgspec.Raw] | None = None


T = TypeVar("T")


class WatchEvent(msgspec.Struct, Generic[T], frozen=True):
    """One line of a watch."""

    type: str
    """One of TYPES, or ERROR."""
    object: T
    """A shape of `model.wire` or JSON; a Status if the type is ERROR."""


TYPES = frozenset({"ADDED", "MODIFIED", "DELETED", "BOOKMARK"})
"""Types of watch events, except ERROR, which ends the watch."""


class _Meta(msgspec.Struct, frozen=True):
    """As in `model.wire`, but the version is readable whatever else is wrong with an object."""

    resourceVersion: str | None = None
    annotations: Any = None


class _Marked(msgspec.Struct, frozen=True):
    metadata: _Meta | None = None


class _Cause(msgspec.Struct, frozen=True):
    reason: str | None = None


class _Details(msgspec.Struct, frozen=True, rename={"retry_after": "retryAfterSeconds"}):
    causes: list[_Cause] | None = None
    retry_after: float | None = None


class ApiStatus(msgspec.Struct, frozen=True):
    """The reason for an error response."""

    code: int = 0
    reason: str | None = None
    message: str | None = None
    details: _Details | None = None

    @property
    def too_large(self) -> bool:
        """Return True if the server has not reached the requested resourceVersion: it lags or lost data."""
        causes = (self.details.causes if self.details is not None else None) or ()
        # Servers before 1.17 and some in between have the words only.
        return any(cause.reason == "ResourceVersionTooLarge" for cause in causes) or (
            "too large resource version" in (self.message or "").lower()
        )

    @property
    def gone(self) -> bool:
        """Return True if the resourceVersion or the continue token is too old."""
        return self.code == 410 or self.reason in ("Expired", "Gone")

    @property
    def retry_after(self) -> float | None:
        """Return the seconds to wait, or None."""
        return self.details.retry_after if self.details is not None else None


_PAGES, _STATUSES = msgspec.json.Decoder(ListPage), msgspec.json.Decoder(ApiStatus)
_MARKED = msgspec.json.Decoder(_Marked)
_EVENTS = msgspec.json.Decoder(WatchEvent[msgspec.Raw])


def read_page(body: bytes) -> ListPage:
    """Decode a list. Raises MalformedResponse."""
    try:
        page = _PAGES.decode(body)
    except _UNREADABLE as error:
        raise MalformedResponse(f"the list is not one: {error}") from error
    if not page.metadata.version:
        raise MalformedResponse("the list has no resourceVersion")
    return page


def read_lines(data: bytes, shape: type[T]) -> Iterable[WatchEvent[T]] | Iterable[WatchEvent[msgspec.Raw]]:
    """Yield the events of a watch. Objects that do not fit their shape of `model.wire` are JSON.

    Raises MalformedResponse at the first invalid line.
    """
    try:
        found: list[WatchEvent[T]] = _reader(shape).decode_lines(data)  # type: ignore[arg-type]
    except _UNREADABLE:
        pass
    else:
        if all(event.type in TYPES for event in found):
            return found
    return map(_read_line, filter(None, data.split(b"\n")))


@cache
def _reader(shape: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(WatchEvent[shape])


def _read_line(data: bytes) -> WatchEvent[msgspec.Raw]:
    try:
        return _EVENTS.decode(data)
    except _UNREADABLE as error:
        raise MalformedResponse(f"a line of the watch is not one: {error}") from error


def read_status(data: bytes | msgspec.Raw, code: int = 0) -> ApiStatus:
    """Decode a Status; an unreadable one has only the code of the response."""
    try:
        status = _STATUSES.decode(data)
    except _UNREADABLE:
        return ApiStatus(code)
    return status if status.code else msgspec.structs.replace(status, code=code)


def version_of(object: Any) -> tuple[str, bool]:
    """Return the resourceVersion of an object or bookmark, and whether it ends the initial events.

    Raises MalformedResponse.

    `object` is a shape of `model.wire` or JSON.
    """
    if isinstance(object, msgspec.Raw):
        try:
            object = _MARKED.decode(object)
        except _UNREADABLE as error:
            raise MalformedResponse(f"an object of the watch has no readable metadata: {error}") from error
    meta = object.metadata
    if meta is None or not meta.resourceVersion:
        raise MalformedResponse("an object of the watch has no resourceVersion")
    marks = meta.annotations
    return meta.resourceVersion, isinstance(marks, dict) and marks.get(INITIAL_EVENTS_END) == "true"


def is_older(version: str, than: str) -> bool:
    """Return True if one resourceVersion precedes another; False if they cannot be compared (KEP-5504)."""
    if not (version.isascii() and version.isdigit() and than.isascii() and than.isdigit()):
        return False
    return int(version) < int(than)


class LineSplitter:
    """Splits a stream of bytes into complete lines."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []

    def feed(self, data: bytes) -> bytes:
        """Return the lines that are now complete; empty if there is none."""
        end = data.rfind(b"\n") + 1
        if not end:
            self._rest.append(data)
            return b""
        whole = b"".join((*self._rest, memoryview(data)[:end])) if self._rest or end < len(data) else data
        self._rest = [data[end:]] if end < len(data) else []
        return whole


def prepare_decoders() -> None:
    """Build msgspec's decoders of all objects and messages, before the first thread starts. Takes two milliseconds.

    msgspec builds the decoder of a type at its first use, and two threads that do so at once crash the process
    (docs/explanation/msgspec-threads.md). All other types have decoders that are built with their modules.
    """
    for found in (*vars(wire).values(), ListPage, ApiStatus, _Marked):
        if isinstance(found, type) and issubclass(found, msgspec.Struct) and not getattr(found, "__parameters__", ()):
            msgspec.json.Decoder(found)
    for kind in KINDS:
        list(read_lines(b"", shape_of(kind)))
    # A line that fits no shape is read as JSON.
    msgspec.json.Decoder(WatchEvent[msgspec.Raw])


DOUBT_SECONDS = 300.0
"""For so long, a list does not remove objects if it is older than what is known, or empty.

Longer than an API server takes to return with its data, and as long as Kubernetes leaves the pods of a lost node in place by
default (`tolerationSeconds`): a Service that is really gone is served no longer than an endpoint that is.
"""


class WatchTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts and periods of a watch, in seconds."""

    backoff: Backoff = Backoff(0.4, 30.0, jitter=1.0)
    """Between a failure and the next request."""
    retry_after: float = 30.0
    """The longest delay that a server may ask for: objects must not age for as long as a server likes."""
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
    doubt: float = DOUBT_SECONDS
    """Objects stay for this long that are missing from a doubted list."""
    doubt_relist: float = 30.0
    """Period of lists meanwhile."""


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
    failures: Counter[str] = msgspec.field(default_factory=Counter)
    """By status code, or `garbled`, `silent`, `lost`, `expired`, `older`, or `doubted`."""
