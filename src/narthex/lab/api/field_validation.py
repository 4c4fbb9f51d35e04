"""Validation of fields against the object's type: unknown fields, and values of the wrong type.

Unknown fields are dropped. `fieldValidation` decides if that is an error, a warning, or neither (KEP-2885).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from narthex.lab.api.errors import bad_request
from narthex.lab.api.kinds import ApiResource
from narthex.lab.api.store import Raw
from narthex.lab.api.types import FieldType, object_type, resolve

_QUANTITY = re.compile(r"([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)")
_GO = {"str": "string", "int": "int32", "num": "float64", "bool": "bool", "list": "[]", "map": "map[string]string"}
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")


def validate_fields(kind: ApiResource, version: str, raw: Raw, validation: str) -> tuple[Raw, tuple[str, ...]]:
    """Return an object without unknown fields, and the warnings about them.

    `validation` is Strict, Warn (also if empty), or Ignore. Raises StatusError (400).
    """
    unknown: list[str] = []
    of = object_type(kind, version)
    clean = _Reader(kind, version, unknown).value(raw, of, "")
    if unknown and validation == "Strict":
        listed = ", ".join(f'unknown field "{field}"' for field in unknown)
        raise _undecodable(kind, version, f"strict decoding error: {listed}")
    if unknown and validation == "Ignore":
        unknown = []
    # Custom objects are stored unpruned.
    return (raw if kind.custom else clean), tuple(f'unknown field "{field}"' for field in unknown)


class _Reader:
    """One object's decoding."""

    def __init__(self, kind: ApiResource, version: str, unknown: list[str]) -> None:
        self._kind = kind
        self._version = version
        self._unknown = unknown

    def value(self, found: Any, of: FieldType, at: str) -> Any:
        if found is None or of.sort == "any":
            return found
        match of.sort:
            case "struct":
                return self._struct(found, of, at)
            case "map":
                if not isinstance(found, Mapping):
                    raise self._mistyped(found, of, at)
                return {key: self.value(each, of.item, f"{at}.{key}") for key, each in found.items()}
            case "list":
                if not isinstance(found, list):
                    raise self._mistyped(found, of, at)
                return [self.value(each, of.item, f"{at}[{index}]") for index, each in enumerate(found)]
        if not _fits(found, of.sort):
            raise self._mistyped(found, of, at)
        if of.sort == "quantity" and not _QUANTITY.fullmatch(str(found)):
            raise _undecodable(
                self._kind, self._version, f"quantities must match the regular expression '^{_QUANTITY.pattern}$'"
            )
        if of.sort == "time" and not _TIME.fullmatch(found):
            text = f'parsing time "{found}" as "2006-01-02T15:04:05Z07:00": cannot parse it'
            raise _undecodable(self._kind, self._version, text)
        return int(found) if of.sort == "int" and isinstance(found, float) else found

    def _struct(self, found: Any, of: FieldType, at: str) -> Raw:
        if not isinstance(found, Mapping):
            raise self._mistyped(found, of, at)
        clean: Raw = {}
        for name, each in found.items():
            field = of.fields.get(name)
            path = f"{at}.{name}" if at else name
            if field is None:
                self._unknown.append(path)
            else:
                clean[name] = self.value(each, resolve(field), path)
        return clean

    def _mistyped(self, found: Any, of: FieldType, at: str) -> Exception:
        sort = {bool: "bool", int: "number", float: "number", str: "string", list: "array"}.get(type(found), "object")
        expected = _GO.get(of.sort) or (of.name.replace("_", ".").rpartition(".")[2] if of.name else of.sort)
        path = re.sub(r"\[\d+\]", "", at)
        text = f"json: cannot unmarshal {sort} into Go struct field {self._kind.kind}.{path} of type {expected}"
        return _undecodable(self._kind, self._version, text)


def _fits(found: Any, sort: str) -> bool:
    match sort:
        case "str" | "bytes" | "time":
            return isinstance(found, str)
        case "bool":
            return isinstance(found, bool)
        case "int":
            return not isinstance(found, bool) and (
                isinstance(found, int) or (isinstance(found, float) and found.is_integer())
            )
        case "num":
            return isinstance(found, int | float) and not isinstance(found, bool)
        case "intstr" | "quantity":
            return isinstance(found, int | float | str) and not isinstance(found, bool)
    return True


def _undecodable(kind: ApiResource, version: str, why: str) -> Exception:
    return bad_request(f'{kind.kind} in version "{version}" cannot be handled as a {kind.kind}: {why}')
