"""OpenAPI version 2 as protobuf (gnostic's openapiv2/OpenAPIv2.proto), which kubectl before 1.27 requests.

Numbers in this module are field numbers of that file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

ASKED = (
    "application/com.github.proto-openapi.spec.v2@v1.0+protobuf",
    "application/com.github.proto-openapi.spec.v2.v1.0+protobuf",
)
"""Media types by which clients request it."""
SENT = ASKED[1]
"""Media type of the response. Some clients reject the other one, whose syntax is invalid."""
_VERBS = {"get": 2, "put": 3, "post": 4, "delete": 5, "patch": 8}


def encode(document: Mapping[str, Any]) -> bytes:
    """Encode a document."""
    info = _text(1, document["info"]["title"]) + _text(2, document["info"]["version"])
    paths = b"".join(_part(2, _named(path, _path(item))) for path, item in document["paths"].items())
    definitions = b"".join(_part(1, _named(name, _schema(each))) for name, each in document["definitions"].items())
    return _text(1, document["swagger"]) + _part(2, info) + _part(8, paths) + _part(9, definitions)


def _path(item: Mapping[str, Any]) -> bytes:
    return b"".join(_part(_VERBS[verb], _operation(each)) for verb, each in item.items())


def _operation(operation: Mapping[str, Any]) -> bytes:
    parameters = b"".join(_part(8, _part(1, _part(2, _part(3, _query(each))))) for each in operation["parameters"])
    responses = b"".join(
        _part(1, _text(1, code) + _part(2, _part(1, _text(1, each["description"]))))
        for code, each in operation["responses"].items()
    )
    return _text(5, operation["operationId"]) + parameters + _part(9, responses) + _extensions(13, operation)


def _query(parameter: Mapping[str, Any]) -> bytes:
    return _text(2, parameter["in"]) + _text(4, parameter["name"]) + _text(6, parameter["type"])


def _schema(schema: Mapping[str, Any]) -> bytes:
    found = (
        _text(1, schema.get("$ref", "")) + _text(2, schema.get("format", "")) + _text(4, schema.get("description", ""))
    )
    found += b"".join(_text(19, name) for name in schema.get("required", ()))
    more = schema.get("additionalProperties")
    if isinstance(more, Mapping):
        found += _part(21, _part(1, _schema(more)))
    if schema.get("type"):
        found += _part(22, _text(1, schema["type"]))
    if isinstance(schema.get("items"), Mapping):
        found += _part(23, _part(1, _schema(schema["items"])))
    if schema.get("properties"):
        fields = (_part(1, _named(name, _schema(each))) for name, each in schema["properties"].items())
        found += _part(25, b"".join(fields))
    return found + _extensions(31, schema)


def _extensions(number: int, of: Mapping[str, Any]) -> bytes:
    """Encode vendor extensions as YAML, of which JSON is a subset."""
    return b"".join(
        _part(number, _named(name, _text(2, msgspec.json.encode(value).decode() + "\n")))
        for name, value in of.items()
        if name.startswith("x-")
    )


def _named(name: str, value: bytes) -> bytes:
    return _text(1, name) + _part(2, value)


def _text(number: int, text: str) -> bytes:
    return _part(number, text.encode()) if text else b""


def _part(number: int, data: bytes) -> bytes:
    """Encode a length-delimited field."""
    return bytes(_varint(number << 3 | 2)) + bytes(_varint(len(data))) + data


def _varint(value: int) -> Iterable[int]:
    while value > 0x7F:
        yield value & 0x7F | 0x80
        value >>= 7
    yield value
