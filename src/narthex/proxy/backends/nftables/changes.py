"""The changes from one table to another, in three phases, with the text for nft.

1. A script, one transaction: new sets and chains, and chains with other rules. No rule leads to a new chain yet, so
   packets never see half a change.
2. One netlink batch, one transaction: rules that nft cannot read as text (`netfilter.netlink.rules` explains why), then
   deleted elements, then added elements. A key with new data is in both.
3. A script: new base chains, after everything that they lead to; then chains and sets that are no longer referenced are
   deleted. It is a separate transaction, because kernels before 6.4 count a reference until the transaction that drops
   it has ended (row 21.15).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from narthex.model import IPFamily
from narthex.netfilter.ast import Chain, ElementData, ElementKey, Set, Table
from narthex.netfilter.edit import TableEdit
from narthex.netfilter.netlink.elements import is_config_set
from narthex.netfilter.netlink.rules import needs_bytecode
from narthex.netfilter.netlink.slot_map import SlotMap
from narthex.netfilter.nft.print import chain_text, element_text, name_text, set_text

Elements = Mapping[str, Mapping[ElementKey, ElementData]]
"""By set."""


class NftChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of one table. False if there is nothing to do."""

    family: IPFamily
    table: str
    replace: bool = False
    """The table is removed first, whatever it contains."""
    sets: tuple[Set, ...] = ()
    """New sets, and sets with another declaration. Sets of networks include all their elements; others are empty here.
    """
    chains: tuple[Chain, ...] = ()
    """New chains, and chains with other rules."""
    known: frozenset[str] = frozenset()
    """Those of `chains` that exist and are flushed first."""
    deletions: Elements = {}
    additions: Elements = {}
    declarations: Mapping[str, Set] = {}
    """The sets of `deletions` and `additions`, without elements."""
    late_chains: tuple[Chain, ...] = ()
    """New base chains."""
    removed_chains: tuple[str, ...] = ()
    removed_sets: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(not self.elements_only or self.deletions or self.additions)

    @property
    def transactions(self) -> int:
        """Number of phases that have something to do."""
        return len(self.phases())

    def phases(self) -> list[NftChanges]:
        """Return the changes of each transaction, in order; phases that have nothing to do are left out."""
        direct, empty = self.direct_chains(), NftChanges(family=self.family, table=self.table)
        declared = [_declared(one) for one in direct if one.name not in self.known]
        first = msgspec.structs.replace(
            empty,
            replace=self.replace,
            sets=self.sets,
            chains=(*(one for one in self.chains if not needs_bytecode(one)), *declared),
            known=self.known - {one.name for one in direct},
        )
        batch = msgspec.structs.replace(
            empty,
            chains=tuple(one for one in direct if one.rules or one.name in self.known),
            known=frozenset(one.name for one in direct),
            deletions=self.deletions,
            additions=self.additions,
            declarations=self.declarations,
        )
        last = msgspec.structs.replace(
            empty, late_chains=self.late_chains, removed_chains=self.removed_chains, removed_sets=self.removed_sets
        )
        return [phase for phase in (first, batch, last) if phase]

    @property
    def elements_only(self) -> bool:
        """True if only elements change: one netlink batch, without text for nft."""
        return not (
            self.replace or self.sets or self.chains or self.late_chains or self.removed_chains or self.removed_sets
        )

    def element_count(self) -> int:
        """Return the number of deleted and added elements; a key with new data counts twice."""
        return sum(map(len, self.deletions.values())) + sum(map(len, self.additions.values()))

    def first_script(self) -> str:
        """Return the script of phase 1; empty if it has nothing to do."""
        where = f"{self.family.nft} {name_text(self.table)}"
        lines = [f"table {where}", f"delete table {where}", f"table {where}"] if self.replace else []
        if self.sets:
            lines.append(_block(where, [set_text(_empty(one), self.family) for one in self.sets]))
        for one in self.sets:
            if is_config_set(one):
                lines.append(f"flush set {where} {name_text(one.name)}")
            if one.elements:
                elements = ", ".join(element_text(key, data) for key, data in one.elements.items())
                lines.append(f"add element {where} {name_text(one.name)} {{ {elements} }}")
        texts = [chain for chain in self.chains if not needs_bytecode(chain)]
        lines += [f"flush chain {where} {name_text(one.name)}" for one in texts if one.name in self.known]
        texts += [_declared(chain) for chain in self.direct_chains() if chain.name not in self.known]
        if texts:
            lines.append(_block(where, [chain_text(one, self.family) for one in texts]))
        return "\n".join([*lines, ""]) if lines else ""

    def direct_chains(self) -> list[Chain]:
        """Return those of `chains` whose rules are sent in phase 2; phase 1 declares them if they are new."""
        return [chain for chain in self.chains if needs_bytecode(chain)]

    def last_script(self) -> str:
        """Return the script of phase 3; empty if it has nothing to do."""
        where = f"{self.family.nft} {name_text(self.table)}"
        lines = [f"flush chain {where} {name_text(name)}" for name in self.removed_chains]
        lines += [f"delete chain {where} {name_text(name)}" for name in self.removed_chains]
        lines += [f"delete set {where} {name_text(name)}" for name in self.removed_sets]
        if self.late_chains:
            lines.append(_block(where, [chain_text(one, self.family) for one in self.late_chains]))
        return "\n".join([*lines, ""]) if lines else ""


def replacement(want: Table) -> NftChanges:
    """Return the changes that replace everything.

    Base chains come last: until then no packet meets a rule, so a partial table does no harm.
    """
    assert want.family is not None
    sets = {name: one for name, one in want.sets.items() if not is_config_set(one) and one.elements}
    return NftChanges(
        family=want.family,
        table=want.name,
        replace=True,
        sets=tuple(one if is_config_set(one) else _empty(one) for one in want.sets.values()),
        chains=tuple(chain for chain in want.chains.values() if chain.hook is None),
        additions={name: one.elements for name, one in sets.items()},
        declarations={name: _empty(one) for name, one in sets.items()},
        late_chains=tuple(chain for chain in want.chains.values() if chain.hook is not None),
    )


def between(have: Table, want: Table) -> NftChanges:
    """Return the changes from `have` to `want`. Both may be parts of tables if the rest is known to be equal."""
    assert want.family is not None
    if not _can_change(have, want):
        return replacement(want)
    put = [chain for name, chain in want.chains.items() if have.chains.get(name) != chain]
    changed = {name: one for name, one in want.sets.items() if name in have.sets and not is_config_set(one)}
    deletions: dict[str, dict[ElementKey, ElementData]] = {}
    additions: dict[str, dict[ElementKey, ElementData]] = {}
    for name, one in want.sets.items():
        if is_config_set(one) or one.dynamic:
            continue
        before = have.sets[name].elements if name in changed else {}
        leaving, coming = _element_difference(before, one.elements)
        if leaving:
            deletions[name] = leaving
        if coming:
            additions[name] = coming
    return NftChanges(
        family=want.family,
        table=want.name,
        sets=tuple(_differing_sets(have.sets, want.sets.values())),
        chains=tuple(chain for chain in put if chain.hook is None or chain.name in have.chains),
        known=frozenset(chain.name for chain in put if chain.name in have.chains),
        deletions=deletions,
        additions=additions,
        declarations={name: _empty(want.sets[name]) for name in deletions.keys() | additions.keys()},
        late_chains=tuple(chain for chain in put if chain.hook is not None and chain.name not in have.chains),
        removed_chains=tuple(name for name in have.chains if name not in want.chains),
        removed_sets=tuple(name for name in have.sets if name not in want.sets),
    )


def patched(have: Table, changes: NftChanges) -> Table:
    """Return the table after the changes."""
    chains = {} if changes.replace else dict(have.chains)
    sets = {} if changes.replace else dict(have.sets)
    for one in changes.sets:
        filled = one if is_config_set(one) or one.name not in sets else with_elements(one, sets[one.name].elements)
        sets[one.name] = filled
    chains.update((chain.name, chain) for chain in (*changes.chains, *changes.late_chains))
    for name in changes.deletions.keys() | changes.additions.keys():
        elements = dict(sets[name].elements)
        for key in changes.deletions.get(name, {}):
            del elements[key]
        elements.update(changes.additions.get(name, {}))
        sets[name] = with_elements(sets[name], elements)
    for name in changes.removed_chains:
        del chains[name]
    for name in changes.removed_sets:
        del sets[name]
    return Table(family=changes.family, name=changes.table, chains=chains, sets=sets)


def edits_of(changes: NftChanges) -> tuple[TableEdit, ...]:
    """Return the changes as those of a table, all transactions together."""
    chains = (*changes.chains, *changes.late_chains)
    return (
        TableEdit(
            family=changes.family,
            table=changes.table,
            replace=changes.replace,
            chains={chain.name: chain.rules for chain in chains},
            hooks={chain.name: chain.hook for chain in chains if chain.hook is not None},
            removed_chains=changes.removed_chains,
            sets=changes.sets,
            filled=frozenset(one.name for one in changes.sets if is_config_set(one)),
            deletions=changes.deletions,
            additions=changes.additions,
            removed_sets=changes.removed_sets,
        ),
    )


def with_elements(one: Set, elements: Mapping[ElementKey, ElementData]) -> Set:
    """Return the set with other elements."""
    return msgspec.structs.replace(one, elements=elements)


def _empty(one: Set) -> Set:
    return with_elements(one, {}) if one.elements else one


def _declared(chain: Chain) -> Chain:
    return Chain(name=chain.name, hook=chain.hook)


def _differing_sets(have: Mapping[str, Set], want: Iterable[Set]) -> Iterable[Set]:
    for one in want:
        before = have.get(one.name)
        if is_config_set(one):
            if before != one:
                yield one
        elif before is None or _empty(before) != _empty(one):
            yield _empty(one)


def _element_difference(
    have: Mapping[ElementKey, ElementData], want: Mapping[ElementKey, ElementData]
) -> tuple[dict[ElementKey, ElementData], dict[ElementKey, ElementData]]:
    if isinstance(have, SlotMap) and isinstance(want, SlotMap):
        return have.without(want), want.without(have)
    missing = object()
    leaving = {key: data for key, data in have.items() if want.get(key, missing) != data}
    coming = {key: data for key, data in want.items() if have.get(key, missing) != data}
    return leaving, coming


def _can_change(have: Table, want: Table) -> bool:
    """Return True if the kernel can change one table into the other.

    A hook cannot change, and of an existing set only the timeout can.
    """
    for name, chain in want.chains.items():
        before = have.chains.get(name)
        if before is not None and before.hook != chain.hook:
            return False
    for name, one in want.sets.items():
        was = have.sets.get(name)
        if was is not None and _declaration(was) != _declaration(one):
            return False
    return True


def _declaration(one: Set) -> tuple[object, ...]:
    return one.key, one.data, one.interval, one.dynamic, one.size, one.counter, bool(one.timeout)


def _block(where: str, parts: list[str]) -> str:
    return "\n".join([f"table {where} {{", *parts, "}"])
