"""How many pods each ReplicaSet of a Deployment gets (kubernetes `pkg/controller/deployment`, rolling.go and sync.go).

Pure arithmetic: sizes in, sizes out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from narthex.lab.controllers.interfaces import Object
from narthex.lab.controllers.objects import integer_or, spec_of

_PERCENT = re.compile(r"\d{1,9}%", re.ASCII)


class RolloutLimits(msgspec.Struct, frozen=True):
    """Between what a rollout must stay."""

    replicas: int
    surge: int
    """So many more there may be."""
    unavailable: int
    """So many fewer may be available."""

    @property
    def most(self) -> int:
        """Pods at most. A Deployment of none has no surge."""
        return self.replicas + self.surge if self.replicas else 0

    @property
    def least(self) -> int:
        """Available pods at least."""
        return self.replicas - self.unavailable


class ReplicaSetSize(msgspec.Struct, frozen=True):
    """One ReplicaSet, as a rollout sees it. Given oldest first."""

    name: str
    replicas: int
    available: int
    """At most `replicas`: what is about to go counts no more."""
    most_before: int | None = None
    """What the Deployment's `most` was when this one was scaled last."""


def is_rolling(deployment: Object) -> bool:
    """Its strategy is not Recreate."""
    return bool((spec_of(deployment).get("strategy") or {}).get("type") != "Recreate")


def replicas_of(deployment: Object) -> int:
    """What `spec.replicas` says."""
    return integer_or(spec_of(deployment).get("replicas"), 1)


def rollout_limits(deployment: Object) -> RolloutLimits:
    """maxSurge rounded up, maxUnavailable rounded down; when both come to nothing, one may be missing."""
    replicas = replicas_of(deployment)
    if not is_rolling(deployment):
        return RolloutLimits(replicas, 0, 0)
    rolling: Mapping[str, Any] = (spec_of(deployment).get("strategy") or {}).get("rollingUpdate") or {}
    surge = _part(rolling.get("maxSurge", "25%"), replicas, up=True)
    unavailable = _part(rolling.get("maxUnavailable", "25%"), replicas, up=False)
    if not surge and not unavailable:
        unavailable = 1
    return RolloutLimits(replicas, surge, min(unavailable, replicas))


def _part(value: object, whole: int, *, up: bool) -> int:
    if isinstance(value, str) and _PERCENT.fullmatch(value):
        share = int(value[:-1]) * whole
        return -(-share // 100) if up else share // 100
    return max(0, integer_or(value))


def scale_new(new: ReplicaSetSize, old: Sequence[ReplicaSetSize], limits: RolloutLimits) -> int:
    """The new one's size: up to what the surge leaves, and never beyond what is wanted."""
    if new.replicas >= limits.replicas:
        return limits.replicas
    room = limits.replicas + limits.surge - new.replicas - sum(each.replicas for each in old)
    return new.replicas + max(0, min(room, limits.replicas - new.replicas))


def scale_old(new: ReplicaSetSize, old: Sequence[ReplicaSetSize], limits: RolloutLimits) -> dict[str, int]:
    """The old ones' sizes where they change: first without what is not available anyway, then as far down as the pods
    that are available allow."""
    total = new.replicas + sum(each.replicas for each in old)
    to_go = total - limits.least - (new.replicas - new.available)
    if to_go <= 0:
        return {}
    sizes = {each.name: each.replicas for each in old}
    for each in old:
        gone = min(to_go, each.replicas - each.available)
        sizes[each.name] -= gone
        to_go -= gone
    spare = new.available + sum(each.available for each in old) - limits.least
    for each in old:
        gone = max(0, min(spare, sizes[each.name]))
        sizes[each.name] -= gone
        spare -= gone
    return {each.name: sizes[each.name] for each in old if sizes[each.name] != each.replicas}


def scale_proportionally(sets: Sequence[ReplicaSetSize], limits: RolloutLimits, pods: int) -> dict[str, int]:
    """The sizes of ReplicaSets of which several have pods, when the Deployment is scaled: each gets its share, and what
    rounding leaves goes to the largest. `pods`: what the Deployment's status counts."""
    change = limits.most - sum(each.replicas for each in sets)
    if not change:
        return {each.name: each.replicas for each in sets}
    # The largest first; of equal ones the newest when there are more to be, the oldest when fewer.
    order = sorted(enumerate(sets), key=lambda pair: (-pair[1].replicas, -pair[0] if change > 0 else pair[0]))
    sizes: dict[str, int] = {}
    added = 0
    for _, each in order:
        share = _share(each, limits, pods) if added != change else 0
        part = min(share, change - added) if change > 0 else max(share, change - added)
        part = max(part, -each.replicas)
        sizes[each.name] = each.replicas + part
        added += part
    for _, each in order:
        if added == change:
            break
        part = max(change - added, -sizes[each.name])
        sizes[each.name] += part
        added += part
    return sizes


def _share(each: ReplicaSetSize, limits: RolloutLimits, pods: int) -> int:
    if not limits.replicas:
        return -each.replicas
    before = each.most_before or pods or limits.most
    return math.floor(each.replicas * limits.most / before + 0.5) - each.replicas
