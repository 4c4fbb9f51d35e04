"""How a proxy in each mode learns that somebody else changed its rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from narthex.apps.logs import LOGGER
from narthex.backends.iptables_names import OWN_TABLES, is_ours
from narthex.backends.nftables_changes import NftChanges
from narthex.backends.nftables_frame import TABLE
from narthex.host.monitor import Concern, Foreign, LegacySizes, Monitor, Poll
from narthex.host.nfnetlink import NfNetlink
from narthex.host.variants import default_variant
from narthex.model.net import IPFamily
from narthex.netfilter.xtables_values import builtin_chains

_CONCERNS = {
    "nftables": Concern(tables=frozenset((TABLE,))),
    # Built-in chains hold our jumps. Chains of others, however often they change, are passed over.
    "iptables": Concern(
        tables=frozenset(OWN_TABLES), chain=lambda table, name: is_ours(table, name) or name in builtin_chains(table)
    ),
}


def foreign_changes(mode: str, families: Sequence[IPFamily]) -> Foreign:
    """For the network namespace of the calling thread."""
    try:
        if mode == "iptables" and default_variant(IPFamily.IPV4) == "legacy":
            return Poll(LegacySizes(families), families)
        return Monitor(_CONCERNS[mode], families)
    except OSError as error:
        LOGGER.warning("the kernel does not tell of changed rules (%s): it is asked each second instead", error)
        return Poll(NfNetlink().generation, families)


def is_silent(mode: str) -> Callable[[Any], bool]:
    """Which changes go to the kernel through our own sockets alone."""
    return _only_elements if mode == "nftables" else lambda changes: False  # noqa: ARG005


def tells(foreign: Foreign) -> bool:
    """Whether the kernel gives notice, so that it need not be read to be sure."""
    return isinstance(foreign, Monitor)


def _only_elements(changes: NftChanges) -> bool:
    return changes.elements_only
