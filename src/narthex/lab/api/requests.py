"""Requests and responses of the API as values: paths, bodies (JSON, YAML, or protobuf), and content negotiation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from narthex.lab.api import errors, protobuf
from narthex.lab.api.errors import StatusError
from narthex.lab.api.kinds import ApiResource, group_version
from narthex.lab.api.store import Key, Raw

JSON = "application/json"


class ApiRequest(msgspec.Struct, frozen=True):
    """A request."""

    method: str
    path: str
    query: Mapping[str, str]
    """Query parameters. Of a repeated one, the last value; `repeated` has all."""
    headers: Mapping[str, str]
    """Header fields by name in lower case."""
    body: bytes = b""
    repeated: tuple[tuple[str, str], ...] = ()
    """All query parameters in order."""
    target: str = ""
    """Path and query as the client sent them, percent-encoded."""

    def all(self, name: str) -> list[str]:
        """Return all values of a query parameter."""
        return [value for each, value in self.repeated if each == name]


def whole_number(query: Mapping[str, str], name: str) -> int | None:
    """Return a number of a query, None if it is absent or empty. Raises StatusError."""
    text = query.get(name)
    if text and not text.isdigit():
        raise errors.bad_request(f"{name}: {text!r} is not a number")
    return int(text) if text else None


def is_true(query: Mapping[str, str], name: str) -> bool:
    """Return True if a query sets a flag."""
    return query.get(name, "").lower() in ("true", "1")


class ApiResponse(msgspec.Struct, frozen=True):
    """A response with a body."""

    status: int
    body: bytes
    headers: Mapping[str, str] = {}
    content_type: str = JSON


class LogRequest(msgspec.Struct, frozen=True):
    """A response that the pod's node gives: the log of a container (`PodLogOptions`)."""

    namespace: str
    pod: str
    container: str
    tail: int | None = None
    """Number of last lines. None: all."""
    follow: bool = False
    since: float | None = None
    """Seconds since 1970. Earlier lines are omitted."""
    previous: bool = False
    timestamps: bool = False
    limit: int | None = None
    """Maximum number of bytes."""


class ExecRequest(msgspec.Struct, frozen=True):
    """A response that the pod's node gives: a program in a container. Without `argv`, the container's own (attach)."""

    namespace: str
    pod: str
    container: str
    argv: tuple[str, ...]
    stdin: bool = False
    stdout: bool = True
    stderr: bool = True
    tty: bool = False


class PortForwardRequest(msgspec.Struct, frozen=True):
    """A response that the pod's node gives: connections to ports of a pod."""

    namespace: str
    pod: str
    ports: tuple[int, ...] = ()
    """The ports of a WebSocket's channels; other clients name a port with each connection."""


def json_response(code: int, raw: Any, headers: Mapping[str, str] | None = None) -> ApiResponse:
    """Return a response with a JSON body."""
    return ApiResponse(code, msgspec.json.encode(raw) + b"\n", headers or {})


class AcceptedType(msgspec.Struct, frozen=True):
    """A media type that a client accepts."""

    type: str
    form: str = ""
    """The parameter `as`, such as Table. Empty: plain objects."""
    group: str = ""
    version: str = ""


def accepted_types(header: str) -> Iterator[AcceptedType]:
    """Yield the media types of an Accept header in its order. Like upstream, ignores `q`."""
    for part in header.split(","):
        type, *parameters = [each.strip() for each in part.split(";")]
        named = dict(each.partition("=")[::2] for each in parameters if "=" in each)
        if type:
            yield AcceptedType(type.lower(), named.get("as", ""), named.get("g", ""), named.get("v", ""))


def choose_type(header: str, *forms: str) -> AcceptedType:
    """Return the type to serve: JSON, plain or in one of `forms`, otherwise plain protobuf. Raises StatusError (406).

    Which one a client names first does not matter, because objects are stored as JSON.
    """
    offers = list(accepted_types(header)) or [AcceptedType(JSON)]
    for offer in offers:
        if offer.type in (JSON, "*/*", "application/*") and (not offer.form or offer.form in forms):
            return offer
    for offer in offers:
        if offer.type == protobuf.MEDIA_TYPE and not offer.form:
            return offer
    raise StatusError(
        406, "NotAcceptable", f"only the following media types are accepted: {JSON}, {protobuf.MEDIA_TYPE}"
    )


def decode_body(request: ApiRequest) -> Raw:
    """Return the object in a request's body. Raises StatusError."""
    if request.body.startswith(protobuf.MAGIC):
        return protobuf.decode(request.body)
    content = request.headers.get("content-type", "")
    if content and not any(known in content for known in ("json", "yaml", "*/*")):
        raise errors.unsupported_media_type("application/json", "application/yaml")
    return as_object(decode_json_or_yaml(request))


def as_object(raw: Any) -> Raw:
    """Return a decoded body. Raises StatusError unless it is an object."""
    if not isinstance(raw, dict):
        raise errors.bad_request("the body of the request is not an object")
    return raw


def decode_json_or_yaml(request: ApiRequest) -> Any:
    """Return the JSON of a request's body, or its YAML if Content-Type allows it. Raises StatusError."""
    try:
        return msgspec.json.decode(request.body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if "yaml" not in request.headers.get("content-type", ""):
            raise errors.bad_request(f"error decoding the body: {error}") from None
    return _yaml(request.body)


def _yaml(body: bytes) -> Any:
    import yaml  # type: ignore[import-untyped]

    try:
        return yaml.load(body, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise errors.bad_request(f"error decoding the body: {error}") from None


_PATH = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+)/(?P<version>[^/]+))"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/[a-z]))?"
    r"/(?P<plural>[a-z0-9-]+)(?:/(?P<name>[^/]+)(?:/(?P<part>[a-z]+))?)?/?"
)
_NAMESPACE = re.compile(r"/api/v1/namespaces/([^/]+)(?:/(status|finalize))?/?")

ResourcePaths = Mapping[tuple[str, str, str], ApiResource]
"""Resources by group, version, and plural."""


class ApiPath(msgspec.Struct, frozen=True):
    """A parsed request path."""

    kind: ApiResource
    version: str
    """Version of the resource's group that the client uses."""
    namespace: str = ""
    """Empty: all namespaces, or a cluster-scoped resource."""
    name: str = ""
    """Empty: the collection."""
    subresource: str = ""

    @property
    def key(self) -> Key:
        """Namespace and name of the object."""
        return self.namespace, self.name

    @property
    def stored(self) -> str:
        """Name of the kind in the registry."""
        return self.kind.stored_as or self.kind.name

    @property
    def api_version(self) -> str:
        """`apiVersion` of the objects that the client gets."""
        return group_version(self.kind.group, self.version)

    def not_found(self) -> StatusError:
        """Return the error for an object that does not exist."""
        return errors.not_found(self.kind.plural, self.kind.group, self.name)


def resource_paths(kinds: Iterable[ApiResource]) -> ResourcePaths:
    """Return the resources by their paths."""
    return {(kind.group, version, kind.plural): kind for kind in kinds for version in kind.versions}


def parse_path(path: str, known: ResourcePaths) -> ApiPath | None:
    """Return what a path addresses, None if nothing is served there."""
    # A namespace itself has a path like that of a list within one.
    found = _NAMESPACE.fullmatch(path)
    if found is not None:
        kind = known.get(("", "v1", "namespaces"))
        return None if kind is None else ApiPath(kind, "v1", name=found[1], subresource=found[2] or "")
    match = _PATH.fullmatch(path)
    if match is None:
        return None
    group, version = ("", "v1") if match["core"] else (match["group"], match["version"])
    kind = known.get((group, version, match["plural"]))
    namespace, name = match["namespace"] or "", match["name"] or ""
    if kind is None or (namespace and not kind.namespaced) or (kind.namespaced and name and not namespace):
        return None
    return ApiPath(kind, version, namespace, name, match["part"] or "")
