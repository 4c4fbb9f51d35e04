"""Columns of custom kinds: the `additionalPrinterColumns` of their definition, and the small JSONPath that these are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from narthex.lab.api.ages import age
from narthex.lab.api.columns import PLAIN

Raw = Mapping[str, Any]
_STEP = re.compile(r"\.((?:\\.|[^.\[\\])+)|\[(?:'((?:\\.|[^'\\])*)'|\"((?:\\.|[^\"\\])*)\"|(-?\d+|\*)|\?\(([^)]*)\))\]")
_TEST = re.compile(r"\s*@\.([\w.-]+)\s*==\s*[\"']([^\"']*)[\"']\s*")


class CustomColumns:
    """The columns of one version of a custom kind."""

    def __init__(self, columns: Sequence[Raw]) -> None:
        self._columns = columns

    def definitions(self) -> list[dict[str, Any]]:
        """As metav1.Table has them."""
        if not self._columns:
            return PLAIN.definitions()
        name = PLAIN.definitions()[0]
        return [name, *(_definition(each) for each in self._columns)]

    def cells(self, raw: Raw, now: datetime) -> Sequence[Any]:
        """One object's row."""
        if not self._columns:
            return PLAIN.cells(raw, now)
        return [raw["metadata"].get("name", ""), *(_cell(each, raw, now) for each in self._columns)]


def _definition(column: Raw) -> dict[str, Any]:
    found = {"name": column.get("name", ""), "type": column.get("type", "string"), "format": column.get("format", "")}
    return {**found, "description": column.get("description", ""), "priority": column.get("priority", 0)}


def _cell(column: Raw, raw: Raw, now: datetime) -> Any:
    found = values(raw, str(column.get("jsonPath", "")))
    if not found:
        return None
    first, type = found[0], column.get("type")
    if type == "date":
        return age(first if isinstance(first, str) else None, now)
    if type == "string":
        return ",".join(each if isinstance(each, str) else _text(each) for each in found)
    return first


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def values(raw: Any, path: str) -> list[Any]:
    """What a simple JSONPath finds: names, indexes, `[*]` and `[?(@.x=="y")]`. Nothing, when it is none of these."""
    found, at = [raw], 0
    while at < len(path):
        step = _STEP.match(path, at)
        if step is None:
            return []
        name = step[1] or step[2] or step[3]
        if name is not None:
            key = re.sub(r"\\(.)", r"\1", name)
            found = [each[key] for each in found if isinstance(each, Mapping) and each.get(key) is not None]
        elif step[5] is not None:
            found = _filtered(found, step[5])
        elif step[4] == "*":
            found = [one for each in found for one in (each.values() if isinstance(each, Mapping) else each)]
        else:
            index = int(step[4])
            found = [each[index] for each in found if isinstance(each, list) and -len(each) <= index < len(each)]
        at = step.end()
    return found


def _filtered(found: list[Any], condition: str) -> list[Any]:
    test = _TEST.fullmatch(condition)
    if test is None:
        return []
    return [one for each in found if isinstance(each, list) for one in each if values(one, f".{test[1]}") == [test[2]]]
