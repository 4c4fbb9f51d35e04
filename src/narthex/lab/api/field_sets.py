"""Sets of fields, as `metadata.managedFields` records ownership (structured-merge-diff).

A field is a path: a tuple of steps `f:NAME`, `k:{"KEY":VALUE}` for an entry of a list, and `v:VALUE` for a member of a set. A set that
contains an entry of a list also contains the fields of that entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from narthex.lab.api.types import FieldType, field_type

Path = tuple[str, ...]
FieldSet = frozenset[Path]
_DEFAULT_KEYS = {"protocol": "TCP"}
"""Defaults of keys that entries may omit."""


def field_set(value: Any, of: FieldType) -> FieldSet:
    """Return the fields of a value."""
    return frozenset(_paths(value, of, ()))


def _paths(value: Any, of: FieldType, at: Path) -> Iterator[Path]:
    if isinstance(value, Mapping) and value and not of.atomic:
        for name, each in value.items():
            yield from _paths(each, field_type(of, name), (*at, f"f:{name}"))
    elif isinstance(value, list) and of.keys:
        if not value:
            yield at
        for each in value:
            step = step_of(each, of)
            yield (*at, step)
            if step.startswith("k:"):
                yield from _paths(each, of.item, (*at, step))
    else:
        yield at


def step_of(entry: Any, of: FieldType) -> str:
    """Return the step that identifies an entry of a list."""
    if of.keys == ("=",) or not isinstance(entry, Mapping):
        return "v:" + _json(entry)
    keys = {key: entry.get(key, _DEFAULT_KEYS.get(key)) for key in sorted(of.keys)}
    return "k:" + _json({key: value for key, value in keys.items() if value is not None})


def nested(fields: Iterable[Path]) -> dict[str, Any]:
    """Return a set in the form of `fieldsV1`."""
    root: dict[str, Any] = {}
    for path in sorted(fields):
        at = root
        for step in path:
            at = at.setdefault(step, {})
        at["."] = {}
    return _without_ends(root)


def _without_ends(node: dict[str, Any]) -> dict[str, Any]:
    """Remove the mark of membership from leaves: only a node with children needs it."""
    if set(node) == {"."}:
        return {}
    return {step: _without_ends(below) if step != "." else {} for step, below in node.items()}


def parsed(fields: Any) -> FieldSet:
    """Return the set that `fieldsV1` describes."""
    return frozenset(_parsed(fields, ())) if isinstance(fields, Mapping) else frozenset()


def _parsed(node: Mapping[str, Any], at: Path) -> Iterator[Path]:
    if not node and at:
        yield at
    for step, below in node.items():
        if step == ".":
            yield at
        elif isinstance(below, Mapping):
            yield from _parsed(below, (*at, step))


def at_path(value: Any, path: Path, of: FieldType) -> Any:
    """Return the value of a field, None if it is absent."""
    for step in path:
        sort, rest = step[:2], step[2:]
        if sort == "f:":
            value = value.get(rest) if isinstance(value, Mapping) else None
            of = field_type(of, rest)
        else:
            entries = value if isinstance(value, list) else []
            value = next((each for each in entries if step_of(each, of) == step), None)
            of = of.item
    return value


def without(value: Any, fields: frozenset[Path], of: FieldType, at: Path = ()) -> Any:
    """Return a value without some of its fields, and without containers that are empty then."""
    if isinstance(value, Mapping) and not of.atomic:
        kept = {}
        for name, each in value.items():
            path = (*at, f"f:{name}")
            if path in fields:
                continue
            below = without(each, fields, field_type(of, name), path)
            if below in ({}, []) and each not in ({}, []):
                continue
            kept[name] = below
        return kept
    if isinstance(value, list) and of.keys:
        paths = [(*at, step_of(each, of)) for each in value]
        return [
            without(each, fields, of.item, path) for each, path in zip(value, paths, strict=True) if path not in fields
        ]
    return value


def printed(path: Path) -> str:
    """Return a field as conflicts name it: .spec.containers[name="web"].image."""
    words = []
    for step in path:
        sort, rest = step[:2], step[2:]
        if sort == "f:":
            words.append(f".{rest}")
        elif sort == "k:":
            keys = msgspec.json.decode(rest)
            words.append("[" + ",".join(f"{key}={_json(value)}" for key, value in keys.items()) + "]")
        else:
            words.append(f"[={rest}]")
    return "".join(words)


def _json(value: Any) -> str:
    return msgspec.json.encode(value, order="sorted").decode()
