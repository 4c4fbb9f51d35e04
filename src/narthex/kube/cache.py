"""The objects of one kind that are held, and what is wrong with those that cannot be used. Pure.

An object that cannot be decoded counts as absent, whatever it was before: what is held depends on what the server has
now and never on what was seen on the way.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from narthex.kube.messages import MalformedResponse
from narthex.model.decode.objects import Decoded, decode_json, decode_shape
from narthex.model.names import NamespacedName
from narthex.model.objects import AnyObject
from narthex.model.problem import Problem
from narthex.model.store import Delete, Event, Upsert
from narthex.model.wire import AnyWire

_Key = NamespacedName | None
"""None: nobody can tell which object it was."""


class ListCache:
    """What one list held, and what its watch told since."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._objects: dict[NamespacedName, AnyObject] = {}
        self._problems: dict[_Key, tuple[Problem, ...]] = {}

    def __len__(self) -> int:
        return len(self._objects)

    @property
    def objects(self) -> Collection[AnyObject]:
        """All that can be used."""
        return self._objects.values()

    @property
    def problems(self) -> tuple[Problem, ...]:
        """All that is wrong with objects now."""
        return tuple(problem for problems in self._problems.values() for problem in problems)

    @property
    def broken(self) -> int:
        """How many objects cannot be used."""
        return sum(any(each.severity == "error" for each in problems) for problems in self._problems.values())

    def put(self, raw: AnyWire | msgspec.Raw) -> Event | None:
        """An object is there, in its shape or as JSON."""
        decoded = self._decode(raw)
        key = self._key(decoded)
        if decoded.problems:
            self._problems[key] = decoded.problems
        elif self._problems:
            self._problems.pop(key, None)
        new = decoded.object
        if key is None or new is None:
            return Delete(self._kind, key) if key is not None and self._objects.pop(key, None) is not None else None
        if self._objects.get(key) == new:
            return None
        self._objects[key] = new
        return Upsert(new)

    def drop(self, raw: AnyWire | msgspec.Raw) -> Event | None:
        """An object is gone; its last state. Raises Garbled when nobody can tell which it was."""
        key = self._key(self._decode(raw))
        if key is None:
            raise MalformedResponse("a deleted object has no readable name")
        self._problems.pop(key, None)
        return Delete(self._kind, key) if self._objects.pop(key, None) is not None else None

    def replace(self, fresh: ListCache) -> list[Event]:
        """All that there is, is this: the difference."""
        events: list[Event] = [Delete(self._kind, key) for key in self._objects if key not in fresh._objects]
        before, self._objects = self._objects, {}
        for key, new in fresh._objects.items():
            old = before.get(key)
            if old is not None and old == new:
                # Whoever was told of it holds the old one: two of each would be twice the memory.
                self._objects[key] = old
            else:
                self._objects[key] = new
                events.append(Upsert(new))
        self._problems = fresh._problems
        return events

    def _decode(self, raw: AnyWire | msgspec.Raw) -> Decoded:
        return decode_json(raw, kind=self._kind) if isinstance(raw, msgspec.Raw) else decode_shape(raw, self._kind)

    def _key(self, decoded: Decoded) -> _Key:
        return decoded.identity[1] if decoded.identity is not None and decoded.identity[0] == self._kind else None
