"""What the API server sends around objects: lists, lines of a watch, and statuses. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, Generic, TypeVar

import msgspec

from narthex.kube import messages
from narthex.model import wire
from narthex.model.decode.objects import KINDS, shape_of

INITIAL_EVENTS_END = "k8s.io/initial-events-end"
"""Annotation of the bookmark that ends a streaming list (KEP-3157)."""


_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class MalformedResponse(ValueError):
    """What was received is not what a server says."""


class ListMeta(msgspec.Struct, frozen=True, rename={"next": "continue", "version": "resourceVersion"}):
    """`metadata` of a list."""

    version: str = ""
    next: str | None = None


class ListPage(msgspec.Struct, frozen=True):
    """A list, or a part of one."""

    metadata: ListMeta
    items: list[msgspec.Raw] | None = None


T = TypeVar("T")


class WatchEvent(msgspec.Struct, Generic[T], frozen=True):
    """One line of a watch."""

    type: str
    """One of TYPES, or ERROR."""
    object: T
    """A shape of `model.wire`, or JSON; a Status in an ERROR."""


TYPES = frozenset({"ADDED", "MODIFIED", "DELETED", "BOOKMARK"})
"""What lines of a watch are, unless it ends with an ERROR."""


class _Meta(msgspec.Struct, frozen=True):
    """As in `model.wire`, but whatever else is wrong with an object, its version can be read."""

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
    """Why something was refused."""

    code: int = 0
    reason: str | None = None
    message: str | None = None
    details: _Details | None = None

    @property
    def too_large(self) -> bool:
        """The server has not come to the resourceVersion that it was asked for: it lags, or lost its newest data."""
        causes = (self.details.causes if self.details is not None else None) or ()
        # Servers before 1.17 and some in between have the words only.
        return any(cause.reason == "ResourceVersionTooLarge" for cause in causes) or (
            "too large resource version" in (self.message or "").lower()
        )

    @property
    def gone(self) -> bool:
        """The resourceVersion or the continue token is too old."""
        return self.code == 410 or self.reason in ("Expired", "Gone")

    @property
    def retry_after(self) -> float | None:
        """Seconds to wait, when the server says so."""
        return self.details.retry_after if self.details is not None else None


def read_page(body: bytes) -> ListPage:
    """A list. Raises Garbled."""
    try:
        page = msgspec.json.decode(body, type=ListPage)
    except _UNREADABLE as error:
        raise MalformedResponse(f"the list is not one: {error}") from error
    if not page.metadata.version:
        raise MalformedResponse("the list has no resourceVersion")
    return page


def read_lines(data: bytes, shape: type[T]) -> Iterable[WatchEvent[T]] | Iterable[WatchEvent[msgspec.Raw]]:
    """Lines of a watch, with their objects in a shape of `model.wire`, or as JSON when one of them does not fit it.

    Raises Garbled when the line that is none is reached.
    """
    try:
        found: list[WatchEvent[T]] = _reader(shape).decode_lines(data)  # type: ignore[arg-type]
    except _UNREADABLE:
        pass
    else:
        if all(told.type in TYPES for told in found):
            return found
    return map(_read_line, filter(None, data.split(b"\n")))


@cache
def _reader(shape: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(WatchEvent[shape])


def _read_line(data: bytes) -> WatchEvent[msgspec.Raw]:
    try:
        return msgspec.json.decode(data, type=WatchEvent[msgspec.Raw])
    except _UNREADABLE as error:
        raise MalformedResponse(f"a line of the watch is not one: {error}") from error


def read_status(data: bytes | msgspec.Raw, code: int = 0) -> ApiStatus:
    """A Status, with the code of the answer where it is not a readable one."""
    try:
        status = msgspec.json.decode(data, type=ApiStatus)
    except _UNREADABLE:
        return ApiStatus(code)
    return status if status.code else msgspec.structs.replace(status, code=code)


def version_of(object: Any) -> tuple[str, bool]:
    """resourceVersion of an object or bookmark, and whether it ends the initial events. Raises Garbled.

    `object` is what a line told: a shape of `model.wire`, or JSON.
    """
    if isinstance(object, msgspec.Raw):
        try:
            object = msgspec.json.decode(object, type=_Marked)
        except _UNREADABLE as error:
            raise MalformedResponse(f"an object of the watch has no readable metadata: {error}") from error
    meta = object.metadata
    if meta is None or not meta.resourceVersion:
        raise MalformedResponse("an object of the watch has no resourceVersion")
    marks = meta.annotations
    return meta.resourceVersion, isinstance(marks, dict) and marks.get(INITIAL_EVENTS_END) == "true"


def is_older(version: str, than: str) -> bool:
    """Whether one resourceVersion comes before another; False where they cannot be compared (KEP-5504)."""
    if not (version.isascii() and version.isdigit() and than.isascii() and than.isdigit()):
        return False
    return int(version) < int(than)


class LineSplitter:
    """Bytes as they come, to whole lines."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []

    def feed(self, data: bytes) -> bytes:
        """The lines that are whole now; empty when none is."""
        end = data.rfind(b"\n") + 1
        if not end:
            self._rest.append(data)
            return b""
        whole = b"".join((*self._rest, memoryview(data)[:end])) if self._rest or end < len(data) else data
        self._rest = [data[end:]] if end < len(data) else []
        return whole


def prepare_decoders() -> None:
    """Let msgspec work out all forms of objects and of what an API server says around them. Takes some milliseconds."""
    for module in (wire, messages):
        for found in vars(module).values():
            if (
                isinstance(found, type)
                and issubclass(found, msgspec.Struct)
                and not getattr(found, "__parameters__", ())
            ):
                msgspec.json.Decoder(found)
    for kind in KINDS:
        list(messages.read_lines(b"", shape_of(kind)))
    # A line that fits no shape is read as JSON.
    msgspec.json.Decoder(messages.WatchEvent[msgspec.Raw])
