"""Events in their two forms, `v1` and `events.k8s.io/v1`, which are the same objects (k8s.io/kubernetes/pkg/apis/events/v1).

They are held as `v1` has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = {
    "regarding": "involvedObject",
    "note": "message",
    "reportingController": "reportingComponent",
    "deprecatedSource": "source",
    "deprecatedFirstTimestamp": "firstTimestamp",
    "deprecatedLastTimestamp": "lastTimestamp",
    "deprecatedCount": "count",
}
_BACK = {old: new for new, old in _NAMES.items()}


def to_core(raw: Mapping[str, Any]) -> dict[str, Any]:
    """An Event of events.k8s.io/v1 as one of v1. What `raw` has of v1's own names stays."""
    return _renamed(raw, _NAMES, "v1")


def to_events(raw: Mapping[str, Any]) -> dict[str, Any]:
    """An Event of v1 as one of events.k8s.io/v1."""
    return _renamed(raw, _BACK, "events.k8s.io/v1")


def _renamed(raw: Mapping[str, Any], names: Mapping[str, str], version: str) -> dict[str, Any]:
    fields = {names.get(name, name): value for name, value in raw.items()}
    return {**fields, "apiVersion": version, "kind": "Event"}
