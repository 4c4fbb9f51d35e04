"""What the API does for POST, PUT, PATCH and DELETE.

As upstream: a resourceVersion in what is sent is a precondition (409); `status` is changed through its own path only, and
nothing else through that; what changes nothing makes no new version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from narthex.lab.api import faults, patches
from narthex.lab.api.events import to_core
from narthex.lab.api.faults import ApiFault, Wrong
from narthex.lab.api.paths import Place
from narthex.lab.api.registry import Registry
from narthex.lab.api.requests import Request
from narthex.lab.api.store import Raw
from narthex.lab.api.types import ANY, Type, object_type

_UNVERSIONED = "metadata.resourceVersion"


class Written(msgspec.Struct, frozen=True):
    """What came of a write."""

    code: int
    raw: Raw
    """The object, or a Status."""
    warnings: tuple[str, ...] = ()


def decoded(request: Request) -> Raw:
    """The object in a request's body. Raises ApiFault."""
    content = request.headers.get("content-type", "")
    if content and not any(known in content for known in ("json", "yaml", "*/*")):
        message = f"the body of the request was in an unknown format - accepted media types include: application/json, application/yaml: {content}"
        raise ApiFault(415, "UnsupportedMediaType", message)
    raw = body_value(request)
    if not isinstance(raw, dict):
        raise faults.bad_request("the body of the request is not an object")
    return raw


def body_value(request: Request) -> Any:
    """The JSON of a request's body, or its YAML where that is said. Raises ApiFault."""
    try:
        return msgspec.json.decode(request.body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if "yaml" not in request.headers.get("content-type", ""):
            raise faults.bad_request(f"error decoding the body: {error}") from None
    return _yaml(request.body)


def _yaml(body: bytes) -> Any:
    import yaml  # type: ignore[import-untyped]

    try:
        return yaml.load(body, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise faults.bad_request(f"error decoding the body: {error}") from None


def create(registry: Registry, place: Place, given: Raw, *, dry_run: bool = False) -> Raw:
    """Make an object. Raises ApiFault."""
    return registry.create(place.stored, _placed(place, given), dry_run=dry_run)


def replace(registry: Registry, place: Place, given: Raw, *, dry_run: bool = False) -> Raw:
    """PUT. Raises ApiFault."""
    given = _placed(place, given)
    if not given["metadata"].get("resourceVersion") and not place.kind.unconditional:
        wrong = Wrong(_UNVERSIONED, "FieldValueInvalid", "Invalid value: 0x0: must be specified for an update")
        raise faults.invalid(place.kind.kind, place.kind.group, place.name, [wrong])
    return registry.update(place.stored, given, subresource=place.subresource, dry_run=dry_run)


def patch(registry: Registry, place: Place, content_type: str, given: Any, *, dry_run: bool = False) -> Raw:
    """PATCH but server-side apply. Raises ApiFault."""
    kind = place.kind
    held = registry.get(place.stored, *place.key)
    if held is None:
        raise faults.not_found(kind.plural, kind.group, place.name)
    new = patched(content_type, held, given, object_type(kind, place.version))
    return registry.update(place.stored, _placed(place, new), subresource=place.subresource, dry_run=dry_run)


def patched(content_type: str, held: Mapping[str, Any], given: Any, of: Type = ANY) -> Raw:
    """What a patch makes of an object of a type. Raises ApiFault."""
    try:
        return patches.apply(content_type, held, given, of)
    except patches.NotAPatch:
        known = ", ".join((patches.JSON_PATCH, patches.MERGE, patches.STRATEGIC, patches.APPLY))
        message = f"the body of the request was in an unknown format - accepted media types include: {known}"
        raise ApiFault(415, "UnsupportedMediaType", message) from None
    except patches.BadPatch as error:
        raise ApiFault(
            422, "Invalid", f"the server rejected our request due to an error in our request: {error}"
        ) from None


def delete(registry: Registry, place: Place, options: Mapping[str, Any], *, dry_run: bool = False) -> Raw:
    """DELETE; returns what is answered: a Status, or the object that is still there. Raises ApiFault."""
    grace = options.get("gracePeriodSeconds")
    if grace is not None and (not isinstance(grace, int) or grace < 0):
        raise faults.bad_request(f"gracePeriodSeconds: {grace!r} is not a number of seconds")
    held = registry.get(place.stored, *place.key)
    wanted = options.get("preconditions")
    way = options.get("propagationPolicy")
    left = registry.delete(
        place.stored, *place.key, grace=grace, preconditions=wanted, propagation=way, dry_run=dry_run
    )
    if left is not None:
        return left
    kind = place.kind
    details = {"name": place.name, "group": kind.group, "kind": kind.plural}
    uid = (held or {}).get("metadata", {}).get("uid")
    details |= {"uid": uid} if uid else {}
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Success",
        "details": {name: value for name, value in details.items() if value},
    }


def _placed(place: Place, given: Raw) -> Raw:
    """What is sent, with the names of the path. Raises ApiFault when it says others."""
    kind, meta = place.kind, given.get("metadata") or {}
    if not isinstance(meta, dict):
        raise faults.bad_request(f"{kind.kind}: metadata is not an object")
    if given.get("kind") not in (None, "", kind.kind) or given.get("apiVersion") not in (None, "", *_versions(place)):
        said = f"{given.get('apiVersion', '')}, Kind={given.get('kind', '')}"
        message = f"{kind.kind} in version {place.version!r} cannot be handled as a {kind.kind}: the body says {said}"
        raise faults.bad_request(message)
    if kind.namespaced and meta.get("namespace") not in (None, "", place.namespace):
        raise faults.bad_request(
            "the namespace of the provided object does not match the namespace sent on the request"
        )
    if place.name and meta.get("name") not in (None, "", place.name):
        said = f"the name of the object ({meta['name']}) does not match the name on the URL ({place.name})"
        raise faults.bad_request(said)
    meta = {**meta, "namespace": place.namespace} if kind.namespaced else {**meta}
    if place.name:
        meta["name"] = place.name
    new = {**given, "metadata": meta}
    if kind.stored_as == "Event":
        return to_core(new)
    return {**new, "apiVersion": kind.api_version, "kind": kind.kind}


def _versions(place: Place) -> set[str]:
    # A patch is made of what is held, in the version in which it is held.
    views = {"v1"} if place.kind.stored_as else set()
    return {place.api_version, place.kind.api_version} | views
