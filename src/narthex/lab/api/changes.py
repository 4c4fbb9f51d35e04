"""What POST, PUT, PATCH and DELETE do, by method and subresource."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from narthex.lab.api import errors as faults
from narthex.lab.api import patches, scale, writes
from narthex.lab.api.bodies import body_value, decoded
from narthex.lab.api.errors import ApiFault
from narthex.lab.api.paths import Place
from narthex.lab.api.pod_parts import bind, evict
from narthex.lab.api.registry import Registry
from narthex.lab.api.requests import Request
from narthex.lab.api.selectors import ListSelector
from narthex.lab.api.writes import Written


def change(registry: Registry, where: Place, request: Request, selector: Callable[[], ListSelector]) -> Written:
    """Do it. Raises ApiFault."""
    part, method = where.subresource, request.method
    if part and part not in where.kind.subresources and part != "finalize":
        raise ApiFault(404, "NotFound", "the server could not find the requested resource")
    if method == "DELETE":
        return _delete(registry, where, request, selector)
    if part == "scale":
        return _scale(registry, where, request)
    if method == "POST" and part in ("binding", "eviction"):
        do = bind if part == "binding" else evict
        return Written(201, do(registry, where, decoded(request)))
    how = writes.options(request)
    if method == "POST" and not where.name:
        return writes.create(registry, where, decoded(request), how)
    if method == "PUT" and where.name:
        return writes.replace(registry, where, decoded(request), how)
    if method == "PATCH" and where.name:
        return writes.patch(registry, where, request, how)
    raise ApiFault(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")


def _scale(registry: Registry, where: Place, request: Request) -> Written:
    kind, held = where.kind, registry.get(where.stored, *where.key)
    if held is None:
        raise faults.not_found(kind.plural, kind.group, where.name)
    if request.method == "PUT":
        wanted = decoded(request)
    elif request.method == "PATCH":
        now, content_type = scale.read(kind, held), request.headers.get("content-type", "")
        # The patch's own version counts, not the one that was just read.
        del now["metadata"]["resourceVersion"]
        how = patches.MERGE if content_type.startswith(patches.APPLY) else content_type
        wanted = writes.patched(how, now, body_value(request))
    else:
        raise ApiFault(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
    new = writes.update(registry, where, scale.write(kind, held, wanted), writes.options(request))
    return Written(200, scale.read(kind, new))


def _delete(registry: Registry, where: Place, request: Request, selector: Callable[[], ListSelector]) -> Written:
    options, dry_run = _options(request), bool(request.query.get("dryRun"))
    if where.name:
        return Written(200, writes.delete(registry, where, options, dry_run=dry_run))
    chosen = selector()
    found = [stored.raw for _, stored in registry.store.now(where.stored, chosen.selects, where.namespace)]
    for raw in found:
        meta = raw["metadata"]
        one = Place(where.kind, where.version, meta.get("namespace", ""), meta["name"])
        # What went meanwhile, with its owner perhaps, is gone all the same.
        if registry.get(one.stored, *one.key) is not None:
            writes.delete(registry, one, {**options, "preconditions": None}, dry_run=dry_run)
    meta = {"resourceVersion": str(registry.version)}
    listed = {"kind": f"{where.kind.kind}List", "apiVersion": where.api_version, "metadata": meta, "items": found}
    return Written(200, listed)


def _options(request: Request) -> Mapping[str, Any]:
    """DeleteOptions, of the body and the query."""
    options: dict[str, Any] = decoded(request) if request.body.strip() else {}
    query = request.query
    if query.get("gracePeriodSeconds"):
        options["gracePeriodSeconds"] = (
            int(query["gracePeriodSeconds"]) if query["gracePeriodSeconds"].isdigit() else -1
        )
    if query.get("propagationPolicy"):
        options["propagationPolicy"] = query["propagationPolicy"]
    return options
