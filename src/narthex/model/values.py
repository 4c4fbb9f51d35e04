"""Frozen value classes, and addresses and networks as packed bytes, for programs that run for milliseconds.

A container runtime starts a CNI plugin twice for every pod. Importing `msgspec`, `dataclasses`, or `typing` takes longer
than the plugin's work, so `Value` builds its classes from annotations alone. `net.py` has addresses as strings.
"""

from __future__ import annotations

from _socket import AF_INET, AF_INET6, inet_ntop, inet_pton

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, dataclass_transform
else:

    def dataclass_transform(**_):
        """Return a decorator that does nothing; only type checkers need the real one."""
        return lambda cls: cls


@dataclass_transform(frozen_default=True)
class Value:
    """Base class of frozen values: the annotated fields, in order, define construction, equality, hash, and repr."""

    _fields: tuple[str, ...] = ()

    def __init_subclass__(cls) -> None:
        cls._fields = (*cls._fields, *(name for name in cls.__annotations__ if name[0] != "_"))

    def __init__(self, *values: Any, **named: Any) -> None:
        own = dict(zip(self._fields, values, strict=False))
        own.update(named)
        for name in self._fields:
            if name not in own and not hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} needs {name}")
        if len(values) > len(self._fields) or not own.keys() <= set(self._fields):
            raise TypeError(f"{type(self).__name__} has only {', '.join(self._fields)}")
        self.__dict__.update(own)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} does not change: cannot set {name}")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        inner = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._fields)
        return f"{type(self).__name__}({inner})"

    def _values(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in self._fields)


def packed_address(text: str) -> bytes:
    """Return the packed bytes of an address; an IPv4-mapped IPv6 address becomes IPv4. Raises ValueError."""
    try:
        if ":" not in text:
            return inet_pton(AF_INET, text)
        data = inet_pton(AF_INET6, text)
    except (OSError, ValueError):
        raise ValueError(f"{text[:64]!r} is not an IP address") from None
    return data[12:] if data.startswith(b"\0" * 10 + b"\xff\xff") else data


def address_text(address: bytes) -> str:
    """Return the canonical text of a packed address."""
    return inet_ntop(AF_INET if len(address) == 4 else AF_INET6, address)


def ip_version(address: bytes) -> int:
    """Return the IP version of a packed address, 4 or 6."""
    return 4 if len(address) == 4 else 6


def address_number(address: bytes) -> int:
    """Return a packed address as an integer."""
    return int.from_bytes(address, "big")


class Network(Value):
    """An address with a prefix length. Host bits may be set."""

    address: bytes
    prefix: int

    @property
    def first(self) -> bytes:
        """The network address: all host bits 0."""
        bits = 8 * len(self.address)
        mask = (1 << bits) - (1 << bits - self.prefix)
        return (address_number(self.address) & mask).to_bytes(len(self.address), "big")

    @property
    def last(self) -> bytes:
        """The highest address: all host bits 1."""
        bits = 8 * len(self.address)
        return (address_number(self.first) + (1 << bits - self.prefix) - 1).to_bytes(len(self.address), "big")

    def holds(self, address: bytes) -> bool:
        """Return True if an address is in the network."""
        return len(address) == len(self.address) and self.first <= address <= self.last

    def overlaps(self, other: Network) -> bool:
        """Return True if the two networks share an address."""
        return len(self.address) == len(other.address) and self.first <= other.last and other.first <= self.last

    def __str__(self) -> str:
        return f"{address_text(self.address)}/{self.prefix}"


def packed_network(cidr: str) -> Network:
    """Parse an address with prefix length such as `10.0.0.1/24`. Raises ValueError."""
    address, slash, prefix = cidr.partition("/")
    data = packed_address(address)
    if not slash or not (prefix.isascii() and prefix.isdigit()) or len(prefix) > 3 or int(prefix) > 8 * len(data):
        raise ValueError(f"{cidr[:64]!r} is not an address with a prefix length")
    return Network(data, int(prefix))
