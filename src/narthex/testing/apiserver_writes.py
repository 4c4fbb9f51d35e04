"""What an API server answers to POST, PUT, PATCH and DELETE, and to GET of one object.

As upstream: a resourceVersion in what is sent is a precondition (409); `status` is changed through its own path only, and
nothing else through that; what changes nothing makes no new version.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import msgspec

from narthex.testing.apiserver_data import KINDS, Data, Stored
from narthex.testing.apiserver_patch import BadPatch, apply
from narthex.testing.apiserver_paths import Place
from narthex.testing.apiserver_protocol import Whole, status

_WITH_STATUS = frozenset({"Service", "Node", "Pod", "Namespace", "ServiceCIDR"})
_UNCONDITIONAL = frozenset(KINDS) - {"Lease", "IPAddressPool", "L2Advertisement"}
"""Kinds that may be PUT without a resourceVersion."""
_uids = itertools.count(1)


def read_one(data: Data, place: Place) -> Whole:
    """The object of a path."""
    held = data.get(place.kind, place.key)
    return _missing(place) if held is None else _whole(200, place.kind, held)


def write(data: Data, method: str, place: Place, body: bytes, content_type: str) -> Whole:
    """Do it, and answer."""
    if method == "DELETE":
        return _delete(data, place)
    try:
        given = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        return status(400, "BadRequest", f"the body is not JSON: {error}")
    if method == "POST" and not place.name:
        return _create(data, place, given)
    held = data.get(place.kind, place.key)
    if not place.name or method not in ("PUT", "PATCH"):
        return status(405, "MethodNotAllowed", f"{method} is not supported here")
    if held is None or (place.subresource and (place.subresource, place.kind in _WITH_STATUS) != ("status", True)):
        return _missing(place)
    if method == "PATCH":
        try:
            given = apply(content_type, held.raw, given)
        except BadPatch as error:
            return status(422, "Invalid", str(error))
    return _replace(data, place, held, given, unconditional=method == "PATCH" or place.kind in _UNCONDITIONAL)


def _create(data: Data, place: Place, given: Any) -> Whole:
    meta = dict(given.get("metadata") or {})
    name = meta.get("name") or f"{meta.get('generateName', 'object-')}{next(_uids)}"
    meta |= {"name": name, "uid": f"uid-{next(_uids)}", "creationTimestamp": "2026-01-01T00:00:00Z"}
    if place.namespace:
        meta["namespace"] = place.namespace
    if data.get(place.kind, (place.namespace, name)) is not None:
        return status(409, "AlreadyExists", f'{KINDS[place.kind][1]} "{name}" already exists')
    data.put(place.kind, {**given, "metadata": meta})
    made = data.get(place.kind, (place.namespace, name))
    assert made is not None
    return _whole(201, place.kind, made)


def _replace(data: Data, place: Place, held: Stored, given: Any, *, unconditional: bool) -> Whole:
    meta = dict(given.get("metadata") or {})
    expected = meta.get("resourceVersion") or ""
    if not expected and not unconditional:
        return status(422, "Invalid", "metadata.resourceVersion: Invalid value: 0x0: must be specified for an update")
    # A patch carries the held version along when it names none.
    if expected and expected != str(held.version):
        text = "the object has been modified; please apply your changes to the latest version and try again"
        return status(
            409, "Conflict", f'Operation cannot be fulfilled on {KINDS[place.kind][1]} "{place.name}": {text}'
        )
    fixed = {name: held.raw["metadata"].get(name) for name in ("name", "namespace", "uid", "creationTimestamp")}
    new = {name: value for name, value in given.items() if name not in ("apiVersion", "kind")}
    new["metadata"] = {**meta, **{name: value for name, value in fixed.items() if value is not None}}
    if place.subresource:
        # Of a Node's status path upstream keeps back the spec alone: annotations go through.
        kept = {**new, "spec": held.raw.get("spec", {})} if place.kind == "Node" else held.raw
        new = {**kept, "status": new.get("status", {})}
    elif place.kind in _WITH_STATUS:
        new.pop("status", None)
        new |= {"status": held.raw["status"]} if "status" in held.raw else {}
    if _content(new) != _content(held.raw):
        data.put(place.kind, new)
    made = data.get(place.kind, place.key)
    assert made is not None
    return _whole(200, place.kind, made)


def _delete(data: Data, place: Place) -> Whole:
    if not place.name or not data.delete(place.kind, *place.key):
        return _missing(place)
    return Whole(200, msgspec.json.encode({"kind": "Status", "apiVersion": "v1", "status": "Success"}))


def _content(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    meta = {name: value for name, value in raw["metadata"].items() if name != "resourceVersion"}
    return {**raw, "metadata": meta}


def _whole(code: int, kind: str, held: Stored) -> Whole:
    return Whole(code, msgspec.json.encode({"kind": kind, "apiVersion": KINDS[kind][0], **held.raw}))


def _missing(place: Place) -> Whole:
    return status(404, "NotFound", f'{KINDS[place.kind][1]} "{place.name}" not found')
