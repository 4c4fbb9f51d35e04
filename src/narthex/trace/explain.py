"""From traces to what a person reads: an Explanation as data, printed as a tree or as JSON."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import msgspec

from narthex.model.net import join_port
from narthex.model.packet import Disposition, Host, Outcome, Packet, Trace, WalkStep, agree
from narthex.proxy.plan.ir import Deviation, Forward, Frontend, FrontendKind, Plan, Sender, ServicePlan
from narthex.proxy.plan.show import conflict_text, frontend_text
from narthex.trace.evaluate import NO_DEVIATIONS, find_frontend, sender_of, sender_reason
from narthex.trace.names import Names

_EXACT_DENOMINATOR = 10_000

RouteOf = Callable[[str], str]


class Party(msgspec.Struct, frozen=True):
    """An address and what it is."""

    address: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.address}, {self.name}" if self.name else self.address


class Met(msgspec.Struct, frozen=True):
    """One rule, map element or decision on the way."""

    where: str
    what: str
    why: str
    chance: float


class End(msgspec.Struct, frozen=True, kw_only=True):
    """One way that the packet may go, with all that happens on it."""

    disposition: str
    probability: float
    fraction: str
    """Exact ("1/3"), or "about 1/7" where the rules hold decimals."""
    endpoint: str | None = None
    endpoint_name: str = ""
    masquerade: bool = False
    rewriting: tuple[str, ...] = ()
    route: str = ""
    note: str = ""
    steps: tuple[Met, ...] = ()


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of one packet's way."""

    packet: str
    node: str
    mode: str
    source: Party
    destination: Party
    lookup: tuple[Met, ...] = ()
    """The names that were asked for, where the destination was given as one."""
    service: str | None
    """Service port, None when the packet meets no frontend."""
    frontend: str | None
    sender: str
    sender_reason: str
    plan: tuple[Met, ...]
    """What the plan says, as far as it holds for all ways."""
    rules: str
    """Where the rules come from."""
    ends: tuple[End, ...]
    agree: bool
    differences: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    announced: tuple[str, ...] = ()
    """Which node answers on the link for a load balancer's address, and why; for packets from outside."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What an explanation is made from."""

    plan: Plan
    packet: Packet
    host: Host
    mode: str
    planned: Trace
    """From `evaluate`."""
    walked: Trace
    """From the rules of the mode."""
    rules: str = "rendered from the plan"
    deviations: frozenset[Deviation] = NO_DEVIATIONS
    """The mode's."""
    lookup: tuple[Met, ...] = ()


def explain(case: Case, names: Names, route: RouteOf) -> Explanation:
    """Put plan, rules, names and routes together. `route` says where a packet for an address leaves the node."""
    plan, packet, host = case.plan, case.packet, case.host
    found = find_frontend(plan, packet, host)
    sender = sender_of(plan, packet, host)
    service, frontend = found if found else (None, None)
    return Explanation(
        packet=str(packet),
        node=plan.node_name,
        mode=case.mode,
        source=Party(packet.source, names.of(packet.source)),
        destination=Party(packet.destination, names.of(packet.destination)),
        lookup=case.lookup,
        service=str(service.name) if service else None,
        frontend=frontend_text(frontend) if frontend else None,
        sender=sender.value,
        sender_reason=sender_reason(plan, packet, sender),
        plan=_planned(case),
        rules=case.rules,
        ends=tuple(_end(case, outcome, found, sender, names, route) for outcome in case.walked.outcomes),
        agree=agree(case.planned, case.walked),
        differences=_differences(case.planned, case.walked),
        conflicts=tuple(conflict_text(each) for each in plan.conflicts if frontend and each.match == frontend.match),
    )


def as_data(explanation: Explanation) -> dict[str, Any]:
    """The explanation as JSON can hold it."""
    data: dict[str, Any] = msgspec.to_builtins(explanation)
    return data


def _planned(case: Case) -> tuple[Met, ...]:
    first = case.planned.outcomes[0]
    shared = [step for step in first.steps if all(step in other.steps for other in case.planned.outcomes)]
    if len(case.planned.outcomes) == 1:
        shared = [step for step in shared if step.where != "endpoint"]
    return tuple(map(_met, shared))


def _met(step: WalkStep) -> Met:
    return Met(step.where, step.what, step.why, float(step.chance))


def _end(
    case: Case,
    outcome: Outcome,
    found: tuple[ServicePlan, Frontend] | None,
    sender: Sender,
    names: Names,
    route: RouteOf,
) -> End:
    delivered = outcome.endpoint is not None
    goes_on = delivered or outcome.disposition is Disposition.NOT_OURS
    return End(
        disposition=outcome.disposition.value,
        probability=float(outcome.probability),
        fraction=fraction_text(outcome.probability),
        endpoint=join_port(*outcome.endpoint) if outcome.endpoint else None,
        endpoint_name=names.of(outcome.endpoint[0]) if outcome.endpoint else "",
        masquerade=outcome.masquerade,
        rewriting=_rewriting(case, outcome, found, sender),
        route=route(outcome.endpoint[0] if outcome.endpoint else case.packet.destination) if goes_on else "",
        note=_note(outcome),
        steps=tuple(map(_met, outcome.steps)),
    )


def _note(outcome: Outcome) -> str:
    """Why it ends so; for what is not known, where it may end; and what was taken for granted."""
    said = [outcome.note]
    if outcome.may:
        ways = (
            disposition.value + (f" to {join_port(*endpoint)}" if endpoint else "")
            for disposition, endpoint, _ in outcome.may
        )
        said.append(f"it may be {' or '.join(dict.fromkeys(ways))}")
    said += (f"supposed: {text}" for text in outcome.supposing)
    return "; ".join(filter(None, said))


def _rewriting(
    case: Case, outcome: Outcome, found: tuple[ServicePlan, Frontend] | None, sender: Sender
) -> tuple[str, ...]:
    packet = case.packet
    if outcome.endpoint is None:
        return ()
    if found and Deviation.RELAYED in case.deviations:
        return (f"made anew: this node connects to {join_port(*outcome.endpoint)}, which never sees {packet.source}",)
    was = join_port(packet.destination, packet.port) if packet.port else packet.destination
    lines = [f"destination rewritten (DNAT): {was} becomes {join_port(*outcome.endpoint)}"]
    if outcome.masquerade:
        why = masquerade_reason(packet, outcome.endpoint, found[1] if found else None, sender)
        lines.append(f"source rewritten (masquerade): {packet.source} becomes this node's address; {why}")
    else:
        lines.append(f"source kept: the endpoint sees {packet.source}")
    return tuple(lines)


def masquerade_reason(packet: Packet, endpoint: tuple[str, int], frontend: Frontend | None, sender: Sender) -> str:
    """Why the source is rewritten, in Kubernetes' words."""
    if endpoint[0] == packet.source:
        return "the endpoint is the sender itself (hairpin), and its reply would never pass this node"
    if frontend is None:
        return "a rule beyond the plan says so"
    decision = frontend.decision(sender)
    if not isinstance(decision, Forward) or not decision.masquerade:
        return "a rule beyond the plan says so"
    if frontend.kind is FrontendKind.CLUSTER_IP:
        if sender is Sender.POD:
            return "masqueradeAll is set"
        return "the sender is no pod, so the reply has to come back through this node"
    if sender is Sender.NODE:
        return "the sender is this node, so the reply has to come back to it"
    return f"traffic to a {frontend.kind.value} may leave this node again, so the reply has to come back through it"


def _differences(planned: Trace, walked: Trace) -> tuple[str, ...]:
    if agree(planned, walked):
        return ()
    said = [f"the plan says: {text}" for text in _end_texts(planned)]
    return (*said, *(f"the rules say: {text}" for text in _end_texts(walked)))


def _end_texts(trace: Trace) -> list[str]:
    texts = []
    for (disposition, endpoint, masquerade), probability in trace.ends().items():
        where = f" to {join_port(*endpoint)}" if endpoint else ""
        mask = ", masqueraded" if masquerade else ""
        texts.append(f"{chance_text(probability)} {disposition.value}{where}{mask}")
    return texts


def fraction_text(probability: Fraction) -> str:
    """A fraction that people can read."""
    if probability.denominator <= _EXACT_DENOMINATOR:
        return str(probability)
    return f"about {probability.limit_denominator(_EXACT_DENOMINATOR // 10)}"


def chance_text(probability: Fraction) -> str:
    """Percent and fraction: "33.33 % (1/3)"."""
    return f"{float(probability) * 100:.2f} % ({fraction_text(probability)})"
