"""Which pod goes first when there are too many (kubernetes `pkg/controller/controller_utils.go`, ActivePodsWithRanks)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from datetime import datetime

from narthex.lab.controllers.objects import (
    annotations_of,
    condition,
    moment,
    pod_active,
    pod_ready,
    spec_of,
    status_of,
)
from narthex.lab.controllers.view import Object

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
_PHASES = {"Pending": 0, "Unknown": 1, "Running": 2}


def first_to_go(pods: Iterable[Object], related: Iterable[Object], count: int, now: datetime) -> list[Object]:
    """`count` of the pods: those without a node, then pending, then not ready ones, then by deletion cost, then those
    that share their node with most of `related` (the pods of the same Deployment), then ready for the shortest time,
    restarted most often, and youngest (times by powers of two); then by name."""
    crowd = Counter(spec_of(pod).get("nodeName") for pod in related if pod_active(pod))

    def rank(pod: Object) -> tuple[object, ...]:
        node, status, ready = spec_of(pod).get("nodeName"), status_of(pod), pod_ready(pod)
        restarts = [each.get("restartCount") or 0 for each in status.get("containerStatuses") or ()]
        return (
            bool(node),
            _PHASES.get(status.get("phase") or "Pending", 0),
            ready,
            _cost(pod),
            -crowd[node],
            _age((condition(pod, "Ready") or {}).get("lastTransitionTime"), now) if ready else 0,
            -max(restarts, default=0),
            _age(pod["metadata"].get("creationTimestamp"), now),
            pod["metadata"]["name"],
        )

    return sorted(pods, key=rank)[:count]


def _cost(pod: Object) -> int:
    text = annotations_of(pod).get(DELETION_COST, "0")
    return int(text) if text.removeprefix("-").isascii() and text.removeprefix("-").isdigit() and len(text) < 12 else 0


def _age(text: str | None, now: datetime) -> int:
    """The power of two of the seconds since: the larger, the longer it stays."""
    since = moment(text)
    seconds = (now - since).total_seconds() if since is not None else 0.0
    return int(math.log2(seconds)) if seconds >= 1 else -1
