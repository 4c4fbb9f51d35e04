"""Accessors and builders for fields of Kubernetes objects: keys, owners, conditions, times, pods."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from narthex.lab.controllers.interfaces import Object, ObjectKey

ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
"""Characters of generated names in Kubernetes: no vowels, so they form no words."""


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
    for reference in obj["metadata"].get("ownerReferences") or ():
        if reference.get("controller"):
            found: Mapping[str, Any] = reference
            return found
    return None


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


def condition(obj: Object, kind: str) -> Mapping[str, Any] | None:
    """Return the status condition of a type, None if it is absent."""
    for each in status_of(obj).get("conditions") or ():
        if each.get("type") == kind:
            found: Mapping[str, Any] = each
            return found
    return None


def condition_holds(obj: Object, kind: str) -> bool:
    """Return True if the status condition of a type is `True`."""
    found = condition(obj, kind)
    return found is not None and found.get("status") == "True"


def with_condition(conditions: Sequence[Mapping[str, Any]], new: Mapping[str, Any], now: datetime) -> list[Object]:
    """Return the conditions with `new` replacing the one of its type. `lastTransitionTime` changes only with the status."""
    made = dict(new)
    result: list[Object] = []
    found = False
    for each in conditions:
        if each.get("type") != made["type"]:
            result.append(dict(each))
            continue
        found = True
        same = each.get("status") == made["status"]
        since = each.get("lastTransitionTime") if same else None
        result.append({**made, "lastTransitionTime": since or format_time(now)})
    return result if found else [*result, {**made, "lastTransitionTime": format_time(now)}]


def with_metadata(obj: Object, **values: Any) -> Object:
    """Return a copy of the object with changed metadata fields. None removes a field."""
    metadata = {**obj["metadata"], **values}
    return {**obj, "metadata": {name: value for name, value in metadata.items() if value is not None}}


def with_spec(obj: Object, **values: Any) -> Object:
    """Return a copy of the object with changed spec fields. None removes a field."""
    spec = {**spec_of(obj), **values}
    return {**obj, "spec": {name: value for name, value in spec.items() if value is not None}}


def with_status(obj: Object, **values: Any) -> Object:
    """Return a copy of the object with changed status fields. None removes a field."""
    status = {**status_of(obj), **values}
    return {**obj, "status": {name: value for name, value in status.items() if value is not None}}


def format_time(time: datetime) -> str:
    """Format a time as `metav1.Time`, in whole seconds."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str | None) -> datetime | None:
    """Parse a `metav1.Time` or `metav1.MicroTime`; None if the text is not a time."""
    if not text:
        return None
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None


def integer_or(value: Any, default: int = 0) -> int:
    """Return an integer field, or `default` if it is absent or not an integer."""
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def hash_suffix(text: str, length: int) -> str:
    """Return the suffix of a generated name, derived from a hash of `text`."""
    rest = int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")
    chosen = []
    for _ in range(length):
        rest, digit = divmod(rest, len(ALPHABET))
        chosen.append(ALPHABET[digit])
    return "".join(chosen)


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
