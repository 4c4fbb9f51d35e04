"""The proof that rules do with all packets what a plan decides: two partitions of the packets, compared class by class.

The result is one of three: proved, the smallest class of packets that differs with a packet of it, or the rules that could not be
interpreted with the part of the packets that they leave undecided.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from fractions import Fraction
from typing import Literal, NamedTuple

import msgspec

from narthex.model import Disposition, Host, Memory, NamespacedName, Packet, Protocol, Trace, join_port
from narthex.netfilter import ast
from narthex.netfilter.sets.branch import PacketEnd
from narthex.netfilter.sets.diagram import (
    Choice,
    Diagram,
    DiagramBuilder,
    Distribution,
    Leaf,
    WeightedBox,
    differing,
    leaves,
)
from narthex.netfilter.sets.probabilities import most_rounding
from narthex.netfilter.sets.space import DADDR, DPORT, PROTOCOL, SPORT, Box, PacketSpace
from narthex.netfilter.sets.touched import Header
from narthex.netfilter.sets.values import EMPTY, ValueSet, union, values
from narthex.netfilter.sets.walk import SetWalk, space_of
from narthex.netfilter.walk.walk import walk
from narthex.proxy.backends.userspace.backend import UserspaceBackend
from narthex.proxy.plan.ir import Deviation, OwnEndpoint, Plan
from narthex.trace.evaluate import evaluate
from narthex.trace.proof.describe import ClassDescriber, sample_point
from narthex.trace.proof.plan_ends import INTERPRETED, PlanEnds
from narthex.trace.proof.referred import ReferredObjects, relayed

_WITHIN = " within "
"""Separates a list's name and its time in the name of a choice."""
_PORTION = 256
"""Destinations to prove at a time. The memory for a portion is free again before the next one."""
_MOST_RULES = 50
"""Rules to report that could not be interpreted. Those with the largest parts come first."""
_MOST_CLASSES = 1000
"""Classes that differ to be kept."""
PARAMETERS = (
    "the packets are first packets of connections that conntrack does not know",
    "their mark is 0 when they arrive",
    "whether an affinity list has a sender is a free choice",
)
_RELAY_GUARD = "connections to the relay's own ports are refused: it is reached through Services only"
_LOOPBACK_GUARD = "packets to loopback from other addresses are dropped"


class ProofOutcome(Enum):
    """The three results of a proof."""

    PROVED = "proved"
    DIFFERENT = "different"
    UNDECIDED = "undecided"


class ProofEnd(msgspec.Struct, frozen=True, kw_only=True):
    """One possible end of a packet."""

    end: str
    """`delivered`, `rejected`, `dropped`, or `not-ours`."""
    endpoint: str = ""
    masquerade: bool = False
    probability: str
    """An exact fraction."""


class CounterexamplePacket(msgspec.Struct, frozen=True, kw_only=True):
    """A packet that rules and plan treat differently, from the smallest class of such packets."""

    source: str
    destination: str
    protocol: str
    port: int
    link: str = ""
    """The link of arrival; empty for a packet that the node itself sends."""
    described: str
    """The class in words."""
    size: str
    """The number of packets in the class, as a decimal number."""
    rules: tuple[ProofEnd, ...]
    plan: tuple[ProofEnd, ...]
    confirmed: bool
    """The walk of this packet and the evaluation of the plan for it differ, too."""


class UndecidedRule(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that could not be interpreted, and the packets that it leaves undecided."""

    rule: str
    share: float
    """The part of all packets, from 0 to 1."""
    described: str
    """The largest undecided class in words."""


class ProofReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a proof for one IP family."""

    node: str
    family: str
    service: str = ""
    """The Service that the proof is limited to."""
    outcome: ProofOutcome
    bits: int
    """Bits of a packet: the space has 2 to the power of `bits` packets."""
    classes: int
    """Classes of packets that the rules treat alike."""
    differing: int = 0
    """Classes that differ."""
    counterexample: CounterexamplePacket | None = None
    undecided: tuple[UndecidedRule, ...] = ()
    parameters: tuple[str, ...] = PARAMETERS
    """What is given and not part of a packet."""
    deviations: tuple[str, ...] = ()
    """The declared deviations from the plan that were taken into account."""
    rounding: float = 0.0
    """The largest difference between a probability in the kernel and the 1/n that it stands for."""

    @property
    def status(self) -> int:
        """The exit status: 0 if it is proved, 1 if it differs, 2 if it is undecided."""
        return {ProofOutcome.PROVED: 0, ProofOutcome.DIFFERENT: 1, ProofOutcome.UNDECIDED: 2}[self.outcome]


class ProofDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="proof"):
    """What `narthex check --prove -o json` prints."""

    version: Literal[1] = 1
    status: int
    """The exit status."""
    reports: tuple[ProofReport, ...]
    """One for each IP family."""


def undecided(plan: Plan, service: NamespacedName | None, reasons: tuple[str, ...]) -> ProofReport:
    """Return the report about rules of which nothing can be proved, for these reasons."""
    return ProofReport(
        node=plan.node_name,
        family=plan.family.label,
        service=str(service or ""),
        outcome=ProofOutcome.UNDECIDED,
        bits=0,
        classes=0,
        undecided=tuple(UndecidedRule(rule=reason, share=1.0, described="all packets") for reason in reasons),
    )


class Partitions(NamedTuple):
    """The partitions of all packets by rules and by plan, as diagrams of one builder."""

    space: PacketSpace
    rules: Diagram
    plan: Diagram
    lists: Mapping[str, str]
    """The affinity lists of the rules by their names in the plan."""
    rounding: Fraction
    ends: PlanEnds


def partitions(
    plan: Plan,
    ruleset: ast.Ruleset,
    host: Host,
    deviations: frozenset[Deviation],
    service: NamespacedName | None = None,
    referred: ReferredObjects = ReferredObjects(),  # noqa: B008  # immutable
    regions: Sequence[Header] | None = None,
    elsewhere: Iterable[OwnEndpoint] = (),
) -> Partitions:
    """Return what rules and plan do with all packets, with those for one Service, or with those of disjoint regions.

    `elsewhere` are endpoints of this node by Service ports that a part of a plan does not have.
    """
    partitioner = _Partitioner(plan, ruleset, host, deviations, referred, elsewhere)
    possible = partitioner.space.possible
    if regions is not None:
        return partitioner.of([(*each, *possible[SPORT:]) for each in regions])
    return partitioner.of([possible] if service is None else partitioner.ends.regions(service))


class _Partitioner:
    """Partitions packets by rules and by a plan, all at once or a portion at a time."""

    def __init__(
        self,
        plan: Plan,
        ruleset: ast.Ruleset,
        host: Host,
        deviations: frozenset[Deviation],
        referred: ReferredObjects,
        elsewhere: Iterable[OwnEndpoint] = (),
    ) -> None:
        pods = plan.pods
        links = (pods.interface, f"{pods.interface_prefix}*" if pods.interface_prefix else "")
        self.space = space_of(ruleset, plan.family, host, links, referred.objects)
        self.ends = PlanEnds(plan, self.space, deviations, elsewhere)
        self._listeners = referred.listeners
        self._walk = SetWalk(ruleset, self.space, referred.objects)
        self._names = _ListNames(self.ends)

    def portions(self) -> Iterator[list[Box]]:
        """Yield all packets in portions. Diagrams split the destination first, so that portions have few classes in common."""
        destinations, possible = self.ends.destinations, self.space.possible
        addresses = [value for first, last in destinations.spans for value in range(first, last + 1)]
        for at in range(0, len(addresses), _PORTION):
            yield [(values(*addresses[at : at + _PORTION]), *possible[1:])]
        yield [(possible[DADDR] - destinations, *possible[1:])]

    def of(self, boxes: Sequence[Box]) -> Partitions:
        """Return the partitions of the packets of disjoint boxes."""
        builder = DiagramBuilder(self.space)
        by_plan = builder.build(list(self._planned(boxes)))
        found: Iterable[WeightedBox] = (each for box in boxes for each in self._walk.ends(box))
        if self._listeners:
            found = relayed(found, self._listeners, self.space)
        by_rules = builder.build(self._names.named(list(found)))
        self._walk.forget()
        return Partitions(self.space, by_rules, by_plan, self._names.lists, self._walk.chains.rounding, self.ends)

    def _planned(self, boxes: Sequence[Box]) -> Iterator[WeightedBox]:
        """Return the parts of the plan's ends that are in one of the boxes."""
        ends = self.ends.ends(union([box[DADDR] for box in boxes]))
        if all(box[1:] == self.space.possible[1:] for box in boxes):
            return ends
        return _within(ends, boxes)


def _within(ends: Iterable[WeightedBox], boxes: Sequence[Box]) -> Iterator[WeightedBox]:
    """Yield the parts of ends that are in one of some disjoint boxes."""
    single: dict[int, list[Box]] = {}
    wide = [box for box in boxes if box[DADDR].size != 1]
    for box in boxes:
        if box[DADDR].size == 1:
            single.setdefault(box[DADDR].first, []).append(box)
    for each in ends:
        address = each.box[DADDR].single
        for box in boxes if address is None else (*single.get(address, ()), *wide):
            part = tuple(one & other for one, other in zip(each.box, box, strict=True))
            if all(part):
                yield each._replace(box=part)


def prove(
    plan: Plan,
    ruleset: ast.Ruleset,
    host: Host,
    deviations: frozenset[Deviation],
    service: NamespacedName | None = None,
    referred: ReferredObjects = ReferredObjects(),  # noqa: B008  # immutable
) -> ProofReport:
    """Compare rules and plan for all packets of the plan's family, or for those to one Service.

    `referred` has what rules refer to, besides other rules. Raises ValueError for deviations without an interpretation, and for a
    Service that the plan does not have.
    """
    unknown = deviations - INTERPRETED
    if unknown:
        words = "; ".join(sorted(each.words for each in unknown))
        raise ValueError(f"rules of this mode are not interpreted: {words}")
    if service is not None and not any(name.service == service for name in plan.services):
        raise ValueError(f"the plan has no Service {service}")
    partitioner = _Partitioner(plan, ruleset, host, deviations, referred)
    portions = partitioner.portions() if service is None else [partitioner.ends.regions(service)]
    comparison, classes = None, 0
    for boxes in portions:
        found = partitioner.of(boxes)
        comparison = comparison or Comparison(found, plan, ruleset, deviations, referred)
        comparison.compare(found)
        classes += sum(len(leaf.regions) for _, leaf in leaves(found.rules, found.space))
    assert comparison is not None
    undecided = comparison.undecided_rules()
    outcome = ProofOutcome.UNDECIDED if undecided else ProofOutcome.PROVED
    counterexample = comparison.counterexample()
    if counterexample is not None:
        outcome = ProofOutcome.DIFFERENT
    return ProofReport(
        node=plan.node_name,
        family=plan.family.label,
        service=str(service or ""),
        outcome=outcome,
        bits=found.space.bits,
        classes=classes,
        differing=comparison.differing,
        counterexample=counterexample,
        undecided=undecided,
        deviations=(*sorted(each.words for each in deviations), *sorted(comparison.declared)),
        rounding=float(found.rounding),
    )


class DifferingClass(NamedTuple):
    """A class of packets that rules and plan treat differently, or that one of them leaves undecided."""

    size: int
    box: Box
    sources: ValueSet
    rules: Distribution
    plan: Distribution


class Comparison:
    """Compares two partitions, and keeps the smallest class that differs."""

    def __init__(
        self,
        found: Partitions,
        plan: Plan,
        ruleset: ast.Ruleset,
        deviations: frozenset[Deviation],
        referred: ReferredObjects = ReferredObjects(),  # noqa: B008  # immutable
    ) -> None:
        self._found = found
        self._plan = plan
        self._ruleset = ruleset
        self._deviations = deviations
        self._referred = referred
        self._listening = {
            protocol.number: values(
                *(each.port for each in referred.listeners.values() if each.name.protocol is protocol)
            )
            for protocol in Protocol
        }
        self._describer = ClassDescriber(found.space, plan, found.ends)
        self._smallest: DifferingClass | None = None
        self.differing = 0
        self.declared: set[str] = set()
        """What rules do with packets that are of no Service, and the plan does not mention."""
        self.classes: list[DifferingClass] = []
        """The first classes that differ."""
        self.not_interpreted: list[DifferingClass] = []
        """Classes that the rules leave undecided, and the plan does not."""
        self._undecided: dict[str, list[DifferingClass]] = {}

    def compare(self, found: Partitions) -> None:
        """Compare the classes of partitions, which may be those of a portion."""
        self._found = found
        for box, rules, plan in differing(self._found.rules, self._found.plan, self._found.space):
            size = 1
            for each in box[:-1]:
                size *= each.size
            self._leaves(box, size, rules, plan)

    def _leaves(self, box: Box, size: int, rules: Leaf, plan: Leaf) -> None:
        for sources, one in rules.regions:
            for others, other in plan.regions:
                if one == other:
                    continue
                ends = (end for _, end, _ in (*one, *other))
                notes = {end.note for end in ends if isinstance(end, PacketEnd) and end.note}
                both = sources & others
                if not both:
                    continue
                differs = DifferingClass(size * both.size, box, both, one, other)
                if notes:
                    for note in notes:
                        self._undecided.setdefault(note, []).append(differs)
                    if not any(isinstance(end, PacketEnd) and end.note for _, end, _ in other):
                        self.not_interpreted.append(differs)
                elif same_choices(one, other):
                    continue
                elif self._guards_loopback(box, both, one, other):
                    self.declared.add(_LOOPBACK_GUARD)
                elif self._guards_relay(box, one, other):
                    self.declared.add(_RELAY_GUARD)
                else:
                    self.differing += 1
                    if self.differing <= _MOST_CLASSES:
                        self.classes.append(differs)
                    if self._smallest is None or differs.size < self._smallest.size:
                        self._smallest = differs

    def _guards_loopback(self, box: Box, sources: ValueSet, rules: Distribution, plan: Distribution) -> bool:
        """Return True where rules drop what other addresses send to loopback, and the plan has no frontend.

        Node ports on loopback need `route_localnet`, which lets such packets in. kube-proxy's KUBE-FIREWALL drops them
        (CVE-2020-8558). Without `route_localnet`, routing does (ip_route_input_slow: martian destination).
        """
        loopback = self._found.space.loopback
        return (
            not box[DADDR] - loopback
            and not sources & loopback
            and {end for _, end, _ in rules} == {PacketEnd(Disposition.DROPPED)}
            and {end for _, end, _ in plan} == {PacketEnd(Disposition.NOT_OURS)}
        )

    def _guards_relay(self, box: Box, rules: Distribution, plan: Distribution) -> bool:
        """Return True where rules refuse direct connections to a port of the relay on this node, and the plan has no frontend."""
        listening = self._listening.get(box[PROTOCOL].single or 0, EMPTY)
        return (
            not box[DADDR] - self._found.space.own
            and not box[DPORT] - listening
            and {end for _, end, _ in rules} == {PacketEnd(Disposition.REJECTED)}
            and {end for _, end, _ in plan} == {PacketEnd(Disposition.NOT_OURS)}
        )

    def undecided_rules(self) -> tuple[UndecidedRule, ...]:
        """Return the rules that could not be interpreted, those that leave most packets undecided first."""
        whole = 1 << self._found.space.bits
        found = []
        for note, classes in self._undecided.items():
            largest = max(classes, key=lambda each: each.size)
            part = Fraction(sum(each.size for each in classes), whole)
            described = self._describer.describe(largest.box, largest.sources)
            found.append(UndecidedRule(rule=note, share=float(part), described=described))
        found.sort(key=lambda each: (-each.share, each.rule))
        return tuple(found[:_MOST_RULES])

    def counterexample(self) -> CounterexamplePacket | None:
        """Return a packet of the smallest class that differs, confirmed by walking it."""
        smallest = self._smallest
        if smallest is None:
            return None
        space = self._found.space
        point = sample_point(space, smallest.box, smallest.sources)
        packet = space.packet(point)
        protocol = packet.protocol.lower if packet is not None else str(point[PROTOCOL])
        return CounterexamplePacket(
            source=space.address_text(point[-1]),
            destination=space.address_text(point[DADDR]),
            protocol=protocol,
            port=point[DPORT] if packet is None or packet.port else 0,
            link=space.link_name(point[4]) if point[4] else "",
            described=self._describer.describe(smallest.box, smallest.sources),
            size=str(smallest.size),
            rules=_ends(smallest.rules),
            plan=_ends(smallest.plan),
            confirmed=packet is not None and self._confirms(packet, smallest),
        )

    def _confirms(self, packet: Packet, differs: DifferingClass) -> bool:
        """Return True if the concrete walk of a packet and the evaluation of the plan differ, for one history of its sender."""
        host = self._found.space.host
        choices = {choice for each, _, _ in (*differs.rules, *differs.plan) for choice in each}
        host = self._found.space.host
        if packet.source in self._referred.objects.bound:
            host = Host(addresses=(*host.addresses, packet.source))
        for taken in (None, *sorted(name for name, true in choices if true)):
            memory = Memory()
            if taken is not None:
                name = taken.partition(_WITHIN)[0]
                memory.touch(self._found.lists.get(name, name), (packet.source,), 0.0)
                memory.touch(name, (packet.source,), 0.0)
            walked = self._walked(packet, memory)
            meant = evaluate(self._plan, packet, host, self._deviations, memory, 0.0)
            if differ(walked, meant, rounded=self._found.rounding > 0):
                return True
        return False

    def _walked(self, packet: Packet, memory: Memory) -> Trace:
        """Return what the concrete walk says about a packet."""
        objects, listeners = self._referred
        walked = walk(self._ruleset, packet, self._found.space.host, memory, 0.0, objects=objects)
        if listeners:
            walked = UserspaceBackend.onwards(walked, listeners, memory, 0.0)
        return walked


def differ(one: Trace, other: Trace, *, rounded: bool) -> bool:
    """Return True if two traces have different ends, or probabilities that differ by more than rounding explains."""
    a, b = one.ends(), other.ends()
    tolerance = most_rounding(len(a)) if rounded else Fraction(0)
    return a.keys() != b.keys() or any(abs(a[end] - b[end]) > tolerance for end in a)


def _ends(distribution: Distribution) -> tuple[ProofEnd, ...]:
    found = []
    for choices, end, (above, below) in sorted(distribution, key=str):
        assert isinstance(end, PacketEnd)
        if any(taken for _, taken in choices):
            continue  # the ends of a sender that no list has are enough to show
        found.append(
            ProofEnd(
                end=end.disposition.value,
                endpoint=join_port(*end.endpoint) if end.disposition is Disposition.DELIVERED else "",
                masquerade=end.masquerade,
                probability=str(Fraction(above, below)),
            )
        )
    return tuple(found)


# ---- affinity ------------------------------------------------------------------------------------------------------------------


class _ListNames:
    """The names that a plan has for the affinity lists of rules: those that packets to one endpoint of one Service port join.

    A list without such a name, or with a name that another list has, keeps its own, and thus differs from all lists of the plan.
    """

    def __init__(self, ends: PlanEnds) -> None:
        self._ends = ends
        self._records: dict[str, str] = {}
        """By list; empty for a list of several endpoints, or of none."""
        self._owners: dict[str, str] = {}
        """Lists by record; empty for a record of several lists."""
        self.lists: dict[str, str] = {}
        """The lists by their names in the plan."""

    def named(self, boxes: list[WeightedBox]) -> list[WeightedBox]:
        """Return boxes in which lists have the names of the plan. Lists of other boxes are remembered."""
        seen: dict[str, None] = {}
        for each in boxes:
            if isinstance(each.end, PacketEnd) and each.end.remembers:
                self._join(each.end, each.box)
                seen |= dict.fromkeys(each.end.remembers)
        new = {name: record for name in seen if self._owners.get(record := self._records[name]) == name}
        self.lists.update((record, name) for name, record in new.items())
        return [renamed_lists(each, new) for each in boxes] if seen else boxes

    def _join(self, end: PacketEnd, box: Box) -> None:
        """Note the record that packets of a box join."""
        records: set[str] = set()
        claim = self._ends.claim(box[DADDR].first, box[PROTOCOL].first, box[DPORT].first)
        if claim is not None:
            pools = (pool.endpoints for pool in claim.service.pools.values())
            alike = (each for each in itertools.chain(*pools) if (each.address, each.port) == end.endpoint)
            records.update(self._ends.record(claim.service, each, box[DADDR].first, box[DPORT].first) for each in alike)
        record = records.pop() if len(records) == 1 else ""
        for name in end.remembers:
            if self._records.setdefault(name, record) != record:
                self._records[name] = ""
            elif record and self._owners.setdefault(record, name) != name:
                self._owners[record] = ""


def renamed_lists(each: WeightedBox, names: Mapping[str, str]) -> WeightedBox:
    """Return a box in which affinity lists have other names."""
    end = each.end
    if isinstance(end, PacketEnd) and end.remembers:
        end = end._replace(remembers=tuple(names.get(name, name) for name in end.remembers))
    elif not each.choices:
        return each
    return each._replace(end=end, choices=frozenset(_renamed_choice(choice, names) for choice in each.choices))


def _renamed_choice(choice: Choice, names: Mapping[str, str]) -> Choice:
    name, within, seconds = choice[0].partition(_WITHIN)
    return f"{names.get(name, name)}{within}{seconds}", choice[1]


def same_choices(one: Distribution, other: Distribution) -> bool:
    """Return True if two distributions that ask for choices in different orders agree however the choices are taken.

    A sender joins one list at a time, but may be in several, so that every pair of cases that can hold together has to agree.
    """
    if not any(choices for each in (one, other) for choices, _, _ in each):
        return False  # without choices, equal distributions are equal values
    cases, others = _cases(one), _cases(other)
    for choices, ends in cases.items():
        for more, ends_there in others.items():
            if any((name, not taken) in more for name, taken in choices):
                continue
            if ends != ends_there:
                return False
    return True


def _cases(distribution: Distribution) -> dict[frozenset[Choice], frozenset[tuple[object, object]]]:
    found: dict[frozenset[Choice], set[tuple[object, object]]] = {}
    for choices, end, ratio in distribution:
        found.setdefault(choices, set()).add((end, ratio))
    return {choices: frozenset(ends) for choices, ends in found.items()}
