"""Health of the proxy, as `/healthz` and `/livez` report it (rows of group 17).

`/healthz` is stricter than kube-proxy's (row 29.1): 503 before the first successful sync of every family, and while rules may
be missing. `/livez` is not, since it says whether a new process could help.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec

from narthex.linux.clock import Clock
from narthex.model import IPFamily, Node
from narthex.runtime.logs import stamp

_DRAINING_TAINT = "ToBeDeletedByClusterAutoscaler"


SUSPICION_SECONDS = 0.7
"""A family is unhealthy if it takes longer than this to check its rules after other programs may have changed them."""


class _FamilyHealth(msgspec.Struct):
    """Times of one family; None means never, or that no change is pending."""

    last_good: float | None = None
    """Wall clock."""
    waiting_since: float | None = None
    """Monotonic clock: arrival of the oldest pending change."""
    refused: int = 0
    """Service ports whose changes are refused."""
    blocked: bool = False
    """All changes are refused."""
    suspected_since: float | None = None
    """Monotonic clock: when others may have changed our rules, until these were checked or repaired."""


class ProxyHealth:
    """Health state, written by the loop and read by the status server's thread; single fields change atomically."""

    def __init__(
        self, families: Iterable[IPFamily], sync_period: float, clock: Clock, *, node_expected: bool = False
    ) -> None:
        """Start unhealthy. `node_expected` makes a node without a Node object ineligible."""
        self._families = {family: _FamilyHealth() for family in families}
        self._patience = 2 * sync_period
        self._clock = clock
        self._node_expected = node_expected
        self.node_eligible = not node_expected
        """False while the Node is deleted or drained, so that load balancers avoid it (row 17.3)."""

    def pace(self, sync_period: float) -> None:
        """Allow changes to be pending for twice this period."""
        self._patience = 2 * sync_period

    def queued(self, family: IPFamily) -> None:
        """Note a pending change. Only the oldest one counts (row 17.2)."""
        state = self._families[family]
        if state.waiting_since is None:
            state.waiting_since = self._clock.now()

    def suspected(self, family: IPFamily) -> None:
        """Note that other programs may have changed our rules."""
        state = self._families[family]
        if state.suspected_since is None:
            state.suspected_since = self._clock.now()

    def trusted(self, family: IPFamily) -> None:
        """Note that what other programs changed does not concern the family's rules."""
        self._families[family].suspected_since = None

    def refused(self, family: IPFamily, count: int, *, blocked: bool) -> None:
        """Note of how many Service ports a verifier refuses the changes; `blocked`: no change at all is written.

        While it is blocked, changes are pending although the rules are as they were meant before.
        """
        state = self._families[family]
        state.refused, state.blocked = count, blocked
        if blocked:
            self.queued(family)

    def checked(self, family: IPFamily, began: float) -> None:
        """Note that a check of the rules in the kernel, which began at a time, found or made them as they should be."""
        state = self._families[family]
        if state.suspected_since is not None and state.suspected_since <= began:
            state.suspected_since = None

    def synced(self, family: IPFamily, *, checked_at: float | None = math.inf) -> None:
        """Note a successful sync.

        `checked_at` is when a check of the rules in the kernel began; None: there was none. It settles what was
        suspected before.
        """
        state = self._families[family]
        state.waiting_since = None
        if checked_at is not None:
            self.checked(family, checked_at)
        state.last_good = self._clock.wall()

    def saw_node(self, node: Node | None) -> None:
        """Note the node's Node object; None if there is none."""
        if node is None:
            self.node_eligible = not self._node_expected
        else:
            self.node_eligible = not (node.deletion_timestamp or _DRAINING_TAINT in node.taints)

    @property
    def ready(self) -> bool:
        """Return True once every family has been synced."""
        return all(state.last_good is not None for state in self._families.values())

    @property
    def healthy(self) -> bool:
        """Return True if no change is pending for too long (rows 17.1, 17.2).

        The state of the Node has no influence (row 16.12).
        """
        return self._report()[0]

    def healthz(self) -> tuple[int, dict[str, Any]]:
        """Return HTTP status and body for `/healthz`."""
        healthy, body = self._report()
        healthy = healthy and self.node_eligible
        return 200 if healthy else 503, {**body, "nodeEligible": self.node_eligible, "healthy": healthy}

    def livez(self) -> tuple[int, dict[str, Any]]:
        """Return HTTP status and body for `/livez`: only a sync that is overdue counts (rows 17.1, 17.4, 17.7).

        A new process would wait for the API server as this one does, and would find the same rules in the kernel.
        """
        healthy, body = self._report(only_late=True)
        return 200 if healthy else 503, {**body, "healthy": healthy}

    def _report(self, *, only_late: bool = False) -> tuple[bool, dict[str, Any]]:
        now, wall = self._clock.now(), self._clock.wall()
        status: dict[str, dict[str, Any]] = {}
        for family, state in self._families.items():
            late = state.waiting_since is not None and now - state.waiting_since > self._patience
            unsure = state.suspected_since is not None and now - state.suspected_since > SUSPICION_SECONDS
            # A new process would refuse them as well.
            late = late and not (only_late and state.blocked)
            good = not late and (only_late or (state.last_good is not None and not unsure))
            status[family.label] = {"lastUpdated": _when(wall if good else state.last_good), "healthy": good}
            if state.refused:
                status[family.label]["refused"] = state.refused
        healthy = all(each["healthy"] for each in status.values())
        # Of all families the one that is worst off says when all was last well (row 17.6).
        goods = [state.last_good for state in self._families.values()]
        oldest = None if None in goods else min(good for good in goods if good is not None)
        updated = wall if healthy else oldest
        return healthy, {"lastUpdated": _when(updated), "currentTime": _when(wall), "status": status}


def _when(wall: float | None) -> str | None:
    return None if wall is None else stamp(wall)
