"""The structure of an nft table: what shows that another program changed it, without its elements being read."""

from __future__ import annotations

import msgspec

from narthex.linux.netlink import attribute, payloads, text_attribute
from narthex.linux.nfnetlink import NfNetlink

_NF_TABLES = 10
_GET_TABLE, _GET_CHAIN, _GET_RULE, _GET_SET = 1, 4, 7, 10
# Attributes, as in linux/netfilter/nf_tables.h; the name of the table is the first of every object.
_TABLE, _TABLE_FLAGS, _TABLE_HANDLE = 1, 2, 4
_CHAIN_NAME, _CHAIN_IDENTITY = 3, (2, 4, 5)
"""Handle, hook, and policy."""
_RULE_CHAIN, _RULE_HANDLE = 2, 3
_SET_NAME, _SET_HANDLE = 2, 16


class TableStructure(msgspec.Struct, frozen=True):
    """What identifies the content of a table, apart from the elements of its sets.

    The kernel gives each object a new handle and never changes the expressions of a rule, so equal handles mean equal
    rules. What can change in place is here, too.
    """

    table: tuple[bytes, ...]
    """Handle and flags, such as dormant."""
    chains: dict[str, tuple[bytes, ...]]
    rules: dict[str, tuple[bytes, ...]]
    """By chain: handles in order. A chain without rules is missing."""
    sets: dict[str, bytes]
    """By name: handle."""

    def changed_chains(self, before: TableStructure) -> list[str] | None:
        """Return the chains whose rules differ from before; None if anything else differs, too."""
        if (self.table, self.sets) != (before.table, before.sets):
            return None
        if any(self.chains.get(name) != held for name, held in before.chains.items()):
            return None
        names = self.rules.keys() | before.rules.keys() | self.chains.keys()
        return sorted(
            name for name in names if name not in before.chains or self.rules.get(name) != before.rules.get(name)
        )


def read_structure(link: NfNetlink, family: int, table: str) -> TableStructure | None:
    """Return the structure of a table; None if it does not exist.

    Costs as much as there are chains, rules, and sets, however many elements these have. Raises NetlinkError, and
    DumpInterrupted if others write meanwhile.
    """
    name = attribute(_TABLE, table.encode() + b"\0")

    def entries(kind: int, payload: bytes = b"") -> list[bytes]:
        found = link.entries(_NF_TABLES, kind, family, payload)
        return [data for data in found if text_attribute(data, 0, _TABLE) == table]

    tables = entries(_GET_TABLE)
    if not tables:
        return None
    rules: dict[str, tuple[bytes, ...]] = {}
    for data in entries(_GET_RULE, name):
        chain = text_attribute(data, 0, _RULE_CHAIN)
        rules[chain] = (*rules.get(chain, ()), payloads(data).get(_RULE_HANDLE, b""))
    return TableStructure(
        table=(payloads(tables[0]).get(_TABLE_HANDLE, b""), payloads(tables[0]).get(_TABLE_FLAGS, b"")),
        chains={
            text_attribute(data, 0, _CHAIN_NAME): tuple(payloads(data).get(kind, b"") for kind in _CHAIN_IDENTITY)
            for data in entries(_GET_CHAIN)
        },
        rules=rules,
        sets={
            text_attribute(data, 0, _SET_NAME): payloads(data).get(_SET_HANDLE, b"") for data in entries(_GET_SET, name)
        },
    )
