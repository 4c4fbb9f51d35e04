"""Reads the kernel's counters of new connections."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from narthex.model.net import IPFamily
from narthex.proxy.backends.counts import Counted
from narthex.proxy.plan.ir import Plan

Reader = Callable[[Plan, bool], Iterable[Counted]]
"""The counters that belong to a plan which is in force. The second argument asks for those of single endpoints, which may
cost much more. Raises ApplyError."""


def reader_for(mode: str, family: IPFamily, namespace: str | None = None) -> Reader | None:
    """Counters of one mode and family in one network namespace (None: that of the calling thread); None where the mode
    has none. A reader has a socket of its own and is not for several threads at once."""
    if mode == "nftables":
        from narthex.proxy.backends.nftables import counts as nftables_counts
        from narthex.proxy.kernel.nftables import NftablesTarget

        nft = NftablesTarget(family, namespace)
        return _Reading(
            nftables_counts.Attribution,
            lambda plan, endpoints: nft.read_counters(nftables_counts.counted_sets(plan, endpoints)),
        ).read
    if mode == "iptables":
        from narthex.proxy.backends.iptables import counts as iptables_counts
        from narthex.proxy.kernel.iptables import IptablesTarget

        iptables = IptablesTarget(family, namespace)
        return _Reading(iptables_counts.Attribution, lambda _plan, _endpoints: iptables.counters("nat")).read
    return None


def invalid_dropped_for(mode: str, family: IPFamily, namespace: str | None = None) -> Callable[[], int] | None:
    """What reads how many packets the rule against invalid ones has dropped, where a mode has such a rule. It raises
    ApplyError."""
    if mode != "iptables":
        return None
    from narthex.proxy.backends.iptables import counts as iptables_counts
    from narthex.proxy.kernel.iptables import IptablesTarget

    iptables = IptablesTarget(family, namespace)
    return lambda: iptables_counts.invalid_dropped(iptables.counters("filter"))


class _Attribution(Protocol):
    """What counters of one plan count for."""

    def counted(self, raw: Any) -> Iterable[Counted]: ...


class _Reading:
    """Keeps what was worked out from a plan while the plan stays."""

    def __init__(self, attribution: Callable[[Plan], _Attribution], look: Callable[[Plan, bool], Any]) -> None:
        self._attribution = attribution
        self._look = look
        self._known: tuple[Plan, _Attribution] | None = None

    def read(self, plan: Plan, endpoints: bool) -> Iterable[Counted]:
        if self._known is None or self._known[0] is not plan:
            self._known = plan, self._attribution(plan)
        return self._known[1].counted(self._look(plan, endpoints))
