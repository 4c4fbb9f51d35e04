"""The context for finding causes: a path, views, objects, and the questions that many causes ask of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import msgspec

from narthex.model import (
    EndpointPort,
    IPFamily,
    Node,
    Protocol,
    Service,
    ServicePort,
    SliceEndpoint,
    Snapshot,
    contains,
    family_of,
)
from narthex.netfilter.ast import Table
from narthex.proxy.plan.select import HEADLESS_LABEL
from narthex.trace.causes.catalogue import CAUSES, CauseFinding
from narthex.trace.follow.views import Impairment, NodeRules, NodeView, TrackedConnection
from narthex.trace.model import Fate, PacketPath, PathLeaf, PathStep, Stage, branch_ends, tree_leaves

BAD = frozenset({Fate.DROPPED, Fate.REJECTED, Fate.LOST})
HOOKS = frozenset({Stage.PREROUTING, Stage.INPUT, Stage.FORWARD, Stage.OUTPUT, Stage.POSTROUTING})

ON = frozenset({Stage.FORWARD, Stage.OUTPUT, Stage.POSTROUTING, Stage.ROUTING})
"""Stages of a packet that the node sends on."""
_REWRITES = re.compile(r"\b(dnat|redirect) to\b|: \[?[0-9a-f:.]+\]?:\d+ \}")
"""A rule that rewrites the destination, or a map element that holds the new one. Others match what was rewritten before (`not dnat`)."""

CLUSTER_IP, EXTERNAL_IP, BALANCER, NODE_PORT = "cluster IP", "external IP", "load balancer address", "node port"


class TargetService(msgspec.Struct, frozen=True, kw_only=True):
    """The Service that the packet is for."""

    service: Service
    kind: str
    port: ServicePort | None
    """None: the Service has the address, but not the port."""

    @property
    def name(self) -> str:
        """`Service shop/web`."""
        return f"Service {self.service.key}"

    @property
    def external(self) -> bool:
        """True if the external traffic policy applies."""
        return self.kind != CLUSTER_IP

    @property
    def local(self) -> bool:
        """True if only endpoints on the packet's node may be used."""
        return self.service.external_policy_local if self.external else self.service.internal_policy_local


class ServiceEndpoint(msgspec.Struct, frozen=True):
    """An endpoint of the Service, of either IP family, with the port for the Service port; None if it has none."""

    endpoint: SliceEndpoint
    family: IPFamily
    port: EndpointPort | None
    where: str
    """The name of the EndpointSlice."""
    where_namespace: str = ""


class DiagnosisContext:
    """A path, the views of its nodes, and the cluster's objects."""

    def __init__(
        self,
        path: PacketPath,
        views: Mapping[str, NodeView],
        cluster: Snapshot | None,
        impairments: Sequence[Impairment] = (),
    ) -> None:
        """Combine a path with the views by node name, the objects if they are known, and what is known to be broken."""
        self.path = path
        self.packet = path.packet
        self.views = views
        self.cluster = cluster
        self.impairments = tuple(impairments)
        self.leaves: tuple[PathLeaf, ...] = path.leaves()
        self.explained = False
        """Something that comes earlier explains the failure already."""

    @cached_property
    def family(self) -> IPFamily:
        """The packet's IP family."""
        return family_of(self.packet.destination or self.packet.source)

    @cached_property
    def protocol(self) -> Protocol:
        """The packet's protocol."""
        return Protocol(self.packet.protocol.upper())

    @cached_property
    def failing(self) -> tuple[PathLeaf, ...]:
        """The alternatives on which the packet doesn't arrive."""
        return tuple(leaf for leaf in self.leaves if leaf.end.fate in BAD)

    @cached_property
    def unanswered(self) -> tuple[PathLeaf, ...]:
        """The alternatives on which the packet arrives and the reply doesn't."""
        return tuple(leaf for leaf in self.leaves if leaf not in self.failing and self._answer_fails(leaf))

    @cached_property
    def lost_replies(self) -> tuple[PathLeaf, ...]:
        """The alternatives of replies that do not arrive."""
        replies = (leaf.end.reply for leaf in self.unanswered)
        return tuple(
            leaf for reply in replies if reply is not None for leaf in tree_leaves(reply) if leaf.end.fate in BAD
        )

    @cached_property
    def undecided(self) -> bool:
        """True if the packet doesn't arrive, or if that is unknown."""
        return bool(self.failing or self.unanswered) or any(leaf.end.fate is Fate.UNKNOWN for leaf in self.leaves)

    @cached_property
    def partial(self) -> bool:
        """True if the rules that the path was read from are known to lack something."""
        if any(leaf.end.supposing or leaf.end.fate is Fate.UNKNOWN for leaf in self.leaves):
            return True
        held = ((view, self.rules(view)) for _, view in self.visited())
        return any(view.partial or (rules is not None and (rules.gaps or rules.unread)) for view, rules in held)

    @staticmethod
    def _answer_fails(leaf: PathLeaf) -> bool:
        return leaf.end.reply is not None and all(end.fate in BAD for end in branch_ends(leaf.end.reply))

    # ---- the node ------------------------------------------------------------------------------------------------

    @cached_property
    def node(self) -> str:
        """The first node whose rules the packet passes."""
        steps = [step for leaf in self.leaves[:1] for step in leaf.steps]
        for step in steps:
            if not step.namespace and step.stage in HOOKS and step.node:
                return step.node
        return self.path.start or next((step.node for step in steps if step.node), "")

    @cached_property
    def view(self) -> NodeView | None:
        """The view of that node."""
        if self.node in self.views:
            return self.views[self.node]
        return next(iter(self.views.values())) if len(self.views) == 1 else None

    def view_at(self, step: PathStep) -> NodeView | None:
        """Return the view of the network namespace in which a step is."""
        node = self.views.get(step.node)
        if not step.namespace:
            return node
        return self.views.get(step.namespace) or (node.pods.get(step.namespace) if node is not None else None)

    @property
    def node_words(self) -> str:
        """`node worker-a`, or `this node`."""
        return node_words(self.node)

    def tables(self, view: NodeView | None = None) -> tuple[Table, ...]:
        """Return the tables of the packet's IP family."""
        rules = self.rules(view)
        return rules.ruleset.tables if rules else ()

    def rules(self, view: NodeView | None = None) -> NodeRules | None:
        """Return the rules of the packet's IP family."""
        view = view or self.view
        return view.rules.get(self.family) if view is not None and view.rules is not None else None

    def visited(self) -> Iterator[tuple[str, NodeView]]:
        """Yield the nodes on the path that have a view, each once, in order."""
        seen: set[str] = set()
        for leaf in self.leaves:
            for step in leaf.steps:
                if step.node not in seen and step.node in self.views:
                    seen.add(step.node)
                    yield step.node, self.views[step.node]
        if not seen and self.view is not None:
            yield self.node, self.view

    def is_own(self, address: str) -> bool:
        """Return True if the first node has the address."""
        return bool(self.view and self.view.own(address)) or contains(self.family.loopback, address)

    # ---- the Service ---------------------------------------------------------------------------------------------

    @cached_property
    def front(self) -> TargetService | None:
        """The Service that the packet is for, by objects."""
        if self.cluster is None:
            return None
        to = self.packet.destination
        found = [
            (service, kind)
            for service in self.cluster.services.values()
            for kind, addresses in (
                (CLUSTER_IP, service.cluster_ips),
                (EXTERNAL_IP, service.external_ips),
                (BALANCER, tuple(entry.ip for entry in service.ingress if not entry.proxy)),
            )
            if to in addresses and service.type != "ExternalName"
        ]
        fronts = [TargetService(service=service, kind=kind, port=self._port(service)) for service, kind in found]
        if fronts:
            return next((front for front in fronts if front.port), fronts[0])
        nodes = {ip for node in self.cluster.nodes.values() for ip in (*node.internal_ips, *node.external_ips)}
        if to not in nodes and not self.is_own(to):
            return None
        for service in self.cluster.services.values():
            for port in service.ports:
                if port.node_port and port.node_port == self.packet.port and port.protocol is self.protocol:
                    return TargetService(service=service, kind=NODE_PORT, port=port)
        return None

    def _port(self, service: Service) -> ServicePort | None:
        same = (each for each in service.ports if each.port == self.packet.port and each.protocol is self.protocol)
        return next(same, None)

    @cached_property
    def endpoints(self) -> tuple[ServiceEndpoint, ...]:
        """All endpoints of the Service, of both IP families, ready or not."""
        front = self.front
        if front is None or self.cluster is None:
            return ()
        held = []
        for each in self.cluster.slices.get(front.service.key, {}).values():
            fitting = (held_port for held_port in each.ports if _serves(held_port, front.port))
            port = next(fitting, None)
            # A slice for names alone is no proxy's business.
            if each.family is not None and each.label(HEADLESS_LABEL) is None:
                held += [
                    ServiceEndpoint(endpoint, each.family, port, each.name, each.namespace)
                    for endpoint in each.endpoints
                ]
        return tuple(held)

    @cached_property
    def usable(self) -> tuple[ServiceEndpoint, ...]:
        """The endpoints that may receive connections: of the packet's IP family, with the port, ready or the last that serve."""
        fitting = [each for each in self.endpoints if each.family is self.family and each.port is not None]
        ready = [each for each in fitting if each.endpoint.ready]
        return tuple(ready or (each for each in fitting if each.endpoint.serving and each.endpoint.terminating))

    @cached_property
    def from_cluster(self) -> bool:
        """True if the sender is a pod or a node of the cluster."""
        source = self.packet.source
        if self.is_own(source) or self.path.source.name.startswith(("pod ", "node ")):
            return True
        return self.owner_of(source) is not None

    def owner_of(self, address: str) -> tuple[Node, str] | None:
        """Return the node with the address in a pod range, and the range."""
        nodes = self.cluster.nodes.values() if self.cluster is not None else ()
        ranges = ((node, cidr) for node in nodes for cidr in node.pod_cidrs if contains(cidr, address))
        return next(ranges, None)

    # ---- alternatives ------------------------------------------------------------------------------------------------

    def rewritten(self, leaf: PathLeaf) -> PathStep | None:
        """Return the step that rewrites the destination."""
        steps = (step for step in leaf.steps if step.chain and _REWRITES.search(f"{step.verdict} {step.what}"))
        return next(steps, None) if self.sent_to(leaf) is not None else None

    def sent_to(self, leaf: PathLeaf) -> tuple[str, int] | None:
        """Return the rewritten address and port of the destination; None if it isn't rewritten."""
        asked = self.packet.destination, self.packet.port
        for step in leaf.steps:
            for header in (step.before, step.after):
                if header is not None and step.stage is not Stage.REPLY and (header.destination, header.port) != asked:
                    return header.destination, header.port
        return None

    def place_of(self, leaf: PathLeaf) -> tuple[str, int]:
        """Return the final destination."""
        return self.sent_to(leaf) or (self.packet.destination, self.packet.port)

    def routed(self, leaf: PathLeaf) -> Iterator[tuple[str, NodeView]]:
        """Yield the nodes with a view that forward the packet on this alternative."""
        seen: set[str] = set()
        for step in leaf.steps:
            if step.stage in ON and not step.namespace and step.node not in seen:
                seen.add(step.node)
                view = self.views.get(step.node) or (self.view if step.node == self.node else None)
                if view is not None:
                    yield step.node, view

    def known_connections(self, view: NodeView) -> list[TrackedConnection]:
        """Return the node's tracked connections from the sender to the packet's destination."""
        packet = self.packet
        if view.connections is None:
            return []
        held = view.connections.to(self.protocol, packet.destination, packet.port)
        return [each for each in held if each.source == packet.source]

    @staticmethod
    def last_rule(leaf: PathLeaf) -> PathStep | None:
        """Return the last step that a rule or a policy caused."""
        return next((step for step in reversed(leaf.steps) if step.chain), None)


def _serves(port: EndpointPort, of: ServicePort | None) -> bool:
    return of is not None and bool(port.port) and port.name == of.name and port.protocol is of.protocol


def finding(
    cause: str,
    sentence: str,
    *,
    evidence: tuple[str, ...] = (),
    advice: str = "",
    certain: bool = True,
    node: str = "",
    explains: bool = True,
) -> CauseFinding:
    """Return a finding of the cause with this id."""
    return CauseFinding(
        cause=CAUSES[cause],
        certain=certain,
        sentence=sentence,
        evidence=tuple(dict.fromkeys(line for line in evidence if line)),
        advice=advice,
        node=node,
        explains=explains,
    )


def node_words(name: str, unnamed: str = "this node") -> str:
    """Return `node worker-a`, or `this node`."""
    return f"node {name}" if name else unnamed


def step_words(step: PathStep) -> str:
    """Return where a step is: `node worker-a`, `pod shop/web-1`, `outside`, or `this node`."""
    if step.namespace:
        return f"pod {step.namespace}" if "/" in step.namespace else step.namespace
    return node_words(step.node)


def of_reply(found: CauseFinding) -> CauseFinding:
    """Return the finding as one about the reply."""
    return msgspec.structs.replace(found, sentence=f"the reply is lost: {found.sentence}")


def rule_text(step: PathStep) -> str:
    """Return a rule as evidence: its position and its text."""
    place = f" ({step.place})" if step.place else ""
    return f"{step.family} {step.table} {step.chain}: {step.rule or step.what}{place}".strip()
