"""Objects as protobuf, which Go's typed clients and newer kubectl send.

`protobuf_fields.txt` has a line for each message: its name and `number=field`, after k8s.io/api's generated.proto files. `*` after
the number marks a pointer in Go, of which zero is a value. Go writes all other fields, so their zero means that they are unset.
`number=(NAME)` is a message whose fields the object has itself. The types of fields are those of types.txt.

Clients that accept JSON get JSON, which is stored encoded. A field that is unknown is an error, so that nothing is lost (ADR 0012).
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import msgspec

from narthex.lab.api.errors import StatusError, bad_request
from narthex.lab.api.protobuf_wire import as_bytes, as_number, fields, part, text, varint, whole
from narthex.lab.api.types import FieldType, field_type, named

MAGIC = b"k8s\0"
MEDIA_TYPE = "application/vnd.kubernetes.protobuf"

_META_KINDS = ("DeleteOptions", "Status", "ListOptions", "CreateOptions", "PatchOptions", "UpdateOptions")
"""Kinds of meta/v1, which have the version of the object that they concern."""
_MICRO = frozenset({"renewTime", "acquireTime", "eventTime", "lastObservedTime"})
"""Fields with microseconds (metav1.MicroTime)."""
_ZEROS: Mapping[str, Any] = {"str": "", "int": 0, "bool": False}


class _Field(NamedTuple):
    number: int
    name: str
    pointer: bool
    inline: str
    """Name of the message whose fields the object has itself; otherwise empty."""


@cache
def _messages() -> Mapping[str, tuple[_Field, ...]]:
    found = {}
    for line in resources.files("narthex.lab.api").joinpath("protobuf_fields.txt").read_text().splitlines():
        name, *words = line.split(" ")
        found[name] = tuple(_field(word) for word in words)
    return found


def _field(word: str) -> _Field:
    number, _, name = word.partition("=")
    inline = name[1:-1] if name.startswith("(") else ""
    return _Field(int(number.rstrip("*")), name, number.endswith("*"), inline)


@cache
def _by_number(message: str) -> Mapping[int, _Field]:
    return {field.number: field for field in _messages().get(message, ())}


def message_of(version: str, kind: str) -> str:
    """Return the name of a kind's message, empty if there is none."""
    group, _, short = version.rpartition("/")
    module = "meta_v1" if kind in _META_KINDS else f"{group.partition('.')[0] or 'core'}_{short}"
    name = f"{module}.{kind}"
    return name if name in _messages() and named(name).sort == "struct" else ""


def decode(body: bytes) -> dict[str, Any]:
    """Decode a body that begins with MAGIC. Raises StatusError."""
    try:
        parts = dict(fields(body[len(MAGIC) :]))
        envelope = dict(fields(as_bytes(parts.get(1, b""))))
        version, kind = as_bytes(envelope.get(1, b"")).decode(), as_bytes(envelope.get(2, b"")).decode()
        message = message_of(version, kind)
        if not message:
            raise _unreadable(f"{kind} ({version})")
        return {"apiVersion": version, "kind": kind, **_struct(as_bytes(parts.get(2, b"")), message, named(message))}
    except (IndexError, UnicodeDecodeError, ValueError, OverflowError) as error:
        raise bad_request(f"error decoding the body: {error}") from None


def _unreadable(what: str) -> StatusError:
    message = f"{what} is not read as {MEDIA_TYPE} here: send application/json"
    return StatusError(415, "UnsupportedMediaType", message)


def _struct(data: bytes, message: str, of: FieldType) -> dict[str, Any]:
    known, found = _by_number(message), dict[str, Any]()
    for number, value in fields(data):
        field = known.get(number)
        if field is None:
            if value:
                raise _unreadable(f"field {number} of {message.rpartition('.')[2]}")
        elif field.inline:
            found |= _struct(as_bytes(value), field.inline, of)
        else:
            _add(found, field, value, field_type(of, field.name), field.name in of.required)
    return found


def _add(found: dict[str, Any], field: _Field, value: int | bytes, of: FieldType, required: bool) -> None:
    if of.sort == "list":
        some = found.setdefault(field.name, [])
        packed = of.item.sort == "int" and isinstance(value, bytes)
        some += _packed(as_bytes(value)) if packed else [_value(value, of.item, field.name)]
    elif of.sort == "map":
        pair = dict(fields(as_bytes(value)))
        key = as_bytes(pair.get(1, b"")).decode()
        found.setdefault(field.name, {})[key] = _value(pair.get(2, b""), of.item, field.name)
    else:
        read = _value(value, of, field.name)
        if read is not None and (field.pointer or required or read != _ZEROS.get(of.sort)):
            found[field.name] = read


def _packed(data: bytes) -> Iterator[int]:
    at = 0
    while at < len(data):
        number, at = varint(data, at)
        yield _signed(number)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _value(value: int | bytes, of: FieldType, name: str) -> Any:
    match of.sort:
        case "str":
            return as_bytes(value).decode()
        case "int":
            return _signed(as_number(value))
        case "bool":
            return bool(as_number(value))
        case "bytes":
            return base64.b64encode(as_bytes(value)).decode()
        case "quantity":
            return as_bytes(dict(fields(as_bytes(value))).get(1, b"")).decode()
        case "intstr":
            parts = dict(fields(as_bytes(value)))
            return as_bytes(parts.get(3, b"")).decode() if parts.get(1) else _signed(as_number(parts.get(2, 0)))
        case "time":
            return _time(dict(fields(as_bytes(value))), name)
        case "struct":
            return _struct(as_bytes(value), of.name, of)
        case "any":
            return _raw(as_bytes(value), name)
    raise _unreadable(f"field {name}")


def _time(parts: Mapping[int, int | bytes], name: str) -> str | None:
    if not parts:
        return None
    moment = datetime.fromtimestamp(_signed(as_number(parts.get(1, 0))), UTC)
    micro = as_number(parts.get(2, 0)) // 1000
    return moment.strftime("%Y-%m-%dT%H:%M:%S") + (f".{micro:06}Z" if name in _MICRO else "Z")


def _raw(data: bytes, name: str) -> Any:
    """Return what FieldsV1 or RawExtension contains: JSON."""
    parts = dict(fields(data))
    try:
        return msgspec.json.decode(as_bytes(parts[1])) if parts else None
    except (KeyError, msgspec.DecodeError):
        raise _unreadable(f"field {name}") from None


def encode(raw: Mapping[str, Any]) -> bytes:
    """Encode an object, a list of objects, or a Status. Raises StatusError (406) if its kind has no message."""
    version, kind = str(raw.get("apiVersion", "")), str(raw.get("kind", ""))
    message = message_of(version, kind)
    if message:
        body = _encoded(raw, message, named(message))
    elif message := message_of(version, kind.removesuffix("List")):
        body = part(1, _encoded(raw.get("metadata") or {}, "meta_v1.ListMeta", named("meta_v1.ListMeta")))
        body += b"".join(part(2, _encoded(each, message, named(message))) for each in raw["items"])
    else:
        raise StatusError(
            406, "NotAcceptable", f"{kind} ({version}) has no form as {MEDIA_TYPE}: accept application/json"
        )
    return MAGIC + part(1, text(1, version) + text(2, kind)) + part(2, body)


def watch_event(type: str, data: bytes) -> bytes:
    """Return one event of a watch with its encoded object: a WatchEvent after its length."""
    event = text(1, type) + part(2, part(1, data))
    return len(event).to_bytes(4, "big") + event


def _encoded(raw: Mapping[str, Any], message: str, of: FieldType) -> bytes:
    made = []
    for field in _messages()[message]:
        if field.inline:
            made.append(part(field.number, _encoded(raw, field.inline, of)))
        elif (value := raw.get(field.name)) is not None:
            made += _fields_of(field, value, field_type(of, field.name))
    return b"".join(made)


def _fields_of(field: _Field, value: Any, of: FieldType) -> Sequence[bytes]:
    if of.sort == "list":
        return [_one(field, each, of.item) for each in value]
    if of.sort == "map":
        entry = _Field(2, field.name, False, "")
        return [part(field.number, text(1, key) + _one(entry, each, of.item)) for key, each in value.items()]
    return [_one(field, value, of)]


def _one(field: _Field, value: Any, of: FieldType) -> bytes:
    number = field.number
    match of.sort:
        case "str":
            return part(number, str(value).encode())
        case "int" | "bool":
            return whole(number, int(value))
        case "bytes":
            return part(number, base64.b64decode(value))
        case "quantity":
            return part(number, text(1, str(value)))
        case "intstr":
            return part(
                number, whole(1, 1) + text(3, value) if isinstance(value, str) else whole(1, 0) + whole(2, value)
            )
        case "time":
            moment = datetime.fromisoformat(value.replace("Z", "+00:00"))
            return part(number, whole(1, int(moment.timestamp())) + whole(2, moment.microsecond * 1000))
        case "struct":
            return part(number, _encoded(value, of.name, of))
    return part(number, part(1, msgspec.json.encode(value)))
