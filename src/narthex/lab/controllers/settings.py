"""Times of the controllers that differ between a lab and a real cluster."""

from __future__ import annotations

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """In seconds."""

    node_grace: float = 40.0
    """So long after its last heartbeat a node's state is unknown (`--node-monitor-grace-period`)."""
    lost_pod_seconds: float = 300.0
    """So long pods that say nothing of it stay on a node that is not ready (`--default-unreachable-toleration-seconds`)."""
    event_seconds: float = 3600.0
    """So long an Event is kept (`--event-ttl`)."""


LAB = Settings(node_grace=2.0)
"""In a lab nobody wants to wait for a node's death."""
