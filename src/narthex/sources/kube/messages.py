"""What the API server sends around objects: lists, lines of a watch, and statuses. Pure."""

from __future__ import annotations

import msgspec

INITIAL_EVENTS_END = "k8s.io/initial-events-end"
"""Annotation of the bookmark that ends a streaming list (KEP-3157)."""


class Garbled(ValueError):
    """What was received is not what a server says."""


class ListMeta(msgspec.Struct, frozen=True, rename={"next": "continue", "version": "resourceVersion"}):
    """`metadata` of a list."""

    version: str = ""
    next: str | None = None


class Page(msgspec.Struct, frozen=True):
    """A list, or a part of one."""

    metadata: ListMeta
    items: list[msgspec.Raw] | None = None


class Line(msgspec.Struct, frozen=True):
    """One line of a watch."""

    type: str
    """ADDED, MODIFIED, DELETED, BOOKMARK or ERROR."""
    object: msgspec.Raw


class _Meta(msgspec.Struct, frozen=True, rename={"version": "resourceVersion"}):
    version: str = ""
    annotations: dict[str, str] | None = None


class _Marked(msgspec.Struct, frozen=True):
    metadata: _Meta


class _Cause(msgspec.Struct, frozen=True):
    reason: str | None = None


class _Details(msgspec.Struct, frozen=True, rename={"retry_after": "retryAfterSeconds"}):
    causes: list[_Cause] | None = None
    retry_after: float | None = None


class Status(msgspec.Struct, frozen=True):
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


def read_page(body: bytes) -> Page:
    """A list. Raises Garbled."""
    try:
        page = msgspec.json.decode(body, type=Page)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Garbled(f"the list is not one: {error}") from error
    if not page.metadata.version:
        raise Garbled("the list has no resourceVersion")
    return page


def read_line(data: bytes) -> Line:
    """A line of a watch. Raises Garbled."""
    try:
        return msgspec.json.decode(data, type=Line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Garbled(f"a line of the watch is not one: {error}") from error


def read_status(data: bytes | msgspec.Raw, code: int = 0) -> Status:
    """A Status, with the code of the answer where it is not a readable one."""
    try:
        status = msgspec.json.decode(data, type=Status)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Status(code)
    return status if status.code else msgspec.structs.replace(status, code=code)


def version_of(data: msgspec.Raw) -> tuple[str, bool]:
    """resourceVersion of an object or bookmark, and whether it ends the initial events. Raises Garbled."""
    try:
        meta = msgspec.json.decode(data, type=_Marked).metadata
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Garbled(f"an object of the watch has no readable metadata: {error}") from error
    if not meta.version:
        raise Garbled("an object of the watch has no resourceVersion")
    return meta.version, (meta.annotations or {}).get(INITIAL_EVENTS_END) == "true"


def is_older(version: str, than: str) -> bool:
    """Whether one resourceVersion comes before another; False where they cannot be compared (KEP-5504)."""
    if not (version.isascii() and version.isdigit() and than.isascii() and than.isdigit()):
        return False
    return int(version) < int(than)


class Splitter:
    """Bytes as they come, to whole lines."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are whole now, without their ends and without empty ones."""
        head, newline, tail = data.rpartition(b"\n")
        if not newline:
            self._rest.append(data)
            return []
        whole = b"".join((*self._rest, head))
        self._rest = [tail] if tail else []
        return [line for line in whole.split(b"\n") if line]
