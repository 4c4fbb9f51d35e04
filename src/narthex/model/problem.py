"""Validation problems in user input: location, object, field, what is wrong, and what is allowed.

User-supplied text appears in messages only through `quoted`, so it cannot forge a line of output.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Generic, Literal, Self, TypeVar

import msgspec

from narthex.model.validate import Syntax

P = TypeVar("P")
Severity = Literal["error", "warning"]

_LONGEST_QUOTE = 60
MAX_OBJECT_PROBLEMS = 100
"""Problems of one object that are listed: the first ones usually explain the others."""
MAX_PROBLEMS = 1000
"""Problems of one file or source that are listed: foreign text must not fill memory, logs, and pages."""


class InputError(ValueError):
    """An input cannot be used; the message says why and what to do."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One validation problem. An error rejects the object or document, a warning only the named field."""

    origin: str = ""
    """`file:line`."""
    object: str = ""
    """`Service shop/web`; empty if unknown."""
    field: str = ""
    """Field path as Kubernetes writes it: `spec.ports[0].port`."""
    message: str
    severity: Severity = "error"

    def __str__(self) -> str:
        """Format as `web.yaml:7: error: Service shop/web: spec.ports[0].port: 0 is not a port (1-65535)`."""
        return ": ".join(part for part in (self.origin, self.severity, self.object, self.field, self.message) if part)

    @property
    def logged(self) -> str:
        """The text for a log, whose lines have a level of their own."""
        return ": ".join(part for part in (self.origin, self.object, self.field, self.message) if part)


class UnlistedProblems(Problem, frozen=True, kw_only=True):
    """Stands for problems that are not listed."""

    count: int


class BoundedProblems(Generic[P]):
    """The first problems of a text, and the number of the others.

    A text in which every line is wrong must not cost a message for each line.
    """

    def __init__(self, summary: Callable[[int], P], most: int = MAX_PROBLEMS) -> None:
        """Create an empty list of at most `most` problems. `summary` makes the last one from the number of the others."""
        self._summary = summary
        self._most = most
        self.kept: list[P] = []
        self.omitted = 0

    @property
    def full(self) -> bool:
        """Return True if no further problem will be kept."""
        return len(self.kept) >= self._most

    def append(self, problem: P) -> None:
        """Keep a problem, or count it."""
        if self.full:
            self.omitted += 1
        else:
            self.kept.append(problem)

    def extend(self, problems: Iterable[P]) -> Self:
        """Keep several problems, or count them; return the list."""
        for problem in problems:
            self.append(problem)
        return self

    def __bool__(self) -> bool:
        """Return True if there is a problem."""
        return bool(self.kept or self.omitted)

    def __iter__(self) -> Iterator[P]:
        """Iterate over the kept problems, and the summary of the others if there are any."""
        yield from self.kept
        if self.omitted:
            yield self._summary(self.omitted)


def omitted_text(count: int) -> str:
    """Return the message about problems that were not kept."""
    return f"{count} more problems are not listed; repair those above first"


class ProblemList(BoundedProblems[Problem]):
    """Problems of objects. The last one stands for those that are not kept, with their number and highest severity."""

    def __init__(self, most: int = MAX_PROBLEMS, origin: str = "", object: str = "") -> None:
        """Create an empty list. `origin` and `object` say where the problems are that are not kept."""
        super().__init__(self._stand_in, most)
        self._origin = origin
        self._object = object
        self._severity: Severity = "warning"

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Return the kept problems and, if there are others, one that states their number."""
        return tuple(self)

    def append(self, problem: Problem) -> None:
        """Keep a problem, or count it, or those that it stands for."""
        if self.full:
            self.count(problem.severity, problem.count if isinstance(problem, UnlistedProblems) else 1)
        else:
            super().append(problem)

    def count(self, severity: Severity, number: int = 1) -> None:
        """Count problems that are not kept."""
        self.omitted += number
        if severity == "error":
            self._severity = severity

    def _stand_in(self, count: int) -> Problem:
        return UnlistedProblems(
            origin=self._origin,
            object=self._object,
            message=f"{count} more problems are not listed",
            severity=self._severity,
            count=count,
        )


class EventProblem(Problem, frozen=True, kw_only=True):
    """A problem that an Event reports, too."""

    reason: str
    """Reason of the Event, in Kubernetes' form."""


def visible(text: str) -> str:
    """Return the text without characters that could move a terminal's cursor or change its colors."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def quoted(value: object, longest: int = _LONGEST_QUOTE) -> str:
    """Format a foreign value for a message: one line of printable ASCII, truncated if long."""
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
    """Describe the type of a JSON or YAML value in words."""
    words = ((bool, "true or false"), (int, "a number"), (float, "a number"), (str, "text"), (dict, "a mapping"))
    if value is None:
        return "nothing"
    return next((word for type_, word in words if isinstance(value, type_)), "a list")


def wrong_type(value: object, must: str) -> str:
    """Return the message for a value that is not `must` ("text", "a whole number"), with a hint if only quotes are wrong."""
    shown = f"{quoted(value)} " if isinstance(value, str | int | float) else ""
    hint = ""
    if must == "text" and isinstance(value, int | float):
        hint = f'; write "{quoted(value)}" with quotes'
    elif must == "a whole number" and isinstance(value, str) and value.isdecimal():
        hint = "; write it without quotes"
    return f"{shown}is {kind_of(value)}, must be {must}{hint}"


def one_of(words: Iterable[str]) -> str:
    """Join words as `A, B or C`."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


_STEP = re.compile(r"\[([^\]]*)\]|([^.\[]+)")


def steps(field: str) -> tuple[str | int, ...]:
    """Split a field path into keys and indices: `a.b[0]` becomes ("a", "b", 0)."""
    found: list[str | int] = []
    for match in _STEP.finditer(field):
        inside = match[1]
        found.append(match[2] if inside is None else int(inside) if inside.isdecimal() else inside)
    return tuple(found)


class ProblemCollector:
    """Collects the problems of one object during decoding."""

    __slots__ = ("_locate", "_problems", "errors", "failed", "object", "origin", "served")

    def __init__(
        self, origin: str = "", object: str = "", locate: Callable[[str], str] | None = None, *, served: bool = False
    ) -> None:
        """Create an empty list of problems.

        `served` is True for an object that an API server has accepted: an error then costs only the field or list item
        that it names, and is a warning.
        """
        self.origin = origin
        self.object = object
        self.served = served
        self._locate = locate
        self._problems = ProblemList(MAX_OBJECT_PROBLEMS, origin, object)
        self.failed = False
        self.errors = 0
        """Number of errors so far, also of those that are warnings because the object is served."""

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The problems so far, in order."""
        return self._problems.problems

    def error(self, field: str, message: str, *, optional: bool = False) -> None:
        """Add an error: the object cannot be used.

        If it is served, only the innermost list item cannot be used, and not even that is lost to an `optional` field.
        """
        self.errors += not (optional and self.served)
        if self.served:
            self._add(field, f"{message}; ignored", "warning")
        else:
            self.failed = True
            self._add(field, message, "error")

    def reject(self, field: str, message: str) -> None:
        """Add an error without which the object has no meaning, even if it is served."""
        self.errors += 1
        self.failed = True
        self._add(field, message, "error")

    def without_error(self, made: Iterable[P]) -> Iterator[P]:
        """Yield the items that are decoded without an error. Decodes each item when it is taken."""
        items = iter(made)
        while True:
            before = self.errors
            try:
                item = next(items)
            except StopIteration:
                return
            if self.errors == before:
                yield item

    def warning(self, field: str, message: str) -> None:
        """Add a warning: the object can be used without this field."""
        self._add(field, message, "warning")

    def check(self, field: str, value: str, syntax: Syntax, *, optional: bool = False) -> bool:
        """Return True if the value has the syntax; otherwise add an error."""
        if syntax.holds(value):
            return True
        self.error(field, f"{quoted(value)} is not {syntax.name}: {syntax.allowed}", optional=optional)
        return False

    def choice(self, field: str, value: str, allowed: Collection[str]) -> bool:
        """Return True if the value is one of the allowed words; otherwise add an error."""
        if value in allowed:
            return True
        words = tuple(allowed)
        self.error(field, f"{quoted(value)} is not {one_of(words)}")
        return False

    def number(
        self, field: str, value: int, low: int, high: int, what: str = "a port", *, optional: bool = False
    ) -> bool:
        """Return True if low <= value <= high; otherwise add an error."""
        if low <= value <= high:
            return True
        self.error(field, f"{quoted(value)} is not {what} ({low}-{high})", optional=optional)
        return False

    def _add(self, field: str, message: str, severity: Severity) -> None:
        if self._problems.full:
            self._problems.count(severity)
            return
        origin = self._locate(field) if self._locate and field else self.origin
        self._problems.append(
            Problem(origin=origin, object=self.object, field=field, message=message, severity=severity)
        )
