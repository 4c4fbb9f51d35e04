"""Type-checked access to configuration fields. Errors name the field's path.

A second reader next to `runtime/configuration/fields.py`, which needs msgspec, re, and typing; see the ADR on value types of
the CNI plugins.
"""

from __future__ import annotations

from narthex.cni.errors import INVALID_CONFIG, CniError
from narthex.model.values import packed_address, packed_network

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeVar

    from narthex.model.values import Network

    Fields = Mapping[str, object]
    T = TypeVar("T")


def wrong(path: str, what: str) -> CniError:
    """Return the error for a field."""
    return CniError(INVALID_CONFIG, f"{path}: {what}")


def _typed(fields: Fields, where: tuple[str, str], kind: type[T], what: str, default: T) -> T:
    """Return a value of a type; absent or null: the default. `where` is name and path."""
    name, path = where
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise wrong(path + name, f"must be {what}")
    return value


def text(fields: Fields, name: str, path: str = "", default: str = "") -> str:
    """Return a string; absent or null: the default."""
    return _typed(fields, (name, path), str, "a string", default)


def flag(fields: Fields, name: str, path: str = "", default: bool = False) -> bool:
    """Return a boolean; absent or null: the default."""
    return _typed(fields, (name, path), bool, "true or false", default)


def whole(fields: Fields, name: str, least: int, most: int, path: str = "") -> int | None:
    """Return an integer within bounds; None if absent."""
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise wrong(path + name, f"must be a whole number from {least} to {most}")
    return value


def part(fields: Fields, name: str, path: str = "") -> Fields:
    """Return an object; absent or null: empty."""
    return _typed(fields, (name, path), dict, "an object", {})


def items(fields: Fields, name: str, path: str = "") -> list[object]:
    """Return a list of any values; absent or null: empty."""
    return _typed(fields, (name, path), list, "a list", [])


def objects(fields: Fields, name: str, path: str = "") -> list[Fields]:
    """Return a list of objects; absent or null: empty."""
    return _items_of(fields, name, path, dict, "an object")


def texts(fields: Fields, name: str, path: str = "") -> tuple[str, ...]:
    """Return a list of strings; absent or null: empty."""
    return tuple(_items_of(fields, name, path, str, "a string"))


def _items_of(fields: Fields, name: str, path: str, kind: type[T], what: str) -> list[T]:
    value = items(fields, name, path)
    for number, one in enumerate(value):
        if not isinstance(one, kind):
            raise wrong(f"{path}{name}[{number}]", f"must be {what}")
    return value  # type: ignore[return-value]


def ip(value: str, path: str) -> bytes:
    """Return the packed form of an address."""
    try:
        return packed_address(value)
    except ValueError as error:
        raise wrong(path, str(error)) from None


def network(value: str, path: str) -> Network:
    """Return an address with its prefix length."""
    try:
        return packed_network(value)
    except ValueError as error:
        raise wrong(path, str(error)) from None


def optional_ip(fields: Fields, name: str, path: str = "") -> bytes:
    """Return the packed form of an address field; absent or empty: empty."""
    value = text(fields, name, path)
    return ip(value, path + name) if value else b""


def directory(fields: Fields, name: str, path: str, default: str) -> str:
    """Return an absolute path without a slash at its end."""
    value = text(fields, name, path) or default
    if not value.startswith("/") or "\0" in value or ".." in value.split("/"):
        raise wrong(path + name, "must be an absolute path without '..'")
    return value.rstrip("/")
