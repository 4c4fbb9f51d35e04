"""The API: a request in, an answer out. Pure; who calls it holds the lock, and carries streams to the client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from narthex.lab.api import faults, reads, writes
from narthex.lab.api.faults import ApiFault
from narthex.lab.api.kinds import VIEWS, Kind
from narthex.lab.api.paths import Paths, Place, paths, place
from narthex.lab.api.reads import PRESENT, Abilities
from narthex.lab.api.registry import Registry
from narthex.lab.api.requests import Answer, Request, Whole, encoded
from narthex.lab.api.selectors import FIELDS, Selector
from narthex.lab.api.store import Stored
from narthex.lab.api.views import plain


class Api:
    """What a server answers, over a Registry."""

    def __init__(self, registry: Registry, abilities: Abilities = PRESENT) -> None:
        self.registry = registry
        self.abilities = abilities
        self._known: tuple[Mapping[str, Kind], Abilities, Paths] | None = None

    def answer(self, request: Request) -> Answer:
        """The answer to a request; refusals are Status objects."""
        try:
            where = place(request.path, self.paths)
            if where is None:
                raise ApiFault(404, "NotFound", "the server could not find the requested resource")
            return self._resource(request, where)
        except ApiFault as fault:
            return refusal(fault)

    @property
    def paths(self) -> Paths:
        """Where which kinds are served."""
        kinds, abilities = self.registry.kinds, self.abilities
        if self._known is None or self._known[0] is not kinds or self._known[1] is not abilities:
            found = [_able(kind, abilities) for kind in (*kinds.values(), *VIEWS)]
            known = paths(kind for kind in found if kind.name not in abilities.missing and kind.versions)
            self._known = kinds, abilities, known
        return self._known[2]

    def _resource(self, request: Request, where: Place) -> Answer:
        if request.method == "GET":
            return self._read(request, where)
        return self._write(request, where)

    def _read(self, request: Request, where: Place) -> Answer:
        view, query, store = plain(where), request.query, self.registry.store
        if where.name:
            held = store.get(where.stored, where.key)
            if held is None:
                raise faults.not_found(where.kind.plural, where.kind.group, where.name)
            return Whole(200, view.one(held) + b"\n")
        selector = self._selector(where, query)
        if query.get("watch") in ("true", "1"):
            return reads.watching(store, where.stored, where.namespace, selector, view, query, self.abilities)
        return reads.listing(store, where.stored, where.namespace, selector, view, query, self.abilities)

    def _selector(self, where: Place, query: Mapping[str, str]) -> Selector:
        fields = FIELDS.get(where.stored, frozenset())
        if where.stored == "Service" and not self.abilities.service_fields:
            fields = frozenset()
        return Selector(query.get("labelSelector", ""), query.get("fieldSelector", ""), fields)

    def _write(self, request: Request, where: Place) -> Answer:
        dry_run = bool(request.query.get("dryRun"))
        registry, method = self.registry, request.method
        part = where.subresource
        if part and part not in where.kind.subresources:
            raise ApiFault(404, "NotFound", "the server could not find the requested resource")
        if method == "POST" and not where.name:
            return self._written(201, where, writes.create(registry, where, writes.decoded(request), dry_run=dry_run))
        if method == "PUT" and where.name:
            return self._written(200, where, writes.replace(registry, where, writes.decoded(request), dry_run=dry_run))
        if method == "PATCH" and where.name:
            content_type, given = request.headers.get("content-type", ""), writes.body_value(request)
            return self._written(200, where, writes.patch(registry, where, content_type, given, dry_run=dry_run))
        if method == "DELETE" and where.name:
            return encoded(200, writes.delete(registry, where, _options(request), dry_run=dry_run))
        raise ApiFault(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")

    def _written(self, code: int, where: Place, raw: dict[str, Any]) -> Whole:
        return Whole(code, plain(where).one(Stored(0, raw)) + b"\n")


def refusal(fault: ApiFault) -> Whole:
    """A Status as answer."""
    retry = fault.details.get("retryAfterSeconds")
    return encoded(fault.code, fault.status(), {"Retry-After": str(retry)} if retry else None)


def _options(request: Request) -> Mapping[str, Any]:
    """DeleteOptions, of the body and the query."""
    options: dict[str, Any] = writes.decoded(request) if request.body.strip() else {}
    query = request.query
    if query.get("gracePeriodSeconds"):
        options["gracePeriodSeconds"] = (
            int(query["gracePeriodSeconds"]) if query["gracePeriodSeconds"].isdigit() else -1
        )
    if query.get("propagationPolicy"):
        options["propagationPolicy"] = query["propagationPolicy"]
    return options


def _able(kind: Kind, abilities: Abilities) -> Kind:
    if kind.name != "ServiceCIDR":
        return kind
    return msgspec.structs.replace(kind, served=abilities.service_cidrs, version=(abilities.service_cidrs or ("",))[0])
