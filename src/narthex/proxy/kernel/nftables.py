"""The nftables Target: writes changes of table `narthex` to one network namespace, and reads the table back.

Tables, chains, rules, and declarations are sent as text through libnftables, so that `nft list` always shows what `nft
-f` accepts. Elements, and the few rules that nft refuses as text, are sent as one netlink batch.
`TableStructure` shows that another program changed the table, without its elements being read.
"""

from __future__ import annotations

import errno
import itertools
import time
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import msgspec

from narthex.linux.failpoints import NFT_ELEMENTS, NFT_REMOVED, NFT_SCRIPT, failpoint
from narthex.linux.libnftables import NftError, run_nft
from narthex.linux.netlink import DumpInterrupted, NetlinkError, attribute, payloads, text_attribute
from narthex.linux.nfnetlink import (
    DELETE_ELEMENTS,
    DELETE_RULE,
    FAMILY_NUMBERS,
    NEW_ELEMENTS,
    NEW_RULE,
    NfNetlink,
    element_messages,
    failed_element,
)
from narthex.model import IPFamily
from narthex.netfilter.ast import ElementData, ElementKey, Set, Table, TouchedPart, Unprintable
from narthex.netfilter.netlink.elements import decode_list, encoder, is_config_set, key_encoder
from narthex.netfilter.netlink.rules import chain_payload, rule_payload
from narthex.netfilter.netlink.slot_map import SlotMap, encode_slots
from narthex.netfilter.nft.parse import parse_ruleset
from narthex.netfilter.nft.print import element_text
from narthex.proxy.backends.base import ApplyError, Target
from narthex.proxy.backends.nftables.backend import NftRules, from_table
from narthex.proxy.backends.nftables.changes import NftChanges, between, with_elements
from narthex.proxy.backends.nftables.frame import TABLE

_READ_ATTEMPTS = 10
_REMOVE_ATTEMPTS = 20
_REMOVE_PAUSE = 0.1
_BUSY = ("Device or resource busy", "Resource busy")


class _Message(NamedTuple):
    """Elements of one set, or a rule of one chain, as one netlink message."""

    kind: int
    payload: bytes
    name: str
    """Of the set or chain."""
    first: int
    """Position of its first element among all elements of the set that are sent."""


class NftablesTarget(Target[NftRules, NftChanges]):
    """Writes table `ip narthex` or `ip6 narthex` of one namespace (None: the current one). Not thread-safe."""

    def __init__(self, family: IPFamily, namespace: str | None = None) -> None:
        self._family = family
        self._number = int(FAMILY_NUMBERS[family.value])
        self._namespace = namespace
        self._netlink: NfNetlink | None = None
        self._seen: int | None = None
        """The ruleset's generation at which the table was as last read or written; None: not known."""
        self._structure: TableStructure | None = None
        """The table's structure as last read or written; None: not known."""

    def _link(self) -> NfNetlink:
        if self._netlink is None:
            self._netlink = NfNetlink(self._namespace)
        return self._netlink

    def close(self) -> None:
        """Close the netlink socket; the next call opens another."""
        if self._netlink is not None:
            self._netlink.close()
            self._netlink = None

    # ---- reading ---------------------------------------------------------------------------------------------------

    def read(self) -> NftRules | None:
        """Return the table as of one moment; None if it does not exist.

        Raises ApplyError if other programs keep changing the ruleset, or if the kernel refuses to be read.
        """
        try:
            for _ in range(_READ_ATTEMPTS):
                self._seen = self._structure = None
                before = self._link().generation()
                try:
                    structure = read_structure(self._link(), self._number, TABLE)
                    table = self._read_table() if structure is not None else None
                except (DumpInterrupted, NftError):
                    continue
                if (table is None) is (structure is None) and self._link().generation() == before:
                    self._seen, self._structure = before, structure
                    return None if table is None else from_table(table)
        except (OSError, ValueError) as error:
            self.close()
            raise ApplyError(f"cannot read table {self._family.nft} {TABLE}: {error}") from error
        raise ApplyError(f"cannot read table {self._family.nft} {TABLE}: other programs keep changing the rules")

    def _read_table(self) -> Table | None:
        text = run_nft(f"list table {self._family.nft} {TABLE}", self._namespace, terse=True)
        tables = parse_ruleset(text).tables
        if not tables:
            return None
        sets = {name: self._filled(one) for name, one in tables[0].sets.items()}
        return msgspec.structs.replace(tables[0], sets=sets)

    def _filled(self, one: Set) -> Set:
        """Return the set with its elements. The elements of a dynamic set are not part of the rules."""
        if one.dynamic:
            return one
        if is_config_set(one):
            text = run_nft(f"list set {self._family.nft} {TABLE} {one.name}", self._namespace)
            return parse_ruleset(text).tables[0].sets[one.name]
        return with_elements(one, self._elements(one))

    def _elements(self, one: Set) -> dict[ElementKey, ElementData]:
        return {key: data for key, data, _ in self._dump(one)}

    def _dump(self, one: Set) -> Iterator[tuple[ElementKey, ElementData, int]]:
        for data, start, end in self._link().dump_elements(self._number, TABLE, one.name):
            yield from decode_list(one, self._family, data, start, end)

    def read_counters(self, sets: Mapping[str, Set]) -> list[tuple[str, ElementKey, ElementData, int]]:
        """Return the counters of new connections of those `sets` that count: set, key, data, connections.

        A counter restarts when the data of its element changes. A set that does not exist has none. Raises ApplyError.
        """
        counts = []
        try:
            for name, one in sets.items():
                if one.counter:
                    counts += [(name, *element) for element in self._dump(one)]
        except NetlinkError as error:
            if error.errno != errno.ENOENT:
                raise ApplyError(f"cannot read the counters of {self._family.nft} {TABLE}: {error}") from error
        except (OSError, ValueError, DumpInterrupted) as error:
            raise ApplyError(f"cannot read the counters of {self._family.nft} {TABLE}: {error}") from error
        return counts

    # ---- changing --------------------------------------------------------------------------------------------------

    def apply(self, changes: NftChanges) -> None:
        """Make the changes in up to three kernel transactions. Raises ApplyError and leaves the rest undone."""
        try:
            first, last = changes.first_script(), changes.last_script()
            messages = self._messages(changes)
        except Unprintable as error:
            raise ApplyError(f"table {self._family.nft} {TABLE}: {error}") from error
        known, self._seen = self._seen, None
        structure, self._structure = self._structure, None
        self._run(first, "rules")
        failpoint(NFT_SCRIPT)
        self._commit(changes, messages)
        failpoint(NFT_ELEMENTS)
        self._remove(last)
        failpoint(NFT_REMOVED)
        # Each of our transactions raises the generation by one; if it is higher, others have written, too.
        if known is not None and self._generation() == known + changes.transactions:
            self._structure = structure if changes.elements_only else self._read_structure()
            if self._generation() == known + changes.transactions:
                self._seen = known + changes.transactions

    def damage(self, rules: NftRules, touched: AbstractSet[TouchedPart] | None) -> NftChanges | None:
        """Return the changes that restore rules of chains and elements of sets, if nothing else was changed.

        Takes some milliseconds, and the time to read the touched sets. Raises ApplyError.
        """
        if self._structure is None or touched is None:
            return None
        names = {part.set for part in touched if part.set}
        generation, found = self._generation(), self._read_structure()
        chains = found.changed_chains(self._structure) if found is not None else None
        if generation is None or chains is None or found is None:
            return None
        # Not kept: rules live for long, and a table with all its elements is large.
        table = rules.spell_out() if chains or names else None
        changes = NftChanges(family=self._family, table=TABLE)
        if table is not None:
            read = {name: table.sets[name] for name in names if name in table.sets and not table.sets[name].dynamic}
            if any(is_config_set(one) for one in read.values()):
                return None
            try:
                have = {name: with_elements(one, self._elements(one)) for name, one in read.items()}
            except (OSError, ValueError, DumpInterrupted):
                return None
            changes = msgspec.structs.replace(
                between(self._part(have), self._part(read)),
                chains=tuple(table.chains[name] for name in chains if name in table.chains),
                known=frozenset(chains),
                removed_chains=tuple(name for name in chains if name not in table.chains),
            )
        # From here on, only what `apply` writes is to differ.
        self._structure, self._seen = found, generation
        return changes if self._generation() == generation else None

    def _part(self, sets: Mapping[str, Set]) -> Table:
        return Table(family=self._family, name=TABLE, sets=sets)

    def _read_structure(self) -> TableStructure | None:
        try:
            return read_structure(self._link(), self._number, TABLE)
        except DumpInterrupted:
            return None
        except OSError:
            self.close()
            return None

    def unchanged(self) -> bool:
        """Return True if no nftables rule of the namespace has changed since the last read or apply."""
        return self._seen is not None and self._seen == self._generation()

    def _generation(self) -> int | None:
        try:
            return self._link().generation()
        except OSError:
            self.close()
            return None

    def _run(self, script: str, what: str) -> None:
        if not script:
            return
        try:
            run_nft(script, self._namespace)
        except (NftError, OSError, ValueError) as error:
            raise ApplyError(f"nft refused the {what} of table {self._family.nft} {TABLE}: {error}") from error

    def _remove(self, script: str) -> None:
        """Run the last phase. Older kernels may briefly count references that no longer exist."""
        for _ in range(_REMOVE_ATTEMPTS):
            try:
                self._run(script, "last rules")
                return
            except ApplyError as error:
                if not any(word in str(error) for word in _BUSY):
                    raise
            time.sleep(_REMOVE_PAUSE)
        self._run(script, "last rules")

    def _messages(self, changes: NftChanges) -> list[_Message]:
        messages: list[_Message] = []
        for chain in changes.direct_chains():
            if chain.name in changes.known:
                messages.append(_Message(DELETE_RULE, chain_payload(TABLE, chain.name), chain.name, 0))
            for rule in chain.rules:
                payload = rule_payload(TABLE, chain.name, rule, self._family)
                messages.append(_Message(NEW_RULE, payload, chain.name, 0))
        for kind, elements in ((DELETE_ELEMENTS, changes.deletions), (NEW_ELEMENTS, changes.additions)):
            for name, pairs in elements.items():
                one = changes.declarations[name]
                if isinstance(pairs, SlotMap) and kind == NEW_ELEMENTS:
                    made = encode_slots(one, self._family, pairs)
                else:
                    encode = encoder(one, self._family) if kind == NEW_ELEMENTS else key_encoder(one, self._family)
                    made = encode(pairs.items())
                first = 0
                for payload, count in element_messages(TABLE, name, made):
                    messages.append(_Message(kind, payload, name, first))
                    first += count
        return messages

    def _commit(self, changes: NftChanges, messages: list[_Message]) -> None:
        if not messages:
            return
        try:
            self._link().commit(self._number, [(message.kind, message.payload) for message in messages])
        except NetlinkError as error:
            raise ApplyError(self._explained(error, changes, messages)) from error
        except OSError as error:
            self.close()
            raise ApplyError(f"cannot send elements of table {self._family.nft} {TABLE}: {error}") from error

    def _explained(self, error: NetlinkError, changes: NftChanges, messages: list[_Message]) -> str:
        """Return the kernel's message with the element that it refers to."""
        where = f"table {self._family.nft} {TABLE}"
        if error.message is None or not 0 <= error.message < len(messages):
            return f"the kernel refused elements of {where}: {error.strerror}"
        message = messages[error.message]
        if message.kind in (NEW_RULE, DELETE_RULE):
            return f"the kernel refused a rule of {where}, chain {message.name}: {error.strerror}"
        adding = message.kind == NEW_ELEMENTS
        verb = "add" if adding else "delete"
        number = None if error.offset is None else failed_element(message.payload, error.offset)
        if number is None:
            return f"the kernel refused to {verb} elements of {where}, set {message.name}: {error.strerror}"
        elements = (changes.additions if adding else changes.deletions)[message.name]
        key, data = next(itertools.islice(elements.items(), message.first + number, None))
        text = element_text(key, data)
        return f"the kernel refused to {verb} the element {text} of {where}, set {message.name}: {error.strerror}"

    def clean(self) -> None:
        """Remove the table, if it exists."""
        where = f"{self._family.nft} {TABLE}"
        self._run(f"table {where}\ndelete table {where}\n", "removal")


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
        """Return the kernel's objects of a kind that belong to this table."""
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
