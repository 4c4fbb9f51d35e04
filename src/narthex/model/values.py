"""Frozen value classes for programs that run for milliseconds.

A container runtime starts a CNI plugin twice for every pod. Importing `msgspec`, `dataclasses`, or `typing` takes longer
than the plugin's work, so `Value` builds its classes from annotations alone.
"""

from __future__ import annotations

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
