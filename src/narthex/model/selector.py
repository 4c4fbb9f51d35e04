"""Label and field selectors, as Kubernetes writes them: `app=web,tier in (front, edge),!canary` and `spec.nodeName=node-1`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import msgspec

from narthex.model.validate import LABEL_KEY, LABEL_VALUE

Operator = Literal["in", "notin", "exists", "absent", ">", "<"]

OPERATORS: Mapping[str, Operator] = {"In": "in", "NotIn": "notin", "Exists": "exists", "DoesNotExist": "absent"}
"""Operators of `metav1.LabelSelectorRequirement`."""
NODE_OPERATORS: Mapping[str, Operator] = {**OPERATORS, "Gt": ">", "Lt": "<"}
"""Operators of `v1.NodeSelectorRequirement`."""

_INTEGER = re.compile(r"[+-]?\d{1,18}", re.ASCII)
_REQUIREMENT = re.compile(
    r"\s*+(?:!\s*+(?P<absent>[^\s!=<>,()]++)|(?P<key>[^\s!=<>,()]++)\s*+(?:(?P<set>in|notin)\s*+\((?P<values>[^()]*+)\)"
    r"|(?P<operator>==|!=|=|<|>)\s*+(?P<value>[^\s!=<>,()]*+))?)\s*+(?:,|$)"
)


class SelectorSyntaxError(ValueError):
    """A selector that cannot be parsed. `rest` is the text from which on it is not understood."""

    def __init__(self, rest: str) -> None:
        """Create the error."""
        super().__init__(f"is not a label selector: {rest[:80]!r}")
        self.rest = rest


class NotAnIntegerError(ValueError):
    """A selector that compares a label with something that is not an integer."""

    def __init__(self, value: str) -> None:
        """Create the error."""
        super().__init__(f"{value[:80]!r} is not a whole number")
        self.value = value


class Requirement(msgspec.Struct, frozen=True):
    """A condition on one label. `values` are sorted; with `>` and `<` there is one, an integer."""

    key: str
    operator: Operator
    values: tuple[str, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return True if labels meet the condition. An absent label meets `notin` and `absent` only."""
        value = labels.get(self.key)
        if self.operator == "absent":
            return value is None
        if self.operator == "notin":
            return value not in self.values
        if value is None or self.operator == "exists":
            return value is not None
        if self.operator == "in":
            return value in self.values
        if len(self.values) != 1 or not (_INTEGER.fullmatch(value) and _INTEGER.fullmatch(self.values[0])):
            return False
        return int(value) > int(self.values[0]) if self.operator == ">" else int(value) < int(self.values[0])

    def __str__(self) -> str:
        """Return the requirement as a selector writes it."""
        if self.operator in ("in", "notin"):
            return f"{self.key} {self.operator} ({','.join(self.values)})"
        if self.operator == "exists":
            return self.key
        return f"!{self.key}" if self.operator == "absent" else f"{self.key}{self.operator}{self.values[0]}"


class FieldRequirement(msgspec.Struct, frozen=True):
    """A condition on one field of an object."""

    path: str
    """Such as `spec.nodeName`."""
    value: str
    equal: bool = True

    def matches(self, raw: Mapping[str, Any]) -> bool:
        """Return True if an object, as JSON, meets the condition."""
        found: Any = raw
        for step in self.path.split("."):
            found = found.get(step) if isinstance(found, Mapping) else None
        text = "" if found is None else str(found).lower() if isinstance(found, bool) else str(found)
        # Go omits a boolean field that is false.
        return (text == self.value or (self.value == "false" and text == "")) is self.equal


def parse_selector(text: str) -> tuple[Requirement, ...]:
    """Return the requirements of a label selector, all of which must be met.

    Raises ValueError for an empty selector, bad syntax, and keys and values that no label can have.
    """
    requirements = tuple(parse_leniently(text))
    if not requirements:
        raise ValueError("is not a label selector: it is empty")
    if text.rstrip().endswith(","):
        raise ValueError("is not a label selector: it ends with a comma")
    for each in requirements:
        if not LABEL_KEY.holds(each.key):
            raise ValueError(f"{each.key[:80]!r} is not a label's key")
        for value in each.values:
            if each.operator in ("in", "notin") and not LABEL_VALUE.holds(value):
                raise ValueError(f"{value[:80]!r} is not a label's value")
    return requirements


def parse_leniently(text: str) -> Iterator[Requirement]:
    """Yield the requirements of a label selector as the API server reads it: empty, it selects everything.

    Raises SelectorSyntaxError and NotAnIntegerError.
    """
    at = 0
    end = len(text.rstrip())
    while at < end:
        found = _REQUIREMENT.match(text, at)
        if found is None:
            raise SelectorSyntaxError(text[at:])
        yield _requirement(found)
        at = found.end()


def parse_fields(text: str) -> Iterator[FieldRequirement]:
    """Yield the requirements of a field selector. Raises SelectorSyntaxError."""
    for part in re.split(r"(?<!\\),", text):
        if not part:
            continue
        path, equal, value = part.partition("=")
        if not equal:
            raise SelectorSyntaxError(part)
        yield FieldRequirement(path.rstrip("!"), value.removeprefix("="), not path.endswith("!"))


def matches(labels: Mapping[str, str], requirements: Iterable[Requirement]) -> bool:
    """Return True if labels meet all requirements."""
    return all(requirement.matches(labels) for requirement in requirements)


def selects(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Return True if a `metav1.LabelSelector`, as JSON, selects labels. None selects nothing, an empty one everything."""
    if selector is None:
        return False
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    return all(expression_matches(each, labels) for each in selector.get("matchExpressions") or ())


def expression_matches(
    expression: Mapping[str, Any], labels: Mapping[str, str], operators: Mapping[str, Operator] = OPERATORS
) -> bool:
    """Return True if labels meet a match expression, given as JSON. An unknown operator matches nothing."""
    operator = operators.get(expression.get("operator", ""))
    if operator is None:
        return False
    return Requirement(expression.get("key", ""), operator, tuple(expression.get("values") or ())).matches(labels)


def is_empty(selector: Mapping[str, Any] | None) -> bool:
    """Return True if a `metav1.LabelSelector`, as JSON, has no requirements."""
    return not selector or not (selector.get("matchLabels") or selector.get("matchExpressions"))


def _requirement(found: re.Match[str]) -> Requirement:
    if found["absent"]:
        return Requirement(found["absent"], "absent")
    key, value = found["key"], found["value"]
    if found["set"]:
        values = {each.strip() for each in found["values"].split(",")}
        return Requirement(key, "in" if found["set"] == "in" else "notin", tuple(sorted(values)))
    match found["operator"]:
        case None:
            return Requirement(key, "exists")
        case "!=":
            return Requirement(key, "notin", (value,))
        case "<" | ">" as sign:
            if not _INTEGER.fullmatch(value):
                raise NotAnIntegerError(value)
            return Requirement(key, "<" if sign == "<" else ">", (value,))
    return Requirement(key, "in", (value,))
