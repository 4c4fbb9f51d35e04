"""Type-checked access to configuration fields. Errors name the field's path.

A second reader next to `runtime/configuration/fields.py`, which needs msgspec, re, and typing; see the ADR on value types of
the CNI plugins.
"""

from __future__ import annotations

from narthex.cni.errors import INVALID_CONFIG, CniError
from narthex.model import packed_addresses as address

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from narthex.model.packed_addresses import Network

    Fields = Mapping[str, object]


def wrong(path: str, what: str) -> CniError:
    """Return the error for a field."""
    return CniError(INVALID_CONFIG, f"{path}: {what}")


def text(fields: Fields, name: str, path: str = "", default: str = "") -> str:
    """Return a string; absent or null: the default."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise wrong(path + name, "must be a string")
    return value


def flag(fields: Fields, name: str, path: str = "", default: bool = False) -> bool:
    """Return a boolean; absent or null: the default."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong(path + name, "must be true or false")
    return value


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
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong(path + name, "must be an object")
    return value


def objects(fields: Fields, name: str, path: str = "") -> list[Fields]:
    """Return a list of objects; absent or null: empty."""
    value = items(fields, name, path)
    for number, one in enumerate(value):
        if not isinstance(one, dict):
            raise wrong(f"{path}{name}[{number}]", "must be an object")
    return value  # type: ignore[return-value]


def texts(fields: Fields, name: str, path: str = "") -> tuple[str, ...]:
    """Return a list of strings; absent or null: empty."""
    value = items(fields, name, path)
    for number, one in enumerate(value):
        if not isinstance(one, str):
            raise wrong(f"{path}{name}[{number}]", "must be a string")
    return tuple(value)  # type: ignore[arg-type]


def items(fields: Fields, name: str, path: str = "") -> list[object]:
    """Return a list of any values; absent or null: empty."""
    value = fields.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong(path + name, "must be a list")
    return value


def ip(value: str, path: str) -> bytes:
    """Return the packed form of an address."""
    try:
        return address.packed(value)
    except ValueError as error:
        raise wrong(path, str(error)) from None


def network(value: str, path: str) -> Network:
    """Return an address with its prefix length."""
    try:
        return address.network(value)
    except ValueError as error:
        raise wrong(path, str(error)) from None
