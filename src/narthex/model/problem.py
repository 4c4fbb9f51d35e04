"""Faults in what people write: where, in which object and field, what is wrong and what is allowed.

Text that a stranger wrote is only ever shown through `quoted`, so it cannot forge a line of output.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import Literal

import msgspec

from narthex.model.validate import Syntax

Severity = Literal["error", "warning"]

_LONGEST_QUOTE = 60


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One fault. An error refuses the object (or the document), a warning only what it names."""

    origin: str = ""
    """`file:line`."""
    object: str = ""
    """`Service shop/web`; empty when nobody can tell."""
    field: str = ""
    """Path of the field as Kubernetes writes it: `spec.ports[0].port`."""
    message: str
    severity: Severity = "error"

    def __str__(self) -> str:
        """`web.yaml:7: error: Service shop/web: spec.ports[0].port: 0 is not a port (1-65535)`."""
        return ": ".join(part for part in (self.origin, self.severity, self.object, self.field, self.message) if part)


def quoted(value: object, longest: int = _LONGEST_QUOTE) -> str:
    """A foreign value for a message: one line, printable ASCII, cut when long."""
    if isinstance(value, str):
        text = ascii(value[: longest + 1])
    elif value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    elif isinstance(value, int):
        text = str(value) if -(10**20) < value < 10**20 else "a number of more than 20 digits"
    elif isinstance(value, float):
        text = repr(value)
    else:
        return kind_of(value)
    return text if len(text) <= longest + 2 else text[:longest] + "...'"


def kind_of(value: object) -> str:
    """What a value read from JSON or YAML is, in words."""
    words = ((bool, "true or false"), (int, "a number"), (float, "a number"), (str, "text"), (dict, "a mapping"))
    if value is None:
        return "nothing"
    return next((word for type_, word in words if isinstance(value, type_)), "a list")


def wrong_type(value: object, must: str) -> str:
    """That a value is not `must` ("text", "a whole number"), with the way out where it is only a matter of quotes."""
    shown = f"{quoted(value)} " if isinstance(value, str | int | float) else ""
    hint = ""
    if must == "text" and isinstance(value, int | float):
        hint = f'; write "{quoted(value)}" with quotes'
    elif must == "a whole number" and isinstance(value, str) and value.isdecimal():
        hint = "; write it without quotes"
    return f"{shown}is {kind_of(value)}, must be {must}{hint}"


def one_of(words: Iterable[str]) -> str:
    """`A, B or C`."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


_STEP = re.compile(r"\[([^\]]*)\]|([^.\[]+)")


def steps(field: str) -> tuple[str | int, ...]:
    """The keys and indices that a field's path goes through: `a.b[0]` is ("a", "b", 0)."""
    found: list[str | int] = []
    for match in _STEP.finditer(field):
        inside = match[1]
        found.append(match[2] if inside is None else int(inside) if inside.isdecimal() else inside)
    return tuple(found)


class ProblemCollector:
    """Collects the problems of one object while it is decoded."""

    __slots__ = ("_locate", "_problems", "failed", "object", "origin")

    def __init__(self, origin: str = "", object: str = "", locate: Callable[[str], str] | None = None) -> None:
        self.origin = origin
        self.object = object
        self._locate = locate
        self._problems: list[Problem] = []
        self.failed = False

    @property
    def problems(self) -> tuple[Problem, ...]:
        """All so far, in the order they were met."""
        return tuple(self._problems)

    def error(self, field: str, message: str) -> None:
        """The object cannot be used."""
        self.failed = True
        self._add(field, message, "error")

    def warning(self, field: str, message: str) -> None:
        """The object can be used, without this."""
        self._add(field, message, "warning")

    def check(self, field: str, value: str, syntax: Syntax) -> bool:
        """Whether the value has the syntax; an error when it has not."""
        if syntax.holds(value):
            return True
        self.error(field, f"{quoted(value)} is not {syntax.name}: {syntax.allowed}")
        return False

    def choice(self, field: str, value: str, allowed: Collection[str]) -> bool:
        """Whether the value is one of the words; an error when it is not."""
        if value in allowed:
            return True
        words = tuple(allowed)
        self.error(field, f"{quoted(value)} is not {one_of(words)}")
        return False

    def number(self, field: str, value: int, low: int, high: int, what: str = "a port") -> bool:
        """Whether low <= value <= high; an error when not."""
        if low <= value <= high:
            return True
        self.error(field, f"{quoted(value)} is not {what} ({low}-{high})")
        return False

    def _add(self, field: str, message: str, severity: Severity) -> None:
        origin = self._locate(field) if self._locate and field else self.origin
        self._problems.append(
            Problem(origin=origin, object=self.object, field=field, message=message, severity=severity)
        )
