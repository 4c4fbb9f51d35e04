"""The objects of one list, and the problems of those that cannot be used. Pure.

An object that cannot be decoded counts as absent, whatever it was before. The content depends only on what the server
has now, never on the order of events.
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
"""None if the object's identity cannot be read."""


class ListCache:
    """The content of one list, kept up to date by its watch."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._objects: dict[NamespacedName, AnyObject] = {}
        self._problems: dict[_Key, tuple[Problem, ...]] = {}

    def __len__(self) -> int:
        return len(self._objects)

    @property
    def objects(self) -> Collection[AnyObject]:
        """Return all usable objects."""
        return self._objects.values()

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Return the present problems of objects."""
        return tuple(problem for problems in self._problems.values() for problem in problems)

    @property
    def broken(self) -> int:
        """Return the number of objects that cannot be used."""
        return sum(any(each.severity == "error" for each in problems) for problems in self._problems.values())

    def put(self, raw: AnyWire | msgspec.Raw) -> Event | None:
        """Add or replace an object, given as a shape of `model.wire` or as JSON; return the event, if any."""
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
        """Remove an object, given its last state. Raises MalformedResponse if its identity cannot be read."""
        key = self._key(self._decode(raw))
        if key is None:
            raise MalformedResponse("a deleted object has no readable name")
        self._problems.pop(key, None)
        return Delete(self._kind, key) if self._objects.pop(key, None) is not None else None

    def replace(self, fresh: ListCache) -> list[Event]:
        """Replace the whole content and return the differences as events."""
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
