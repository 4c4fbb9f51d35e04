"""Requests and answers of the API, as values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import msgspec

from narthex.lab.api.errors import ApiFault

JSON = "application/json"


class Request(msgspec.Struct, frozen=True):
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


class Whole(msgspec.Struct, frozen=True):
    """An answer with a body."""

    status: int
    body: bytes
    headers: Mapping[str, str] = {}
    content_type: str = JSON


class Stream(Protocol):
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


class Logs(msgspec.Struct, frozen=True):
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


class Exec(msgspec.Struct, frozen=True):
    """A conversation with a program in a pod: one that is started, or (no `argv`) the container's own."""

    namespace: str
    pod: str
    container: str
    argv: tuple[str, ...]
    stdin: bool = False
    stdout: bool = True
    stderr: bool = True
    tty: bool = False


Answer = Whole | Stream | Logs | Exec


def encoded(code: int, raw: Any, headers: Mapping[str, str] | None = None) -> Whole:
    """JSON as answer."""
    return Whole(code, msgspec.json.encode(raw) + b"\n", headers or {})


class Accepted(msgspec.Struct, frozen=True):
    """One of the things that a client accepts."""

    type: str
    form: str = ""
    """Such as Table; empty for objects as they are."""
    group: str = ""
    version: str = ""


def accepted(header: str) -> Iterator[Accepted]:
    """What an Accept header lists, in its order (upstream takes the first that it can serve, whatever its q)."""
    for part in header.split(","):
        type, *parameters = [each.strip() for each in part.split(";")]
        named = dict(each.partition("=")[::2] for each in parameters if "=" in each)
        if type:
            yield Accepted(type.lower(), named.get("as", ""), named.get("g", ""), named.get("v", ""))


def chosen(header: str, *forms: str) -> Accepted:
    """The first of what is accepted that can be served: JSON, plain or in one of these forms. Raises ApiFault 406."""
    offers = list(accepted(header)) or [Accepted(JSON)]
    for offer in offers:
        if offer.type in (JSON, "*/*", "application/*") and (not offer.form or offer.form in forms):
            return offer
    raise ApiFault(406, "NotAcceptable", f"only the following media types are accepted: {JSON}")
