"""Decoding of request bodies: JSON, YAML, or protobuf."""

from __future__ import annotations

from typing import Any

import msgspec

from narthex.lab.api import errors, protobuf
from narthex.lab.api.errors import StatusError
from narthex.lab.api.requests import ApiRequest
from narthex.lab.api.store import Raw


def decode_body(request: ApiRequest) -> Raw:
    """Return the object in a request's body. Raises StatusError."""
    if request.body.startswith(protobuf.MAGIC):
        return protobuf.decode(request.body)
    content = request.headers.get("content-type", "")
    if content and not any(known in content for known in ("json", "yaml", "*/*")):
        known = "application/json, application/yaml"
        message = f"the body of the request was in an unknown format - accepted media types include: {known}"
        raise StatusError(415, "UnsupportedMediaType", message)
    raw = decode_json_or_yaml(request)
    if not isinstance(raw, dict):
        raise errors.bad_request("the body of the request is not an object")
    return raw


def decode_json_or_yaml(request: ApiRequest) -> Any:
    """Return the JSON of a request's body, or its YAML if Content-Type allows it. Raises StatusError."""
    try:
        return msgspec.json.decode(request.body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if "yaml" not in request.headers.get("content-type", ""):
            raise errors.bad_request(f"error decoding the body: {error}") from None
    return _yaml(request.body)


def _yaml(body: bytes) -> Any:
    import yaml  # type: ignore[import-untyped]

    try:
        return yaml.load(body, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise errors.bad_request(f"error decoding the body: {error}") from None
