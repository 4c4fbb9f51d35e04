"""Requests and answers of the API, as values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import msgspec

from narthex.lab.api.errors import StatusError

JSON = "application/json"


class ApiRequest(msgspec.Struct, frozen=True):
    """One request."""

    method: str
    path: str
    query: Mapping[str, str]
    """Of a name that is there several times, the last value; `repeated` has all."""
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes = b""
    repeated: tuple[tuple[str, str], ...] = ()
    """The query, whole."""

    def all(self, name: str) -> list[str]:
        """The values of a query's name."""
        return [value for each, value in self.repeated if each == name]


class ApiResponse(msgspec.Struct, frozen=True):
    """An answer with a body."""

    status: int
    body: bytes
    headers: Mapping[str, str] = {}
    content_type: str = JSON


class WatchStream(Protocol):
    """An answer that goes on: lines, as they become available."""

    content_type: str
    broken: bool
    """Nothing comes any more after what has come."""

    @property
    def timeout(self) -> float:
        """Seconds after which the server ends it."""
        ...

    def lines(self) -> Iterator[bytes]:
        """What is new since the last call."""
        ...

    def bookmark(self) -> bytes | None:
        """A line that says how far it has come, None when there is nothing to say."""
        ...


class LogRequest(msgspec.Struct, frozen=True):
    """An answer that the node of a pod gives: what a container has written."""

    namespace: str
    pod: str
    container: str
    tail: int | None = None
    """So many of the last lines, None: all."""
    follow: bool = False
    since: float | None = None
    """Seconds since 1970 before which nothing is told."""
    previous: bool = False
    timestamps: bool = False
    limit: int | None = None
    """At most so many bytes."""


class ExecRequest(msgspec.Struct, frozen=True):
    """A conversation with a program in a pod: one that is started, or (no `argv`) the container's own."""

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
    """JSON as answer."""
    return ApiResponse(code, msgspec.json.encode(raw) + b"\n", headers or {})


class AcceptedType(msgspec.Struct, frozen=True):
    """One of the things that a client accepts."""

    type: str
    form: str = ""
    """Such as Table; empty for objects as they are."""
    group: str = ""
    version: str = ""


def accepted_types(header: str) -> Iterator[AcceptedType]:
    """What an Accept header lists, in its order (upstream takes the first that it can serve, whatever its q)."""
    for part in header.split(","):
        type, *parameters = [each.strip() for each in part.split(";")]
        named = dict(each.partition("=")[::2] for each in parameters if "=" in each)
        if type:
            yield AcceptedType(type.lower(), named.get("as", ""), named.get("g", ""), named.get("v", ""))


def choose_type(header: str, *forms: str) -> AcceptedType:
    """The first of what is accepted that can be served: JSON, plain or in one of these forms. Raises ApiFault 406."""
    offers = list(accepted_types(header)) or [AcceptedType(JSON)]
    for offer in offers:
        if offer.type in (JSON, "*/*", "application/*") and (not offer.form or offer.form in forms):
            return offer
    raise StatusError(406, "NotAcceptable", f"only the following media types are accepted: {JSON}")
