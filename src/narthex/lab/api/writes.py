"""POST, PUT, PATCH, and DELETE, by subresource.

As upstream, a resourceVersion in the body is a precondition (409), `status` changes only through its subresource, which
changes nothing else, and a write without effect makes no new version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from narthex.lab.api import errors, patches
from narthex.lab.api.apply import apply, updated_managed_fields
from narthex.lab.api.errors import FieldError
from narthex.lab.api.kinds import event_from_v1, event_to_v1
from narthex.lab.api.reads import ListSelector
from narthex.lab.api.registry import Registry
from narthex.lab.api.requests import ApiPath, ApiRequest, as_object, decode_body, decode_json_or_yaml, is_true
from narthex.lab.api.store import Raw
from narthex.lab.api.subresources import SUCCESS, bind, evict, read_scale, write_scale
from narthex.lab.api.tokens import request_token
from narthex.lab.api.types import object_type, validate_fields
from narthex.lab.api.validation import warnings_of


class WriteOptions(msgspec.Struct, frozen=True):
    """Query parameters of a write."""

    manager: str
    """The fieldManager, or the product name in User-Agent."""
    dry_run: bool = False
    validation: str = ""
    """Strict, Warn, or Ignore. Empty: Warn."""
    force: bool = False


class WriteResult(msgspec.Struct, frozen=True):
    """The result of a write."""

    code: int
    raw: Raw
    """The object, or a Status."""
    warnings: tuple[str, ...] = ()


def write_options(request: ApiRequest) -> WriteOptions:
    """Return a request's options. Raises StatusError."""
    query, agent = request.query, request.headers.get("user-agent", "")
    if query.get("dryRun") not in (None, "", "All"):
        raise errors.bad_request(f'dryRun: Unsupported value: "{query["dryRun"]}": supported values: "All"')
    validation = query.get("fieldValidation", "")
    if validation not in ("", "Strict", "Warn", "Ignore"):
        raise errors.bad_request(
            f'fieldValidation: Unsupported value: "{validation}": supported values: "Ignore", "Strict", "Warn"'
        )
    return WriteOptions(
        manager=query.get("fieldManager") or agent.partition("/")[0] or "unknown",
        dry_run=bool(query.get("dryRun")),
        validation=validation,
        force=is_true(query, "force"),
    )


def create(registry: Registry, place: ApiPath, given: Raw, how: WriteOptions) -> WriteResult:
    """Create an object (POST). Raises StatusError."""
    new, warnings = _accepted(place, given, how)
    return WriteResult(201, registry.create(place.stored, new, dry_run=how.dry_run), warnings)


def replace(registry: Registry, place: ApiPath, given: Raw, how: WriteOptions) -> WriteResult:
    """Replace an object (PUT). Raises StatusError."""
    new, warnings = _accepted(place, given, how)
    if not new["metadata"].get("resourceVersion") and not place.kind.unconditional:
        text = "Invalid value: 0x0: must be specified for an update"
        error = FieldError("metadata.resourceVersion", "FieldValueInvalid", text)
        raise errors.invalid(place.kind.kind, place.kind.group, place.name, [error])
    return WriteResult(200, update(registry, place, new, how), warnings)


def patch(registry: Registry, place: ApiPath, request: ApiRequest, how: WriteOptions) -> WriteResult:
    """Patch or apply an object (PATCH). Raises StatusError."""
    content_type, given = request.headers.get("content-type", ""), decode_json_or_yaml(request)
    if content_type.startswith(patches.APPLY):
        return _applied(registry, place, given, how)
    held = registry.get(place.stored, *place.key)
    if held is None:
        raise place.not_found()
    shown = event_from_v1(held) if place.kind.stored_as == "Event" else held
    new = patches.apply(content_type, shown, given, object_type(place.kind, place.version))
    new, warnings = _accepted(place, new, how)
    return WriteResult(200, update(registry, place, new, how), warnings)


_LAST_STATE = frozenset({"Pod", "Service", "ServiceAccount"})
"""Kinds whose last state is the response to a deletion (upstream's `ReturnDeletedObject`); clients decode it as such."""


def delete(registry: Registry, place: ApiPath, options: Mapping[str, Any], *, dry_run: bool = False) -> Raw:
    """Delete an object. Return a Status, or the object if it still exists. Raises StatusError."""
    grace = options.get("gracePeriodSeconds")
    if grace is not None and (not isinstance(grace, int) or grace < 0):
        raise errors.bad_request(f"gracePeriodSeconds: {grace!r} is not a number of seconds")
    held = registry.get(place.stored, *place.key)
    requested, propagation = options.get("preconditions"), options.get("propagationPolicy")
    if propagation not in (None, "", "Background", "Foreground", "Orphan"):
        raise errors.bad_request(f'propagationPolicy: Unsupported value: "{propagation}"')
    left = registry.delete(
        place.stored, *place.key, grace=grace, preconditions=requested, propagation=propagation, dry_run=dry_run
    )
    if left is not None:
        return left
    kind = place.kind
    if held is not None and kind.name in _LAST_STATE:
        return held
    uid = (held or {}).get("metadata", {}).get("uid", "")
    details = {"name": place.name, "group": kind.group, "kind": kind.plural, "uid": uid}
    return {**SUCCESS, "details": {name: value for name, value in details.items() if value}}


def _applied(registry: Registry, place: ApiPath, given: Any, how: WriteOptions) -> WriteResult:
    given = as_object(given)
    if not given.get("kind") or not given.get("apiVersion"):
        raise errors.bad_request("Incorrect version specified in apply patch: apiVersion and kind must be set")
    if (given.get("metadata") or {}).get("managedFields"):
        raise errors.bad_request("metadata.managedFields must be nil")
    new, warnings = _accepted(place, given, how)
    raw, made = apply(
        registry,
        registry.kinds[place.stored],
        new,
        manager=how.manager,
        force=how.force,
        subresource=place.subresource,
        dry_run=how.dry_run,
    )
    return WriteResult(201 if made else 200, raw, warnings)


def update(registry: Registry, place: ApiPath, new: Raw, how: WriteOptions) -> Raw:
    """Write an object and update its managedFields, if it has any. Raises StatusError."""
    held, kind = registry.get(place.stored, *place.key), registry.kinds[place.stored]
    part = "" if place.subresource == "scale" else place.subresource
    if held is not None and held["metadata"].get("managedFields"):
        will = registry.update(place.stored, new, subresource=part, dry_run=True)
        owned = updated_managed_fields(
            kind, held, will, manager=how.manager, subresource=place.subresource, now=registry.stamp()
        )
        meta = {name: value for name, value in new["metadata"].items() if name != "managedFields"}
        new = {**new, "metadata": {**meta, **({"managedFields": owned} if owned else {})}}
    return registry.update(place.stored, new, subresource=part, dry_run=how.dry_run)


def _accepted(place: ApiPath, given: Raw, how: WriteOptions) -> tuple[Raw, tuple[str, ...]]:
    """Return a request's object in the storage version, and warnings about its fields. Raises StatusError."""
    new, warnings = validate_fields(place.kind, place.version, _placed(place, given), how.validation)
    if place.kind.stored_as == "Event":
        return event_to_v1(new), warnings
    warnings += warnings_of(place.kind, new)
    return {**new, "apiVersion": place.kind.api_version, "kind": place.kind.kind}, warnings


def _placed(place: ApiPath, given: Raw) -> Raw:
    """Return a request's object with namespace and name of the path. Raises StatusError if it has others."""
    kind, meta = place.kind, given.get("metadata") or {}
    if not isinstance(meta, dict):
        raise errors.bad_request(f"{kind.kind}: metadata is not an object")
    # A patch is applied to the stored object, in the storage version.
    versions = (None, "", place.api_version, kind.api_version)
    if given.get("kind") not in (None, "", kind.kind) or given.get("apiVersion") not in versions:
        body = f"{given.get('apiVersion', '')}, Kind={given.get('kind', '')}"
        message = f"{kind.kind} in version {place.version!r} cannot be handled as a {kind.kind}: the body says {body}"
        raise errors.bad_request(message)
    if kind.namespaced and meta.get("namespace") not in (None, "", place.namespace):
        raise errors.bad_request(
            "the namespace of the provided object does not match the namespace sent on the request"
        )
    if place.name and meta.get("name") not in (None, "", place.name):
        body = f"the name of the object ({meta['name']}) does not match the name on the URL ({place.name})"
        raise errors.bad_request(body)
    meta = {**meta, "namespace": place.namespace} if kind.namespaced else {**meta}
    if place.name:
        meta["name"] = place.name
    return {**given, "metadata": meta}


_REQUESTS = {"binding": bind, "eviction": evict, "token": request_token}
"""Subresources that are only created: the answer is no object that is kept."""


def handle_write(
    registry: Registry, where: ApiPath, request: ApiRequest, selector: Callable[[], ListSelector]
) -> WriteResult:
    """Execute a write by method and subresource. Raises StatusError."""
    part, method = where.subresource, request.method
    if part and part not in where.kind.subresources and part != "finalize":
        raise errors.unknown_path()
    if method == "DELETE":
        return _delete(registry, where, request, selector)
    if part == "scale":
        return _scale(registry, where, request)
    if method == "POST" and part in _REQUESTS:
        return WriteResult(201, _REQUESTS[part](registry, where, decode_body(request)))
    how = write_options(request)
    if method == "POST" and not where.name:
        return create(registry, where, decode_body(request), how)
    if method == "PUT" and where.name:
        return replace(registry, where, decode_body(request), how)
    if method == "PATCH" and where.name:
        return patch(registry, where, request, how)
    raise errors.method_not_allowed()


def _scale(registry: Registry, where: ApiPath, request: ApiRequest) -> WriteResult:
    kind, held = where.kind, registry.get(where.stored, *where.key)
    if held is None:
        raise where.not_found()
    if request.method == "PUT":
        requested = decode_body(request)
    elif request.method == "PATCH":
        now, content_type = read_scale(kind, held), request.headers.get("content-type", "")
        # The patch's own version counts, not the one that was just read.
        del now["metadata"]["resourceVersion"]
        how = patches.MERGE if content_type.startswith(patches.APPLY) else content_type
        requested = patches.apply(how, now, decode_json_or_yaml(request))
    else:
        raise errors.method_not_allowed()
    new = update(registry, where, write_scale(kind, held, requested), write_options(request))
    return WriteResult(200, read_scale(kind, new))


def _delete(
    registry: Registry, where: ApiPath, request: ApiRequest, selector: Callable[[], ListSelector]
) -> WriteResult:
    options, dry_run = _options(request), bool(request.query.get("dryRun"))
    if where.name:
        return WriteResult(200, delete(registry, where, options, dry_run=dry_run))
    chosen = selector()
    found = [stored.raw for _, stored in registry.store.now(where.stored, chosen.selects, where.namespace)]
    for raw in found:
        meta = raw["metadata"]
        one = ApiPath(where.kind, where.version, meta.get("namespace", ""), meta["name"])
        # An earlier deletion may have removed this object, too.
        if registry.get(one.stored, *one.key) is not None:
            delete(registry, one, {**options, "preconditions": None}, dry_run=dry_run)
    meta = {"resourceVersion": str(registry.version)}
    listed = {"kind": f"{where.kind.kind}List", "apiVersion": where.api_version, "metadata": meta, "items": found}
    return WriteResult(200, listed)


def _options(request: ApiRequest) -> Mapping[str, Any]:
    """Return the DeleteOptions in a request's body and query."""
    options: dict[str, Any] = decode_body(request) if request.body.strip() else {}
    query = request.query
    if query.get("gracePeriodSeconds"):
        seconds = query["gracePeriodSeconds"]
        options["gracePeriodSeconds"] = int(seconds) if seconds.isdigit() else -1
    if query.get("propagationPolicy"):
        options["propagationPolicy"] = query["propagationPolicy"]
    return options
