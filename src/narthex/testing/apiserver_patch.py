"""The three kinds of patches, as kube-apiserver applies them to the kinds that are here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

Raw = dict[str, Any]

_MERGE_KEYS = {"conditions": "type", "addresses": "type", "ports": "port", "taints": "key"}
"""Lists that strategic merge takes as sets of entries, and what tells the entries apart."""


class BadPatch(ValueError):
    """It cannot be applied."""


def apply(content_type: str, target: Mapping[str, Any], patch: Any) -> Raw:
    """The object after a patch. Raises BadPatch."""
    try:
        how = _KINDS[content_type.partition(";")[0]]
    except KeyError:
        raise BadPatch(f"the media type {content_type!r} is not a patch") from None
    return how(copy.deepcopy(dict(target)), patch)


def merge(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, Mapping):
        return patch
    into = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            into.pop(name, None)
        else:
            into[name] = merge(into.get(name), value)
    return into


def _merge(target: Raw, patch: Any) -> Raw:
    if not isinstance(patch, Mapping):
        raise BadPatch("a merge patch is an object")
    return merge(target, patch)  # type: ignore[no-any-return]


def strategic(target: Any, patch: Any, name: str = "") -> Any:
    """Merge, but the lists of `_MERGE_KEYS` entry by entry."""
    if isinstance(patch, list) and name in _MERGE_KEYS and isinstance(target, list):
        key = _MERGE_KEYS[name]
        entries = {each.get(key): each for each in target}
        for each in patch:
            entries[each.get(key)] = strategic(entries.get(each.get(key)), each)
        return list(entries.values())
    if not isinstance(patch, Mapping):
        return patch
    into = dict(target) if isinstance(target, Mapping) else {}
    for field, value in patch.items():
        if value is None:
            into.pop(field, None)
        else:
            into[field] = strategic(into.get(field), value, field)
    return into


def _strategic(target: Raw, patch: Any) -> Raw:
    if not isinstance(patch, Mapping):
        raise BadPatch("a strategic merge patch is an object")
    return strategic(target, patch)  # type: ignore[no-any-return]


def _json(target: Raw, patch: Any) -> Raw:
    """RFC 6902, without `move` and `copy`."""
    if not isinstance(patch, list):
        raise BadPatch("a JSON patch is a list")
    for step in patch:
        _operate(target, step)
    return target


def _operate(target: Raw, step: Any) -> None:
    *way, last = [part.replace("~1", "/").replace("~0", "~") for part in str(step["path"]).split("/")[1:]]
    at: Any = target
    try:
        for part in way:
            at = at[int(part)] if isinstance(at, list) else at[part]
        index: Any = (len(at) if last == "-" else int(last)) if isinstance(at, list) else last
        match step["op"]:
            case "test":
                if at[index] != step["value"]:
                    raise BadPatch(f"test of {step['path']} failed")
            case "add" if isinstance(at, list):
                at.insert(index, step["value"])
            case "replace" if index in at or isinstance(at, list):
                at[index] = step["value"]
            case "add":
                at[index] = step["value"]
            case "remove":
                del at[index]
            case other:
                raise BadPatch(f"{other} of {step['path']} cannot be done")
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise BadPatch(f"{step.get('op')} of {step.get('path')}: {error}") from None


_KINDS: dict[str, Callable[[Raw, Any], Raw]] = {
    "application/merge-patch+json": _merge,
    "application/strategic-merge-patch+json": _strategic,
    "application/json-patch+json": _json,
}
