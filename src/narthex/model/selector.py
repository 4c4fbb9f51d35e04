"""Label selectors as Kubernetes writes them: `app=web,tier in (front, edge),!canary`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

Operator = Literal["in", "notin", "exists", "absent", ">", "<"]

_KEY = re.compile(
    r"(?:[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", re.ASCII
)
_VALUE = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?", re.ASCII)
_SET = re.compile(r"(\S+)\s+(in|notin)\s*\(([^()]*)\)", re.ASCII)
_COMPARED = re.compile(r"([^\s=!<>]+)\s*(==|=|!=|>|<)\s*([^\s=!<>]*)", re.ASCII)
_PARTS = re.compile(r"\s*((?:[^,()]|\([^()]*\))*)\s*(,|$)", re.ASCII)


class Requirement(msgspec.Struct, frozen=True):
    """What one label must be. `values` are sorted; with `>` and `<` it is one whole number."""

    key: str
    operator: Operator
    values: tuple[str, ...] = ()

    def meets(self, labels: Mapping[str, str]) -> bool:
        """Whether labels meet it. An absent label meets `notin` and `absent` only."""
        value = labels.get(self.key)
        if self.operator == "absent":
            return value is None
        if self.operator == "notin":
            return value not in self.values
        if value is None or self.operator == "exists":
            return value is not None
        if self.operator == "in":
            return value in self.values
        number = re.fullmatch(r"[+-]?\d{1,18}", value, re.ASCII)
        if number is None:
            return False
        return int(value) > int(self.values[0]) if self.operator == ">" else int(value) < int(self.values[0])

    def __str__(self) -> str:
        if self.operator in ("in", "notin"):
            return f"{self.key} {self.operator} ({','.join(self.values)})"
        if self.operator == "exists":
            return self.key
        return f"!{self.key}" if self.operator == "absent" else f"{self.key}{self.operator}{self.values[0]}"


def parse(text: str) -> tuple[Requirement, ...]:
    """The requirements of a selector, all of which must hold. Raises ValueError for anything that is none."""
    found: list[Requirement] = []
    at = 0
    while at < len(text):
        part = _PARTS.match(text, at)
        if part is None or not part[1].strip():
            raise ValueError(f"is not a label selector: {text[at : at + 80]!r}")
        found.append(_requirement(part[1].strip()))
        at = part.end()
        if part[2] and at == len(text):
            raise ValueError("is not a label selector: it ends with a comma")
    if not found:
        raise ValueError("is not a label selector: it is empty")
    return tuple(found)


def text(requirements: Iterable[Requirement]) -> str:
    """What `parse` reads as these requirements; the API server reads it, too (parameter labelSelector)."""
    return ",".join(str(requirement) for requirement in requirements)


def meets(labels: Mapping[str, str], requirements: Iterable[Requirement]) -> bool:
    """Whether labels meet all of them."""
    return all(requirement.meets(labels) for requirement in requirements)


def _requirement(part: str) -> Requirement:
    if in_set := _SET.fullmatch(part):
        values = {value.strip() for value in in_set[3].split(",")}
        return _checked(in_set[1], "in" if in_set[2] == "in" else "notin", values)
    if compared := _COMPARED.fullmatch(part):
        key, operator, value = compared.groups()
        if operator in ("<", ">"):
            if not re.fullmatch(r"[+-]?\d{1,18}", value, re.ASCII):
                raise ValueError(f"{part[:80]!r}: {value[:80]!r} is not a whole number")
            return _checked(key, "<" if operator == "<" else ">", {value}, any_value=True)
        return _checked(key, "notin" if operator == "!=" else "in", {value})
    if part.startswith("!"):
        return _checked(part[1:].strip(), "absent", set())
    return _checked(part, "exists", set())


def _checked(key: str, operator: Operator, values: set[str], *, any_value: bool = False) -> Requirement:
    if not _KEY.fullmatch(key):
        raise ValueError(f"{key[:80]!r} is not a label's key")
    for value in sorted(values):
        if not any_value and not _VALUE.fullmatch(value):
            raise ValueError(f"{value[:80]!r} is not a label's value")
    return Requirement(key, operator, tuple(sorted(values)))
