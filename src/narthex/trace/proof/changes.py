"""Every class of packets whose outcome changes from one set of rules to another: exact classes, and lines that describe them.

The classes are disjoint and complete: a packet outside of them, and outside of what is undecided, has the same outcome with both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from narthex.model import Disposition, IPFamily
from narthex.netfilter.sets.branch import PacketEnd
from narthex.netfilter.sets.diagram import Diagram, DiagramBuilder, Distribution, WeightedBox, differing
from narthex.netfilter.sets.space import DADDR, DPORT, HERE, LINK, PROTOCOL, SADDR, SPORT, Box, PacketSpace
from narthex.netfilter.sets.values import ValueSet, segments, values
from narthex.trace.proof.class_groups import ClassGroups, ClassLine, Effect, across_services
from narthex.trace.proof.describe import PROTOCOL_NAMES, sample_point
from narthex.trace.proof.named_frontends import NamedFrontends
from narthex.trace.proof.outcomes import ClassOutcome, change_text, outcome_of
from narthex.trace.proof.packet_source import (
    PacketSource,
    ends_of,
    packets_in,
    space_of_sources,
    undecided_notes,
    undecided_rules,
)
from narthex.trace.proof.prove import PARAMETERS, ProofEnd, ProofOutcome, UndecidedRule, renamed_lists, same_choices
from narthex.trace.proof.sender_sets import SenderFacts, SenderSets

MOST_LINES = 40
"""Lines that a report has by default."""
_MOST_SETS = 20
"""Exact sets of packets that a line has in JSON."""
_MOST_RANGES = 100
"""Ranges of one field of such a set."""
_LOOPBACK = {IPFamily.IPV4: "127.0.0.1", IPFamily.IPV6: "::1"}
_FIRST_HOST = 5
"""What an example adds to the first address of a set, which may be that of a network."""


class PacketSet(msgspec.Struct, frozen=True, kw_only=True):
    """A set of packets: all combinations of these values. A field without values is not limited."""

    destinations: tuple[str, ...] = ()
    """Addresses and ranges `FIRST-LAST`."""
    protocols: tuple[str, ...] = ()
    """Names or numbers, and ranges of numbers."""
    ports: tuple[str, ...] = ()
    source_ports: tuple[str, ...] = ()
    arrival: str = ""
    """`this node` for packets that it sends itself, `received` for all others, or the links of arrival; empty: not limited."""
    sources: tuple[str, ...] = ()
    packets: str
    """The number of packets, as a decimal number."""
    shortened: bool = False
    """A field has more ranges than are listed."""


class ExamplePacket(msgspec.Struct, frozen=True, kw_only=True):
    """A packet of a class, as `narthex trace` takes it."""

    source: str
    destination: str
    protocol: str
    port: int
    link: str = ""
    """The link of arrival; empty for a packet that the node itself sends."""


class PacketChange(msgspec.Struct, frozen=True, kw_only=True):
    """Classes of packets with one description whose outcome changes in the same way."""

    described: str
    """The line: senders, destination, and change."""
    senders: str
    destination: str
    services: tuple[str, ...] = ()
    """The Service ports; empty for packets without a frontend or with a frontend that nothing names."""
    change: str
    before: tuple[ProofEnd, ...]
    """The ends of the example's class."""
    after: tuple[ProofEnd, ...]
    hairpin: tuple[str, ...] = ()
    """Endpoints whose own packets are masqueraded where they get back to them, unlike `before` and `after` say."""
    packets: str
    """The number of packets, as a decimal number."""
    example: ExamplePacket
    sets: tuple[PacketSet, ...]
    """The packets, as disjoint sets."""
    more_sets: int = 0
    """Sets that are not listed."""


class ChangeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What changes for all packets of one IP family."""

    node: str
    family: str
    before: str
    after: str
    outcome: ProofOutcome
    """`proved`: no packet changes its outcome."""
    bits: int
    """Bits of a packet: the space has 2 to the power of `bits` packets."""
    classes: int = 0
    """Exact classes of packets whose outcome changes."""
    packets: str = "0"
    """The number of their packets, as a decimal number."""
    changes: tuple[PacketChange, ...] = ()
    more: int = 0
    """Changes that are not listed."""
    undecided: tuple[UndecidedRule, ...] = ()
    parameters: tuple[str, ...] = PARAMETERS
    """What is given and not part of a packet."""

    @property
    def status(self) -> int:
        """The exit status: 0 if nothing changes, 1 if something does, 2 if nothing is known to and something is undecided."""
        return {ProofOutcome.PROVED: 0, ProofOutcome.DIFFERENT: 1, ProofOutcome.UNDECIDED: 2}[self.outcome]


class ChangesDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="changes"):
    """What `narthex diff --prove -o json` and `narthex migrate --prove -o json` print."""

    version: Literal[1] = 1
    status: int
    """The exit status."""
    reports: tuple[ChangeReport, ...]
    """One for each node and IP family."""


class ChangedClass(NamedTuple):
    """A class of packets with two different outcomes."""

    box: Box
    before: Distribution
    after: Distribution


class ComparedSources(NamedTuple):
    """What two sources do with all packets, as diagrams of one builder."""

    space: PacketSpace
    """On the host of the first source."""
    before: Diagram
    after: Diagram
    undecided: Mapping[str, list[Box]]
    """Packets that one of them leaves undecided, by the reason."""


def compare_sources(before: PacketSource, after: PacketSource, links: Iterable[str] = ()) -> ComparedSources:
    """Walk all packets through both sources; `links` are further names of links that matter."""
    space, other = (space_of_sources((before, after), source.host, links) for source in (before, after))
    first = list(ends_of(before, space, [space.possible]))
    second = list(ends_of(after, other, [other.possible]))
    notes = undecided_notes(first)
    for note, boxes in undecided_notes(second).items():
        notes.setdefault(note, []).extend(boxes)
    names = _matching_lists(first, second)
    if names:
        second = [renamed_lists(each, names) for each in second]
    builder = DiagramBuilder(space)
    return ComparedSources(space, builder.build(first), builder.build(second), notes)


def changed_classes(found: ComparedSources) -> Iterator[ChangedClass]:
    """Yield the classes of packets that both sources decide, and decide differently."""
    for box, one, other in differing(found.before, found.after, found.space):
        regions = [*one.regions, *other.regions]
        for part, (here, there) in segments([sources for sources, _ in regions]):
            before, after = regions[here][1], regions[there][1]
            if before == after or _undecided(before) or _undecided(after) or same_choices(before, after):
                continue
            yield ChangedClass((*box[:SADDR], part), before, after)


def _undecided(distribution: Distribution) -> bool:
    return any(isinstance(end, PacketEnd) and end.note for _, end, _ in distribution)


_Joined = tuple[tuple[str, int], int, int, int]
"""What joins an affinity list: packets to an endpoint, by destination, protocol, and port."""


def _matching_lists(one: Sequence[WeightedBox], other: Sequence[WeightedBox]) -> dict[str, str]:
    """Return the names on the first side for the affinity lists of the second side: those that the same packets join.

    A list that matches none or several keeps its name, and thus differs from all others.
    """
    first, second = _joined(one), _joined(other)
    owner = {key: name for name, keys in first.items() for key in keys}
    matches = {name: {owner[key] for key in keys if key in owner} for name, keys in second.items()}
    taken: dict[str, list[str]] = {}
    for name, found in matches.items():
        for each in found:
            taken.setdefault(each, []).append(name)
    return {
        name: match
        for name, found in matches.items()
        if len(found) == 1 and len(taken[match := next(iter(found))]) == 1 and name != match
    }


def _joined(boxes: Sequence[WeightedBox]) -> dict[str, set[_Joined]]:
    found: dict[str, set[_Joined]] = {}
    for each in boxes:
        if isinstance(each.end, PacketEnd):
            for name in each.end.remembers:
                box = each.box
                key = each.end.endpoint, box[DADDR].first, box[PROTOCOL].first, box[DPORT].first
                found.setdefault(name, set()).add(key)
    return found


# ---- the report ----------------------------------------------------------------------------------------------------------------


def change_report(
    node: str,
    before: PacketSource,
    after: PacketSource,
    facts: SenderFacts,
    name_frontends: Callable[[NamedFrontends], None],
    most: int | None = MOST_LINES,
) -> ChangeReport:
    """Return what changes from one source to the other, in at most `most` lines.

    Args:
        node: The name of the node.
        before: The rules before the change.
        after: The rules after it.
        facts: What is known of senders.
        name_frontends: Adds the frontends that are known.
        most: The number of lines; None for all.
    """
    found = compare_sources(before, after, facts.pod_links)
    space = found.space
    senders, frontends = SenderSets(space, facts), NamedFrontends(space)
    name_frontends(frontends)
    groups = ClassGroups(space, senders, frontends, _text, _own_text)
    classes = _add_changes(groups, found)
    lines = across_services(groups.lines())
    shown = lines if most is None else lines[:most]
    undecided = undecided_rules(dict(found.undecided), space, lambda box: describe_box(box, senders, frontends))
    undecided = (*_obstacles((before, after)), *undecided)
    outcome = ProofOutcome.DIFFERENT if lines else ProofOutcome.UNDECIDED if undecided else ProofOutcome.PROVED
    return ChangeReport(
        node=node,
        family=space.family.label,
        before=before.name,
        after=after.name,
        outcome=outcome,
        bits=space.bits,
        classes=classes,
        packets=str(sum(line.size for line in lines)),
        changes=tuple(_change(space, line) for line in shown),
        more=len(lines) - len(shown),
        undecided=undecided,
        parameters=(*PARAMETERS, *dict.fromkeys((*before.given, *after.given))),
    )


def _add_changes(groups: ClassGroups, found: ComparedSources) -> int:
    """Add all classes that change to groups. Return their number."""
    outcomes: dict[Distribution, ClassOutcome] = {}
    classes = 0
    for classes, each in enumerate(changed_classes(found), start=1):  # noqa: B007
        for side in (each.before, each.after):
            if side not in outcomes:
                outcomes[side] = outcome_of(side)
        groups.add(each.box, (outcomes[each.before], outcomes[each.after]))
    return classes


def undecided_change(node: str, before: PacketSource, after: PacketSource) -> ChangeReport:
    """Return the report about sources of which at least one decides nothing."""
    return ChangeReport(
        node=node,
        family=before.family.label,
        before=before.name,
        after=after.name,
        outcome=ProofOutcome.UNDECIDED,
        bits=0,
        undecided=tuple(_obstacles((before, after))),
    )


def _obstacles(sources: Sequence[PacketSource]) -> Iterator[UndecidedRule]:
    found = dict.fromkeys(text for source in sources for text in source.obstacles)
    for text in found:
        where = [source.name for source in sources if text in source.obstacles]
        yield UndecidedRule(rule=f"{' and '.join(where)}: {text}", share=1.0, described="all packets")


def describe_box(box: Box, senders: SenderSets, frontends: NamedFrontends) -> str:
    """Return the senders and the destination of a box in words."""
    name, piece = next(iter(frontends.split(box)))
    where = f"{name.service}'s {name.kind} {name.at}" if name is not None else frontends.place(piece)
    return f"{senders.words([(piece[SPORT], piece[LINK], piece[SADDR])])} to {where}"


def _text(effect: Effect) -> str:
    return change_text(*effect)


def _own_text(effect: Effect) -> str:
    before, after = ({each.masquerade for each in outcome.shares} for outcome in effect)
    return f"{'masqueraded' if True in before else 'not masqueraded'} -> {'masqueraded' if True in after else 'not masqueraded'}"


def _change(space: PacketSpace, line: ClassLine) -> PacketChange:
    before, after = line.effect
    largest = max(line.boxes, key=packets_in)
    return PacketChange(
        described=line.described,
        senders=line.senders,
        destination=line.destination,
        services=line.services,
        change=line.text,
        before=proof_ends(before),
        after=proof_ends(after),
        hairpin=line.hairpin,
        packets=str(line.size),
        example=example_packet(space, largest),
        sets=tuple(packet_set(space, box) for box in line.boxes[:_MOST_SETS]),
        more_sets=max(len(line.boxes) - _MOST_SETS, 0),
    )


def proof_ends(outcome: ClassOutcome) -> tuple[ProofEnd, ...]:
    """Return the ends of an outcome; those of senders that only affinity lists have come with probability 1."""
    return tuple(
        ProofEnd(
            end=each.disposition.value,
            endpoint=each.words if each.disposition is Disposition.DELIVERED else "",
            masquerade=each.masquerade,
            probability="/".join(map(str, each.probability)).removesuffix("/1"),
        )
        for each in outcome.shares
    )


def example_packet(space: PacketSpace, box: Box) -> ExamplePacket:
    """Return an ordinary packet of a box: one that this node sends where its sources are addresses of this node."""
    daddr, links, sources = box[DADDR], box[LINK], box[SADDR]
    if links & HERE and not sources - space.own:
        links = HERE
    usual = values(space.address(_LOOPBACK[space.family]))
    daddr = daddr & usual or daddr
    if not sources & space.own:
        sources = values(sources.first + _FIRST_HOST) & sources or sources
    point = sample_point(space, (daddr, *box[1:LINK], links, sources), sources)
    return ExamplePacket(
        source=space.address_text(point[SADDR]),
        destination=space.address_text(point[DADDR]),
        protocol=PROTOCOL_NAMES.get(point[PROTOCOL], str(point[PROTOCOL])),
        port=point[DPORT],
        link=space.link_name(point[LINK]) if point[LINK] else "",
    )


def packet_set(space: PacketSpace, box: Box) -> PacketSet:
    """Return a box as text."""
    found: dict[str, tuple[str, ...]] = {}
    shortened = False
    for name, field in (("destinations", DADDR), ("protocols", PROTOCOL), ("ports", DPORT), ("source_ports", SPORT), ("sources", SADDR)):  # fmt: skip
        if box[field] != space.whole[field]:
            shortened |= len(box[field].spans) > _MOST_RANGES
            found[name] = tuple(_ranges(space, field, box[field]))
    return PacketSet(**found, arrival=_arrival(space, box[LINK]), packets=str(packets_in(box)), shortened=shortened)


def _ranges(space: PacketSpace, field: int, part: ValueSet) -> Iterator[str]:
    def text(value: int) -> str:
        """Return one value."""
        if field in (DADDR, SADDR):
            return space.address_text(value)
        return PROTOCOL_NAMES.get(value, str(value)) if field == PROTOCOL else str(value)

    for first, last in part.spans[:_MOST_RANGES]:
        yield (
            text(first) if first == last else f"{text(first)}-{text(last)}" if field != PROTOCOL else f"{first}-{last}"
        )


def _arrival(space: PacketSpace, links: ValueSet) -> str:
    received = space.possible[LINK] - ValueSet(((0, 0),))
    if links == space.possible[LINK]:
        return ""
    if links == received:
        return "received"
    named = [
        space.link_name(value)
        for value in range(links.first, min(links.spans[-1][1], 64) + 1)
        if value and value in links
    ]
    texts = [*(["this node"] if 0 in links else []), *named]
    return ", ".join(texts) + (" and links that no rule names" if links.size > len(texts) else "")
