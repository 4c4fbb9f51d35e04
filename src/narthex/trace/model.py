"""The explained path of one packet: over nodes, namespaces, hooks, rules, and routes, with every possible branch.

A `PacketPath` holds a tree of `PathBranch`es. A branch is a sequence of steps that ends with a `PathEnd` or splits into
further branches, whose probabilities add up to 1. Probabilities are exact `Fraction`s. Where the input doesn't decide what
happens, the branch ends as UNKNOWN and says why; nothing is guessed.

All sources of rules produce this one type: rules rendered from a plan, dumps, bundles, and live nodes. If a plan is known,
`PacketPath.plan` holds what it decides and whether the rules agree. docs/reference/json.md documents the JSON form; its
field names are those that version 1 has always had.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import msgspec

from narthex.model import Disposition, WalkStep, join_port

_RULE_STAGES = frozenset({"prerouting", "input", "forward", "output", "postrouting", "relay"})
_ONE = Fraction(1)
_EXACT_DENOMINATOR = 10_000


def _certain() -> Fraction:
    # A factory, because a JSON Schema can't hold a Fraction as the default.
    return _ONE


class Stage(enum.Enum):
    """Where on the path a step happens."""

    START = "start"
    """The packet is created, or enters the part of the network that is known."""
    SOCKET = "socket"
    """A socket connects, and socket load balancing replaces its destination before there is a packet."""
    POD_LINK = "pod link"
    """Between the network namespaces of a pod and its node."""
    BRIDGE = "bridge"
    NEIGHBOUR = "neighbour"
    """Resolution of the next hop's link address: ARP, neighbour discovery, a VXLAN's forwarding table."""
    PREROUTING = "prerouting"
    ROUTING = "routing"
    RP_FILTER = "rp_filter"
    INPUT = "input"
    FORWARD = "forward"
    OUTPUT = "output"
    POSTROUTING = "postrouting"
    IPVS = "ipvs"
    CONNTRACK = "conntrack"
    RELAY = "relay"
    """The userspace relay of a node proxy accepts the connection and opens another one."""
    OVERLAY = "overlay"
    """Encapsulation or decapsulation (VXLAN)."""
    MTU = "mtu"
    NEXT_NODE = "next node"
    FAULT = "fault"
    """Something beyond the nodes' configuration: a fault of a lab, or a dead node."""
    DELIVERY = "delivery"
    REPLY = "reply"
    """Reverse translation of a reply packet."""
    PLAN = "plan"
    """A decision of the plan, for a path that is read from the plan alone."""


class Fate(enum.Enum):
    """How a branch ends."""

    DELIVERED = "delivered"
    """An address of this node, of a pod, or of a known neighbour receives it."""
    DROPPED = "dropped"
    """A rule or a policy drops it silently."""
    REJECTED = "rejected"
    """A rule rejects it, and the sender receives an error."""
    LOST = "lost"
    """Lost without a rule: no route, no neighbour, too large, or a failed reverse path check."""
    LEAVES = "leaves"
    """It continues where nothing more is known; `PathEnd.reason` says what would help."""
    UNKNOWN = "unknown"
    """What happens depends on something that is unknown; `PathEnd.reason` says what."""


FATES = {
    Disposition.DELIVERED: Fate.DELIVERED,
    Disposition.DROPPED: Fate.DROPPED,
    Disposition.REJECTED: Fate.REJECTED,
    Disposition.NOT_OURS: Fate.LEAVES,
    Disposition.UNSUPPORTED: Fate.UNKNOWN,
}
"""The fate for each outcome of a walk."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The packet's addresses, ports, and mark at one moment."""

    source: str
    destination: str
    protocol: str
    """`tcp`, `udp`, `sctp` or `icmp`."""
    source_port: int | None = None
    """None: unknown, because the client chooses one."""
    port: int = 0
    """Destination port; 0 for ICMP."""
    mark: int = 0
    iif: str = ""
    oif: str = ""
    masqueraded: bool = False
    """`source` is an address of the outgoing link; empty if that address is unknown."""

    def __str__(self) -> str:
        """Return `tcp 10.0.0.1 -> 10.96.0.1:80`."""
        to = join_port(self.destination, self.port) if self.port else self.destination
        return f"{self.protocol} {self.source or '(an address of this node)'} -> {to}"


class NearMiss(msgspec.Struct, frozen=True, kw_only=True):
    """A rule of which exactly one match failed."""

    table: str
    chain: str
    rule: str
    place: str = ""
    """File and line of the dump ("nat.txt:214"); empty if unknown."""
    missing: str = ""
    """The match that failed, and the packet's value."""


class Party(msgspec.Struct, frozen=True, kw_only=True):
    """An address and the object that owns it."""

    address: str
    name: str = ""
    """`pod shop/web-1 on worker-a`, `Service shop/web`, `node worker-a`; empty if no known object owns the address."""

    def __str__(self) -> str:
        """Return the address with its owner."""
        return f"{self.address}, {self.name}" if self.name else self.address


class PathStep(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happens to the packet."""

    stage: Stage
    node: str = ""
    namespace: str = ""
    """`NAMESPACE/NAME` of the pod in whose network namespace it happens; `outside` or `fabric` for those of a lab; empty for the
    node's own.
    """
    what: str = ""
    """One line for people."""
    why: str = ""
    """The meaning in Kubernetes terms if known, otherwise the rule's comment."""
    family: str = ""
    """Address family of the table: `ip`, `ip6` or `inet`."""
    table: str = ""
    chain: str = ""
    rule: str = ""
    """The rule's text in the dump, if known."""
    place: str = ""
    """File and line of the dump; empty if unknown."""
    verdict: str = ""
    """`accept`, `drop`, `reject`, `jump KUBE-SERVICES`, `dnat 10.1.0.5:80`, `masquerade`, `local`, …"""
    probability: Fraction = msgspec.field(default_factory=_certain, name="chance")  # codespell:ignore chance
    """Of this step, given that the packet reached the step before."""
    before: Header | None = None
    after: Header | None = None
    """Set if the step changes the packet (NAT, mark)."""
    evidence: tuple[str, ...] = ()
    """What the step was read from, as printed by its tool: route, neighbour, connection entry, setting."""
    near: tuple[NearMiss, ...] = ()
    """Rules of the same chain, since the step before, of which one match failed."""
    unknown: str = ""
    """What is unknown here without any effect on how the packet continues."""


class PossibleEnd(msgspec.Struct, frozen=True, kw_only=True):
    """An end that is possible where the input doesn't decide."""

    when: str = ""
    """The condition, as a clause: `it leaves by docker0`; empty if there is no more to say than that it is possible."""
    fate: Fate
    address: str = ""
    port: int = 0
    name: str = ""
    masqueraded: bool = False
    reason: str = ""


class _EndFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of an end, without the reply."""

    fate: Fate
    node: str = ""
    """The node where the branch ends."""
    address: str = ""
    port: int = 0
    """Destination after all rewriting, for DELIVERED and LEAVES."""
    name: str = ""
    """The object that owns `address`."""
    source: str = ""
    """The source address that the receiver sees; empty if unknown."""
    masqueraded: bool = False
    reason: str = ""
    rewriting: tuple[str, ...] = ()
    """What happens to both addresses and why, one sentence each, if the plan is known."""
    route: str = ""
    """Where the packet leaves the node, by Node objects or by the node's own answer, if the plan is known."""
    supposing: tuple[str, ...] = ()
    """What the input lacks and what the end therefore assumes, one clause each. Empty: the end assumes nothing."""
    may: tuple[PossibleEnd, ...] = ()
    """For UNKNOWN: the ends that are possible. Otherwise: those that are if an assumption is wrong."""


class PathEnd(_EndFacts, frozen=True, kw_only=True):
    """How a branch ends."""

    reply: PathBranch | None = None
    """The path of the reply, if it could be followed. It ends as DELIVERED if the sender accepts it as the reply."""


class WeightedEnd(_EndFacts, frozen=True, kw_only=True):
    """An end with its total probability, for consumers that need no steps."""

    probability: Fraction


class PathBranch(msgspec.Struct, frozen=True, kw_only=True):
    """Steps in order, then an end or several branches."""

    steps: tuple[PathStep, ...] = ()
    probability: Fraction = msgspec.field(default_factory=_certain, name="chance")  # codespell:ignore chance
    """Of this branch, given that the packet reached its start."""
    branches: tuple[PathBranch, ...] = msgspec.field(default=(), name="ways")
    """The alternatives after the steps; their probabilities add up to 1."""
    end: PathEnd | None = None
    """Set exactly if `branches` is empty."""


class PathLeaf(msgspec.Struct, frozen=True, kw_only=True):
    """One complete alternative from start to end."""

    probability: Fraction
    steps: tuple[PathStep, ...]
    end: PathEnd


class MissingPart(msgspec.Struct, frozen=True, kw_only=True):
    """Information about a node that the path depends on and that the input lacks."""

    node: str
    part: str
    """`routes`, `rules`, `sysctls`, …"""
    why: str = ""


class NameLookup(msgspec.Struct, frozen=True, kw_only=True):
    """One DNS question of the sender's resolver and its answer."""

    question: str
    answer: str


class PlanStep(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the plan's decision for the packet."""

    part: str
    """`frontend`, `source ranges`, `sender`, `decision`, `endpoint`, `affinity`, or the name of a guard."""
    what: str
    why: str = ""


class PlanReading(msgspec.Struct, frozen=True, kw_only=True):
    """What the plan decides about the packet, and whether the rules agree."""

    node: str
    """The node that the plan is for."""
    mode: str
    frontend: str | None
    """`node port 30001/TCP`; None if the packet matches no frontend."""
    sender: str
    sender_reason: str
    decision: tuple[PlanStep, ...]
    """The part of the decision that all outcomes share."""
    rules: str
    """Where the rules come from: `rendered from the plan`, `read from the node`, `read from dumps`."""
    agree: bool
    """Plan and rules lead to the same ends with the same probabilities."""
    differences: tuple[str, ...] = ()
    """How the rules differ, in sentences, if they don't agree."""
    deviations: tuple[str, ...] = ()
    """Documented deviations of the mode; the plan was read with them."""
    conflicts: tuple[str, ...] = ()
    """Other Services that claim the same frontend."""


class PacketPath(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is known about the path of one packet."""

    packet: Header
    source: Party
    destination: Party
    start: str = ""
    """The node where the path begins; empty for outside."""
    service: str = ""
    """Service port (`shop/web:http`) of the destination, by objects or by comments of rules."""
    tree: PathBranch = msgspec.field(name="way")
    sources: tuple[str, ...] = ()
    """What was read: `bundle node-1.tgz (node worker-a)`, `live`, `rules nat.txt`."""
    missing: tuple[MissingPart, ...] = ()
    """Information that the path depends on and that was not available."""
    lookup: tuple[NameLookup, ...] = ()
    """The DNS questions that led to the destination, if it was given as a name."""
    announced: tuple[str, ...] = ()
    """Which node announces a load balancer's address and why, for packets from outside."""
    plan: PlanReading | None = None
    """None if only rules are known."""
    next_command: str = ""
    """The command whose output decides what the input doesn't; empty if the path needs no more input."""

    def leaves(self) -> tuple[PathLeaf, ...]:
        """Return all alternatives from start to end: the most probable first, otherwise in order."""
        return tree_leaves(self.tree)

    def ends(self) -> dict[tuple[Fate, str, int, bool], Fraction]:
        """Return the total probability of each (fate, address, port, masqueraded)."""
        total: dict[tuple[Fate, str, int, bool], Fraction] = {}
        for leaf in self.leaves():
            key = leaf.end.fate, leaf.end.address, leaf.end.port, leaf.end.masqueraded
            total[key] = total.get(key, Fraction(0)) + leaf.probability
        return total

    def weighted_ends(self) -> tuple[WeightedEnd, ...]:
        """Return the ends of all leaves with their total probabilities."""
        names = _EndFacts.__struct_fields__
        return tuple(
            WeightedEnd(probability=leaf.probability, **{name: getattr(leaf.end, name) for name in names})
            for leaf in self.leaves()
        )

    def _repr_svg_(self) -> str:
        """Return the picture that a notebook shows."""
        # Names, not import statements: pictures depend on paths, and no path needs a picture to exist.
        drawing = importlib.import_module("narthex.trace.render.drawing").draw(self)
        return str(importlib.import_module("narthex.trace.render.svg").svg(drawing))

    def _repr_html_(self) -> str:
        """Return the page that a notebook shows, as an element."""
        return str(importlib.import_module("narthex.trace.render.html").frame(self))


def tree_leaves(tree: PathBranch) -> tuple[PathLeaf, ...]:
    """Return all alternatives from start to end: the most probable first, otherwise in order."""
    return tuple(sorted(_leaves(tree, _ONE, ()), key=lambda leaf: -leaf.probability))


def _leaves(branch: PathBranch, probability: Fraction, steps: tuple[PathStep, ...]) -> Iterator[PathLeaf]:
    probability *= branch.probability
    steps = (*steps, *branch.steps)
    if branch.end is not None:
        yield PathLeaf(probability=probability, steps=steps, end=branch.end)
    for each in branch.branches:
        yield from _leaves(each, probability, steps)


def branch_ends(branch: PathBranch) -> Iterator[PathEnd]:
    """Yield the ends below a branch, in order."""
    if branch.end is not None:
        yield branch.end
    for each in branch.branches:
        yield from branch_ends(each)


def branch_steps(branch: PathBranch) -> Iterator[PathStep]:
    """Yield all steps of a branch and below it, each once."""
    yield from branch.steps
    for each in branch.branches:
        yield from branch_steps(each)


def map_ends(branch: PathBranch, change: Callable[[PathEnd], PathBranch]) -> PathBranch:
    """Return the tree with each end replaced by what `change` makes of it: an end alone, or steps and branches."""
    if branch.end is None:
        return msgspec.structs.replace(branch, branches=tuple(map_ends(each, change) for each in branch.branches))
    new = change(branch.end)
    return msgspec.structs.replace(new, steps=(*branch.steps, *new.steps), probability=branch.probability)


def rule_step(
    step: WalkStep,
    node: str,
    before: Header,
    after: Header | None = None,
    *,
    namespace: str = "",
    rule: str = "",
    place: str = "",
) -> PathStep:
    """Return a step of a walk as a step of a path; `rule` and `place` are its text and position in a dump."""
    hook, *names = step.where.split(" ")
    stage = Stage(hook) if hook in _RULE_STAGES else Stage.PLAN
    table, chain = "", ""
    if names == ["IPVS"]:
        stage = Stage.IPVS
    elif stage is not Stage.PLAN:
        table, chain = names[0] if names else "", " ".join(names[1:])
    return PathStep(
        stage=stage,
        node=node,
        namespace=namespace,
        what=step.what if stage is not Stage.PLAN else f"{step.where}: {step.what}",
        why=step.why or (f"in the {hook} hook" if stage is Stage.IPVS else ""),
        table=table,
        chain=chain,
        rule=rule,
        place=place,
        verdict="" if stage in (Stage.RELAY, Stage.PLAN) else step.what.rpartition(", ")[2],
        probability=step.probability,
        before=before,
        after=after,
    )


# ---- from single alternatives to a tree ----------------------------------------------------------------------------

Alternative = tuple[Fraction, tuple[PathStep, ...], PathEnd]
"""Probability, given that the packet reached the start of the steps; the steps; the end."""


def branch_tree(alternatives: Sequence[Alternative]) -> PathBranch:
    """Merge alternatives into one tree in which shared steps occur once."""
    return _grown(list(alternatives), 0, sum((share for share, _, _ in alternatives), Fraction(0)))


def _grown(alternatives: list[Alternative], start: int, total: Fraction) -> PathBranch:
    mine = sum((share for share, _, _ in alternatives), Fraction(0))
    probability = mine / total if total else Fraction(0)
    first = alternatives[0][1]
    if len(alternatives) == 1:
        return PathBranch(steps=first[start:], probability=probability, end=alternatives[0][2])
    shared = start
    while all(shared < len(steps) and _alike(steps[shared], first[shared]) for _, steps, _ in alternatives):
        shared += 1
    groups: list[list[Alternative]] = []
    for each in alternatives:
        group = next((known for known in groups if _same(known[0], each, shared)), None)
        if group is None:
            groups.append(group := [])
        group.append(each)
    if len(groups) == 1:
        # The same steps with different ends, where the steps don't show what decides.
        groups = [[each] for each in alternatives]
    branches = tuple(_grown(group, shared, mine) for group in groups)
    return PathBranch(steps=first[start:shared], probability=probability, branches=branches)


def _same(one: Alternative, other: Alternative, position: int) -> bool:
    return min(len(one[1]), len(other[1])) > position and _alike(one[1][position], other[1][position])


def _alike(one: PathStep, other: PathStep) -> bool:
    """Return True if two steps are the same step, possibly with different probabilities."""
    return one is other or (
        one.stage is other.stage
        and (one.node, one.namespace, one.what, one.table, one.chain)
        == (other.node, other.namespace, other.what, other.table, other.chain)
        and one.before == other.before
        and one.after == other.after
    )


# ---- probabilities as text -----------------------------------------------------------------------------------------


def fraction_text(probability: Fraction) -> str:
    """Return a readable fraction: "1/3", or "about 1/7" where rules contain decimals."""
    if probability.denominator <= _EXACT_DENOMINATOR:
        return str(probability)
    return f"about {probability.limit_denominator(_EXACT_DENOMINATOR // 10)}"


def probability_text(probability: Fraction) -> str:
    """Return percent and fraction: "33.33 % (1/3)"."""
    return f"{float(probability) * 100:.2f} % ({fraction_text(probability)})"
