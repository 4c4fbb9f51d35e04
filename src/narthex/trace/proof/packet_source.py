"""What one side says about all packets, as weighted boxes: rules by walking sets, or a plan by its decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from narthex.model import Host, IPFamily
from narthex.netfilter import ast
from narthex.netfilter.sets.branch import PacketEnd
from narthex.netfilter.sets.diagram import DiagramBuilder, WeightedBox, leaves
from narthex.netfilter.sets.space import SADDR, Box, LinkNames, PacketSpace
from narthex.netfilter.sets.walk import SetWalk
from narthex.proxy.plan.ir import Deviation, Plan
from narthex.trace.proof.plan_ends import PlanEnds
from narthex.trace.proof.prove import UndecidedRule


class PacketSource(msgspec.Struct, frozen=True, kw_only=True):
    """Rules or a plan of a node for one IP family."""

    name: str
    family: IPFamily
    host: Host
    ruleset: ast.Ruleset | None = None
    plan: Plan | None = None
    """Used where there is no ruleset."""
    deviations: frozenset[Deviation] = frozenset()
    """Those of the mode, for a plan."""
    obstacles: tuple[str, ...] = ()
    """Why the input does not decide everything: parts of the rules that are not known or not interpreted."""
    given: tuple[str, ...] = ()
    """What the input does not say and is taken for granted."""

    @property
    def decides(self) -> bool:
        """True if sets can be walked through it."""
        return self.ruleset is not None or self.plan is not None


def space_of_sources(sources: Iterable[PacketSource], host: Host, links: Iterable[str] = ()) -> PacketSpace:
    """Return a space on a host in which the links of all sources have the same numbers."""
    names = LinkNames(set(links))
    families = set()
    for source in sources:
        families.add(source.family)
        for table in source.ruleset.tables if source.ruleset is not None else ():
            if table.family in (None, source.family):
                names.read(table)
        if source.plan is not None:
            pods = source.plan.pods
            names.names.update((pods.interface, f"{pods.interface_prefix}*" if pods.interface_prefix else ""))
    (family,) = families
    return PacketSpace(family, host, names.names)


def ends_of(source: PacketSource, space: PacketSpace, within: Iterable[Box]) -> Iterator[WeightedBox]:
    """Yield the ends of the packets of disjoint boxes, in a space on the host of the source.

    The deviations of a plan must have an interpretation (`INTERPRETED`).
    """
    if source.ruleset is not None:
        walked = SetWalk(source.ruleset, space)
        for box in within:
            yield from walked.ends(box)
        return
    assert source.plan is not None
    asked = list(within)
    for each in PlanEnds(source.plan, space, source.deviations).ends():
        for box in asked:
            part = tuple(one & other for one, other in zip(each.box, box, strict=True))
            if all(part):
                yield each._replace(box=part)


def undecided_notes(found: Iterable[WeightedBox]) -> dict[str, list[Box]]:
    """Return the boxes of packets whose ends are undecided, by the rule that is the reason. They may overlap."""
    notes: dict[str, list[Box]] = {}
    for each in found:
        if isinstance(each.end, PacketEnd) and each.end.note:
            notes.setdefault(each.end.note, []).append(each.box)
    return notes


def disjoint(boxes: Iterable[Box], space: PacketSpace) -> Iterator[Box]:
    """Yield disjoint boxes with the packets of boxes that may overlap."""
    weighted = [WeightedBox(box, True) for box in boxes]
    if not weighted:
        return
    for box, leaf in leaves(DiagramBuilder(space).build(weighted), space):
        for sources, _ in leaf.regions:
            yield (*box[:SADDR], sources)


def packets_in(box: Box) -> int:
    """Return the number of packets of a box."""
    size = 1
    for each in box:
        size *= each.size
    return size


def undecided_rules(
    notes: dict[str, list[Box]], space: PacketSpace, describe: Callable[[Box], str]
) -> tuple[UndecidedRule, ...]:
    """Return the rules that leave packets undecided, those that leave most of them first."""
    whole = 1 << space.bits
    found = []
    for note, boxes in notes.items():
        sizes = sorted(((packets_in(box), box) for box in disjoint(boxes, space)), key=lambda each: -each[0])
        share = sum(size for size, _ in sizes) / whole
        found.append(UndecidedRule(rule=note, share=share, described=describe(sizes[0][1])))
    return tuple(sorted(found, key=lambda each: (-each.share, each.rule)))
