"""From one table to another: what to change, in phases, and as text where nft writes it.

1. A script, one transaction: sets and chains that are new, chains that read differently. Nobody is led to a new chain
   yet, so the packet path never meets half a change.
2. One netlink batch and so one transaction: rules that nft cannot take as text (`netfilter.bytecode` says why), then
   all elements that go, then all that come. A key whose data changes is in both.
3. A script: base chains that are new, when everything that they lead to is there, and away with chains and sets that
   nobody refers to any more. A transaction of its own, because kernels before 6.4 count a reference until the
   transaction that drops it is over (behaviour row 21.15).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from narthex.model.net import IPFamily
from narthex.netfilter.ast import Chain, ElementData, ElementKey, Set, Table
from narthex.netfilter.netlink.elements import is_config_set
from narthex.netfilter.netlink.rules import needs_bytecode
from narthex.netfilter.netlink.slot_map import SlotMap
from narthex.netfilter.nft import chain_text, set_text
from narthex.netfilter.nft.print import element_text, name_text

Elements = Mapping[str, Mapping[ElementKey, ElementData]]
"""By set."""


class NftChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of one table. False when there is nothing to do."""

    family: IPFamily
    table: str
    replace: bool = False
    """The table is removed first, whatever stands in it."""
    sets: tuple[Set, ...] = ()
    """New, or declared differently; lists of networks are filled anew, other sets are empty here."""
    chains: tuple[Chain, ...] = ()
    """New, or with other rules."""
    known: frozenset[str] = frozenset()
    """Those of `chains` that exist: emptied first."""
    deletions: Elements = {}
    additions: Elements = {}
    declarations: Mapping[str, Set] = {}
    """The sets of `deletions` and `additions`, without elements."""
    late_chains: tuple[Chain, ...] = ()
    """Base chains that are new."""
    removed_chains: tuple[str, ...] = ()
    removed_sets: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(
            self.replace
            or self.sets
            or self.chains
            or self.deletions
            or self.additions
            or self.late_chains
            or self.removed_chains
            or self.removed_sets
        )

    @property
    def transactions(self) -> int:
        """How many the phases are: those that have something to do."""
        first = (
            self.replace
            or self.sets
            or any(not needs_bytecode(one) or one.name not in self.known for one in self.chains)
        )
        batch = (
            self.deletions or self.additions or any(one.rules or one.name in self.known for one in self.direct_chains())
        )
        last = self.late_chains or self.removed_chains or self.removed_sets
        return sum(map(bool, (first, batch, last)))

    @property
    def elements_only(self) -> bool:
        """No rules, chains or sets come or go: all of it is one batch of elements, without nft text."""
        return not (
            self.replace or self.sets or self.chains or self.late_chains or self.removed_chains or self.removed_sets
        )

    def element_count(self) -> int:
        """Elements deleted and added; a key with new data counts twice."""
        return sum(map(len, self.deletions.values())) + sum(map(len, self.additions.values()))

    def first_script(self) -> str:
        """Phase 1; empty when it has nothing to do."""
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
        """Those of `chains` whose rules go in phase 2; phase 1 declares them when they are new."""
        return [chain for chain in self.chains if needs_bytecode(chain)]

    def last_script(self) -> str:
        """Phase 3; empty when it has nothing to do."""
        where = f"{self.family.nft} {name_text(self.table)}"
        lines = [f"flush chain {where} {name_text(name)}" for name in self.removed_chains]
        lines += [f"delete chain {where} {name_text(name)}" for name in self.removed_chains]
        lines += [f"delete set {where} {name_text(name)}" for name in self.removed_sets]
        if self.late_chains:
            lines.append(_block(where, [chain_text(one, self.family) for one in self.late_chains]))
        return "\n".join([*lines, ""]) if lines else ""


def replacement(want: Table) -> NftChanges:
    """Everything anew. Base chains come last: until then no rule is met, so a half-made table does no harm."""
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
    """What makes `want` of `have`. Either may be a part of a table, when the rest is known to be equal."""
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
    """The table after the changes."""
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


def with_elements(one: Set, elements: Mapping[ElementKey, ElementData]) -> Set:
    """The same set with these elements."""
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
    """Whether the kernel can come from one to the other. A hook stays as it is, and of a set that exists only the
    timeout can change."""
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
