"""How Kubernetes' objects say the things that controllers ask: names, owners, conditions, times."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from narthex.lab.controllers.interfaces import Object, ObjectKey

ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
"""Letters that form no words, as in Kubernetes' generated names."""


def key_of(obj: Object) -> ObjectKey:
    """Namespace and name."""
    metadata = obj["metadata"]
    return ObjectKey(metadata.get("namespace") or "", metadata["name"])


def labels_of(obj: Object) -> Mapping[str, str]:
    """Its labels."""
    return obj["metadata"].get("labels") or {}


def annotations_of(obj: Object) -> Mapping[str, str]:
    """Its annotations."""
    return obj["metadata"].get("annotations") or {}


def uid_of(obj: Object) -> str:
    """Its uid, empty while it has none."""
    return obj["metadata"].get("uid") or ""


def is_terminating(obj: Object) -> bool:
    """Somebody has deleted it, and it is still there."""
    return bool(obj["metadata"].get("deletionTimestamp"))


def spec_of(obj: Object) -> Mapping[str, Any]:
    """Its spec."""
    return obj.get("spec") or {}


def status_of(obj: Object) -> Mapping[str, Any]:
    """Its status."""
    return obj.get("status") or {}


def controller_of(obj: Object) -> Mapping[str, Any] | None:
    """The reference to the owner that controls it."""
    for reference in obj["metadata"].get("ownerReferences") or ():
        if reference.get("controller"):
            found: Mapping[str, Any] = reference
            return found
    return None


def controlled_by(obj: Object, owner: Object) -> bool:
    """Whether `owner` is its controller."""
    reference = controller_of(obj)
    return reference is not None and reference.get("uid") == uid_of(owner)


def reference_to(owner: Object) -> Object:
    """What the objects that `owner` controls have among their ownerReferences."""
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": uid_of(owner),
        "controller": True,
        "blockOwnerDeletion": True,
    }


def condition(obj: Object, kind: str) -> Mapping[str, Any] | None:
    """One condition of its status."""
    for each in status_of(obj).get("conditions") or ():
        if each.get("type") == kind:
            found: Mapping[str, Any] = each
            return found
    return None


def condition_holds(obj: Object, kind: str) -> bool:
    """Whether a condition is True."""
    found = condition(obj, kind)
    return found is not None and found.get("status") == "True"


def with_condition(conditions: Sequence[Mapping[str, Any]], new: Mapping[str, Any], now: datetime) -> list[Object]:
    """The conditions with `new` in the place of the one of its type. `lastTransitionTime` is kept while the status is."""
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
    """The object with other metadata. A value of None takes a field away."""
    metadata = {**obj["metadata"], **values}
    return {**obj, "metadata": {name: value for name, value in metadata.items() if value is not None}}


def with_spec(obj: Object, **values: Any) -> Object:
    """The object with another spec. A value of None takes a field away."""
    spec = {**spec_of(obj), **values}
    return {**obj, "spec": {name: value for name, value in spec.items() if value is not None}}


def with_status(obj: Object, **values: Any) -> Object:
    """The object with another status. A value of None takes a field away."""
    status = {**status_of(obj), **values}
    return {**obj, "status": {name: value for name, value in status.items() if value is not None}}


def format_time(time: datetime) -> str:
    """As `metav1.Time` prints it: whole seconds."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str | None) -> datetime | None:
    """What `metav1.Time` or `MicroTime` says; None for what is no time."""
    if not text:
        return None
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None


def integer_or(value: Any, default: int = 0) -> int:
    """A whole number of a spec that may be missing or written badly."""
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def hash_suffix(text: str, length: int) -> str:
    """A name's end that follows from `text`."""
    rest = int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")
    chosen = []
    for _ in range(length):
        rest, digit = divmod(rest, len(ALPHABET))
        chosen.append(ALPHABET[digit])
    return "".join(chosen)


# Pods.


def is_pod_ready(pod: Object) -> bool:
    """Its condition Ready."""
    return condition_holds(pod, "Ready")


def is_pod_finished(pod: Object) -> bool:
    """Its containers have ended and are not started again."""
    return status_of(pod).get("phase") in ("Succeeded", "Failed")


def is_pod_active(pod: Object) -> bool:
    """It runs or is going to."""
    return not is_pod_finished(pod) and not is_terminating(pod)


def pod_addresses(pod: Object) -> list[str]:
    """Its addresses, one of a family."""
    status = status_of(pod)
    many = [each["ip"] for each in status.get("podIPs") or () if each.get("ip")]
    return many or ([status["podIP"]] if status.get("podIP") else [])
