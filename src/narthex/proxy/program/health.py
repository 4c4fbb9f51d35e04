"""Whether the proxy does its work: what `/healthz` and `/livez` answer (rows of group 17).

Better than upstream in one point (row 29.1): it is not healthy before the first good sync of every family.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from narthex.linux.clock import Clock
from narthex.model.net import IPFamily
from narthex.model.objects import Node
from narthex.runtime.logs import stamp

_DRAINING_TAINT = "ToBeDeletedByClusterAutoscaler"


class _FamilyHealth(msgspec.Struct):
    """Times of one family; None: never, or nothing waits."""

    last_good: float | None = None
    """Wall clock."""
    waiting_since: float | None = None
    """Monotonic clock: when the oldest change came that is not written yet."""


class ProxyHealth:
    """The loop writes it, the status server reads it from its own thread; single fields change atomically."""

    def __init__(
        self, families: Iterable[IPFamily], sync_period: float, clock: Clock, *, node_expected: bool = False
    ) -> None:
        """`node_expected`: there is a Node object for every node, so one that was never seen is not eligible."""
        self._families = {family: _FamilyHealth() for family in families}
        self._patience = 2 * sync_period
        self._clock = clock
        self._node_expected = node_expected
        self.node_eligible = not node_expected
        """False while the Node is being deleted or drained; balancers should then look elsewhere (row 17.3)."""

    def pace(self, sync_period: float) -> None:
        """From now on a change may wait for twice this time."""
        self._patience = 2 * sync_period

    def queued(self, family: IPFamily) -> None:
        """A change came in. Only the oldest that waits counts (row 17.2)."""
        state = self._families[family]
        if state.waiting_since is None:
            state.waiting_since = self._clock.now()

    def synced(self, family: IPFamily) -> None:
        """The kernel holds what it should, now."""
        state = self._families[family]
        state.waiting_since = None
        state.last_good = self._clock.wall()

    def saw_node(self, node: Node | None) -> None:
        """Take in the node's own object; None: there is none."""
        if node is None:
            self.node_eligible = not self._node_expected
        else:
            self.node_eligible = not (node.deletion_timestamp or _DRAINING_TAINT in node.taints)

    @property
    def ready(self) -> bool:
        """Every family has been synced once."""
        return all(state.last_good is not None for state in self._families.values())

    @property
    def healthy(self) -> bool:
        """No family has work that waits too long (rows 17.1, 17.2), whatever becomes of the node (row 16.12)."""
        return self._report()[0]

    def healthz(self) -> tuple[int, dict[str, Any]]:
        """HTTP status and body for `/healthz`."""
        healthy, body = self._report()
        healthy = healthy and self.node_eligible
        return 200 if healthy else 503, {**body, "nodeEligible": self.node_eligible, "healthy": healthy}

    def livez(self) -> tuple[int, dict[str, Any]]:
        """HTTP status and body for `/livez`, which ignores the node (row 17.4)."""
        healthy, body = self._report()
        return 200 if healthy else 503, {**body, "healthy": healthy}

    def _report(self) -> tuple[bool, dict[str, Any]]:
        now, wall = self._clock.now(), self._clock.wall()
        status = {}
        for family, state in self._families.items():
            late = state.waiting_since is not None and now - state.waiting_since > self._patience
            good = state.last_good is not None and not late
            status[family.label] = {"lastUpdated": _when(wall if good else state.last_good), "healthy": good}
        healthy = all(each["healthy"] for each in status.values())
        # Of all families the one that is worst off says when all was last well (row 17.6).
        goods = [state.last_good for state in self._families.values()]
        oldest = None if None in goods else min(good for good in goods if good is not None)
        updated = wall if healthy else oldest
        return healthy, {"lastUpdated": _when(updated), "currentTime": _when(wall), "status": status}


def _when(wall: float | None) -> str | None:
    return None if wall is None else stamp(wall)
