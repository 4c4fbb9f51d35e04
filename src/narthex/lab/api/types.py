"""The types of Kubernetes' objects: their fields, and the merge keys of their lists.

`types_table` has a line for each type: its name, and its fields as `name=reference`, with `!` after required ones. A reference is
a scalar (`str int num bool time quantity intstr bytes any`), a type's name, `[item]`, `[item;merge;keys]` for associative lists
(`merge` is the key of strategic merge, `keys` are those of server-side apply, `=` is the entry itself), or `{value}` for maps.
`|atomic` marks what server-side apply treats as one value. Custom resources have an OpenAPI schema instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from narthex.lab.api.kinds import ApiResource

_SCHEMA_SCALARS = {"string": "str", "integer": "int", "number": "num", "boolean": "bool"}


class FieldType:
    """The type of a value."""

    __slots__ = ("_item", "atomic", "fields", "keys", "merge", "name", "required", "sort")

    def __init__(
        self,
        sort: str,
        *,
        name: str = "",
        fields: Mapping[str, str | FieldType] | None = None,
        required: tuple[str, ...] = (),
        item: str | FieldType = "any",
        merge: str = "",
        keys: tuple[str, ...] = (),
        atomic: bool = False,
    ) -> None:
        """Create a type."""
        self.sort = sort
        """`struct`, `list`, `map`, `any`, or a scalar's name."""
        self.name = name
        """Name of a struct, such as core_v1.PodSpec. May be empty."""
        self.fields = fields or {}
        self.required = required
        self.merge = merge
        """Merge key of a list in strategic merge. `=`: the entry itself. Empty: the list is replaced."""
        self.keys = keys
        """Keys that identify the entries of a list in server-side apply. Empty: the list is atomic."""
        self.atomic = atomic
        self._item = item

    @property
    def item(self) -> FieldType:
        """Type of the entries of a list, or the values of a map."""
        return resolve(self._item)


ANY = FieldType("any")
"""An unknown type, which may contain anything."""


def object_type(kind: ApiResource, version: str = "") -> FieldType:
    """Return the type of a resource's objects."""
    if kind.custom:
        return _custom(kind, version or kind.version)
    return named(f"{_module(kind)}.{kind.kind}")


def named(name: str) -> FieldType:
    """Return a type of the table by its name, ANY if it has none."""
    return _structs().get(name, ANY)


def names() -> list[str]:
    """Return the names of all types of the table."""
    return list(_structs())


def field_type(of: FieldType, name: str) -> FieldType:
    """Return the type of a field, or of a map's values; ANY if it is unknown."""
    if of.sort == "map":
        return of.item
    found = of.fields.get(name)
    return ANY if found is None else resolve(found)


def resolve(reference: str | FieldType) -> FieldType:
    """Return the type that a reference names."""
    return reference if isinstance(reference, FieldType) else _referred(reference)


@cache
def _referred(text: str) -> FieldType:
    text, mark, _ = text.rpartition("|atomic") if text.endswith("|atomic") else (text, "", "")
    if text.startswith("["):
        item, *rest = text[1:-1].split(";")
        merge, keys = rest or ("", "")
        return FieldType("list", item=item, merge=merge, keys=tuple(keys.split(",")) if keys else ())
    if text.startswith("{"):
        return FieldType("map", item=text[1:-1], atomic=bool(mark))
    if "." not in text:
        return ANY if text == "any" else FieldType(text)
    of = named(text)
    return FieldType(of.sort, name=of.name, fields=of.fields, required=of.required, atomic=True) if mark else of


@cache
def _structs() -> dict[str, FieldType]:
    from narthex.lab.api.types_table import TABLE

    found = {}
    for line in TABLE.splitlines():
        name, *fields = line.split(" ")
        pairs = [each.partition("=") for each in fields if each]
        required = tuple(field for field, _, reference in pairs if reference.endswith("!"))
        references = {field: reference.removesuffix("!") for field, _, reference in pairs}
        found[name] = FieldType("struct", name=name, fields=references, required=required)
    return found


def _module(kind: ApiResource) -> str:
    group = kind.group.partition(".")[0]
    return f"{group}_{kind.version}" if group else "core_v1"


def _custom(kind: ApiResource, version: str) -> FieldType:
    of = of_schema(kind.schemas.get(version) or {})
    base = {"apiVersion": "str", "kind": "str", "metadata": "meta_v1.ObjectMeta"}
    if of.sort != "struct":
        return FieldType("struct", fields={**base, "spec": ANY, "status": ANY, "data": ANY})
    return FieldType("struct", fields={**of.fields, **base}, required=of.required)


def of_schema(schema: Mapping[str, Any]) -> FieldType:
    """Return the type that an OpenAPI v3 schema of a CustomResourceDefinition describes."""
    sort, atomic = schema.get("type"), schema.get("x-kubernetes-map-type") == "atomic"
    if schema.get("x-kubernetes-int-or-string"):
        return FieldType("intstr")
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return ANY
    if sort == "array":
        keys = tuple(schema.get("x-kubernetes-list-map-keys") or ())
        keys = keys or (("=",) if schema.get("x-kubernetes-list-type") == "set" else ())
        return FieldType("list", item=of_schema(schema.get("items") or {}), keys=keys)
    if sort == "object" and schema.get("properties"):
        fields: dict[str, str | FieldType] = {name: of_schema(each) for name, each in schema["properties"].items()}
        return FieldType("struct", fields=fields, required=tuple(schema.get("required") or ()), atomic=atomic)
    if sort == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return FieldType("map", item=of_schema(schema["additionalProperties"]), atomic=atomic)
    scalar = _SCHEMA_SCALARS.get(str(sort))
    return ANY if scalar is None else FieldType(scalar)
