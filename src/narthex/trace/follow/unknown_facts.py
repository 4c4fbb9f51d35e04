"""The paths of a packet where the input lacks a fact: one for each possible value, and what follows from all of them.

The facts are the link that the packet leaves by (without routes) and whether the destination is an address of the node (without
addresses). If every value leads to the same end, the fact doesn't matter. Otherwise the end is UNKNOWN, and names both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

import msgspec

from narthex.trace.model import (
    Alternative,
    Fate,
    Header,
    PathBranch,
    PathEnd,
    PathLeaf,
    PossibleEnd,
    branch_ends,
    branch_tree,
    tree_leaves,
)

_OTHER_LINK = "(another)"
"""A link that no rule names."""
_MOST_LINKS = 12
"""Links that rules may name before the rest count as another: a node has a handful of bridges and uplinks."""
_REFUSED = (Fate.DROPPED, Fate.REJECTED, Fate.LOST)

Target = tuple[str, int]


class Assumption(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that the input lacks, with one of their possible values."""

    link: str = ""
    """The link that the packet leaves by where no route is known; empty: not known."""
    own: tuple[str, ...] = ()
    """More addresses of the node."""


NOTHING = Assumption()


class AskedFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that rules asked for and the input lacks."""

    links: frozenset[str] = frozenset()
    """Names of links, possibly with `*` at the end, that rules compare with the unknown output link."""
    addresses: frozenset[str] = frozenset()
    """Addresses of which rules ask whether they are the node's own."""


Run = Callable[[Assumption], tuple[PathBranch, AskedFacts]]
"""Follows the packet with an assumption."""


def follow_all(run: Run, header: Header, known: Assumption = NOTHING) -> PathBranch:
    """Return the path of a packet, with all ends that facts missing in the input allow; `known` is assumed in any case."""
    here, asked = _over_links(run, known)
    if header.destination not in asked.addresses:
        return here
    there, _ = _over_links(run, Assumption(own=(*known.own, header.destination)))
    if _effects(here, header) == _effects(there, header):
        return here
    own = f"{header.destination} is an address of this node"
    may = (*_possible(own, tree_leaves(there)), *_possible("it is not", tree_leaves(here)))
    first = next(branch_ends(here))
    reason = f"it is unknown whether {own}"
    steps = here.steps[:1]
    return PathBranch(steps=steps, end=PathEnd(fate=Fate.UNKNOWN, node=first.node, reason=reason, may=may))


def doubt_sender(received: PathBranch, made: PathBranch, header: Header) -> PathBranch:
    """Return the path of a packet that is assumed to come from another machine, though the node itself may have made it."""
    if _effects(received, header) == _effects(made, header):
        return received
    text = f"{header.source} is assumed not to be an address of this node"
    may = _possible(f"{header.source} is an address of this node", tree_leaves(made))
    ends = (
        (leaf, msgspec.structs.replace(leaf.end, supposing=(*leaf.end.supposing, text), may=leaf.end.may or may))
        for leaf in tree_leaves(received)
    )
    return branch_tree([(leaf.probability, leaf.steps, end) for leaf, end in ends])


def _over_links(run: Run, assumption: Assumption) -> tuple[PathBranch, AskedFacts]:
    tree, asked = run(assumption)
    if not asked.links:
        return tree, asked
    names = sorted(asked.links)[:_MOST_LINKS]
    cases: list[tuple[str, PathBranch]] = []
    for name in names:
        link = name.removesuffix("*") + ("0" if name.endswith("*") else "")
        cases.append((name, run(msgspec.structs.replace(assumption, link=link))[0]))
    cases.append(("another interface", run(msgspec.structs.replace(assumption, link=_OTHER_LINK))[0]))
    return _combined(cases), asked


def _combined(cases: Sequence[tuple[str, PathBranch]]) -> PathBranch:
    """Return one tree for all links: the ends on which they agree, and UNKNOWN ends where they don't."""
    last = cases[-1][1]
    leaves = {name: {_target(leaf): leaf for leaf in tree_leaves(tree)} for name, tree in cases}
    alternatives: list[Alternative] = []
    for leaf in tree_leaves(last):
        target = _target(leaf)
        groups: dict[tuple[object, ...], tuple[list[str], PathEnd]] = {}
        for name, held in leaves.items():
            end = held[target].end if target in held else PathEnd(fate=Fate.UNKNOWN)
            groups.setdefault(_kind(end), ([], end))[0].append(name)
        end = leaf.end
        if len(groups) > 1:
            may = tuple(possible_end(f"it leaves by {' or '.join(names)}", found) for names, found in groups.values())
            reason = "it depends on the interface that it leaves by, and the routes are unknown"
            end = PathEnd(fate=Fate.UNKNOWN, node=leaf.end.node, reason=reason, supposing=leaf.end.supposing, may=may)
        alternatives.append((leaf.probability, leaf.steps, end))
    return branch_tree(alternatives)


def _kind(end: PathEnd) -> tuple[object, ...]:
    return end.fate, end.address, end.port, end.masqueraded


def _target(leaf: PathLeaf) -> Target:
    """Return the destination after all rewriting."""
    for step in reversed(leaf.steps):
        header = step.after or step.before
        if header is not None:
            return header.destination, header.port
    return leaf.end.address, leaf.end.port


def _effects(tree: PathBranch, header: Header) -> dict[tuple[object, ...], Fraction]:
    """Return what rules do with the packet: where they send it, and whether they refuse it."""
    found: dict[tuple[object, ...], Fraction] = {}
    for leaf in tree_leaves(tree):
        target = _target(leaf)
        rewritten = target != (header.destination, header.port)
        if not rewritten and leaf.end.fate not in _REFUSED:
            continue
        key = target, leaf.end.fate in _REFUSED, leaf.end.masqueraded
        found[key] = found.get(key, Fraction(0)) + leaf.probability
    return found


def _possible(when: str, leaves: Sequence[PathLeaf]) -> tuple[PossibleEnd, ...]:
    found = {_kind(leaf.end): possible_end(when, leaf.end) for leaf in leaves}
    return tuple(found.values())


def possible_end(when: str, end: PathEnd) -> PossibleEnd:
    """Return an end as one that is possible, with its condition."""
    return PossibleEnd(
        when=when,
        fate=end.fate,
        address=end.address,
        port=end.port,
        name=end.name,
        masqueraded=end.masqueraded,
        reason=end.reason,
    )
