"""Objects of the API as controllers read and write them: keys, requests to write, fields, conditions, times.

Objects are plain JSON values. Objects from the registry are immutable by convention; the functions `with_...` return copies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypeAlias

import msgspec

from narthex.lab.api.registry import stamp
from narthex.model import NamespacedName

Object: TypeAlias = dict[str, Any]
"""A Kubernetes object as decoded JSON."""
ObjectKey: TypeAlias = NamespacedName
"""The namespace and name of an object. `namespace` is empty for cluster-scoped kinds."""

ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
"""Characters of generated names in Kubernetes: no vowels, so they form no words."""


class CreateObject(msgspec.Struct, frozen=True):
    """A request to create an object. The registry adds `apiVersion` and `kind`."""

    kind: str
    obj: Object


class UpdateObject(msgspec.Struct, frozen=True):
    """A request to replace an object. `obj` carries the resourceVersion on which the decision is based."""

    kind: str
    obj: Object
    subresource: str = ""


class DeleteObject(msgspec.Struct, frozen=True):
    """A request to delete an object. `grace` in seconds; None uses the default of the kind."""

    kind: str
    key: ObjectKey
    grace: int | None = None


class RequeueAt(msgspec.Struct, frozen=True):
    """A request to reconcile the key again at a time, even if nothing changes until then."""

    at: datetime


Write: TypeAlias = CreateObject | UpdateObject | DeleteObject
ReconcileResult: TypeAlias = Write | RequeueAt


def key_of(obj: Object) -> ObjectKey:
    """Return the namespace and name."""
    metadata = obj["metadata"]
    return ObjectKey(metadata.get("namespace") or "", metadata["name"])


def labels_of(obj: Object) -> Mapping[str, str]:
    """Return the labels."""
    return obj["metadata"].get("labels") or {}


def annotations_of(obj: Object) -> Mapping[str, str]:
    """Return the annotations."""
    return obj["metadata"].get("annotations") or {}


def uid_of(obj: Object) -> str:
    """Return the UID, empty if it has none yet."""
    return obj["metadata"].get("uid") or ""


def finalizers_of(obj: Object) -> list[str]:
    """Return the finalizers."""
    return obj["metadata"].get("finalizers") or []


def without_finalizer(kind: str, obj: Object, finalizer: str) -> UpdateObject:
    """Return the update that removes a finalizer."""
    rest = [each for each in finalizers_of(obj) if each != finalizer]
    return UpdateObject(kind, with_fields(obj, "metadata", finalizers=rest or None))


def owners_of(obj: Object) -> list[Object]:
    """Return the owner references."""
    return obj["metadata"].get("ownerReferences") or []


def is_terminating(obj: Object) -> bool:
    """Return True if the object has a deletionTimestamp."""
    return bool(obj["metadata"].get("deletionTimestamp"))


def spec_of(obj: Object) -> Mapping[str, Any]:
    """Return the spec."""
    return obj.get("spec") or {}


def status_of(obj: Object) -> Mapping[str, Any]:
    """Return the status."""
    return obj.get("status") or {}


def controller_of(obj: Object) -> Mapping[str, Any] | None:
    """Return the owner reference with `controller: true`, None if there is none."""
    return next((each for each in owners_of(obj) if each.get("controller")), None)


def controlled_by(obj: Object, owner: Object) -> bool:
    """Return True if `owner` is the controller of the object."""
    reference = controller_of(obj)
    return reference is not None and reference.get("uid") == uid_of(owner)


def reference_to(owner: Object) -> Object:
    """Return the controller's owner reference for objects that `owner` creates."""
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": uid_of(owner),
        "controller": True,
        "blockOwnerDeletion": True,
    }


def condition(obj: Object, kind: str) -> Mapping[str, Any]:
    """Return the status condition of a type, empty if it is absent."""
    return next((each for each in status_of(obj).get("conditions") or () if each.get("type") == kind), {})


def condition_holds(obj: Object, kind: str) -> bool:
    """Return True if the status condition of a type is `True`."""
    return condition(obj, kind).get("status") == "True"


def with_condition(conditions: Sequence[Object], new: Mapping[str, Any], now: datetime) -> list[Object]:
    """Return the conditions with `new` replacing the one of its type. `lastTransitionTime` changes only with the status."""
    before = next((each for each in conditions if each.get("type") == new["type"]), None)
    since = before.get("lastTransitionTime") if before and before.get("status") == new["status"] else None
    made = {**new, "lastTransitionTime": since or stamp(now)}
    return [*conditions, made] if before is None else [made if each is before else each for each in conditions]


def update_condition(kind: str, obj: Object, new: Mapping[str, Any], now: datetime, **status: Any) -> UpdateObject:
    """Return the update of a condition, and of other fields of the status."""
    conditions = with_condition(status_of(obj).get("conditions") or [], new, now)
    return UpdateObject(kind, with_fields(obj, "status", conditions=conditions, **status), "status")


def with_fields(obj: Object, section: str, **values: Any) -> Object:
    """Return a copy of the object with changed fields of `metadata`, `spec`, or `status`. None removes a field."""
    fields = {**(obj.get(section) or {}), **values}
    return {**obj, section: {name: value for name, value in fields.items() if value is not None}}


def parse_time(text: str | None) -> datetime | None:
    """Parse a `metav1.Time` or `metav1.MicroTime`; None if the text is not a time."""
    try:
        return datetime.fromisoformat(text) if text else None
    except ValueError:
        return None


def integer_or(value: Any, default: int = 0) -> int:
    """Return an integer field, or `default` if it is absent or not an integer."""
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def decimal(text: str, most_digits: int = 9) -> int | None:
    """Return the number that decimal digits mean; None for any other or a longer text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= most_digits else None


def hash_suffix(text: str, length: int) -> str:
    """Return the suffix of a generated name, derived from a hash of `text`."""
    rest = int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")
    chosen = []
    for _ in range(length):
        rest, digit = divmod(rest, len(ALPHABET))
        chosen.append(ALPHABET[digit])
    return "".join(chosen)


def replicas_of(obj: Object) -> int:
    """Return `spec.replicas` of a Deployment or ReplicaSet, 1 if absent."""
    return integer_or(spec_of(obj).get("replicas"), 1)


def is_pod_ready(pod: Object) -> bool:
    """Return True if the condition Ready is `True`."""
    return condition_holds(pod, "Ready")


def is_pod_finished(pod: Object) -> bool:
    """Return True if all containers have ended and are not restarted."""
    return status_of(pod).get("phase") in ("Succeeded", "Failed")


def is_pod_active(pod: Object) -> bool:
    """Return True if the pod is neither finished nor terminating."""
    return not is_pod_finished(pod) and not is_terminating(pod)


def pod_addresses(pod: Object) -> list[str]:
    """Return the pod's IP addresses, one for each family."""
    status = status_of(pod)
    many = [each["ip"] for each in status.get("podIPs") or () if each.get("ip")]
    return many or ([status["podIP"]] if status.get("podIP") else [])
