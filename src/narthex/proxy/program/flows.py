"""Removes tracked connections that the new rules made stale, after each successful sync (group 18)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from narthex.linux.clock import Clock
from narthex.linux.conntrack import ConntrackTable
from narthex.model import IPFamily, ServicePortName
from narthex.netfilter.netlink.conntrack import ConntrackEntry
from narthex.proxy.plan.ir import Plan
from narthex.proxy.plan.show import counted
from narthex.proxy.plan.stale import MatchOwners, StaleReason, StaleSearch
from narthex.proxy.program.metrics import ProxyMetrics
from narthex.proxy.program.sync import SyncResult
from narthex.runtime.logs import LOGGER, data


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
    ) -> None:
        """Create the remover; `relayed` and `gentle` as for `StaleSearch`."""
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
        start = self._clock.now()
        own = frozenset(self._own_addresses())
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
        if removed:
            LOGGER.info(
                "removed %s of %s: %s",
                counted(removed.total(), "stale connection"),
                family.label,
                ", ".join(f"{count} {reason.value}" for reason, count in removed.items()),
                extra=data(family=family.label, removed={reason.value: count for reason, count in removed.items()}),
            )
