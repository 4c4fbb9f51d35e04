"""Removes leftovers of other modes and of kube-proxy: at the start of a proxy, or on request.

A proxy does this after its first sync, so that there are rules at any time (rows 26.1, 26.2, 29.15). Meanwhile old and
new rules exist side by side, and a new connection meets both. This is safe: the kernel's nat core calls the chains of
one hook in turn and stops at the first that binds the connection, so one of the two rewrites it and the other never
sees a packet of it. Both use bit 14 of the mark in the same way and masquerade packets that have it. The filter chains
of either judge only packets that still have the address of a Service, so not those that the other has forwarded.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from narthex.linux.clock import Clock
from narthex.linux.monitor import OwnTransactions
from narthex.linux.privileges import may_change_network
from narthex.model import FAMILIES, IPFamily
from narthex.proxy.kernel.cleanup import Cleanup, CleanupOutcome, RemainingObject, RemovedObjects
from narthex.proxy.kernel.dataplanes import DATAPLANES
from narthex.proxy.program.sync import SyncResult
from narthex.runtime.logs import LOGGER, data

_SHOWN = 3
RETRY_SECONDS = 30.0
"""Interval at which a proxy that could not remove everything tries again, when it syncs."""
_SETTLE_SECONDS = 0.3
"""A running proxy restores its rules faster than this."""


class CleanupError(RuntimeError):
    """Nothing could be done; the message says why."""


class LeftoverRemover:
    """Removes leftovers of other modes after each family's first sync, and again later if some remain."""

    def __init__(
        self,
        mode: str,
        clock: Clock,
        writing: Callable[[], AbstractContextManager[OwnTransactions]],
        cleanup: Any = Cleanup,
    ) -> None:
        self._mode = mode
        self._clock = clock
        self._writing = writing
        self._cleanup = cleanup
        self._next: dict[IPFamily, float] = {}
        self._said: dict[IPFamily, tuple[RemainingObject, ...]] = {}
        self._done: set[IPFamily] = set()

    def after(self, done: SyncResult) -> None:
        """Remove leftovers after a successful sync, when the rules of this mode are in place."""
        family, now = done.family, self._clock.now()
        if family in self._done or now < self._next.get(family, now):
            return
        # The keeper of the route_localnet guard is the plan in force.
        with self._writing() as own:
            cleanup = self._cleanup(keep=self._mode, keep_localnet=_needs_localnet(self._mode, done))
            outcome: CleanupOutcome = cleanup.clean(family)
            own.transactions += outcome.transactions
        for removed in outcome.removed:
            LOGGER.info(
                "removed what another mode or kube-proxy had left: %s",
                described(removed),
                extra=data(family=family.label, removed=list(removed.names)),
            )
        if outcome.left != self._said.get(family, ()):
            for left in outcome.left:
                LOGGER.warning("cannot remove %s %s (%s): %s", left.kind, left.name, family.label, left.reason)
        if self._said.get(family) and not outcome.left:
            LOGGER.info("what could not be removed before is gone (%s)", family.label)
        self._said[family] = outcome.left
        if outcome.left:
            self._next[family] = now + RETRY_SECONDS
        else:
            self._done.add(family)


def clean_up(clock: Clock, namespace: str | None = None) -> CleanupOutcome:
    """Remove everything of Narthex and kube-proxy, both families. Raises CleanupError without permission."""
    if not may_change_network():
        raise CleanupError("removing rules needs root (CAP_NET_ADMIN): run it with sudo")
    cleanup = Cleanup(namespace)
    outcomes = [cleanup.clean(family) for family in FAMILIES]
    removed = tuple(one for outcome in outcomes for one in outcome.removed)
    left = tuple(one for outcome in outcomes for one in outcome.left)
    if removed:
        clock.sleep(_SETTLE_SECONDS)
        watched = [one for one in removed if one.kind in ("nftables table", "iptables-nft chain")]
        back = {one.family: None for one in watched if cleanup.came_back(one.family, one.names)}
        left += tuple(
            RemainingObject(
                "rules", family, "of a Service network", "they came back: stop the node proxy that runs here first"
            )
            for family in back
        )
    return CleanupOutcome(removed, left)


def described(removed: RemovedObjects) -> str:
    """Return kind, family, number, and names as text."""
    shown = ", ".join(removed.names[:_SHOWN])
    more = len(removed.names) - _SHOWN
    count = f"{len(removed.names)} {removed.kind}{'s' if len(removed.names) > 1 else ''}"
    return f"{count} ({removed.family.label}): {shown}{f' and {more} more' if more > 0 else ''}"


def to_builtins(outcome: CleanupOutcome) -> dict[str, list[dict[str, Any]]]:
    """Return the outcome as plain data for JSON."""
    return {
        "removed": [
            {"kind": one.kind, "family": one.family.label, "count": len(one.names), "names": list(one.names)}
            for one in outcome.removed
        ],
        "left": [{**msgspec.structs.asdict(one), "family": one.family.label} for one in outcome.left],
    }


def _needs_localnet(mode: str, done: SyncResult) -> bool:
    return DATAPLANES[mode].route_localnet and done.plan.node_ports.localhost
