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

from narthex.lab.api import errors, protobuf
from narthex.lab.api.errors import StatusError, bad_request
from narthex.lab.api.requests import ApiResponse, is_true, whole_number
from narthex.lab.api.store import Key, ObjectStore, StoredObject
from narthex.lab.api.views import ObjectView, json_event
from narthex.model.selector import (
    FieldRequirement,
    NotAnIntegerError,
    SelectorSyntaxError,
    matches,
    parse_fields,
    parse_leniently,
)


def expired(view: ObjectView | None = None) -> bytes:
    """Return the ERROR event of a watch whose version has been compacted, without a view as a line of JSON."""
    status = errors.expired().status()
    if view is not None and view.content_type == protobuf.MEDIA_TYPE:
        return view.event("ERROR", protobuf.encode(status))
    return json_event("ERROR", msgspec.json.encode(status))


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


class ListRequest(msgspec.Struct, frozen=True):
    """A list or a watch."""

    store: ObjectStore
    kind: str
    """The registry's name."""
    namespace: str
    """Empty: all."""
    selector: ListSelector
    view: ObjectView
    query: Mapping[str, str]
    abilities: ServerFeatures

    def objects(self) -> ApiResponse:
        """Return the response to a list. Raises StatusError."""
        store, query = self.store, self.query
        limit, version, at = whole_number(query, "limit"), query.get("resourceVersion", ""), store.version
        if token := query.get("continue", ""):
            at, start = _continuation(token)
            kept = store.kept_page(at, self.kind)
            if kept is None:
                raise errors.expired("The provided continue parameter is too old to display a consistent list result.")
            entries = [entry for entry in kept if entry[0] > start]
        else:
            if version.isdigit() and int(version) > at:
                raise too_large(int(version), at)
            entries = self._entries()
        if version == "0" and self.abilities.cached_lists:
            limit = 0
        meta: dict[str, Any] = {"resourceVersion": str(at)}
        if limit and len(entries) > limit:
            store.keep_page(at, self.kind, entries)
            meta["remainingItemCount"] = len(entries) - limit
            entries = entries[:limit]
            meta["continue"] = base64.urlsafe_b64encode(msgspec.json.encode((at, entries[-1][0]))).decode()
        return ApiResponse(200, self.view.many(entries, meta), content_type=self.view.content_type)

    def watch(self) -> WatchCursor:
        """Return the response to a watch. Raises StatusError."""
        store, query, view = self.store, self.query, self.view
        version, match = query.get("resourceVersion", ""), query.get("resourceVersionMatch", "")
        initial = is_true(query, "sendInitialEvents")
        if (initial or match) and not self.abilities.streaming:
            raise _invalid_options("sendInitialEvents is forbidden for watch")
        if initial != bool(match):
            raise _invalid_options("resourceVersionMatch")
        if version and not version.isdigit():
            raise errors.bad_request(f"Invalid value: {version!r}")
        at = int(version or 0)
        if initial and at > store.version:
            raise too_large(at, store.version)
        if initial or at == 0:
            first = [view.event("ADDED", view.one(stored)) for _, stored in self._entries()]
            if initial:
                first.append(view.event("BOOKMARK", view.bookmark(_bookmark(store.version, _INITIAL_END))))
            return WatchCursor(self, store.version, first)
        return WatchCursor(self, at, [])

    def _entries(self) -> list[tuple[Key, StoredObject]]:
        if not self.selector:
            return self.store.entries(self.kind, self.namespace)
        return self.store.now(self.kind, self.selector.selects, self.namespace)


class WatchCursor:
    """The response to a watch: lines, as they become available."""

    def __init__(self, request: ListRequest, version: int, first: list[bytes]) -> None:
        """Start after `version`; the lines `first` precede the events. Raises StatusError."""
        self._request = request
        self.content_type = request.view.stream_type
        self._version = version
        self._first = first
        self.timeout = whole_number(request.query, "timeoutSeconds") or _LONGEST
        """Seconds after which the server ends the watch."""
        self.broken = False
        """True once no further lines will come."""

    def lines(self) -> Iterator[bytes]:
        """Yield the lines that are new since the last call."""
        store = self._request.store
        first, self._first = self._first, []
        yield from first
        if self.broken:
            return
        if self._version < store.oldest:
            self.broken = True
            yield expired(self._request.view)
            return
        view = self._request.view
        for type, stored in store.since(self._version, self._request.kind, self._request.selector.selects):
            yield view.event(type, view.one(stored))
        # A watch may have begun at a version from the future.
        self._version = max(self._version, store.version)

    def bookmark(self) -> bytes | None:
        """Return a BOOKMARK line for the current version, None while the watch waits for a later one."""
        version = self._request.store.version
        if self.broken or self._version > version:
            return None
        view = self._request.view
        return view.event("BOOKMARK", view.bookmark(_bookmark(version)))


def _invalid_options(why: str) -> StatusError:
    return StatusError(422, "Invalid", f'ListOptions.meta.k8s.io "" is invalid: {why}')


def too_large(asked: int, there: int) -> StatusError:
    """Return the error for a version from the future."""
    causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
    message = f"Too large resource version: {asked}, current: {there}"
    return StatusError(504, "Timeout", message, {"causes": causes, "retryAfterSeconds": 1})


def _bookmark(version: int, annotations: Mapping[str, str] | None = None) -> dict[str, Any]:
    meta: dict[str, Any] = {"resourceVersion": str(version)}
    return meta | ({"annotations": annotations} if annotations else {})


_CONTINUATIONS = msgspec.json.Decoder(tuple[int, Key])


def _continuation(token: str) -> tuple[int, Key]:
    try:
        return _CONTINUATIONS.decode(base64.urlsafe_b64decode(token))
    except (msgspec.DecodeError, binascii.Error, ValueError):
        raise errors.bad_request("continue key is not valid") from None


_COMMON = frozenset({"metadata.name", "metadata.namespace"})
_POD = ("nodeName", "restartPolicy", "schedulerName", "serviceAccountName", "hostNetwork")
_OBJECT = ("kind", "namespace", "name", "uid", "apiVersion", "resourceVersion", "fieldPath")
FIELDS: Mapping[str, frozenset[str]] = {
    "Pod": frozenset({f"spec.{name}" for name in _POD} | {"status.phase", "status.podIP", "status.nominatedNodeName"}),
    "Node": frozenset({"spec.unschedulable"}),
    "Namespace": frozenset({"status.phase"}),
    "Service": frozenset({"spec.clusterIP", "spec.type"}),
    "Secret": frozenset({"type"}),
    "ReplicaSet": frozenset({"status.replicas"}),
    "Event": frozenset(
        {f"involvedObject.{name}" for name in _OBJECT} | {"reason", "reportingComponent", "source", "type"}
    ),
}
"""Fields that a field selector may name, by kind, in addition to name and namespace."""


class ListSelector:
    """The label and field selectors of one request."""

    def __init__(self, labels: str, fields: str, known: frozenset[str]) -> None:
        """Parse both. Raises StatusError (BadRequest) for bad syntax, and for fields that are not `known`."""
        try:
            self._labels = tuple(parse_leniently(labels))
        except SelectorSyntaxError as error:
            message = f"unable to parse requirement: {error.rest!r} is not understood as a label selector"
            raise bad_request(message) from None
        except NotAnIntegerError as error:
            message = f"for 'Gt', 'Lt' operators, the value must be an integer: {error.value!r}"
            raise bad_request(f"unable to parse requirement: {message}") from None
        self._fields = tuple(_field_requirements(fields, _COMMON | known))

    def selects(self, raw: Mapping[str, Any]) -> bool:
        """Return True if an object belongs to the list."""
        if self._labels:
            labels = raw.get("metadata", {}).get("labels")
            if not matches(labels if isinstance(labels, Mapping) else {}, self._labels):
                return False
        return all(requirement.matches(raw) for requirement in self._fields)

    def __bool__(self) -> bool:
        """Return True if it limits anything."""
        return bool(self._labels or self._fields)


def _field_requirements(text: str, known: frozenset[str]) -> Iterator[FieldRequirement]:
    try:
        for requirement in parse_fields(text):
            if requirement.path not in known:
                raise bad_request(f"field label not supported: {requirement.path}")
            yield requirement
    except SelectorSyntaxError as error:
        raise bad_request(f"invalid selector: '{text}'; can't understand '{error.rest}'") from None
