"""OpenAPI documents, versions 2 and 3: enough for `kubectl apply`, `explain` and the validation of fields.

The schemas come from `types`, with the merge keys of strategic merge. Each resource has the path of its objects, whose
parameters announce dry run and field validation to kubectl.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import msgspec

from narthex.lab.api import types
from narthex.lab.api.kinds import VERSION, ApiResource, group_version
from narthex.lab.api.requests import ResourcePaths
from narthex.lab.api.types import FieldType

GVK = "x-kubernetes-group-version-kind"
_SCALARS: Mapping[str, Mapping[str, str]] = {
    "str": {"type": "string"},
    "int": {"type": "integer"},
    "num": {"type": "number"},
    "bool": {"type": "boolean"},
    "time": {"type": "string", "format": "date-time"},
    "quantity": {"type": "string"},
    "bytes": {"type": "string", "format": "byte"},
    "intstr": {"type": "string", "format": "int-or-string"},
    "any": {},
}
_PACKAGES = {
    "meta": "io.k8s.apimachinery.pkg.apis.meta",
    "apiextensions": "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions",
}
_PARAMETERS = ("dryRun", "fieldManager", "fieldValidation", "force", "pretty")

Ref = Callable[[str, str], dict[str, Any]]
"""Returns a reference to a type, with a description."""


def version_2(paths: ResourcePaths) -> dict[str, Any]:
    """Return the document of version 2."""

    def ref(name: str, text: str) -> dict[str, Any]:
        """Return a described reference to a definition."""
        return _described({"$ref": f"#/definitions/{_full(name)}"}, text)

    found = sorted(paths.items(), key=lambda entry: entry[0])
    definitions = {_full(name): _schema(types.named(name), ref, _of_type(paths, name)) for name in types.names()}
    for (_, version, _), kind in found:
        if kind.custom:
            definitions[_custom_name(kind, version)] = _custom(kind, version, ref)
    return {
        "swagger": "2.0",
        "info": {"title": "Kubernetes", "version": VERSION},
        "paths": {_path(kind, at[1]): _operations(kind, at, "type") for at, kind in found},
        "definitions": definitions,
    }


def version_3_index(paths: ResourcePaths) -> dict[str, Any]:
    """Return the index of the documents of version 3."""
    found = sorted({at[:2] for at in paths})
    return {"paths": {_place(*at): {"serverRelativeURL": _url(paths, *at)} for at in found}}


def version_3(paths: ResourcePaths, group: str, version: str) -> dict[str, Any] | None:
    """Return the document of one group and version, None if there is none."""
    kinds = {plural: kind for (of, at, plural), kind in paths.items() if (of, at) == (group, version)}
    if not kinds:
        return None

    def ref(name: str, text: str) -> dict[str, Any]:
        """Return a described reference to a schema, which defaults to an empty object."""
        return _described({"allOf": [{"$ref": f"#/components/schemas/{_full(name)}"}], "default": {}}, text)

    schemas: dict[str, Any] = {}
    for kind in kinds.values():
        if kind.custom:
            schemas[_custom_name(kind, version)] = _custom(kind, version, ref)
            _collect("meta_v1.ObjectMeta", schemas, ref, paths)
        else:
            _collect(types.object_type(kind).name, schemas, ref, paths)
    operations = {
        _path(kind, version): _operations(kind, (group, version, plural), "schema")
        for plural, kind in sorted(kinds.items())
    }
    info = {"title": "Kubernetes", "version": VERSION}
    return {"openapi": "3.0.0", "info": info, "paths": operations, "components": {"schemas": schemas}}


def _collect(name: str, into: dict[str, Any], ref: Ref, paths: ResourcePaths) -> None:
    """Add a type's schema and those that it refers to."""
    if not name or _full(name) in into:
        return
    of = types.named(name)
    into[_full(name)] = _schema(of, ref, _of_type(paths, name))
    for below in types.structs_below(of):
        _collect(below, into, ref, paths)


def _schema(of: FieldType, ref: Ref, kinds: Iterable[Mapping[str, str]] = ()) -> dict[str, Any]:
    """Return the schema of a struct."""
    text, fields = description(of.name)
    properties = {name: _value(types.resolve(each), ref, fields.get(name, "")) for name, each in of.fields.items()}
    found: dict[str, Any] = _described({"type": "object", "properties": properties}, text)
    if of.required:
        found["required"] = list(of.required)
    if listed := list(kinds):
        found[GVK] = listed
    return found


def _value(of: FieldType, ref: Ref, text: str = "") -> dict[str, Any]:
    match of.sort:
        case "struct":
            if of.name:
                return ref(of.name, text) | ({"x-kubernetes-map-type": "atomic"} if of.atomic else {})
            return _described(_schema(of, ref), text)
        case "list":
            return _described({"type": "array", "items": _value(of.item, ref)} | _merging(of), text)
        case "map":
            atomic = {"x-kubernetes-map-type": "atomic"} if of.atomic else {}
            return _described({"type": "object", "additionalProperties": _value(of.item, ref)} | atomic, text)
    return _described(dict(_SCALARS[of.sort]), text)


def _merging(of: FieldType) -> dict[str, Any]:
    found: dict[str, Any] = {"x-kubernetes-list-type": "atomic"}
    if of.keys == ("=",):
        found = {"x-kubernetes-list-type": "set"}
    elif of.keys:
        found = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(of.keys)}
    if of.merge:
        found["x-kubernetes-patch-strategy"] = "merge"
        found |= {"x-kubernetes-patch-merge-key": of.merge} if of.merge != "=" else {}
    return found


def _custom(kind: ApiResource, version: str, ref: Ref) -> dict[str, Any]:
    """Return the schema of a custom resource from its definition, with the fields that all objects have."""
    schema = dict(kind.schemas.get(version) or {"type": "object", "x-kubernetes-preserve-unknown-fields": True})
    fields = dict(schema.get("properties") or {})
    fields |= {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": ref("meta_v1.ObjectMeta", "")}
    return {**schema, "properties": fields, GVK: [_gvk(kind.group, version, kind.kind)]}


def _operations(kind: ApiResource, at: tuple[str, str, str], typed: str) -> dict[str, Any]:
    string: dict[str, Any] = {"type": "string"} if typed == "type" else {"schema": {"type": "string"}}
    parameters = [{"name": name, "in": "query", **string} for name in _PARAMETERS]
    gvk = _gvk(at[0], at[1], kind.kind)
    common = {"responses": {"200": {"description": "OK"}}, "parameters": parameters, GVK: gvk}
    name = f"{at[0].split('.')[0].capitalize() or 'Core'}{at[1].capitalize()}{kind.kind}"
    verbs = {"get": "read", "put": "replace", "patch": "patch"}
    return {
        verb: {**common, "operationId": f"{does}{name}", "x-kubernetes-action": verb} for verb, does in verbs.items()
    }


def _path(kind: ApiResource, version: str) -> str:
    """Return the path of a kind's objects."""
    root = f"/apis/{kind.group}/{version}" if kind.group else f"/api/{version}"
    scope = "/namespaces/{namespace}" if kind.namespaced else ""
    return f"{root}{scope}/{kind.plural}/{{name}}"


def _of_type(paths: ResourcePaths, name: str) -> list[dict[str, str]]:
    """Return the kinds whose objects have a type."""
    kinds = {(group, version, kind.kind) for (group, version, _), kind in paths.items() if not kind.custom}
    # MetalLB's kinds have no type in the table.
    return [_gvk(*each) for each in sorted(kinds) if _type_name(*each) == name]


def _type_name(group: str, version: str, kind: str) -> str:
    return f"{group.partition('.')[0] or 'core'}_{version}.{kind}"


def _custom_name(kind: ApiResource, version: str) -> str:
    return ".".join((*reversed(kind.group.split(".")), version, kind.kind))


def _full(name: str) -> str:
    """Return a type's name in documents: core_v1.Pod is io.k8s.api.core.v1.Pod."""
    module, _, bare = name.rpartition(".")
    group, _, version = module.partition("_")
    return f"{_PACKAGES.get(group, f'io.k8s.api.{group}')}.{version}.{bare}"


def _gvk(group: str, version: str, kind: str) -> dict[str, str]:
    return {"group": group, "version": version, "kind": kind}


def _described(schema: dict[str, Any], text: str) -> dict[str, Any]:
    return {**schema, "description": text} if text else schema


def _place(group: str, version: str) -> str:
    return f"apis/{group_version(group, version)}" if group else f"api/{version}"


def _url(paths: ResourcePaths, group: str, version: str) -> str:
    """Return a document's URL with a hash of its contents, so that clients can cache it."""
    listed = sorted(paths.items(), key=lambda one: one[0])
    there = [(kind.name, kind.schemas) for at, kind in listed if at[:2] == (group, version)]
    digest = hashlib.sha256(msgspec.json.encode((VERSION, there))).hexdigest()
    return f"/openapi/v3/{_place(group, version)}?hash={digest.upper()[:32]}"


_FIELD = re.compile(r"^\s*\* \*\*(?P<name>\S+)\*\* ``[^`]*`` - (?P<text>.*)$")


@cache
def description(name: str) -> tuple[str, dict[str, str]]:
    """Return the descriptions of a type such as core_v1.Pod and of its fields, for `kubectl explain`. Empty: unknown.

    They are the docstrings of lightkube's models, whose import takes a moment and is put off to the first request.
    """
    module, _, bare = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(f"lightkube.models.{module}"), bare, None)
    except ImportError:
        return "", {}
    text, _, parameters = (getattr(found, "__doc__", "") or "").partition("**parameters**")
    fields: dict[str, list[str]] = {}
    at: list[str] = []
    for line in parameters.splitlines():
        match = _FIELD.match(line)
        if match is not None:
            at = fields.setdefault(match["name"], [match["text"]])
        elif line.strip():
            at.append(line.strip())
    return _plain(text.splitlines()), {field: _plain(lines) for field, lines in fields.items()}


def _plain(lines: list[str]) -> str:
    text = "\n".join(line.strip() for line in lines).strip()
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text)
