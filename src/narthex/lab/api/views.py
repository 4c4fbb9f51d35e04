"""The forms in which clients get objects: whole, metadata alone, or rows of a table.

Objects are stored as encoded JSON, and lists and watches are concatenated from it; only what differs is encoded anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from narthex.lab.api import protobuf
from narthex.lab.api.columns import built_in_columns, custom_columns
from narthex.lab.api.kinds import event_from_v1
from narthex.lab.api.requests import JSON, ApiPath
from narthex.lab.api.store import Key, StoredObject

Entry = tuple[Key, StoredObject]


def json_event(type: str, data: bytes) -> bytes:
    """Return one event of a watch, on a line of its own."""
    return b'{"type":"' + type.encode() + b'","object":' + data + b"}\n"


class ObjectView(msgspec.Struct, frozen=True):
    """Encoders of one form."""

    one: Callable[[StoredObject], bytes]
    """Encodes an object for a watch or a GET."""
    many: Callable[[Sequence[Entry], Mapping[str, Any]], bytes]
    """Encodes a list from its entries and its metadata."""
    bookmark: Callable[[Mapping[str, Any]], bytes]
    """Encodes an object that has only this metadata."""
    event: Callable[[str, bytes], bytes] = json_event
    """Encodes an event of a watch from its type and its encoded object."""
    content_type: str = JSON
    stream_type: str = JSON
    """Content-Type of a watch."""
    end: bytes = b"\n"
    """What follows a single object."""


def plain(place: ApiPath) -> ObjectView:
    """Return the view of whole objects."""
    # Lists of custom resources have the kind in each item; lists of built-in kinds do not.
    return _view(place.kind.kind, place.api_version, lambda stored: _inner(place, stored), typed=place.kind.custom)


def packed(place: ApiPath) -> ObjectView:
    """Return the view of whole objects as protobuf."""
    top = {"apiVersion": place.api_version, "kind": place.kind.kind}

    def raw(stored: StoredObject) -> Mapping[str, Any]:
        """Return the object with kind and API version; an Event in the form of the core group."""
        return event_from_v1(stored.raw) if place.kind.stored_as == "Event" else {**stored.raw, **top}

    def many(entries: Sequence[Entry], meta: Mapping[str, Any]) -> bytes:
        """Encode a list."""
        items = [raw(stored) for _, stored in entries]
        return protobuf.encode({**top, "kind": f"{place.kind.kind}List", "metadata": meta, "items": items})

    return ObjectView(
        one=lambda stored: protobuf.encode(raw(stored)),
        many=many,
        bookmark=lambda meta: protobuf.encode({**top, "metadata": meta}),
        event=protobuf.watch_event,
        content_type=protobuf.MEDIA_TYPE,
        stream_type=f"{protobuf.MEDIA_TYPE};stream=watch",
        end=b"",
    )


def partial(version: str) -> ObjectView:
    """Return the view of metadata alone (PartialObjectMetadata)."""
    return _view("PartialObjectMetadata", f"meta.k8s.io/{version}", lambda stored: _only(stored.raw["metadata"]))


def _view(kind: str, version: str, inner: Callable[[StoredObject], bytes], *, typed: bool = True) -> ObjectView:
    """Return a view of objects of a kind, of which `inner` encodes the rest. Items of lists have the kind if `typed`."""
    head = f'{{"kind":"{kind}","apiVersion":"{version}",'.encode()

    def one(stored: StoredObject) -> bytes:
        """Encode an object after its kind and API version."""
        return head + inner(stored)[1:]

    def many(entries: Sequence[Entry], meta: Mapping[str, Any]) -> bytes:
        """Encode a list, whose items start with their kind if the view is `typed`."""
        top = msgspec.json.encode({"kind": f"{kind}List", "apiVersion": version, "metadata": meta})
        item = one if typed else inner
        return top[:-1] + b',"items":[' + b",".join(item(stored) for _, stored in entries) + b"]}\n"

    return ObjectView(one, many, lambda meta: head + _only(meta)[1:])


def _only(meta: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode({"metadata": meta})


def table(place: ApiPath, version: str, objects: str, now: Callable[[], datetime]) -> ObjectView:
    """Return the view of rows that `kubectl get` prints (metav1.Table).

    `objects` is what each row includes: Object, Metadata, or None (`includeObject`).
    """
    kind = place.kind
    columns = custom_columns(kind.columns.get(place.version, ())) if kind.custom else built_in_columns(place.stored)
    top = {"kind": "Table", "apiVersion": f"meta.k8s.io/{version}"}
    head = msgspec.json.encode(columns.definitions)
    carried = plain(place) if objects == "Object" else partial(version)

    def made(meta: Mapping[str, Any], rows: Iterable[bytes]) -> bytes:
        """Encode a table of encoded rows."""
        start = msgspec.json.encode({**top, "metadata": meta})[:-1]
        return start + b',"columnDefinitions":' + head + b',"rows":[' + b",".join(rows) + b"]}"

    def row(stored: StoredObject, at: datetime) -> bytes:
        """Encode the cells of an object at a time, and the part of the object that the client requested."""
        cells = b'{"cells":' + msgspec.json.encode(columns.row(stored.raw, at))
        return cells + (b"}" if objects == "None" else b',"object":' + carried.one(stored) + b"}")

    def one(stored: StoredObject) -> bytes:
        """Encode a table with the row of one object."""
        return made({"resourceVersion": str(stored.version)}, [row(stored, now())])

    def many(entries: Sequence[Entry], meta: Mapping[str, Any]) -> bytes:
        """Encode a table with a row for each object, all at the same time."""
        at = now()
        return made(meta, (row(stored, at) for _, stored in entries)) + b"\n"

    return ObjectView(one, many, lambda meta: made(meta, ()))


def _inner(place: ApiPath, stored: StoredObject) -> bytes:
    """Return an object as JSON without apiVersion and kind."""
    if place.kind.stored_as != "Event":
        return stored.data
    body = event_from_v1(stored.raw)
    del body["apiVersion"], body["kind"]
    return msgspec.json.encode(body)
