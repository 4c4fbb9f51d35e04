"""Fields of a configuration, read with their type checked and their place named."""

from __future__ import annotations

from narthex.cni.errors import INVALID_CONFIG, CniError
from narthex.model import packed_addresses as address

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from narthex.model.packed_addresses import Network

    Fields = Mapping[str, object]


def wrong(place: str, what: str) -> CniError:
    """The error for a field."""
    return CniError(INVALID_CONFIG, f"{place}: {what}")


def text(fields: Fields, name: str, place: str = "", default: str = "") -> str:
    """A string; absent or null is the default."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise wrong(place + name, "must be a string")
    return value


def flag(fields: Fields, name: str, place: str = "", default: bool = False) -> bool:
    """true or false; absent or null is the default."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong(place + name, "must be true or false")
    return value


def whole(fields: Fields, name: str, least: int, most: int, place: str = "") -> int | None:
    """A whole number within bounds; None when absent."""
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise wrong(place + name, f"must be a whole number from {least} to {most}")
    return value


def part(fields: Fields, name: str, place: str = "") -> Fields:
    """An object; absent or null is an empty one."""
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong(place + name, "must be an object")
    return value


def objects(fields: Fields, name: str, place: str = "") -> list[Fields]:
    """A list of objects; absent or null is an empty one."""
    value = items(fields, name, place)
    for number, one in enumerate(value):
        if not isinstance(one, dict):
            raise wrong(f"{place}{name}[{number}]", "must be an object")
    return value  # type: ignore[return-value]


def texts(fields: Fields, name: str, place: str = "") -> tuple[str, ...]:
    """A list of strings; absent or null is an empty one."""
    value = items(fields, name, place)
    for number, one in enumerate(value):
        if not isinstance(one, str):
            raise wrong(f"{place}{name}[{number}]", "must be a string")
    return tuple(value)  # type: ignore[arg-type]


def items(fields: Fields, name: str, place: str = "") -> list[object]:
    """A list of anything; absent or null is an empty one."""
    value = fields.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong(place + name, "must be a list")
    return value


def ip(value: str, place: str) -> bytes:
    """The bytes of an address."""
    try:
        return address.packed(value)
    except ValueError as error:
        raise wrong(place, str(error)) from None


def network(value: str, place: str) -> Network:
    """An address with its prefix length."""
    try:
        return address.network(value)
    except ValueError as error:
        raise wrong(place, str(error)) from None
