"""Faults in change sets, and changes between any two rulesets as typed data."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import msgspec

from narthex.netfilter import ast
from narthex.netfilter.edit import TableEdit

Edits = tuple[TableEdit, ...]
EditFault = Callable[[Edits, random.Random, ast.Ruleset], Edits]


def edits_between(have: ast.Ruleset, want: ast.Ruleset) -> Edits:
    """Return the changes from one ruleset to the other, of tables that both have."""
    before = {table.name: table for table in have.tables}
    return tuple(_edit(before[table.name], table) for table in want.tables)


def _edit(have: ast.Table, want: ast.Table) -> TableEdit:
    assert want.family is not None
    new = {name: one for name, one in want.sets.items() if name not in have.sets}
    old = {name: one for name, one in want.sets.items() if name in have.sets}
    chains = {name: chain for name, chain in want.chains.items() if have.chains.get(name) != chain}
    return TableEdit(
        family=want.family,
        table=want.name,
        chains={name: chain.rules for name, chain in chains.items()},
        hooks={name: chain.hook for name, chain in chains.items() if chain.hook is not None},
        removed_chains=tuple(name for name in have.chains if name not in want.chains),
        sets=(
            *new.values(),
            *(
                msgspec.structs.replace(one, elements={})
                for name, one in old.items()
                if _declared(one) != _declared(have.sets[name])
            ),
        ),
        deletions={name: _without(have.sets[name].elements, one.elements) for name, one in old.items()},
        additions={name: _without(one.elements, have.sets[name].elements) for name, one in old.items()},
        removed_sets=tuple(name for name in have.sets if name not in want.sets),
    )


def _declared(one: ast.Set) -> ast.Set:
    return msgspec.structs.replace(one, elements={})


def _without(
    some: Mapping[ast.ElementKey, ast.ElementData], others: Mapping[ast.ElementKey, ast.ElementData]
) -> dict[ast.ElementKey, ast.ElementData]:
    missing = object()
    return {key: data for key, data in some.items() if others.get(key, missing) != data}


# ---- faults --------------------------------------------------------------------------------------------------------------------


def _changed(edits: Edits, at: int, **fields: object) -> Edits:
    return (*edits[:at], msgspec.structs.replace(edits[at], **fields), *edits[at + 1 :])


def _chosen(edits: Edits, rng: random.Random, field: str) -> tuple[int, str] | None:
    found = [(at, name) for at, edit in enumerate(edits) for name, held in getattr(edit, field).items() if held]
    return rng.choice(found) if found else None


def forgotten_element(edits: Edits, rng: random.Random, _have: ast.Ruleset) -> Edits:
    """Don't add or don't delete an element."""
    field = rng.choice(("additions", "deletions"))
    chosen = _chosen(edits, rng, field)
    if chosen is None:
        return edits
    at, name = chosen
    held = dict(getattr(edits[at], field))
    left = dict(held[name])
    del left[rng.choice(list(left))]
    return _changed(edits, at, **{field: {**held, name: left}})


def other_data(edits: Edits, rng: random.Random, have: ast.Ruleset) -> Edits:
    """Give a new element the data of another element."""
    chosen = _chosen(edits, rng, "additions")
    if chosen is None:
        return edits
    at, name = chosen
    added = dict(edits[at].additions)
    elements = dict(added[name])
    known = [one for table in have.tables for held, one in table.sets.items() if held == name]
    data = [*elements.values(), *(each for one in known for each in one.elements.values())]
    elements[rng.choice(list(elements))] = rng.choice(data)
    return _changed(edits, at, additions={**added, name: elements})


def damaged_bystander(edits: Edits, rng: random.Random, have: ast.Ruleset) -> Edits:
    """Delete an element that has nothing to do with the change."""
    found = [
        (at, name, key)
        for at, edit in enumerate(edits)
        for table in have.tables
        if table.name == edit.table
        for name, one in table.sets.items()
        for key in one.elements
        if key not in edit.deletions.get(name, {})
        and key not in edit.additions.get(name, {})
        and name not in edit.removed_sets
    ]
    if not found:
        return edits
    at, name, key = rng.choice(found)
    deletions = dict(edits[at].deletions)
    elements = next(table.sets[name].elements for table in have.tables if table.name == edits[at].table)
    deletions[name] = {**deletions.get(name, {}), key: elements[key]}
    return _changed(edits, at, deletions=deletions)


def forgotten_chain(edits: Edits, rng: random.Random, _have: ast.Ruleset) -> Edits:
    """Don't write a chain."""
    chosen = [(at, name) for at, edit in enumerate(edits) for name in edit.chains]
    if not chosen:
        return edits
    at, name = rng.choice(chosen)
    return _changed(edits, at, chains={each: rules for each, rules in edits[at].chains.items() if each != name})


def forgotten_rule(edits: Edits, rng: random.Random, _have: ast.Ruleset) -> Edits:
    """Write a chain without one of its rules."""
    return _with_other_rules(edits, rng, lambda rules: rules.pop(rng.randrange(len(rules))))


def moved_rule(edits: Edits, rng: random.Random, _have: ast.Ruleset) -> Edits:
    """Write a chain with its rules in another order."""
    return _with_other_rules(edits, rng, rng.shuffle)


def strange_rule(edits: Edits, rng: random.Random, have: ast.Ruleset) -> Edits:
    """Write a chain with a rule of another chain."""
    rules = [rule for table in have.tables for chain in table.chains.values() for rule in chain.rules]
    if not rules:
        return edits
    return _with_other_rules(edits, rng, lambda held: held.insert(rng.randrange(len(held) + 1), rng.choice(rules)))


def _with_other_rules(edits: Edits, rng: random.Random, change: Callable[[list[ast.Rule]], object]) -> Edits:
    chosen = _chosen(edits, rng, "chains")
    if chosen is None:
        return edits
    at, name = chosen
    rules = list(edits[at].chains[name])
    change(rules)
    return _changed(edits, at, chains={**edits[at].chains, name: tuple(rules)})


def other_chain(edits: Edits, rng: random.Random, have: ast.Ruleset) -> Edits:
    """Write the rules of a changed chain into another one that is there."""
    chosen = _chosen(edits, rng, "chains")
    if chosen is None:
        return edits
    at, name = chosen
    names = [each for table in have.tables if table.name == edits[at].table for each in table.chains]
    if not names:
        return edits
    return _changed(edits, at, chains={**edits[at].chains, rng.choice(names): edits[at].chains[name]})


EDIT_FAULTS: tuple[EditFault, ...] = (
    forgotten_element,
    other_data,
    damaged_bystander,
    forgotten_chain,
    forgotten_rule,
    moved_rule,
    strange_rule,
    other_chain,
)
