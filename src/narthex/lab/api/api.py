"""The API: a request in, an answer out. Pure; who calls it holds the lock, and carries streams to the client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from narthex.lab.api import errors as faults
from narthex.lab.api import reads
from narthex.lab.api.bodies import decoded
from narthex.lab.api.discovery import REVIEWS, Documents
from narthex.lab.api.errors import ApiFault
from narthex.lab.api.kinds import VIEWS, Kind
from narthex.lab.api.paths import Paths, Place, paths, place
from narthex.lab.api.reads import PRESENT, Abilities
from narthex.lab.api.registry import Registry
from narthex.lab.api.requests import Answer, Request, Whole, chosen, encoded
from narthex.lab.api.selectors import FIELDS, ListSelector
from narthex.lab.api.store import Stored
from narthex.lab.api.subresources import conversation, logs, read_scale
from narthex.lab.api.views import View, partial, plain, table
from narthex.lab.api.writes import change

_PARTIAL = ("PartialObjectMetadata", "PartialObjectMetadataList")
_PORT_FORWARD = (
    "port-forward is not served by the lab: its pods can be reached by their addresses, see `narthex lab status`"
)


class Api:
    """What a server answers, over a Registry."""

    def __init__(self, registry: Registry, abilities: Abilities = PRESENT) -> None:
        self.registry = registry
        self.abilities = abilities
        self._known: tuple[Mapping[str, Kind], Abilities, Paths, Documents] | None = None

    def answer(self, request: Request) -> Answer:
        """The answer to a request; refusals are Status objects."""
        try:
            return self._answer(request)
        except ApiFault as fault:
            return refusal(fault)

    @property
    def paths(self) -> Paths:
        """Where which kinds are served."""
        return self._served()[0]

    def _served(self) -> tuple[Paths, Documents]:
        kinds, abilities = self.registry.kinds, self.abilities
        if self._known is None or self._known[0] is not kinds or self._known[1] is not abilities:
            found = [_able(kind, abilities) for kind in (*kinds.values(), *VIEWS)]
            known = paths(kind for kind in found if kind.name not in abilities.missing and kind.versions)
            self._known = kinds, abilities, known, Documents(known)
        return self._known[2:]

    def _answer(self, request: Request) -> Answer:
        known, documents = self._served()
        where = place(request.path, known)
        if where is not None:
            return self._read(request, where) if request.method == "GET" else self._change(request, where)
        found = documents.answer(request) if request.method == "GET" else review(request)
        if found is None:
            raise ApiFault(404, "NotFound", "the server could not find the requested resource")
        return found

    def _read(self, request: Request, where: Place) -> Answer:
        query, store, part = request.query, self.registry.store, where.subresource
        if part in ("exec", "attach", "log", "portforward") and where.stored == "Pod":
            return self._talk(request, where)
        view = self._view(request, where)
        if where.name:
            held = store.get(where.stored, where.key)
            if held is None or (part and part not in where.kind.subresources):
                raise faults.not_found(where.kind.plural, where.kind.group, where.name)
            if part == "scale":
                return encoded(200, read_scale(where.kind, held.raw))
            return Whole(200, view.one(held) + b"\n")
        selector = self._selector(where, query)
        if query.get("watch") in ("true", "1"):
            return reads.watching(store, where.stored, where.namespace, selector, view, query, self.abilities)
        return reads.listing(store, where.stored, where.namespace, selector, view, query, self.abilities)

    def _talk(self, request: Request, where: Place) -> Answer:
        if where.subresource == "portforward":
            raise ApiFault(501, "NotImplemented", _PORT_FORWARD)
        if where.subresource == "log":
            return logs(self.registry, where, request)
        return conversation(self.registry, where, request)

    def _change(self, request: Request, where: Place) -> Answer:
        if where.subresource in ("exec", "attach", "portforward") and request.method == "POST":
            return self._talk(request, where)
        written = change(self.registry, where, request, lambda: self._selector(where, request.query))
        headers = (
            {"Warning": ", ".join(f'299 - "{_quoted(each)}"' for each in written.warnings)} if written.warnings else {}
        )
        if written.raw.get("kind") != where.kind.kind or (where.name and where.subresource == "scale"):
            return encoded(written.code, written.raw, headers)
        return Whole(written.code, self._view(request, where).one(Stored(0, written.raw)) + b"\n", headers)

    def _view(self, request: Request, where: Place) -> View:
        offer = chosen(request.headers.get("accept", ""), "Table", *_PARTIAL)
        version = offer.version if offer.version in ("v1", "v1beta1") else "v1"
        if offer.form == "Table":
            return table(where, version, request.query.get("includeObject") or "Metadata", self.registry.now)
        return partial(version) if offer.form else plain(where)

    def _selector(self, where: Place, query: Mapping[str, str]) -> ListSelector:
        fields = FIELDS.get(where.stored, frozenset())
        if where.stored == "Service" and not self.abilities.service_fields:
            fields = frozenset()
        words = query.get("fieldSelector", "")
        if where.namespace and query.get("watch") in ("true", "1"):
            words += f",metadata.namespace={where.namespace}"
        return ListSelector(query.get("labelSelector", ""), words, fields)


def refusal(fault: ApiFault) -> Whole:
    """A Status as answer."""
    retry = fault.details.get("retryAfterSeconds")
    return encoded(fault.code, fault.status(), {"Retry-After": str(retry)} if retry else None)


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _able(kind: Kind, abilities: Abilities) -> Kind:
    if kind.name != "ServiceCIDR":
        return kind
    return msgspec.structs.replace(kind, served=abilities.service_cidrs, version=(abilities.service_cidrs or ("",))[0])


_PLACES = {f"/apis/authorization.k8s.io/v1/{kind.lower()}s": kind for kind in REVIEWS}
_ALL = ["*"]
_RULES = {
    "resourceRules": [{"verbs": _ALL, "apiGroups": _ALL, "resources": _ALL}],
    "nonResourceRules": [{"verbs": _ALL, "nonResourceURLs": _ALL}],
    "incomplete": False,
}


def review(request: Request) -> Whole | None:
    """The answer to a question, None when the request is none. Raises ApiFault."""
    kind = _PLACES.get(request.path)
    if kind is None or request.method != "POST":
        return None
    # Newer clients ask in protocol buffers, and understand JSON. The question does not matter to the answer.
    given: dict[str, Any] = {} if request.body.startswith(b"k8s\0") else decoded(request)
    status = (
        _RULES if kind == "SelfSubjectRulesReview" else {"allowed": True, "reason": "the lab's token may do everything"}
    )
    return encoded(201, {**given, "kind": kind, "apiVersion": "authorization.k8s.io/v1", "status": status})
