"""Requests and answers of the API, as values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import msgspec

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
