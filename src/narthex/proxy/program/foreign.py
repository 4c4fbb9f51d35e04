"""How a proxy in each mode learns that somebody else changed its rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from narthex.linux.monitor import Concern, Foreign, Monitor, watch_rules
from narthex.model.net import IPFamily
from narthex.netfilter.xtables.values import builtin_chains
from narthex.proxy.backends.iptables.names import IPTABLES, OWN_TABLES, Ownership
from narthex.proxy.backends.iptables.rules import XtablesChanges
from narthex.proxy.backends.ipvs.names import IPVS
from narthex.proxy.backends.ipvs.rules import IpvsChanges
from narthex.proxy.backends.nftables.changes import NftChanges
from narthex.proxy.backends.nftables.frame import TABLE
from narthex.proxy.backends.userspace.names import USERSPACE
from narthex.proxy.backends.userspace.rules import UserspaceChanges

FEW_ELEMENTS = 50
"""That the kernel tells of so many costs less than not to listen meanwhile."""


def _of_owner(owner: Ownership) -> Concern:
    """Built-in chains hold our jumps. Chains of others, however often they change, are passed over."""
    return Concern(
        tables=frozenset(OWN_TABLES),
        chain=lambda table, name: owner.is_ours(table, name) or name in builtin_chains(table),
    )


_KEPT_WITH_IPTABLES = {"iptables": IPTABLES, "userspace": USERSPACE, "ipvs": IPVS}
_CONCERNS = {
    "nftables": Concern(tables=frozenset((TABLE,))),
    **{mode: _of_owner(owner) for mode, owner in _KEPT_WITH_IPTABLES.items()},
}


def foreign_changes(mode: str, families: Sequence[IPFamily]) -> Foreign:
    """For the network namespace of the calling thread."""
    return watch_rules(_CONCERNS[mode], families, iptables=mode in _KEPT_WITH_IPTABLES)


def transactions(mode: str) -> Callable[[Any], int]:
    """How many transactions of nf_tables some changes are; 0 for those that need no announcement."""
    if mode == "ipvs":
        return _of_ipvs
    return _of_nftables if mode == "nftables" else _of_iptables


def tells(mode: str, foreign: Foreign) -> bool:
    """Whether the kernel gives notice of all that concerns a mode, so that it need not be read to be sure. Of virtual
    servers and sets it tells nobody."""
    return isinstance(foreign, Monitor) and mode != "ipvs"


def _of_nftables(changes: NftChanges) -> int:
    few = changes.elements_only and changes.element_count() <= FEW_ELEMENTS
    return 0 if few else changes.transactions


def _of_iptables(changes: XtablesChanges | UserspaceChanges) -> int:
    return changes.transactions


def _of_ipvs(changes: IpvsChanges) -> int:
    return changes.tables.transactions
