"""Lists and watches. Pure: the response to a watch is a cursor that the server polls.

As in kube-apiserver, a list at version 0 comes whole from the cache, a limit makes pages, and a version from before the
compaction is an ERROR line. A version from the future is rejected by lists, while watches wait for it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from narthex.lab.api import errors
from narthex.lab.api.errors import StatusError
from narthex.lab.api.requests import JSON, ApiResponse
from narthex.lab.api.selectors import ListSelector
from narthex.lab.api.store import Key, ObjectStore
from narthex.lab.api.views import ObjectView

_INITIAL_END = {"k8s.io/initial-events-end": "true"}
_LONGEST = 1800


class ServerFeatures(msgspec.Struct, frozen=True, kw_only=True):
    """Features that differ between versions of Kubernetes."""

    streaming: bool = True
    """WatchList (beta, on by default since 1.32)."""
    service_cidrs: tuple[str, ...] = ("v1",)
    """Versions of networking.k8s.io that have ServiceCIDR."""
    service_fields: bool = True
    """Services can be selected by spec.clusterIP (since 1.31)."""
    bookmarks: bool = True
    cached_lists: bool = True
    """Lists at version 0 ignore the limit."""
    missing: frozenset[str] = frozenset()
    """Kinds that are not installed."""


PRESENT = ServerFeatures()
"""Features of the newest version."""


class WatchCursor:
    """The position of a watch."""

    content_type = JSON

    def __init__(
        self,
        store: ObjectStore,
        kind: str,
        selector: ListSelector,
        view: ObjectView,
        version: int,
        first: list[bytes],
        timeout: float,
    ) -> None:
        """Start after `version`; the lines `first` precede the events."""
        self._store = store
        self._kind = kind
        self._selector = selector
        self._view = view
        self._version = version
        self._first = first
        self._timeout = timeout
        self.broken = False
        """Nothing comes any more after what has come."""

    @property
    def timeout(self) -> float:
        """Seconds after which the server ends the watch."""
        return self._timeout

    def lines(self) -> Iterator[bytes]:
        """Yield the lines that are new since the last call."""
        first, self._first = self._first, []
        yield from first
        if self.broken:
            return
        if self._version < self._store.oldest:
            self.broken = True
            yield expired()
            return
        for type, _, stored in self._store.since(self._version, self._kind, self._selector.selects):
            yield line(type, self._view.one(stored))
        # A watch may have begun at a version from the future.
        self._version = max(self._version, self._store.version)

    def bookmark(self) -> bytes | None:
        """Return a BOOKMARK line for the current version, None while the watch waits for a later one."""
        if self.broken or self._version > self._store.version:
            return None
        return line("BOOKMARK", self._view.bookmark(_bookmark(self._store.version)))


def list_objects(
    store: ObjectStore,
    kind: str,
    namespace: str,
    selector: ListSelector,
    view: ObjectView,
    query: Mapping[str, str],
    abilities: ServerFeatures,
) -> ApiResponse:
    """Return the response to a list. `kind` is the registry's name. Raises StatusError."""
    limit, token, version = _whole_number(query, "limit"), query.get("continue", ""), query.get("resourceVersion", "")
    at = store.version
    if token:
        at, start = _continuation(token)
        kept = store.kept_page(at, kind)
        if kept is None:
            raise errors.expired("The provided continue parameter is too old to display a consistent list result.")
        entries = [entry for entry in kept if entry[0] > start]
    else:
        if version.isdigit() and int(version) > at:
            raise too_large(int(version), at)
        entries = store.now(kind, selector.selects, namespace) if selector else store.entries(kind, namespace)
    if version == "0" and abilities.cached_lists:
        limit = 0
    meta: dict[str, Any] = {"resourceVersion": str(at)}
    if limit and len(entries) > limit:
        store.keep_page(at, kind, entries)
        meta["remainingItemCount"] = len(entries) - limit
        entries = entries[:limit]
        meta["continue"] = base64.urlsafe_b64encode(msgspec.json.encode((at, entries[-1][0]))).decode()
    return ApiResponse(200, view.many(entries, meta))


def watch_objects(
    store: ObjectStore,
    kind: str,
    namespace: str,
    selector: ListSelector,
    view: ObjectView,
    query: Mapping[str, str],
    abilities: ServerFeatures,
) -> WatchCursor:
    """Return the response to a watch. Raises StatusError."""
    version, match = query.get("resourceVersion", ""), query.get("resourceVersionMatch", "")
    initial = query.get("sendInitialEvents") in ("true", "1")
    if (initial or match) and not abilities.streaming:
        raise StatusError(
            422, "Invalid", 'ListOptions.meta.k8s.io "" is invalid: sendInitialEvents is forbidden for watch'
        )
    if initial != bool(match):
        raise StatusError(422, "Invalid", 'ListOptions.meta.k8s.io "" is invalid: resourceVersionMatch')
    if version and not version.isdigit():
        raise errors.bad_request(f"Invalid value: {version!r}")
    timeout = _whole_number(query, "timeoutSeconds") or _LONGEST
    at = int(version or 0)
    if initial and at > store.version:
        raise too_large(at, store.version)
    if initial or at == 0:
        entries = store.now(kind, selector.selects, namespace)
        first = [line("ADDED", view.one(stored)) for _, stored in entries]
        if initial:
            first.append(line("BOOKMARK", view.bookmark(_bookmark(store.version, _INITIAL_END))))
        return WatchCursor(store, kind, selector, view, store.version, first, timeout)
    return WatchCursor(store, kind, selector, view, at, [], timeout)


def too_large(asked: int, there: int) -> StatusError:
    """Return the error for a version from the future."""
    causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
    message = f"Too large resource version: {asked}, current: {there}"
    return StatusError(504, "Timeout", message, {"causes": causes, "retryAfterSeconds": 1})


def expired(message: str = errors.expired().message) -> bytes:
    """Return the ERROR line of a watch whose version has been compacted."""
    return line("ERROR", msgspec.json.encode(errors.expired(message).status()))


def line(type: str, data: bytes) -> bytes:
    """Return one event of a watch."""
    return b'{"type":"' + type.encode() + b'","object":' + data + b"}\n"


def _bookmark(version: int, annotations: Mapping[str, str] | None = None) -> dict[str, Any]:
    meta: dict[str, Any] = {"resourceVersion": str(version)}
    return meta | ({"annotations": annotations} if annotations else {})


def _continuation(token: str) -> tuple[int, Key]:
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(token), type=tuple[int, Key])
    except (msgspec.DecodeError, binascii.Error, ValueError):
        raise errors.bad_request("continue key is not valid") from None


def _whole_number(query: Mapping[str, str], name: str) -> int:
    text = query.get(name) or "0"
    if not text.isdigit():
        raise errors.bad_request(f"{name}: {text!r} is not a number")
    return int(text)
