"""Sizes of a Deployment's ReplicaSets during rollout and scaling (kubernetes `pkg/controller/deployment/{rolling,sync}.go`)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from narthex.lab.controllers.objects import Object, integer_or, replicas_of, spec_of

_PERCENT = re.compile(r"\d{1,9}%", re.ASCII)


class RolloutLimits(msgspec.Struct, frozen=True):
    """Limits on the number of pods during a rollout."""

    replicas: int
    surge: int
    """Pods above `replicas` that may exist."""
    unavailable: int
    """Pods below `replicas` that may be missing."""

    @property
    def max_pods(self) -> int:
        """Maximum number of pods. A Deployment with zero replicas has no surge."""
        return self.replicas + self.surge if self.replicas else 0

    @property
    def min_available(self) -> int:
        """Minimum number of available pods."""
        return self.replicas - self.unavailable


class ReplicaSetSize(msgspec.Struct, frozen=True):
    """Replica counts of one ReplicaSet. Sequences are sorted oldest first."""

    name: str
    replicas: int
    available: int
    """At most `replicas`: surplus pods no longer count."""
    max_pods_before: int | None = None
    """The Deployment's `max_pods` when the ReplicaSet was last scaled."""


def is_rolling(deployment: Object) -> bool:
    """Return True unless the strategy is Recreate."""
    return bool((spec_of(deployment).get("strategy") or {}).get("type") != "Recreate")


def rollout_limits(deployment: Object) -> RolloutLimits:
    """Return the limits: maxSurge rounded up, maxUnavailable rounded down, and 1 unavailable if both are 0."""
    replicas = replicas_of(deployment)
    if not is_rolling(deployment):
        return RolloutLimits(replicas, 0, 0)
    rolling: Mapping[str, Any] = (spec_of(deployment).get("strategy") or {}).get("rollingUpdate") or {}
    surge = part_of(rolling.get("maxSurge", "25%"), replicas, up=True)
    unavailable = part_of(rolling.get("maxUnavailable", "25%"), replicas, up=False)
    if not surge and not unavailable:
        unavailable = 1
    return RolloutLimits(replicas, surge, min(unavailable, replicas))


def part_of(value: object, whole: int, *, up: bool) -> int:
    """Return a number, or a percentage of `whole`, rounded up or down."""
    if isinstance(value, str) and _PERCENT.fullmatch(value):
        share = int(value[:-1]) * whole
        return -(-share // 100) if up else share // 100
    return max(0, integer_or(value))


def scale_new(new: ReplicaSetSize, old: Sequence[ReplicaSetSize], limits: RolloutLimits) -> int:
    """Return the size of the new ReplicaSet: as large as the surge allows, at most `limits.replicas`."""
    if new.replicas >= limits.replicas:
        return limits.replicas
    room = limits.replicas + limits.surge - new.replicas - sum(each.replicas for each in old)
    return new.replicas + max(0, min(room, limits.replicas - new.replicas))


def scale_old(new: ReplicaSetSize, old: Sequence[ReplicaSetSize], limits: RolloutLimits) -> dict[str, int]:
    """Return the changed sizes of the old ReplicaSets: unavailable pods go first, then as many as `min_available` allows."""
    total = new.replicas + sum(each.replicas for each in old)
    to_go = total - limits.min_available - (new.replicas - new.available)
    if to_go <= 0:
        return {}
    sizes = {each.name: each.replicas for each in old}
    for each in old:
        gone = min(to_go, each.replicas - each.available)
        sizes[each.name] -= gone
        to_go -= gone
    spare = new.available + sum(each.available for each in old) - limits.min_available
    for each in old:
        gone = max(0, min(spare, sizes[each.name]))
        sizes[each.name] -= gone
        spare -= gone
    return {each.name: sizes[each.name] for each in old if sizes[each.name] != each.replicas}


def scale_proportionally(sets: Sequence[ReplicaSetSize], limits: RolloutLimits, pods: int) -> dict[str, int]:
    """Return the sizes when a Deployment with several non-empty ReplicaSets is scaled.

    Each ReplicaSet gets its share; the remainder of rounding goes to the largest. `pods` is the replica count in the
    Deployment's status.
    """
    change = limits.max_pods - sum(each.replicas for each in sets)
    if not change:
        return {each.name: each.replicas for each in sets}
    # Largest first; among equals the newest when scaling up, the oldest when scaling down.
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
    before = each.max_pods_before or pods or limits.max_pods
    return math.floor(each.replicas * limits.max_pods / before + 0.5) - each.replicas
