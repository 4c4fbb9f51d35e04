"""Answers to questions: the packets of a node that have the asked outcome, as exact sets with short descriptions.

Rules and plan are asked alike. An answer is complete: every other packet does not have the outcome, apart from those that are named as
undecided.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Literal, NamedTuple

import msgspec

from narthex.model import Disposition, InputError, family_of
from narthex.netfilter.sets.branch import PacketEnd
from narthex.netfilter.sets.diagram import DiagramBuilder, WeightedBox, leaves
from narthex.netfilter.sets.space import DADDR, DPORT, HERE, LINK, PROTOCOL, SADDR, Box, PacketSpace
from narthex.netfilter.sets.values import EMPTY, ValueSet, union, values
from narthex.trace.proof.changes import (
    MOST_LINES,
    ExamplePacket,
    PacketSet,
    describe_box,
    example_packet,
    packet_set,
    proof_ends,
)
from narthex.trace.proof.class_groups import ClassGroups, ClassLine, across_services
from narthex.trace.proof.named_frontends import NamedFrontends
from narthex.trace.proof.outcomes import ClassOutcome, EndShare, outcome_of
from narthex.trace.proof.packet_source import PacketSource, ends_of, packets_in, undecided_notes, undecided_rules
from narthex.trace.proof.prove import PARAMETERS, ProofEnd, UndecidedRule
from narthex.trace.proof.sender_sets import SenderRegion, SenderSets
from narthex.trace.query.question import Question, QuestionKind, QuestionSender, QuestionTarget

_MOST_SETS = 20
"""Exact sets of packets that a line has in JSON."""
_FATES = {
    "refused": Disposition.REJECTED,
    "dropped": Disposition.DROPPED,
    "left alone": Disposition.NOT_OURS,
    "undecided": Disposition.UNSUPPORTED,
}
_NAMED_ENDPOINTS = 3


class QueryLine(msgspec.Struct, frozen=True, kw_only=True):
    """Packets with one description and one outcome."""

    given_by: tuple[str, ...]
    """Who says so: `rules`, `objects`, or both."""
    senders: str
    destination: str
    services: tuple[str, ...] = ()
    """The Service ports; empty for packets without a frontend, or with one that nothing names."""
    outcome: str
    """What happens to the packets, in words."""
    ends: tuple[ProofEnd, ...]
    """The asked ends with their probabilities, of the example's class."""
    hairpin: tuple[str, ...] = ()
    """Endpoints whose own packets are masqueraded where they get back to them, though `ends` does not say so."""
    packets: str
    """The number of packets, as a decimal number."""
    example: ExamplePacket
    evidence: tuple[str, ...] = ()
    """The rule or the decision that the example meets."""
    sets: tuple[PacketSet, ...]
    """The packets, as disjoint sets."""
    more_sets: int = 0
    """Sets that are not listed."""


class QueryReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for one node and IP family."""

    node: str
    family: str
    read: tuple[str, ...]
    """What was asked: names of rules and objects."""
    certain: bool
    """Nothing is undecided: the answer holds for all packets."""
    agree: bool | None
    """Rules and objects give the same answer; null if only one of them is known."""
    lines: tuple[QueryLine, ...] = ()
    more: int = 0
    """Lines that are left out."""
    undecided: tuple[UndecidedRule, ...] = ()
    parameters: tuple[str, ...] = PARAMETERS
    """What is given and not part of a packet."""

    @property
    def status(self) -> int:
        """The exit status: 0 for a certain answer, 1 if rules and objects differ, 2 if a part is undecided."""
        return 1 if self.agree is False else 0 if self.certain else 2


class QueryDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="query"):
    """What `narthex query -o json` prints."""

    version: Literal[1] = 1
    status: int
    """The exit status."""
    question: str
    reports: tuple[QueryReport, ...]
    """One for each node and IP family."""


class QueryScene(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a node for answers."""

    node: str
    space: PacketSpace
    senders: SenderSets
    frontends: NamedFrontends
    sources: Mapping[str, PacketSource]
    """By `rules` and `objects`."""
    pods: Mapping[str, tuple[str, ...]] = {}
    """Addresses of pods by `NAMESPACE/NAME`."""
    local_pods: tuple[str, ...] | None = None
    """Networks and addresses of this node's pods; None if they are unknown."""
    evidence: Callable[[str, ExamplePacket, EndShare], str]
    """Returns the rule or decision by which a packet gets to an end, for a source."""


class AskedPackets(NamedTuple):
    """A question as sets."""

    boxes: list[Box]
    """The packets that are asked about."""
    select: Callable[[WeightedBox], WeightedBox | None]
    """Returns the part of a box that has an asked end; None for other ends."""
    words: Callable[[ClassOutcome], str]
    """Returns an outcome in words; those of Services with equal words become one line."""
    endpoints: bool = True
    """False: the answer says no endpoints, so that classes which differ in them alone are one."""


def answer(question: Question, scene: QueryScene, most: int | None = MOST_LINES) -> QueryReport | None:
    """Return the answer in at most `most` lines (None: all), or None if the question names addresses of the other family only.

    Raises InputError for a Service, a pod, or a node that is not known.
    """
    reading = QueryReading(question, scene)
    asked = reading.asked()
    if asked is None:
        return None
    found: dict[str, list[ClassLine]] = {}
    notes: dict[str, list[Box]] = {}
    for name, source in scene.sources.items():
        if not source.decides:
            continue
        weighted = list(ends_of(source, scene.space, asked.boxes))
        for note, boxes in undecided_notes(weighted).items():
            notes.setdefault(note, []).extend(boxes)
        groups = ClassGroups(scene.space, scene.senders, scene.frontends, lambda effect: asked.words(effect[0]))
        for box, outcome in reading.classes(weighted):
            if asked.endpoints:
                groups.add(box, (outcome,))
            else:
                own = box[SADDR].single
                itself = own is not None and outcome.only_to(scene.space.address_text(own))
                groups.add_alike(box, (outcome,), (outcome.without_endpoints,), itself=itself)
        found[name] = groups.lines()
    obstacles = dict.fromkeys(
        UndecidedRule(rule=f"{source.name}: {text}", share=1.0, described="all packets")
        for source in scene.sources.values()
        for text in source.obstacles
    )
    rules = undecided_rules(notes, scene.space, lambda box: describe_box(box, scene.senders, scene.frontends))
    merged = _merged(found)
    shown = merged if most is None else merged[:most]
    undecided = (*obstacles, *rules)
    return QueryReport(
        node=scene.node,
        family=scene.space.family.label,
        read=tuple(source.name for source in scene.sources.values()),
        certain=not undecided,
        agree=all(len(names) == len(found) for names, _ in merged) if len(found) > 1 else None,
        lines=tuple(_line(scene, names, line) for names, line in shown),
        more=len(merged) - len(shown),
        undecided=undecided,
        parameters=tuple(_given(question, scene)),
    )


def _given(question: Question, scene: QueryScene) -> Iterator[str]:
    """Yield what is taken as given."""
    yield from PARAMETERS
    yield from dict.fromkeys(text for each in scene.sources.values() for text in each.given)
    if question.kind is QuestionKind.UNMASKED and scene.local_pods is None:
        yield "which endpoints are on this node is unknown: all but its own addresses count as elsewhere"


def _merged(found: Mapping[str, Sequence[ClassLine]]) -> list[tuple[tuple[str, ...], ClassLine]]:
    """Merge the lines that several sources have, then lines over Services: those of Services by their names, then large ones first."""
    held: dict[tuple[object, ...], tuple[list[str], ClassLine]] = {}
    for name, lines in found.items():
        for line in lines:
            key = line.senders, line.destination, line.text, line.hairpin, line.size
            held.setdefault(key, ([], line))[0].append(name)
    by_source: dict[tuple[str, ...], list[ClassLine]] = {}
    for names, line in held.values():
        by_source.setdefault(tuple(names), []).append(line)
    return sorted(
        ((names, line) for names, lines in by_source.items() for line in across_services(lines)),
        key=lambda each: (not each[1].frontends, each[1].services, -each[1].size, each[1].senders, each[1].text),
    )


def _line(scene: QueryScene, names: tuple[str, ...], line: ClassLine) -> QueryLine:
    outcome = line.effect[0]
    example = example_packet(scene.space, max(line.boxes, key=packets_in))
    evidence = (scene.evidence(name, example, outcome.shares[0]) for name in names)
    return QueryLine(
        given_by=names,
        senders=line.senders,
        destination=line.destination,
        services=line.services,
        outcome=line.text,
        ends=proof_ends(outcome),
        hairpin=line.hairpin,
        packets=str(line.size),
        example=example,
        evidence=tuple(filter(None, evidence)),
        sets=tuple(packet_set(scene.space, box) for box in line.boxes[:_MOST_SETS]),
        more_sets=max(len(line.boxes) - _MOST_SETS, 0),
    )


# ---- questions as sets -----------------------------------------------------------------------------------------------------------


class QueryReading:
    """Reads one question in terms of a scene."""

    def __init__(self, question: Question, scene: QueryScene) -> None:
        self._question, self._scene, self._space = question, scene, scene.space

    def classes(self, weighted: Iterable[WeightedBox]) -> Iterator[tuple[Box, ClassOutcome]]:
        """Yield disjoint classes of packets that have asked ends, each with these ends."""
        asked = self.asked()
        selected = [part for each in weighted if asked is not None and (part := asked.select(each)) is not None]
        if not selected:
            return
        for box, leaf in leaves(DiagramBuilder(self._space).build(selected), self._space):
            for sources, distribution in leaf.regions:
                yield (*box[:SADDR], sources), outcome_of(distribution)

    def asked(self) -> AskedPackets | None:
        """Return the packets and ends that are asked for; None if none can be of this family."""
        question = self._question
        senders = self._senders(question.sender)
        if not senders:
            return None
        if question.kind is QuestionKind.REACHES:
            return self._reaches(senders)
        targets = [self._space.possible] if question.target is None else self._destinations(question.target)
        boxes = self._crossed(targets, senders)
        if not boxes:
            return None
        if question.kind is QuestionKind.GOES:
            return AskedPackets(boxes, _any_end, _outcome_words)
        if question.kind is QuestionKind.CAN_REACH:
            return AskedPackets(boxes, lambda each: each if _is(each, Disposition.DELIVERED) else None, _outcome_words)
        if question.kind is QuestionKind.UNMASKED:
            return AskedPackets(
                boxes, lambda each: each if self._leaves_unmasked(each) else None, _unmasked_words, False
            )
        if question.fate == "masqueraded":
            return AskedPackets(boxes, lambda each: each if _end(each).masquerade else None, _masked_words, False)
        fate = _FATES[question.fate]
        return AskedPackets(boxes, lambda each: each if _is(each, fate) else None, _outcome_words)

    def _crossed(self, targets: Iterable[Box], senders: Iterable[SenderRegion]) -> list[Box]:
        regions = list(senders)
        found = (
            (*target[:LINK], target[LINK] & each.links, target[SADDR] & each.sources)
            for target in targets
            for each in regions
        )
        return [box for box in found if all(box)]

    # ---- senders -------------------------------------------------------------------------------------------------------------

    def _senders(self, sender: QuestionSender) -> list[SenderRegion]:
        """Return the senders as disjoint regions; none if they are of the other family."""
        sets, space = self._scene.senders, self._space
        if sender.group in ("pods", "outside") and not sets.knows_pods:
            raise InputError(
                "which addresses are pods is unknown: give --cluster-cidr, or objects with the pods' networks"
            )
        if sender.group == "pods":
            found = sets.pods_on(sender.node) if sender.node else sets.pods
            if found is None:
                raise InputError(f"the networks of the pods on node {sender.node} are unknown: check the name")
            return [found] if found.sources else []
        if sender.group:
            return [{"outside": sets.outside, "nodes": sets.nodes, "this node": sets.this_node}[sender.group]]
        if sender.pod:
            return self._sending(self._pod(sender.pod))
        if sender.network:
            networks = [sender.network] if family_of(sender.network.partition("/")[0]) is space.family else []
            return self._sending(networks)
        return [SenderRegion("anyone", space.possible[LINK], space.addresses)]

    def _sending(self, networks: Sequence[str]) -> list[SenderRegion]:
        """Return the senders with these addresses: this node's own are sent here, and all others arrive."""
        space = self._space
        sources = space.networks(networks)
        own, others = sources & space.own, sources - space.own
        received = space.possible[LINK] - HERE
        found = (SenderRegion("", HERE, own), SenderRegion("", received, others))
        return [each for each in found if each.sources]

    def _pod(self, name: str) -> list[str]:
        known = self._scene.pods
        if name not in known:
            near = difflib.get_close_matches(name, known, 3)
            raise InputError(f"no pod {name} is known{_instead(near)}")
        return [each for each in known[name] if family_of(each) is self._space.family]

    # ---- targets -------------------------------------------------------------------------------------------------------------

    def _destinations(self, target: QuestionTarget) -> list[Box]:
        """Return the packets for a target, as disjoint boxes; none if its addresses are of the other family."""
        space = self._space
        if target.service:
            boxes = self._scene.frontends.of_service(target.service)
            if not boxes:
                near = difflib.get_close_matches(target.service, self._scene.frontends.services, 3)
                raise InputError(f"no frontend of Service {target.service} is known{_instead(near)}")
        else:
            boxes = [(each, *space.possible[1:]) for each in [self._addresses(target)] if each]
        protocols, ports = self._limits(target)
        found = ((box[DADDR], box[PROTOCOL] & protocols, box[DPORT] & ports, *box[DPORT + 1 :]) for box in boxes)
        return [box for box in found if all(box)]

    def _limits(self, target: QuestionTarget) -> tuple[ValueSet, ValueSet]:
        """Return the protocols and the ports of a target."""
        whole = self._space.whole
        ports = values(target.port) if target.port is not None else whole[DPORT]
        protocols = values(target.protocol.number) if target.protocol is not None else whole[PROTOCOL]
        return protocols, ports

    def _addresses(self, target: QuestionTarget) -> ValueSet:
        texts = self._pod(target.pod) if target.pod else [target.address]
        return self._space.networks(each for each in texts if family_of(each) is self._space.family)

    def _reaches(self, senders: list[SenderRegion]) -> AskedPackets | None:
        """Return who reaches a target: for frontends what happens there, for others by which ways packets get there."""
        target = self._question.target
        assert target is not None
        addresses = EMPTY if target.service else self._addresses(target)
        if not target.service and not addresses:
            return None
        single = addresses.single
        if target.service or (single is not None and self._scene.frontends.has(single, target.port)):
            boxes = self._crossed(self._destinations(target), senders)
            return AskedPackets(boxes, _any_end, _outcome_words) if boxes else None
        boxes = self._crossed([self._space.possible], senders)
        texts = {self._space.address_text(value) for first, last in addresses.spans for value in range(first, last + 1)}
        return AskedPackets(boxes, lambda each: self._reaching(each, target, addresses, texts), _reaching_words)

    def _reaching(
        self, each: WeightedBox, target: QuestionTarget, addresses: ValueSet, texts: set[str]
    ) -> WeightedBox | None:
        """Return the packets of a box that get to an endpoint, by a Service or directly."""
        end, (protocols, ports) = _end(each), self._limits(target)
        box = each.box
        if end.disposition is Disposition.DELIVERED and end.endpoint[0] in texts:
            # An endpoint without a port keeps the port of the packet.
            if target.port is not None and end.endpoint[1] not in (0, target.port):
                return None
            kept = box[DPORT] & ports if not end.endpoint[1] else box[DPORT]
            part = (box[DADDR], box[PROTOCOL] & protocols, kept, *box[DPORT + 1 :])
        elif end.disposition is Disposition.NOT_OURS:
            part = (box[DADDR] & addresses, box[PROTOCOL] & protocols, box[DPORT] & ports, *box[DPORT + 1 :])
        else:
            return None
        return each._replace(box=part) if all(part) else None

    # ---- ends ----------------------------------------------------------------------------------------------------------------

    def _leaves_unmasked(self, each: WeightedBox) -> bool:
        end = _end(each)
        if end.disposition is not Disposition.DELIVERED or end.masquerade:
            return False
        return self._space.address(end.endpoint[0]) not in self._here

    @cached_property
    def _here(self) -> ValueSet:
        """The addresses of this node and of its pods."""
        local = self._scene.local_pods or ()
        texts = [each for each in local if family_of(each.partition("/")[0]) is self._space.family]
        return union((self._space.own, self._space.networks(texts)))


def _instead(near: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _end(each: WeightedBox) -> PacketEnd:
    assert isinstance(each.end, PacketEnd)
    return each.end


def _is(each: WeightedBox, disposition: Disposition) -> bool:
    return _end(each).disposition is disposition


def _any_end(each: WeightedBox) -> WeightedBox | None:
    return each


def _outcome_words(outcome: ClassOutcome) -> str:
    return outcome.text(_NAMED_ENDPOINTS)


def _unmasked_words(_outcome: ClassOutcome) -> str:
    return "to endpoints on other nodes, with the address of the sender"


def _masked_words(_outcome: ClassOutcome) -> str:
    return "masqueraded"


def _reaching_words(outcome: ClassOutcome) -> str:
    """Return `1/2 of new connections, not masqueraded` for the share of connections that get to an endpoint."""
    shares = [each for each in outcome.shares if each.disposition is Disposition.DELIVERED]
    if not shares:
        return "directly, without a Service: left to routing"
    total = sum((Fraction(*each.probability) for each in shares if not each.remembered), Fraction(0))
    part = "all" if total == 1 else str(total)
    text = f"{part} of new connections" if total else "connections of senders that its affinity list has"
    masked = {each.masquerade for each in shares}
    text += (
        ", masqueraded" if masked == {True} else ", not masqueraded" if masked == {False} else ", partly masqueraded"
    )
    if len({each.endpoint for each in shares}) > 1:
        text += f", at {', '.join(sorted({each.words for each in shares}))}"
    return f"{text}, session affinity" if outcome.affinity else text
