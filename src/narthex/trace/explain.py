"""The path of a packet as a plan and its rules decide it: outcomes of the walk as a `PacketPath`, annotated with the plan."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import msgspec

from narthex.model import Disposition, Host, Outcome, Packet, Trace, WalkStep, agree, join_port
from narthex.netfilter.dump.dump import WalkInput
from narthex.proxy.plan.ir import Deviation, Forward, Frontend, FrontendKind, Plan, Sender, ServicePlan
from narthex.proxy.plan.show import conflict_text, frontend_text
from narthex.trace.evaluate import NO_DEVIATIONS, find_frontend, sender_of, sender_reason
from narthex.trace.model import (
    FATES,
    Alternative,
    Header,
    NameLookup,
    PacketPath,
    Party,
    PathBranch,
    PathEnd,
    PathStep,
    PlanReading,
    PlanStep,
    branch_tree,
    map_ends,
    probability_text,
    rule_step,
)
from narthex.trace.names import AddressNames

RouteOf = Callable[[str], str]
"""Returns where a packet for an address leaves the node."""

NO_SERVICE_RULE = "no Service rule sends it anywhere: it goes wherever routing takes it"
_REASONS = {
    Disposition.NOT_OURS: NO_SERVICE_RULE,
    Disposition.REJECTED: "the sender receives ICMP port unreachable",
    Disposition.DROPPED: "a rule drops it silently",
}
_REWRITES = re.compile(r"\b(?:dnat|redirect) to\b|: \[?[0-9a-f:.]+\]?:\d+ \}")
"""A rule that rewrites the destination, or a map element that holds the new one."""
_HIDES = re.compile(r"\b(?:masquerade|snat)\b")


class PlanCase(msgspec.Struct, frozen=True, kw_only=True):
    """A packet, a plan, and the predictions of both the plan and the rules."""

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
    """Those of the mode."""
    lookup: tuple[NameLookup, ...] = ()
    held: WalkInput | None = None
    """The dump that the rules are from, which has their positions."""

    def step(self, step: WalkStep, before: Header, after: Header | None = None) -> PathStep:
        """Return a step of the walk as a step of the path."""
        place, rule = self.held.place(step.table, step.chain, step.rule, step.what) if self.held else ("", "")
        return rule_step(step, self.plan.node_name, before, after, rule=rule, place=place)

    @property
    def frontend(self) -> tuple[ServicePlan, Frontend] | None:
        """The frontend that the packet matches."""
        return find_frontend(self.plan, self.packet, self.host)


def explain(case: PlanCase, names: AddressNames, route: RouteOf) -> PacketPath:
    """Return the path through the rules of one node, annotated with the plan."""
    packet = case.packet
    path = PacketPath(
        packet=_header(packet),
        source=Party(address=packet.source, name=names.of(packet.source)),
        destination=Party(address=packet.destination, name=names.of(packet.destination)),
        start=case.plan.node_name,
        tree=branch_tree([_alternative(case, outcome, names) for outcome in case.walked.outcomes]),
        lookup=case.lookup,
    )
    return annotate(path, case, route)


def annotate(path: PacketPath, case: PlanCase, route: RouteOf) -> PacketPath:
    """Add what the plan says: its decision, its agreement with the rules, and for each end the rewriting and the route."""
    found = case.frontend
    sender = sender_of(case.plan, case.packet, case.host)
    service, frontend = found if found else (None, None)

    return msgspec.structs.replace(
        path,
        service=str(service.name) if service else path.service,
        tree=map_ends(path.tree, lambda end: PathBranch(end=_end(case, end, frontend, sender, route))),
        lookup=case.lookup or path.lookup,
        plan=PlanReading(
            node=case.plan.node_name,
            mode=case.mode,
            frontend=frontend_text(frontend) if frontend else None,
            sender=sender.value,
            sender_reason=sender_reason(case.plan, case.packet, sender),
            decision=_decision(case.planned),
            rules=case.rules,
            agree=agree(case.planned, case.walked),
            differences=_differences(case.planned, case.walked),
            deviations=tuple(sorted(each.value for each in case.deviations)),
            conflicts=tuple(
                conflict_text(each) for each in case.plan.conflicts if frontend and each.match == frontend.match
            ),
        ),
    )


def _decision(planned: Trace) -> tuple[PlanStep, ...]:
    shared = [step for step in planned.outcomes[0].steps if all(step in other.steps for other in planned.outcomes)]
    if len(planned.outcomes) == 1:
        shared = [step for step in shared if step.where != "endpoint"]
    return tuple(PlanStep(part=step.where, what=step.what, why=step.why) for step in shared)


# ---- outcomes of a walk --------------------------------------------------------------------------------------------


def _header(packet: Packet) -> Header:
    return Header(
        source=packet.source,
        destination=packet.destination,
        protocol=packet.protocol.lower,
        source_port=packet.source_port or None,
        port=packet.port,
        iif=packet.iif,
    )


def _alternative(case: PlanCase, outcome: Outcome, names: AddressNames) -> Alternative:
    packet = case.packet
    address, port = outcome.endpoint or (packet.destination, packet.port)
    goes_on = outcome.endpoint is not None or outcome.disposition is Disposition.NOT_OURS
    end = PathEnd(
        fate=FATES[outcome.disposition],
        node=case.plan.node_name,
        address=address if goes_on else "",
        port=port if goes_on else 0,
        name=names.of(address) if goes_on else "",
        source=outcome.source if outcome.masquerade else packet.source if goes_on else "",
        masqueraded=outcome.masquerade,
        reason=_reason(outcome),
    )
    return outcome.probability, tuple(_steps(outcome, case)), end


def _steps(outcome: Outcome, case: PlanCase) -> Iterator[PathStep]:
    """Yield the steps with the header before and after the two that rewrite: destination and source."""
    header = _header(case.packet)
    address, port = outcome.endpoint or (header.destination, header.port)
    if outcome.steps and outcome.steps[-1].where == "relay":
        *first, last = outcome.steps
        yield from (case.step(step, header) for step in first)
        onwards = msgspec.structs.replace(header, source="", destination=address, port=port, masqueraded=True)
        yield case.step(last, header, onwards if outcome.endpoint else None)
        return
    last_rewrite = max((n for n, step in enumerate(outcome.steps) if _rewrites(step)), default=-1)
    last_hiding = max((n for n, step in enumerate(outcome.steps) if _HIDES.search(step.what)), default=-1)
    for number, step in enumerate(outcome.steps):
        before = header
        after: Header | None = None
        if number == last_rewrite and outcome.endpoint is not None:
            after = header = msgspec.structs.replace(header, destination=address, port=port)
        elif number == last_hiding and outcome.masquerade:
            after = header = msgspec.structs.replace(header, source=outcome.source, masqueraded=True)
        yield case.step(step, before, after)


def _rewrites(step: WalkStep) -> bool:
    return step.where.endswith(" IPVS") or bool(_REWRITES.search(step.what))


def _reason(outcome: Outcome) -> str:
    """Return why it ends so, and for unknown outcomes the possible ends and the assumptions made."""
    parts = [outcome.note or _REASONS.get(outcome.disposition, "")]
    if outcome.may:
        ends = (
            disposition.value + (f" to {join_port(*endpoint)}" if endpoint else "")
            for disposition, endpoint, _ in outcome.may
        )
        parts.append(f"it may be {' or '.join(dict.fromkeys(ends))}")
    parts += (f"assumed: {text}" for text in outcome.supposing)
    return "; ".join(filter(None, parts))


# ---- ends ----------------------------------------------------------------------------------------------------------


def _end(case: PlanCase, end: PathEnd, frontend: Frontend | None, sender: Sender, route: RouteOf) -> PathEnd:
    if not end.address:
        return end
    rewriting = _rewriting(case, end, frontend, sender)
    return msgspec.structs.replace(end, rewriting=rewriting, route=route(end.address))


def _rewriting(case: PlanCase, end: PathEnd, frontend: Frontend | None, sender: Sender) -> tuple[str, ...]:
    packet = case.packet
    was = join_port(packet.destination, packet.port) if packet.port else packet.destination
    now = join_port(end.address, end.port) if end.port else end.address
    if end.reason == NO_SERVICE_RULE or (now == was and not end.masqueraded):
        return ()
    if frontend and Deviation.RELAYED in case.deviations:
        return (f"made anew: this node connects to {now}, which never sees {packet.source}",)
    lines = [f"destination rewritten (DNAT): {was} becomes {now}"]
    if end.masqueraded:
        why = masquerade_reason(packet, (end.address, end.port), frontend, sender)
        lines.append(f"source rewritten (masquerade): {packet.source} becomes this node's address; {why}")
    else:
        lines.append(f"source kept: the endpoint sees {packet.source}")
    return tuple(lines)


def masquerade_reason(packet: Packet, endpoint: tuple[str, int], frontend: Frontend | None, sender: Sender) -> str:
    """Return why the source is rewritten, in Kubernetes terms."""
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
        texts.append(f"{probability_text(probability)} {disposition.value}{where}{mask}")
    return texts
