"""Types that the controllers share: the objects they read and the writes they request.

Objects are plain JSON values. Objects from the registry are immutable by convention: copy them to change them (`objects.py`
has helpers).
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple, TypeAlias

import msgspec

Object: TypeAlias = dict[str, Any]
"""A Kubernetes object as decoded JSON."""


class ObjectKey(NamedTuple):
    """The namespace and name of an object. `namespace` is empty for cluster-scoped kinds."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class WorkItem(NamedTuple):
    """The controller and key that a write was decided for."""

    controller: str
    key: ObjectKey


class CreateObject(msgspec.Struct, frozen=True):
    """A request to create an object."""

    kind: str
    obj: Object
    by: WorkItem | None = None


class UpdateObject(msgspec.Struct, frozen=True):
    """A request to replace an object. `obj` carries the resourceVersion on which the decision is based."""

    kind: str
    obj: Object
    subresource: str = ""
    by: WorkItem | None = None


class DeleteObject(msgspec.Struct, frozen=True):
    """A request to delete an object. `grace` in seconds; None uses the default of the kind."""

    kind: str
    namespace: str
    name: str
    grace: int | None = None
    by: WorkItem | None = None


Write: TypeAlias = CreateObject | UpdateObject | DeleteObject


def describe_write(write: Write) -> str:
    """Return the kind and key of the object that a write concerns, for messages."""
    if isinstance(write, DeleteObject):
        return f"{write.kind} {ObjectKey(write.namespace, write.name)}"
    metadata = write.obj["metadata"]
    return f"{write.kind} {ObjectKey(metadata.get('namespace') or '', metadata['name'])}"


class RequeueAt(msgspec.Struct, frozen=True):
    """A request to reconcile the key again at a time, even if nothing changes until then."""

    at: datetime


ReconcileResult: TypeAlias = Write | RequeueAt
