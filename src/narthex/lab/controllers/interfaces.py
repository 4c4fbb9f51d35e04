"""What controllers see and what they answer: objects of the API as plain JSON, and writes.

Nobody may change an object that a view gave; who wants it otherwise builds another (`objects.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec

Object: TypeAlias = dict[str, Any]
"""One object as the API has it."""


class Key(NamedTuple):
    """Which of its kind an object is. `namespace` is empty for kinds without."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class Change(Protocol):
    """One write that happened."""

    @property
    def kind(self) -> str:
        """The Kind's name in the registry."""

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name."""

    @property
    def after(self) -> Object | None:
        """None: it is gone."""


class View(Protocol):
    """All objects at one moment, and what happened until then. `narthex.lab.api.registry.Registry` is one."""

    @property
    def version(self) -> int:
        """Grows with every write."""

    @property
    def kinds(self) -> Mapping[str, Any]:
        """All kinds, by name."""

    def list(self, kind: str, namespace: str = "") -> list[Object]:
        """All of a kind, or of a kind in a namespace."""

    def changes_since(self, version: int) -> Iterable[Change]:
        """What happened after that version, oldest first. Raises ApiFault 410 when that is forgotten."""


class Work(NamedTuple):
    """Who decided a write, and about which object."""

    controller: str
    key: Key


class Create(msgspec.Struct, frozen=True):
    """Make an object."""

    kind: str
    obj: Object
    by: Work | None = None


class Update(msgspec.Struct, frozen=True):
    """Replace an object. `obj` carries the resourceVersion on which this was decided."""

    kind: str
    obj: Object
    subresource: str = ""
    by: Work | None = None


class Delete(msgspec.Struct, frozen=True):
    """End an object. `grace` in seconds, None: as its kind has it."""

    kind: str
    namespace: str
    name: str
    grace: int | None = None
    by: Work | None = None


Write: TypeAlias = Create | Update | Delete


def named(write: Write) -> str:
    """What a write is about, for people."""
    if isinstance(write, Delete):
        return f"{write.kind} {Key(write.namespace, write.name)}"
    metadata = write.obj["metadata"]
    return f"{write.kind} {Key(metadata.get('namespace') or '', metadata['name'])}"


class Again(msgspec.Struct, frozen=True):
    """No write, but this object is to be looked at again at this moment, whatever happens until then."""

    at: datetime


Answer: TypeAlias = Write | Again
