"""Label and field selectors, as far as lists here use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Raw = Mapping[str, Any]


class Unknown(ValueError):
    """A field that cannot be selected by."""


class Selector:
    """What a list or watch is limited to. Raises Unknown for a field that is not among those known of the kind."""

    def __init__(self, labels: str, fields: str, known: frozenset[str]) -> None:
        self._tests = [_label_test(part) for part in labels.split(",") if part]
        self._tests += [_field_test(part, known) for part in fields.split(",") if part]

    def selects(self, raw: Raw) -> bool:
        """Whether the object is in the list."""
        return all(test(raw) for test in self._tests)


def _labels(raw: Raw) -> Mapping[str, Any]:
    labels = raw.get("metadata", {}).get("labels")
    return labels if isinstance(labels, Mapping) else {}


def _label_test(part: str) -> Callable[[Raw], bool]:
    if part.startswith("!"):
        return lambda raw: part[1:] not in _labels(raw)
    name, equal, value = part.partition("=")
    if not equal:
        return lambda raw: part in _labels(raw)
    if name.endswith("!"):
        return lambda raw: _labels(raw).get(name[:-1]) != value
    return lambda raw: _labels(raw).get(name) == value.lstrip("=")


def _field_test(part: str, known: frozenset[str]) -> Callable[[Raw], bool]:
    path, _, value = part.partition("=")
    unequal, path = path.endswith("!"), path.rstrip("!")
    if path not in known:
        raise Unknown(f"field label not supported: {path}")

    def test(raw: Raw) -> bool:
        found: Any = raw
        for step in path.split("."):
            found = found.get(step, "") if isinstance(found, Mapping) else ""
        return (found == value.lstrip("=")) is not unequal

    return test
