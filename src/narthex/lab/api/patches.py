"""Patches: JSON Patch (RFC 6902), merge patch (RFC 7386), and strategic merge. Server-side apply is in `apply`.

Strategic merge takes the merge keys of lists from `types` and follows apimachinery's util/strategicpatch.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from narthex.lab.api.errors import StatusError, unsupported_media_type
from narthex.lab.api.types import ANY, FieldType, field_type

Raw = dict[str, Any]

MERGE, STRATEGIC, JSON_PATCH, APPLY = (
    f"application/{name}"
    for name in ("merge-patch+json", "strategic-merge-patch+json", "json-patch+json", "apply-patch+yaml")
)


_FORMS: Mapping[str, tuple[type, str]] = {
    JSON_PATCH: (list, "a JSON patch is a list"),
    MERGE: (dict, "a merge patch is an object"),
    STRATEGIC: (dict, "a strategic merge patch is an object"),
}


class BadPatch(StatusError):
    """A patch that cannot be applied."""

    def __init__(self, why: str) -> None:
        """Create the error (422)."""
        super().__init__(422, "Invalid", f"the server rejected our request due to an error in our request: {why}")


def apply(content_type: str, target: Mapping[str, Any], patch: Any, of: FieldType = ANY) -> Raw:
    """Return an object of type `of` after a patch. Raises StatusError."""
    kind = content_type.partition(";")[0].strip()
    if kind not in _FORMS:
        raise unsupported_media_type(JSON_PATCH, MERGE, STRATEGIC, APPLY)
    form, name = _FORMS[kind]
    if not isinstance(patch, form):
        raise BadPatch(name)
    held = copy.deepcopy(dict(target))
    if kind == JSON_PATCH:
        return _json(held, patch)
    return merge(held, patch) if kind == MERGE else strategic(held, patch, of)  # type: ignore[no-any-return]


def merge(target: Any, patch: Any) -> Any:
    """Return a value after a merge patch (RFC 7386)."""
    if not isinstance(patch, Mapping):
        return patch
    into = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            into.pop(name, None)
        else:
            into[name] = merge(into.get(name), value)
    return into


def strategic(target: Any, patch: Any, of: FieldType) -> Any:
    """Return a value after a strategic merge patch: lists that have a merge key are merged entry by entry."""
    if isinstance(patch, list):
        return _merged_list(target, patch, of) if of.merge else [strategic(None, each, of.item) for each in patch]
    if not isinstance(patch, Mapping):
        return patch
    operation = patch.get("$patch")
    if operation == "delete":
        return {}
    into = dict(target) if isinstance(target, Mapping) and operation != "replace" else {}
    kept = patch.get("$retainKeys")
    for field, value in patch.items():
        if field == "$patch" or field == "$retainKeys" or field.startswith("$setElementOrder/"):
            continue
        if field.startswith("$deleteFromPrimitiveList/"):
            name = field.partition("/")[2]
            into[name] = [each for each in into.get(name) or [] if each not in value]
        elif value is None:
            into.pop(field, None)
        else:
            into[field] = strategic(into.get(field), value, field_type(of, field))
    for field, order in patch.items():
        name = field.removeprefix("$setElementOrder/")
        if name != field and isinstance(into.get(name), list):
            into[name] = _ordered(into[name], order, field_type(of, name).merge)
    if isinstance(kept, list):
        into = {name: value for name, value in into.items() if name in kept}
    return into


def _merged_list(target: Any, patch: list[Any], of: FieldType) -> list[Any]:
    held = list(target) if isinstance(target, list) else []
    if of.merge == "=":
        return held + [each for each in patch if each not in held]
    if any(isinstance(each, Mapping) and each.get("$patch") == "replace" for each in patch):
        return [each for each in patch if not (isinstance(each, Mapping) and each.get("$patch") == "replace")]
    for each in patch:
        if not isinstance(each, Mapping) or of.merge not in each:
            raise BadPatch(f"map: {each} does not contain declared merge key: {of.merge}")
        at = next((index for index, one in enumerate(held) if one.get(of.merge) == each[of.merge]), None)
        if each.get("$patch") == "delete":
            held = [one for one in held if one.get(of.merge) != each[of.merge]]
        elif at is None:
            held.append(strategic(None, each, of.item))
        else:
            held[at] = strategic(held[at], each, of.item)
    return held


def _ordered(entries: list[Any], order: Any, key: str) -> list[Any]:
    """Return entries in a patch's order. Entries that it does not name keep their places."""

    def name(each: Any) -> Any:
        """Return the entry's merge key, or the entry itself if it has none."""
        return each.get(key) if key and key != "=" and isinstance(each, Mapping) else each

    ordered = [name(each) for each in order] if isinstance(order, list) else []
    listed = sorted((each for each in entries if name(each) in ordered), key=lambda each: ordered.index(name(each)))
    return [listed.pop(0) if name(each) in ordered else each for each in entries]


def _json(target: Raw, patch: Any) -> Raw:
    """Apply a JSON Patch (RFC 6902)."""
    # Few clients send one.
    import jsonpatch

    for step in patch:
        if not isinstance(step, Mapping) or "op" not in step or "path" not in step:
            raise BadPatch("each step of a JSON patch has an op and a path")
        op, path = step["op"], step["path"]
        if op not in ("add", "remove", "replace", "move", "copy", "test"):
            raise BadPatch(f"Unexpected kind: {op}")
        try:
            target = jsonpatch.JsonPatch([step]).apply(target)
        except jsonpatch.JsonPatchTestFailed:
            raise BadPatch(f"testing value {path} failed: test failed") from None
        except (jsonpatch.JsonPatchException, jsonpatch.JsonPointerException, KeyError, TypeError, ValueError):
            message = f"{op} operation does not apply: doc is missing path: {path}: missing value"
            raise BadPatch(message) from None
        if not isinstance(target, dict):
            raise BadPatch(f"{op} of the whole object cannot be done")
    return target
