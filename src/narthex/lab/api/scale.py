"""The scale subresource: autoscaling/v1 Scale of Deployments, ReplicaSets and custom kinds that have one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narthex.lab.api import errors as faults
from narthex.lab.api.columns_custom import values
from narthex.lab.api.errors import Wrong
from narthex.lab.api.kinds import Kind

_SPEC, _STATUS, _SELECTOR = "specReplicasPath", "statusReplicasPath", "labelSelectorPath"


def read(kind: Kind, raw: Mapping[str, Any]) -> dict[str, Any]:
    """An object's Scale."""
    meta = {
        name: raw["metadata"].get(name) for name in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    }
    wanted, there = (
        _found(raw, kind.scale.get(_SPEC, ".spec.replicas")),
        _found(raw, kind.scale.get(_STATUS, ".status.replicas")),
    )
    status: dict[str, Any] = {"replicas": there or 0}
    if selector := _selector(kind, raw):
        status["selector"] = selector
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {name: value for name, value in meta.items() if value is not None},
        "spec": {"replicas": wanted or 0},
        "status": status,
    }


def write(kind: Kind, raw: Mapping[str, Any], scale: Mapping[str, Any]) -> dict[str, Any]:
    """The object with the replicas of a Scale. Raises ApiFault."""
    name = str(raw["metadata"].get("name", ""))
    wanted = (scale.get("spec") or {}).get("replicas", 0)
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 0:
        text = f"Invalid value: {wanted}: must be greater than or equal to 0"
        raise faults.invalid("Scale", "autoscaling", name, [Wrong("spec.replicas", "FieldValueInvalid", text)])
    version = (scale.get("metadata") or {}).get("resourceVersion")
    meta = {key: value for key, value in raw["metadata"].items() if key != "resourceVersion"}
    new = {**raw, "metadata": {**meta, **({"resourceVersion": version} if version else {})}}
    *way, last = kind.scale.get(_SPEC, ".spec.replicas").strip(".").split(".")
    at = new
    for step in way:
        at[step] = dict(at.get(step) or {})
        at = at[step]
    at[last] = wanted
    return new


def _found(raw: Mapping[str, Any], path: str) -> Any:
    return next(iter(values(raw, path)), None)


def _selector(kind: Kind, raw: Mapping[str, Any]) -> str:
    if kind.custom:
        return str(_found(raw, kind.scale.get(_SELECTOR, "")) or "") if kind.scale.get(_SELECTOR) else ""
    selector = (raw.get("spec") or {}).get("selector") or {}
    words = [f"{key}={value}" for key, value in sorted((selector.get("matchLabels") or {}).items())]
    form = {"In": "{} in ({})", "NotIn": "{} notin ({})", "Exists": "{}", "DoesNotExist": "!{}"}
    for each in selector.get("matchExpressions") or ():
        values_of = ",".join(each.get("values") or ())
        words.append(form.get(each.get("operator"), "{}").format(each.get("key"), values_of))
    return ",".join(words)
