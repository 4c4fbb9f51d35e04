"""Requests and responses of the API as values, and content negotiation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import msgspec

from narthex.lab.api.errors import StatusError

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

    def all(self, name: str) -> list[str]:
        """Return all values of a query parameter."""
        return [value for each, value in self.repeated if each == name]


class ApiResponse(msgspec.Struct, frozen=True):
    """A response with a body."""

    status: int
    body: bytes
    headers: Mapping[str, str] = {}
    content_type: str = JSON


class WatchStream(Protocol):
    """The response to a watch: lines, as they become available."""

    content_type: str
    broken: bool
    """True once no further lines will come."""

    @property
    def timeout(self) -> float:
        """Seconds after which the server ends the watch."""
        ...

    def lines(self) -> Iterator[bytes]:
        """Yield the lines that are new since the last call."""
        ...

    def bookmark(self) -> bytes | None:
        """Return a BOOKMARK line, None if there is nothing to confirm."""
        ...


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


ApiAnswer = ApiResponse | WatchStream | LogRequest | ExecRequest


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
    """Return the first accepted type that can be served: JSON, plain or in one of `forms`. Raises StatusError (406)."""
    offers = list(accepted_types(header)) or [AcceptedType(JSON)]
    for offer in offers:
        if offer.type in (JSON, "*/*", "application/*") and (not offer.form or offer.form in forms):
            return offer
    raise StatusError(406, "NotAcceptable", f"only the following media types are accepted: {JSON}")
