"""Server-side apply (KEP-555): field ownership, merging of applied configurations, and conflicts.

Ownership is tracked from an object's first apply on. What the object had before belongs to `before-first-apply`, as upstream, or
to kubectl's client-side apply if its annotation is there, so that kubectl can take it over.

A set of fields, as `metadata.managedFields` records ownership (structured-merge-diff), consists of paths: tuples of steps `f:NAME`,
`k:{"KEY":VALUE}` for an entry of a list, and `v:VALUE` for a member of a set. A set that contains an entry of a list also
contains the fields of that entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from narthex.lab.api import errors
from narthex.lab.api.errors import StatusError
from narthex.lab.api.kinds import ApiResource
from narthex.lab.api.registry import Registry
from narthex.lab.api.store import Raw
from narthex.lab.api.types import FieldType, field_type, object_type

_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_SERVERS = frozenset({("f:apiVersion",), ("f:kind",), ("f:metadata",)}) | {
    ("f:metadata", f"f:{name}")
    for name in [
        "name",
        "namespace",
        "creationTimestamp",
        "selfLink",
        "uid",
        "generation",
        "managedFields",
        "resourceVersion",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "generateName",
    ]
}
"""Fields without an owner."""


class ManagedFields(msgspec.Struct, frozen=True):
    """The fields that one manager owns."""

    manager: str
    operation: str
    """Apply or Update."""
    subresource: str
    api_version: str
    time: str
    fields: FieldSet

    @property
    def writer(self) -> tuple[str, str, str]:
        """What identifies the manager."""
        return self.manager, self.operation, self.subresource


def apply(
    registry: Registry,
    kind: ApiResource,
    given: Raw,
    *,
    manager: str,
    force: bool = False,
    subresource: str = "",
    dry_run: bool = False,
) -> tuple[Raw, bool]:
    """Apply a configuration in the storage version of its kind. Return the object, and True if it was created.

    Raises StatusError: Conflict if other managers own some of its fields with other values, unless `force`.
    """
    of, meta = object_type(kind), given.get("metadata") or {}
    key = (str(meta.get("namespace") or "") if kind.namespaced else "", str(meta.get("name") or ""))
    held = registry.get(kind.name, *key)
    if held is None and subresource:
        raise errors.not_found(kind.plural, kind.group, key[1])
    owned = field_set(given, of) - _SERVERS
    now, version = registry.stamp(), kind.api_version
    owner = ManagedFields(manager, "Apply", subresource, version, now, owned)
    if held is None:
        made = {**given, "metadata": {**meta, "managedFields": _written([owner])}}
        return registry.create(kind.name, made, dry_run=dry_run), True
    entries = managed_fields_of(held) or _before(held, of, now)
    others = [each for each in entries if each.writer != owner.writer]
    before = next((each for each in entries if each.writer == owner.writer), None)
    merged = _merged(held, given, of)
    if before is not None:
        others_own = frozenset(path for each in others for path in each.fields)
        merged = without(merged, _gone(before.fields, owned, others_own), of)
    conflicts = [
        (each, path) for each in others for path in sorted(each.fields & owned) if _differs(held, merged, path, of)
    ]
    if conflicts and not force:
        raise _conflict(conflicts)
    lost = frozenset(path for _, path in conflicts)
    others = [msgspec.structs.replace(each, fields=each.fields - lost) for each in others]
    if before is not None and before.fields == owned and before.api_version == version:
        owner = before
    tracked = _written([each for each in (*others, owner) if each.fields])
    new = {**merged, "metadata": {**merged["metadata"], "managedFields": tracked}}
    # A version that is named in the configuration is a precondition; otherwise the last apply counts.
    new["metadata"]["resourceVersion"] = meta.get("resourceVersion") or held["metadata"]["resourceVersion"]
    return registry.update(kind.name, new, subresource=subresource, dry_run=dry_run), False


def updated_managed_fields(
    kind: ApiResource, held: Mapping[str, Any], new: Raw, *, manager: str, subresource: str, now: str
) -> Any:
    """Return `managedFields` after a write other than apply, None if ownership is not tracked."""
    tracked, submitted = held["metadata"].get("managedFields"), new["metadata"].get("managedFields")
    if not tracked or (submitted and submitted != tracked):
        # The client manages the fields itself: kubectl takes them over this way.
        return submitted if submitted and submitted != [{}] else None
    of = object_type(kind)
    present = field_set(new, of) - _SERVERS
    was = field_set(held, of) - _SERVERS
    changed = frozenset(path for path in present if path not in was or _differs(held, new, path, of))
    if not changed and was <= present:
        return tracked
    owner = (manager, "Update", subresource)
    entries = managed_fields_of(held)
    before = next((each.fields for each in entries if each.writer == owner), frozenset())
    others = [
        msgspec.structs.replace(each, fields=(each.fields & _with_parents(present)) - changed)
        for each in entries
        if each.writer != owner
    ]
    owned = ManagedFields(*owner, kind.api_version, now, (before & present) | changed)
    return _written([each for each in (*others, owned) if each.fields])


def managed_fields_of(raw: Mapping[str, Any]) -> list[ManagedFields]:
    """Return the managers of an object and their fields."""
    return [
        ManagedFields(
            manager=str(each.get("manager", "")),
            operation=str(each.get("operation", "")),
            subresource=str(each.get("subresource", "")),
            api_version=str(each.get("apiVersion", "")),
            time=str(each.get("time", "")),
            fields=parsed(each.get("fieldsV1")),
        )
        for each in raw["metadata"].get("managedFields") or ()
        if each
    ]


def _written(entries: list[ManagedFields]) -> list[Raw]:
    return [
        {
            "manager": each.manager,
            "operation": each.operation,
            "apiVersion": each.api_version,
            "time": each.time,
            "fieldsType": "FieldsV1",
            "fieldsV1": nested(each.fields),
            **({"subresource": each.subresource} if each.subresource else {}),
        }
        for each in entries
    ]


def _before(held: Mapping[str, Any], of: FieldType, now: str) -> list[ManagedFields]:
    there = {name: value for name, value in held.items() if name != "status"}
    manager = "before-first-apply"
    if _LAST_APPLIED in (held["metadata"].get("annotations") or {}):
        manager = "kubectl-client-side-apply"
    at = held["metadata"].get("creationTimestamp") or now
    return [ManagedFields(manager, "Update", "", str(held.get("apiVersion", "")), at, field_set(there, of) - _SERVERS)]


def _with_parents(fields: FieldSet) -> FieldSet:
    return frozenset(path[:length] for path in fields for length in range(1, len(path) + 1))


def _gone(before: FieldSet, owned: FieldSet, others_own: FieldSet) -> FieldSet:
    """Return the fields that the manager applied before but not now, and that no other manager owns."""
    given_steps = _with_parents(owned) | _with_parents(others_own)
    return frozenset(path for path in before if path not in given_steps)


def _differs(held: Mapping[str, Any], new: Mapping[str, Any], path: Path, of: FieldType) -> bool:
    if path[-1].startswith("k:"):
        return False
    return bool(at_path(held, path, of) != at_path(new, path, of))


def _merged(held: Any, given: Any, of: FieldType) -> Any:
    """Return the stored value with the applied one merged into it."""
    if isinstance(given, Mapping) and isinstance(held, Mapping) and not of.atomic:
        into = dict(held)
        for name, value in given.items():
            if value is None:
                into.pop(name, None)
            else:
                into[name] = _merged(held.get(name), value, field_type(of, name))
        return into
    if isinstance(given, list) and isinstance(held, list) and of.keys:
        return list(_merged_entries(held, given, of))
    return given


def _merged_entries(held: list[Any], given: list[Any], of: FieldType) -> Iterator[Any]:
    given_steps = {step_of(each, of): each for each in given}
    there = {step_of(each, of): each for each in held}
    # The configuration's order, if it names all; else new entries come last.
    order = (
        list(given_steps)
        if set(there) <= set(given_steps)
        else [*there, *(step for step in given_steps if step not in there)]
    )
    for step in order:
        if step not in given_steps:
            yield there[step]
        elif step in there:
            yield _merged(there[step], given_steps[step], of.item)
        else:
            yield given_steps[step]


def _conflict(conflicts: list[tuple[ManagedFields, Path]]) -> StatusError:
    by: dict[str, list[str]] = {}
    for entry, path in conflicts:
        by.setdefault(_named(entry), []).append(printed(path))
    causes = [
        {"reason": "FieldManagerConflict", "message": f"conflict with {name}", "field": field}
        for name, fields in by.items()
        for field in fields
    ]
    if len(conflicts) == 1:
        text = f"1 conflict: {causes[0]['message']}: {causes[0]['field']}"
    else:
        lists = (
            f"conflicts with {name}:\n" + "\n".join(f"- {field}" for field in fields)
            for name, fields in sorted(by.items())
        )
        text = f"{len(conflicts)} conflicts: " + "\n".join(lists)
    return StatusError(409, "Conflict", f"Apply failed with {text}", {"causes": causes})


def _named(entry: ManagedFields) -> str:
    name = f'"{entry.manager}"' + (f' with subresource "{entry.subresource}"' if entry.subresource else "")
    if entry.operation != "Update":
        return name
    return f"{name} using {entry.api_version}" + (f" at {entry.time}" if entry.time else "")


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
