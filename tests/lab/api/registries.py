"""Registries in made-up time, with names that come out the same each time."""

import hashlib
from datetime import UTC, datetime, timedelta
from typing import Any

from narthex.lab.api.registry import Registry, admit_all

START = datetime(2026, 5, 5, 10, 0, 0, tzinfo=UTC)


class World:
    """A clock and a source of bytes that can be foreseen."""

    def __init__(self) -> None:
        self.at = START
        self.drawn = 0

    def now(self) -> Any:
        return self.at

    def later(self, seconds: float) -> None:
        self.at += timedelta(seconds=seconds)

    def entropy(self, count: int) -> bytes:
        self.drawn += 1
        return hashlib.sha256(str(self.drawn).encode()).digest()[:count]


def registry(world: World | None = None, admit: Any = admit_all) -> Registry:
    world = world or World()
    return Registry(world.now, world.entropy, admit=admit)


def thing(name: str, namespace: str = "shop", /, **more: Any) -> dict[str, Any]:
    """An object with a name; other fields as given."""
    meta = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {"metadata": meta | more.pop("metadata", {}), **more}
