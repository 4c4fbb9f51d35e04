"""OpenAPI of version 2 as protobuf (gnostic's openapiv2/OpenAPIv2.proto), which kubectl before 1.27 requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from narthex.lab.api.protobuf_wire import part, text

ACCEPTED = (
    "application/com.github.proto-openapi.spec.v2@v1.0+protobuf",
    "application/com.github.proto-openapi.spec.v2.v1.0+protobuf",
)
"""Media types by which clients request it."""
MEDIA_TYPE = ACCEPTED[1]
"""Media type of the response. Some clients reject the other one, whose syntax is invalid."""
_VERBS = {"get": 2, "put": 3, "post": 4, "delete": 5, "patch": 8}


def encode(document: Mapping[str, Any]) -> bytes:
    """Encode an OpenAPI document of version 2 (gnostic's openapiv2/OpenAPIv2.proto), as kubectl before 1.27 requests it."""
    info = text(1, document["info"]["title"]) + text(2, document["info"]["version"])
    paths = b"".join(part(2, _named(path, _path(item))) for path, item in document["paths"].items())
    definitions = b"".join(part(1, _named(name, _schema(each))) for name, each in document["definitions"].items())
    return text(1, document["swagger"]) + part(2, info) + part(8, paths) + part(9, definitions)


def _path(item: Mapping[str, Any]) -> bytes:
    return b"".join(part(_VERBS[verb], _operation(each)) for verb, each in item.items())


def _operation(operation: Mapping[str, Any]) -> bytes:
    parameters = b"".join(part(8, part(1, part(2, part(3, _query(each))))) for each in operation["parameters"])
    responses = b"".join(
        part(1, text(1, code) + part(2, part(1, text(1, each["description"]))))
        for code, each in operation["responses"].items()
    )
    return text(5, operation["operationId"]) + parameters + part(9, responses) + _extensions(13, operation)


def _query(parameter: Mapping[str, Any]) -> bytes:
    return text(2, parameter["in"]) + text(4, parameter["name"]) + text(6, parameter["type"])


def _schema(schema: Mapping[str, Any]) -> bytes:
    found = text(1, schema.get("$ref", "")) + text(2, schema.get("format", "")) + text(4, schema.get("description", ""))
    found += b"".join(text(19, name) for name in schema.get("required", ()))
    more = schema.get("additionalProperties")
    if isinstance(more, Mapping):
        found += part(21, part(1, _schema(more)))
    if schema.get("type"):
        found += part(22, text(1, schema["type"]))
    if isinstance(schema.get("items"), Mapping):
        found += part(23, part(1, _schema(schema["items"])))
    if schema.get("properties"):
        fields = (part(1, _named(name, _schema(each))) for name, each in schema["properties"].items())
        found += part(25, b"".join(fields))
    return found + _extensions(31, schema)


def _extensions(number: int, of: Mapping[str, Any]) -> bytes:
    """Encode vendor extensions as YAML, of which JSON is a subset."""
    return b"".join(
        part(number, _named(name, text(2, msgspec.json.encode(value).decode() + "\n")))
        for name, value in of.items()
        if name.startswith("x-")
    )


def _named(name: str, value: bytes) -> bytes:
    return text(1, name) + part(2, value)
