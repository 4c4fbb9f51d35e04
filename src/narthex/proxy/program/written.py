"""Short descriptions of what a sync wrote, for the log."""

from __future__ import annotations

from typing import Any

from narthex.proxy.backends.iptables.rules import XtablesChanges
from narthex.proxy.backends.ipvs.rules import IpvsChanges
from narthex.proxy.backends.nftables.changes import NftChanges
from narthex.proxy.backends.userspace.rules import UserspaceChanges


def written(changes: Any) -> str:
    """Return the numbers of written rules; empty if nothing was written or the type of changes has no numbers."""
    if not changes:
        return ""
    match changes:
        case NftChanges():
            chains = len(changes.chains) + len(changes.late_chains) + len(changes.removed_chains)
            parts = [
                counted(changes.element_count(), "element"),
                counted(chains, "chain"),
                counted(len(changes.sets) + len(changes.removed_sets), "set"),
            ]
        case XtablesChanges():
            chains = sum(map(len, changes.written.values()))
            removed = sum(map(len, changes.removed.values()))
            parts = [counted(changes.rules, "rule"), counted(chains, "chain"), counted(removed, "chain") + " removed"]
        case IpvsChanges():
            virtual = len(changes.servers_added) + len(changes.servers_edited) + len(changes.servers_removed)
            real = sum(len(one.added) + len(one.edited) + len(one.removed) for one in changes.reals.values())
            entries = sum(len(one.added) + len(one.removed) for one in changes.entries.values())
            entries += sum(len(one.entries) for one in changes.sets_added)
            parts = [
                counted(virtual, "virtual server"),
                counted(real, "real server"),
                counted(entries, "set entry", "set entries"),
                counted(changes.tables.rules, "rule"),
            ]
        case UserspaceChanges():
            ports = counted(len(changes.listen), "listener"), counted(len(changes.close), "listener") + " closed"
            said = ", ".join(part for part in ports if not part.startswith("0 "))
            return "; ".join(filter(None, (said, written(changes.tables))))
        case _:
            return ""
    said = ", ".join(part for part in parts if not part.startswith("0 ")) or "settings only"
    return f"everything anew: {said}" if changes.replace else f"wrote {said}"


def counted(number: int, thing: str, things: str = "") -> str:
    """Return a number with its noun: `1 chain`, `2 chains`."""
    return f"{number} {thing}" if number == 1 else f"{number} {things or thing + 's'}"


def rules_by_table(changes: Any) -> dict[str, int]:
    """Return the number of rules that an iptables sync wrote, by table."""
    if not isinstance(changes, XtablesChanges):
        return {}
    return {table: sum(map(len, chains.values())) for table, chains in changes.written.items()}
