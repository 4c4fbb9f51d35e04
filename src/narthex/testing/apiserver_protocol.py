"""What an API server answers to lists and watches. Pure: the answer to a watch is a cursor that is asked for more.

Follows kube-apiserver: a list at version 0 comes from the cache, whole; a limit makes pages; a version from the future is
refused by lists and waited for by watches; a version from before the compaction is an ERROR line.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping

import msgspec

from narthex.testing.apiserver_data import KINDS, Data, Key, Stored
from narthex.testing.apiserver_paths import place
from narthex.testing.apiserver_selectors import Selector, Unknown

_INITIAL_END = {"k8s.io/initial-events-end": "true"}


class Abilities(msgspec.Struct, frozen=True, kw_only=True):
    """What differs between versions of Kubernetes."""

    streaming: bool = True
    """Streaming lists (beta and on since 1.32)."""
    service_cidrs: tuple[str, ...] = ("v1",)
    """Versions of networking.k8s.io with ServiceCIDRs."""
    service_fields: bool = True
    """Services can be selected by spec.clusterIP (since 1.31)."""
    bookmarks: bool = True
    cached_lists: bool = True
    """Lists at version 0 come whole, whatever the limit."""
    missing: frozenset[str] = frozenset()
    """Kinds that are not installed."""


PRESENT = Abilities()
"""Those of the newest version."""


class Whole(msgspec.Struct, frozen=True):
    """An answer with a body."""

    status: int
    body: bytes
    headers: Mapping[str, str] = {}


class Cursor:
    """An answer that goes on: lines, as they become available."""

    def __init__(self, data: Data, kind: str, selector: Selector, version: int, first: list[bytes], last: int) -> None:
        self._data = data
        self._kind = kind
        self._selector = selector
        self._version = version
        self._first = first
        self._timeout = last
        self.broken = False
        """Nothing comes any more after what has come."""

    @property
    def timeout(self) -> int:
        """Seconds after which the server ends it."""
        return self._timeout

    def lines(self) -> Iterator[bytes]:
        """What is new since the last call."""
        first, self._first = self._first, []
        yield from first
        if self.broken:
            return
        for type, version, stored in self._data.since(self._version, self._kind, self._selector):
            self._version = max(self._version, version)
            yield _line(type, self._kind, stored.data)

    def bookmark(self) -> bytes | None:
        """A bookmark at the present version, None while the watcher is ahead of it."""
        if self.broken or self._version > self._data.version:
            return None
        self._version = self._data.version
        return _bookmark(self._kind, self._version)


Answer = Whole | Cursor


def answer(data: Data, path: str, query: Mapping[str, str], abilities: Abilities) -> Answer:
    """The answer to GET of a list or watch."""
    where = place(path, abilities.service_cidrs, abilities.missing)
    if where is None or where.name:
        return status(404, "NotFound", "the server could not find the requested resource")
    kind, fields = where.kind, query.get("fieldSelector", "")
    if where.namespace:
        fields += f",metadata.namespace={where.namespace}"
    try:
        selector = Selector(query.get("labelSelector", ""), fields, _fields(kind, abilities))
    except Unknown as error:
        return status(400, "BadRequest", str(error))
    if query.get("watch") in ("true", "1"):
        return _watch(data, kind, selector, query, abilities)
    return _list(data, kind, selector, query, abilities)


def status(code: int, reason: str, message: str, **details: object) -> Whole:
    """A Status as answer."""
    return Whole(code, _status(code, reason, message, details))


def expired(message: str = "The resourceVersion for the provided watch is too old.") -> bytes:
    """The ERROR line of a watch from a version that is too old."""
    return b'{"type":"ERROR","object":' + _status(410, "Expired", message, {}) + b"}\n"


def _status(code: int, reason: str, message: str, details: Mapping[str, object]) -> bytes:
    return msgspec.json.encode(
        {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "details": dict(details),
            "code": code,
        }
    )


def _fields(kind: str, abilities: Abilities) -> frozenset[str]:
    known = {"metadata.name", "metadata.namespace"}
    if kind == "Service" and abilities.service_fields:
        known |= {"spec.clusterIP", "spec.type"}
    return frozenset(known)


def _list(data: Data, kind: str, selector: Selector, query: Mapping[str, str], abilities: Abilities) -> Whole:
    limit, token, version = int(query.get("limit", "0")), query.get("continue", ""), query.get("resourceVersion", "")
    at = data.version
    if token:
        try:
            at, start = msgspec.json.decode(base64.urlsafe_b64decode(token), type=tuple[int, Key])
        except (msgspec.DecodeError, binascii.Error):
            return status(400, "BadRequest", "continue key is not valid")
        kept = data.kept_page(at, kind)
        if kept is None:
            return status(410, "Expired", "The provided continue parameter is too old to display a consistent list.")
        entries = [entry for entry in kept if entry[0] > start]
    else:
        if version.isdigit() and int(version) > data.version:
            return _too_large(int(version), data.version)
        entries = data.now(kind, selector)
    if version == "0" and abilities.cached_lists:
        limit = 0
    following = ""
    if limit and len(entries) > limit:
        data.keep_page(at, kind, entries)
        entries = entries[:limit]
        following = base64.urlsafe_b64encode(msgspec.json.encode((at, entries[-1][0]))).decode()
    return Whole(200, _page(kind, at, entries, following))


def _page(kind: str, version: int, entries: list[tuple[Key, Stored]], following: str) -> bytes:
    meta = {"resourceVersion": str(version)} | ({"continue": following} if following else {})
    head = msgspec.json.encode({"kind": f"{kind}List", "apiVersion": KINDS[kind][0], "metadata": meta})
    return head[:-1] + b',"items":[' + b",".join(stored.data for _, stored in entries) + b"]}\n"


def _watch(data: Data, kind: str, selector: Selector, query: Mapping[str, str], abilities: Abilities) -> Answer:
    version, match = query.get("resourceVersion", ""), query.get("resourceVersionMatch", "")
    initial = query.get("sendInitialEvents") == "true"
    if (initial or match) and not abilities.streaming:
        return status(422, "Invalid", 'ListOptions.meta.k8s.io "" is invalid: sendInitialEvents is forbidden for watch')
    if initial != bool(match):
        return status(422, "Invalid", 'ListOptions.meta.k8s.io "" is invalid: resourceVersionMatch')
    if version and not version.isdigit():
        return status(400, "BadRequest", f"Invalid value: {version!r}")
    timeout = int(query.get("timeoutSeconds", "1800"))
    at = int(version or 0)
    if initial and at > data.version:
        return _too_large(at, data.version)
    if initial or at == 0:
        first = [_line("ADDED", kind, stored.data) for _, stored in data.now(kind, selector)]
        if initial:
            first.append(_bookmark(kind, data.version, _INITIAL_END))
        return Cursor(data, kind, selector, data.version, first, timeout)
    if at < data.oldest:
        gone = Cursor(data, kind, selector, at, [expired()], 0)
        gone.broken = True
        return gone
    return Cursor(data, kind, selector, at, [], timeout)


def _too_large(asked: int, there: int) -> Whole:
    causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
    message = f"Too large resource version: {asked}, current: {there}"
    return status(504, "Timeout", message, causes=causes, retryAfterSeconds=1)


def _line(type: str, kind: str, data: bytes) -> bytes:
    head = f'{{"type":"{type}","object":{{"kind":"{kind}","apiVersion":"{KINDS[kind][0]}",'
    return head.encode() + data[1:] + b"}\n"


def _bookmark(kind: str, version: int, annotations: Mapping[str, str] | None = None) -> bytes:
    meta: dict[str, object] = {"resourceVersion": str(version)}
    if annotations:
        meta["annotations"] = annotations
    return _line("BOOKMARK", kind, msgspec.json.encode({"metadata": meta}))
