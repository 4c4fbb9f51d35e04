"""Removes connections that the new rules made stale, after each successful sync (group 18).

These are entries of the kernel's connection tracking, and, with socket load balancing, connected UDP sockets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Protocol

from narthex.linux.clock import Clock
from narthex.linux.conntrack import ConntrackTable
from narthex.model import ConntrackFlow, IPFamily, ServicePortName
from narthex.netfilter.netlink.conntrack import ConntrackEntry
from narthex.proxy.plan.ir import Plan
from narthex.proxy.plan.show import counted
from narthex.proxy.plan.stale import MatchOwners, StaleReason, StaleSearch
from narthex.proxy.program.metrics import ProxyMetrics
from narthex.proxy.program.sync import SyncResult
from narthex.runtime.logs import LOGGER, data


class StaleSocketCloser(Protocol):
    """What closes the sockets that were connected to an endpoint in the place of a Service address."""

    def close_stale(
        self,
        family: IPFamily,
        endpoints: Collection[tuple[str, int]] | None,
        reason: Callable[[ConntrackFlow], StaleReason | None],
    ) -> Counter[StaleReason]:
        """Close the sockets, connected to one of `endpoints` (None: any), for which `reason` returns one. Raises OSError."""
        ...


class _Half:
    """State of one family."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        """The plan that the table was last brought in line with."""
        self.changed: frozenset[ServicePortName] = frozenset()
        """Service ports that differ from it."""
        self.everything = False
        self.owners = MatchOwners()
        self.failing = False


class StaleFlowRemover:
    """Searches the connection table only if a connection can have lost its endpoint.

    It never raises: a stale entry does less harm than a loop that ends.
    """

    def __init__(
        self,
        table: ConntrackTable,
        own_addresses: Callable[[], Collection[str]],
        clock: Clock,
        metrics: ProxyMetrics,
        *,
        relayed: bool = False,
        gentle: bool = False,
        sockets: StaleSocketCloser | None = None,
    ) -> None:
        """Create the remover; `relayed` and `gentle` as for `StaleSearch`."""
        self._sockets = sockets
        self._table = table
        self._own_addresses = own_addresses
        self._clock = clock
        self._metrics = metrics
        self._relayed = relayed
        self._gentle = gentle
        self._halves: dict[IPFamily, _Half] = {}

    def after(self, done: SyncResult) -> None:
        """Remove the entries that the sync made stale."""
        half = self._halves.setdefault(done.family, _Half())
        half.changed |= done.changed
        half.owners.follow(done.plan)
        # While our rules were changed by others, connections bypassed them.
        half.everything |= done.first or done.drift
        search = StaleSearch(
            done.plan,
            half.plan,
            half.changed,
            everything=half.everything,
            relayed=self._relayed,
            gentle=self._gentle,
            owners=half.owners,
        )
        if search.towards:
            try:
                self._clean(done.family, search)
            except OSError as error:
                if not half.failing:
                    LOGGER.warning(
                        "stale %s connections could not be removed, which is tried again at the next sync: %s",
                        done.family.label,
                        error,
                    )
                half.failing = True
                return
        half.plan, half.changed, half.everything, half.failing = done.plan, frozenset(), False, False

    def _clean(self, family: IPFamily, search: StaleSearch) -> None:
        own = frozenset(self._own_addresses())
        # `left` is to be asked before `reason`.
        left = search.left
        removed = self._clean_table(family, search, own)
        _log_removed(family, removed, "stale connection", "removed")
        if self._sockets is None or not (left is None or left):
            return
        closed = self._sockets.close_stale(family, left, lambda flow: search.reason(flow, own))
        self._metrics.sockets_closed(family, closed)
        _log_removed(family, closed, "stale UDP socket", "closed")

    def _clean_table(self, family: IPFamily, search: StaleSearch, own: Collection[str]) -> Counter[StaleReason]:
        start = self._clock.now()
        stale: list[ConntrackEntry] = []
        reasons: list[StaleReason] = []
        for entry in self._table.entries(family, search.towards):
            reason = search.reason(entry.flow, own)
            if reason is not None:
                stale.append(entry)
                reasons.append(reason)
        there = self._table.remove(family, stale) if stale else []
        removed = Counter(reason for reason, was_there in zip(reasons, there, strict=True) if was_there)
        self._metrics.flows(family, self._clock.now() - start, removed)
        return removed


def _log_removed(family: IPFamily, removed: Counter[StaleReason], what: str, done: str) -> None:
    if removed:
        LOGGER.info(
            "%s %s of %s: %s",
            done,
            counted(removed.total(), what),
            family.label,
            ", ".join(f"{count} {reason.value}" for reason, count in removed.items()),
            extra=data(family=family.label, removed={reason.value: count for reason, count in removed.items()}),
        )
