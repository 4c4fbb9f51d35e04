"""Answers about nodes, from their rules and from the objects of their cluster."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from narthex.model import Disposition, Host, InputError, IPFamily, Packet, Protocol, Snapshot, Trace, family_of
from narthex.netfilter.walk.walk import walk
from narthex.proxy.backends import BACKENDS
from narthex.proxy.plan.ir import Forward, Plan
from narthex.proxy.plan.show import decision_text, frontend_text
from narthex.trace.evaluate import find_frontend, sender_of
from narthex.trace.follow.views import NodeRules, NodeView
from narthex.trace.program.inputs import ClusterObjects, NodeInputs, NodeOptions, node_inputs
from narthex.trace.program.packet_sources import add_frontends, sender_facts, source_of_view, without_collections
from narthex.trace.program.reports import families_of_rules, mode_of_rules
from narthex.trace.proof.changes import MOST_LINES, ExamplePacket
from narthex.trace.proof.named_frontends import NamedFrontends
from narthex.trace.proof.outcomes import EndShare
from narthex.trace.proof.packet_source import PacketSource, space_of_sources
from narthex.trace.proof.plan_ends import INTERPRETED
from narthex.trace.proof.sender_sets import SenderSets
from narthex.trace.query.answer import QueryReport, QueryScene, answer
from narthex.trace.query.question import Question
from narthex.trace.reports.senders import pod_networks

RULES, OBJECTS = "rules", "objects"
_PROTOCOLS = {each.lower: each for each in Protocol}


def query_reports(
    question: Question,
    view: NodeView | None,
    cluster: ClusterObjects | None,
    options: NodeOptions,
    most: int | None = MOST_LINES,
) -> tuple[tuple[QueryReport, ...], tuple[str, ...]]:
    """Return the answers about one node, for each IP family, and problems of the objects. Raises InputError.

    Args:
        question: The question.
        view: The node's rules; None if only objects are asked.
        cluster: The objects; None if only rules are asked.
        options: The options of the user.
        most: The number of lines for each answer; None for all.
    """
    inputs = None
    if cluster is not None:
        known = view is not None and any(key.name == view.name for key in cluster.snapshot.nodes)
        name = options.node or (view.name if view is not None and known else "")
        mode = options.mode or ("" if options.config_file is not None else _mode(view))
        inputs = node_inputs(cluster, msgspec.structs.replace(options, node=name, mode=mode))
    reports: list[QueryReport] = []
    with without_collections():
        for family in _families(view, inputs):
            report = answer(question, _NodeScene(view, inputs, options, family).scene(), most)
            if report is not None:
                reports.append(report)
    if not reports:
        raise InputError(f"{question.text!r} names no address of an IP family that the input has")
    return tuple(reports), inputs.problems if inputs is not None else ()


def _mode(view: NodeView | None) -> str:
    """Return the mode that wrote a node's rules; empty if they are unknown."""
    if view is None or view.rules is None:
        return ""
    family = families_of_rules((view,))[0]
    return mode_of_rules(view.rules[family], family)


def _families(view: NodeView | None, inputs: NodeInputs | None) -> Sequence[IPFamily]:
    if inputs is not None:
        return inputs.families
    return families_of_rules((view,)) if view is not None else ()


class _NodeScene:
    """What is known of one node and IP family."""

    def __init__(
        self, view: NodeView | None, inputs: NodeInputs | None, options: NodeOptions, family: IPFamily
    ) -> None:
        self._view, self._inputs, self._family, self._options = view, inputs, family, options
        self._plan = inputs.plan(family) if inputs is not None else None
        self._own = inputs.host.addresses if inputs is not None else options.node_ips
        self._held: NodeRules | None = view.rules.get(family) if view is not None and view.rules is not None else None
        self._sources = self._of_inputs()
        self._host = next(iter(self._sources.values())).host

    def _of_inputs(self) -> dict[str, PacketSource]:
        """Return the sources, all with the addresses of the rules' node."""
        found: dict[str, PacketSource] = {}
        if self._view is not None:
            found[RULES] = source_of_view(self._view, self._family, self._own)
        if self._plan is not None and self._inputs is not None:
            mode = mode_of_rules(self._held, self._family) if self._held is not None else self._inputs.mode
            own = tuple(ip for ip in self._own if family_of(ip) is self._family)
            deviations = BACKENDS[mode].deviations
            unknown = sorted(each.words for each in deviations - INTERPRETED)
            found[OBJECTS] = PacketSource(
                name=f"objects, as mode {mode} implements them",
                family=self._family,
                host=found[RULES].host if found else Host(addresses=own),
                plan=None if unknown else self._plan,
                deviations=deviations,
                obstacles=(f"this mode is not interpreted: {'; '.join(unknown)}",) if unknown else (),
            )
        return found

    def scene(self) -> QueryScene:
        """Return what answers need."""
        snapshot = self._inputs.snapshot if self._inputs is not None else None
        views = [self._view] if self._view is not None else []
        facts = sender_facts(snapshot, self._plan, views, self._family)
        networks = tuple(filter(None, self._options.cluster_cidr.split(",")))
        facts = msgspec.structs.replace(facts, pods=(*facts.pods, *networks))
        space = space_of_sources(self._sources.values(), self._host, facts.pod_links)
        frontends = NamedFrontends(space)
        add_frontends(frontends, self._plan, [self._held] if self._held is not None else [], self._host, self._family)
        return QueryScene(
            node=self._node,
            space=space,
            senders=SenderSets(space, facts),
            frontends=frontends,
            sources=self._sources,
            pods=_pods(snapshot) if snapshot is not None else {},
            local_pods=self._local_pods(),
            evidence=self._evidence,
        )

    @property
    def _node(self) -> str:
        if self._inputs is not None:
            return self._inputs.config.node_name
        return self._view.node if self._view is not None else ""

    def _local_pods(self) -> tuple[str, ...] | None:
        found: list[str] = [] if self._view is None else [*pod_networks(self._view, self._family)]
        if self._inputs is not None:
            found += self._inputs.node.pod_cidrs
        if self._plan is not None:
            pools = (pool for service in self._plan.services.values() for pool in service.pools.values())
            found += dict.fromkeys(each.address for pool in pools for each in pool.endpoints if each.local)
        return tuple(found) if found or self._plan is not None else None

    # ---- evidence ------------------------------------------------------------------------------------------------------------

    def _evidence(self, source: str, example: ExamplePacket, share: EndShare) -> str:
        """Return the rule or the decision by which a packet gets to an end."""
        protocol = _PROTOCOLS.get(example.protocol)
        if protocol is None:
            return ""
        packet = Packet(
            source=example.source,
            destination=example.destination,
            protocol=protocol,
            port=example.port if protocol is not Protocol.ICMP else 0,
            iif=example.link,
            from_host=not example.link,
        )
        if source == OBJECTS and self._plan is not None:
            return _decision(self._plan, packet, self._host)
        if self._held is None or share.disposition is Disposition.NOT_OURS:
            return ""  # that no rule applies has no rule as its evidence
        return self._rule(walk(self._held.ruleset, packet, self._host), share)

    def _rule(self, walked: Trace, share: EndShare) -> str:
        outcomes = (
            each
            for each in walked.outcomes
            if each.disposition is share.disposition and (each.endpoint or ("", 0)) in (share.endpoint, ("", 0))
        )
        outcome = next(outcomes, None)
        steps = [each for each in outcome.steps if each.chain] if outcome is not None else []
        before = [each for each in steps if each.where.startswith(("prerouting", "output"))]
        chosen = (before or steps)[-1:] if share.endpoint[0] else steps[-1:]
        if not chosen or self._held is None:
            return ""
        step = chosen[0]
        place, text = (
            self._held.place(step.table, step.chain, step.rule, step.what) if step.rule is not None else ("", "")
        )
        return f"rule {place}: {text or step.what}" if place else f"rule {step.where}: {step.what}"


def _decision(plan: Plan, packet: Packet, host: Host) -> str:
    found = find_frontend(plan, packet, host)
    if found is None:
        return "objects: no frontend of a Service"
    service, frontend = found
    decision = frontend.decision(sender_of(plan, packet, host))
    reason = service.pool(decision.scope).reason if isinstance(decision, Forward) else ""
    text = f"objects: {service.name}, {frontend_text(frontend)}: {decision_text(decision)}"
    return f"{text}; endpoints: {reason}" if reason else text


def _pods(snapshot: Snapshot) -> dict[str, tuple[str, ...]]:
    """Return the addresses of pods by `NAMESPACE/NAME`, by Pods and by EndpointSlices."""
    found: dict[str, dict[str, None]] = {}
    for pod in snapshot.pods.values():
        found.setdefault(str(pod.key), {}).update(dict.fromkeys(pod.ips))
    for slices in snapshot.slices.values():
        for each in slices.values():
            for endpoint in each.endpoints:
                if endpoint.target:
                    found.setdefault(f"{each.namespace}/{endpoint.target}", {})[endpoint.address] = None
    return {name: tuple(addresses) for name, addresses in found.items()}
