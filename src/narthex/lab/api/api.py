"""The API: a request in, a response out. Pure; the caller holds the lock and carries streams to the client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from narthex.lab.api import errors, protobuf
from narthex.lab.api.discovery import REVIEWS, Documents
from narthex.lab.api.errors import StatusError
from narthex.lab.api.kinds import VIEWS, ApiResource
from narthex.lab.api.proxy_path import KubeletProxyRequest, ProxyRequest, proxy_request
from narthex.lab.api.reads import FIELDS, PRESENT, ListRequest, ListSelector, ServerFeatures, WatchCursor
from narthex.lab.api.registry import Registry
from narthex.lab.api.requests import (
    ApiPath,
    ApiRequest,
    ApiResponse,
    ExecRequest,
    LogRequest,
    PortForwardRequest,
    ResourcePaths,
    choose_type,
    decode_body,
    is_true,
    json_response,
    parse_path,
    resource_paths,
)
from narthex.lab.api.store import StoredObject
from narthex.lab.api.subresources import exec_request, log_request, port_forward_request, read_scale
from narthex.lab.api.views import ObjectView, packed, partial, plain, table
from narthex.lab.api.writes import handle_write

ApiAnswer = (
    ApiResponse | WatchCursor | LogRequest | ExecRequest | PortForwardRequest | ProxyRequest | KubeletProxyRequest
)
_PARTIAL = ("PartialObjectMetadata", "PartialObjectMetadataList")


class ApiHandler:
    """The Kubernetes API over a Registry."""

    def __init__(self, registry: Registry, abilities: ServerFeatures = PRESENT) -> None:
        """Serve a registry. `abilities` are the features of the Kubernetes version to follow."""
        self.registry = registry
        self.abilities = abilities
        self._known: tuple[Mapping[str, ApiResource], ServerFeatures, Documents] | None = None

    def answer(self, request: ApiRequest) -> ApiAnswer:
        """Return the response to a request. Errors become Status objects."""
        try:
            return self._answer(request)
        except StatusError as fault:
            return error_response(fault)

    @property
    def resource_paths(self) -> ResourcePaths:
        """The resources that are served, by group, version, and plural."""
        return self._documents().paths

    def _documents(self) -> Documents:
        kinds, abilities = self.registry.kinds, self.abilities
        if self._known is None or self._known[0] is not kinds or self._known[1] is not abilities:
            found = [_able(kind, abilities) for kind in (*kinds.values(), *VIEWS)]
            known = resource_paths(kind for kind in found if kind.name not in abilities.missing and kind.versions)
            self._known = kinds, abilities, Documents(known)
        return self._known[2]

    def _answer(self, request: ApiRequest) -> ApiAnswer:
        if (proxied := proxy_request(self.registry, request.target.partition("?")[0])) is not None:
            return proxied
        documents = self._documents()
        where = parse_path(request.path, documents.paths)
        if where is not None:
            return self._read(request, where) if request.method == "GET" else self._change(request, where)
        found = documents.answer(request) if request.method == "GET" else review_access(request)
        if found is None:
            raise errors.unknown_path()
        return found

    def _read(self, request: ApiRequest, where: ApiPath) -> ApiAnswer:
        query, store, part = request.query, self.registry.store, where.subresource
        if part in ("exec", "attach", "log", "portforward") and where.stored == "Pod":
            return self._talk(request, where)
        view = self._view(request, where)
        if where.name:
            held = store.get(where.stored, where.key)
            if held is None or (part and part not in where.kind.subresources):
                raise where.not_found()
            if part == "scale":
                return json_response(200, read_scale(where.kind, held.raw))
            return ApiResponse(200, view.one(held) + view.end, content_type=view.content_type)
        selector = self._selector(where, query)
        listing = ListRequest(store, where.stored, where.namespace, selector, view, query, self.abilities)
        return listing.watch() if is_true(query, "watch") else listing.objects()

    def _talk(self, request: ApiRequest, where: ApiPath) -> ApiAnswer:
        if where.subresource == "portforward":
            return port_forward_request(self.registry, where, request)
        if where.subresource == "log":
            return log_request(self.registry, where, request)
        return exec_request(self.registry, where, request)

    def _change(self, request: ApiRequest, where: ApiPath) -> ApiAnswer:
        if where.subresource in ("exec", "attach", "portforward") and request.method == "POST":
            return self._talk(request, where)
        written = handle_write(self.registry, where, request, lambda: self._selector(where, request.query))
        warnings = ", ".join(f'299 - "{_quoted(each)}"' for each in written.warnings)
        headers = {"Warning": warnings} if warnings else {}
        if written.raw.get("kind") != where.kind.kind or (where.name and where.subresource == "scale"):
            return json_response(written.code, written.raw, headers)
        view = self._view(request, where)
        body = view.one(StoredObject(0, written.raw)) + view.end
        return ApiResponse(written.code, body, headers, view.content_type)

    def _view(self, request: ApiRequest, where: ApiPath) -> ObjectView:
        offer = choose_type(request.headers.get("accept", ""), "Table", *_PARTIAL)
        version = offer.version if offer.version in ("v1", "v1beta1") else "v1"
        if offer.form == "Table":
            return table(where, version, request.query.get("includeObject") or "Metadata", self.registry.now)
        if offer.type == protobuf.MEDIA_TYPE:
            return packed(where)
        return partial(version) if offer.form else plain(where)

    def _selector(self, where: ApiPath, query: Mapping[str, str]) -> ListSelector:
        fields = FIELDS.get(where.stored, frozenset())
        if where.stored == "Service" and not self.abilities.service_fields:
            fields = frozenset()
        words = query.get("fieldSelector", "")
        if where.namespace and is_true(query, "watch"):
            words += f",metadata.namespace={where.namespace}"
        return ListSelector(query.get("labelSelector", ""), words, fields)


def error_response(fault: StatusError) -> ApiResponse:
    """Return the response that carries a Status."""
    retry = fault.details.get("retryAfterSeconds")
    return json_response(fault.code, fault.status(), {"Retry-After": str(retry)} if retry else None)


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _able(kind: ApiResource, abilities: ServerFeatures) -> ApiResource:
    if kind.name != "ServiceCIDR":
        return kind
    return msgspec.structs.replace(kind, served=abilities.service_cidrs, version=(abilities.service_cidrs or ("",))[0])


_ALL = ["*"]
_ALLOWED = {"allowed": True, "reason": "the lab's token may do everything"}
_RULES = {
    "resourceRules": [{"verbs": _ALL, "apiGroups": _ALL, "resources": _ALL}],
    "nonResourceRules": [{"verbs": _ALL, "nonResourceURLs": _ALL}],
    "incomplete": False,
}


def review_access(request: ApiRequest) -> ApiResponse | None:
    """Return the response to a self-subject access review, None for any other request. Raises StatusError.

    A client with the token may do everything.
    """
    where = parse_path(request.path, REVIEWS)
    if where is None or where.name or request.method != "POST":
        return None
    # Newer clients send protobuf and accept JSON. The response does not depend on the request.
    given: dict[str, Any] = {} if request.body.startswith(b"k8s\0") else decode_body(request)
    status = _RULES if where.kind.kind == "SelfSubjectRulesReview" else _ALLOWED
    return json_response(201, {**given, "kind": where.kind.kind, "apiVersion": where.api_version, "status": status})
