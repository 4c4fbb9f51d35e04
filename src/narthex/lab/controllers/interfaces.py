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


class ObjectKey(NamedTuple):
    """Which of its kind an object is. `namespace` is empty for kinds without."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class RecordedChange(Protocol):
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


class RegistryView(Protocol):
    """All objects at one moment, and what happened until then. `narthex.lab.api.registry.Registry` is one."""

    @property
    def version(self) -> int:
        """Grows with every write."""

    @property
    def kinds(self) -> Mapping[str, Any]:
        """All kinds, by name."""

    def list(self, kind: str, namespace: str = "") -> list[Object]:
        """All of a kind, or of a kind in a namespace."""

    def changes_since(self, version: int) -> Iterable[RecordedChange]:
        """What happened after that version, oldest first. Raises ApiFault 410 when that is forgotten."""


class WorkItem(NamedTuple):
    """Who decided a write, and about which object."""

    controller: str
    key: ObjectKey


class CreateObject(msgspec.Struct, frozen=True):
    """Make an object."""

    kind: str
    obj: Object
    by: WorkItem | None = None


class UpdateObject(msgspec.Struct, frozen=True):
    """Replace an object. `obj` carries the resourceVersion on which this was decided."""

    kind: str
    obj: Object
    subresource: str = ""
    by: WorkItem | None = None


class DeleteObject(msgspec.Struct, frozen=True):
    """End an object. `grace` in seconds, None: as its kind has it."""

    kind: str
    namespace: str
    name: str
    grace: int | None = None
    by: WorkItem | None = None


Write: TypeAlias = CreateObject | UpdateObject | DeleteObject


def describe_write(write: Write) -> str:
    """What a write is about, for people."""
    if isinstance(write, DeleteObject):
        return f"{write.kind} {ObjectKey(write.namespace, write.name)}"
    metadata = write.obj["metadata"]
    return f"{write.kind} {ObjectKey(metadata.get('namespace') or '', metadata['name'])}"


class RequeueAt(msgspec.Struct, frozen=True):
    """No write, but this object is to be looked at again at this moment, whatever happens until then."""

    at: datetime


ReconcileResult: TypeAlias = Write | RequeueAt
