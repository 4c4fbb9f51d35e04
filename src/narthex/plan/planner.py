"""Snapshot and NodeConfig to Plan, one family each, reusing all that did not change."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from immutables import Map

from narthex.model.names import NamespacedName, ServicePortName
from narthex.model.net import IPFamily, address, address_key, contains, family_of, host_network, is_zero_prefix, network
from narthex.model.objects import EndpointSlice, Node, Service
from narthex.plan.decide import Context, cluster_ip, decide, health_check
from narthex.plan.ir import (
    Conflict,
    Frontend,
    FrontendKind,
    HealthCheck,
    Lineage,
    Match,
    NodePorts,
    Plan,
    PodDetector,
    ServicePlan,
)
from narthex.plan.select import Place
from narthex.state.store import Snapshot

ZONE_LABEL = "topology.kubernetes.io/zone"

_RANK = {
    FrontendKind.CLUSTER_IP: 0,
    FrontendKind.LOAD_BALANCER: 1,
    FrontendKind.EXTERNAL_IP: 2,
    FrontendKind.NODE_PORT: 3,
}
"""Who wins an address and port that two Services claim: what the control plane allocated beats what a Service's author
wrote down, so that `externalIPs` cannot take over another Service's ClusterIP (CVE-2020-8554)."""


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the configuration that decisions depend on; modes have their defaults filled in already."""

    node_name: str
    detect_local_mode: str = "ClusterCIDR"
    """ClusterCIDR, NodeCIDR, BridgeInterface, InterfaceNamePrefix, or empty for no detection."""
    cluster_cidrs: tuple[str, ...] = ()
    """The first of each family counts (row 6.1)."""
    bridge_interface: str = ""
    interface_name_prefix: str = ""
    masquerade_all: bool = False
    masquerade_bit: int = 14
    node_port_addresses: tuple[str, ...] | None = None
    """None: every local address; ("primary",); or networks."""
    localhost_node_ports: bool = False
    node_addresses: tuple[str, ...] = ()
    """See `Plan.node_addresses`, of both families; (): those that the Node object has, of its machine or by name."""
    bind_address: str = ""
    """Says which address the node has, when it is set and not unspecified (row 15.6)."""
    allow_service_external_ips: bool = True
    strict_source_ranges: bool = False
    """`loadBalancerSourceRanges` holds for node ports and external IPs too, not for balancer addresses alone (rows
    10.4, 29.16)."""
    drop_invalid: bool = True
    """See `Plan.drop_invalid`."""


class _Source(msgspec.Struct, frozen=True):
    """What one Service was last decided from, kept to see by identity that nothing changed."""

    service: Service | None
    slices: Map[str, EndpointSlice] | None


class _Claim(msgspec.Struct, frozen=True, order=True):
    """A wish for one match; the smallest claim has it."""

    rank: int
    key: tuple[str, str, str, str]
    name: ServicePortName


class Planner:
    """Keeps what was decided before, so that a change costs what changed.

    `plan` is a function of the snapshot alone: any sequence of calls ends in the plan that a new Planner would make.
    """

    def __init__(self, config: NodeConfig, family: IPFamily) -> None:
        self._config = config
        self._family = family
        self._context: Context | None = None
        self._sources: dict[NamespacedName, _Source] = {}
        self._wishes: dict[NamespacedName, tuple[ServicePlan, ...]] = {}
        """What each Service would get if no other were there."""
        self._health: Map[NamespacedName, HealthCheck] = Map()
        self._claims: dict[Match, tuple[_Claim, ...]] = {}
        self._contested: set[Match] = set()
        self._plan: Plan | None = None

    def plan(self, snapshot: Snapshot, changed: frozenset[NamespacedName] | None = None) -> Plan:
        """The plan for a snapshot. `changed` names the Services that may differ since the last call; None: look at
        all. Returns the identical Plan when nothing is different."""
        context = _context(self._config, self._family, snapshot)
        if changed is None or context != self._context:
            changed = frozenset(self._sources) | frozenset(snapshot.services)
        fresh = context != self._context
        self._context = context
        touched: set[ServicePortName] = set()
        matches: set[Match] = set()
        for name in changed:
            self._redecide(name, snapshot, fresh, touched, matches)
        for match in matches:
            touched.update(self._settle(match))
        return self._assemble(snapshot, touched)

    def _redecide(
        self,
        name: NamespacedName,
        snapshot: Snapshot,
        fresh: bool,
        touched: set[ServicePortName],
        matches: set[Match],
    ) -> None:
        """Decide one Service again and note which ports and matches that may concern."""
        assert self._context is not None
        service, slices = snapshot.services.get(name), snapshot.slices.get(name)
        source = self._sources.get(name)
        if not fresh and source and source.service is service and source.slices is slices:
            return
        before = self._wishes.get(name, ())
        after: tuple[ServicePlan, ...] = ()
        check = None
        if service is not None and cluster_ip(service, self._family):
            ordered = [slices[key] for key in sorted(slices)] if slices else []
            after = decide(service, ordered, self._context)
            check = health_check(service, ordered, self._context)
        self._note_health(name, check)
        if service is None:
            self._sources.pop(name, None)
        else:
            self._sources[name] = _Source(service, slices)
        if after == before:
            return
        if after:
            self._wishes[name] = after
        else:
            self._wishes.pop(name, None)
        if before:
            known = set(before)
            touched.update(plan.name for plan in after if plan not in known)
            touched.update({plan.name for plan in before} - {plan.name for plan in after})
        else:
            touched.update([plan.name for plan in after])
        self._reclaim(before, after, matches)

    def _note_health(self, name: NamespacedName, check: HealthCheck | None) -> None:
        if self._health.get(name) == check:
            return
        self._health = self._health.delete(name) if check is None else self._health.set(name, check)

    def _reclaim(self, before: tuple[ServicePlan, ...], after: tuple[ServicePlan, ...], matches: set[Match]) -> None:
        old, new = _claims(before), _claims(after)
        for match in {**old, **new}:
            if old.get(match) == new.get(match):
                continue
            matches.add(match)
            held = {claim for claim in self._claims.get(match, ()) if claim not in old.get(match, ())}
            held.update(new.get(match, ()))
            if held:
                self._claims[match] = tuple(sorted(held))
            else:
                self._claims.pop(match, None)

    def _settle(self, match: Match) -> set[ServicePortName]:
        """Note whether a match is contested; return all ports that claim it."""
        claims = self._claims.get(match, ())
        names = {claim.name for claim in claims}
        if len(names) > 1:
            self._contested.add(match)
        else:
            self._contested.discard(match)
        return names

    def _assemble(self, snapshot: Snapshot, touched: set[ServicePortName]) -> Plan:
        assert self._context is not None
        last = self._plan
        services: Map[ServicePortName, ServicePlan] = last.services if last else Map()  # type: ignore[assignment]
        differing: set[ServicePortName] = set()
        with services.mutate() as mutation:
            for name in touched:
                held, now = services.get(name), self._granted(name)
                if held == now:
                    continue
                differing.add(name)
                if now is None:
                    del mutation[name]
                else:
                    mutation[name] = now
            services = mutation.finish()
        plan = Plan(
            family=self._family,
            node_name=self._config.node_name,
            services=services,
            pods=_detector(self._config, self._family, snapshot),
            node_ports=_node_ports(self._config, self._family, self._context.node_ip),
            node_addresses=_node_addresses(self._config, self._family, _node(self._config, snapshot)),
            service_cidrs=_service_cidrs(snapshot, self._family),
            masquerade_mark=1 << self._config.masquerade_bit,
            drop_invalid=self._config.drop_invalid,
            conflicts=self._conflicts(),
            health_checks=self._health,
            lineage=Lineage(last.lineage if last else None, frozenset(differing)),
        )
        if last is not None and not differing and _frame(plan) == _frame(last):
            return last
        self._plan = plan
        return plan

    def _granted(self, name: ServicePortName) -> ServicePlan | None:
        """The port's plan without the frontends that others won; None when nothing is left."""
        for wish in self._wishes.get(name.service, ()):
            if wish.name == name:
                break
        else:
            return None
        frontends = tuple([front for front in wish.frontends if self._claims[front.match][0].name == name])
        if len(frontends) == len(wish.frontends):
            return wish
        return msgspec.structs.replace(wish, frontends=frontends) if frontends else None

    def _conflicts(self) -> tuple[Conflict, ...]:
        found = []
        for match in self._contested:
            winner, *others = self._claims[match]
            found += [
                Conflict(match=match, kind=_KIND_OF_RANK[loser.rank], winner=winner.name, loser=loser.name)
                for loser in others
                if loser.name != winner.name
            ]
        return tuple(sorted(found, key=lambda c: (c.match[0] or "", c.match[1].value, c.match[2], c.loser.sort_key)))


_KIND_OF_RANK = {rank: kind for kind, rank in _RANK.items()}


def plan_once(snapshot: Snapshot, config: NodeConfig, family: IPFamily) -> Plan:
    """The plan for one snapshot, from scratch."""
    return Planner(config, family).plan(snapshot)


def _claims(plans: Iterable[ServicePlan]) -> dict[Match, tuple[_Claim, ...]]:
    claims: dict[Match, tuple[_Claim, ...]] = {}
    for plan in plans:
        for frontend in plan.frontends:
            claim = _Claim(_RANK[frontend.kind], plan.name.sort_key, plan.name)
            claims[frontend.match] = (*claims.get(frontend.match, ()), claim)
    return claims


def _frame(plan: Plan) -> tuple[object, ...]:
    """All of a plan but its Services."""
    return (
        plan.pods,
        plan.node_ports,
        plan.node_addresses,
        plan.service_cidrs,
        plan.masquerade_mark,
        plan.conflicts,
        plan.health_checks,
    )


def _node(config: NodeConfig, snapshot: Snapshot) -> Node | None:
    return snapshot.nodes.get(NamespacedName("", config.node_name))


def _context(config: NodeConfig, family: IPFamily, snapshot: Snapshot) -> Context:
    node = _node(config, snapshot)
    return Context(
        family=family,
        place=Place(config.node_name, (node.label(ZONE_LABEL) or "") if node else ""),
        node_ip=_node_ip(config, family, node),
        detect_pods=_detector(config, family, snapshot).enabled,
        masquerade_all=config.masquerade_all,
        external_ips=config.allow_service_external_ips,
        strict_source_ranges=config.strict_source_ranges,
    )


def _node_ip(config: NodeConfig, family: IPFamily, node: Node | None) -> str:
    """The node's primary address of a family: bindAddress, else InternalIP, else ExternalIP (row 15.6)."""
    if config.bind_address not in ("", "0.0.0.0", "::"):
        bound = address(config.bind_address)
        if family_of(bound) is family:
            return bound
    known = (*node.internal_ips, *node.external_ips) if node else ()
    return next((ip for ip in known if family_of(ip) is family), "")


def _detector(config: NodeConfig, family: IPFamily, snapshot: Snapshot) -> PodDetector:
    """How pods are told on this node; off for a family without a CIDR (row 6.2)."""
    mode = config.detect_local_mode
    if mode == "ClusterCIDR":
        return PodDetector(cidrs=tuple(cidr for cidr in config.cluster_cidrs if family_of(cidr) is family)[:1])
    if mode == "NodeCIDR":
        node = _node(config, snapshot)
        return PodDetector(cidrs=tuple(cidr for cidr in (node.pod_cidrs if node else ()) if family_of(cidr) is family))
    if mode == "BridgeInterface":
        return PodDetector(interface=config.bridge_interface)
    if mode == "InterfaceNamePrefix":
        return PodDetector(interface_prefix=config.interface_name_prefix)
    return PodDetector()


def _node_ports(config: NodeConfig, family: IPFamily, node_ip: str) -> NodePorts:
    """Where node ports answer. What is not known fails closed: an unknown primary address, or a list that names the
    other family only, opens nothing (upstream opens everything; rows 9.4, 9.5, 29.2)."""
    words = config.node_port_addresses
    cidrs: tuple[str, ...] | None
    if words is None:
        cidrs = None
    elif "primary" in words:
        cidrs = (host_network(node_ip),) if node_ip else ()
    else:
        own = tuple(network(word) for word in words if family_of(word) is family)
        cidrs = None if any(is_zero_prefix(cidr) for cidr in own) else own
    localhost = config.localhost_node_ports and family is IPFamily.IPV4
    if localhost and cidrs is not None:
        localhost = any(contains(cidr, "127.0.0.1") or contains("127.0.0.0/8", cidr.split("/")[0]) for cidr in cidrs)
    return NodePorts(cidrs=cidrs, localhost=localhost)


def _node_addresses(config: NodeConfig, family: IPFamily, node: Node | None) -> tuple[str, ...]:
    named = (node.machine_ips or (*node.internal_ips, *node.external_ips)) if node else ()
    own = {ip for ip in config.node_addresses or named if family_of(ip) is family}
    return tuple(sorted((ip for ip in own if not contains(family.loopback, ip)), key=address_key))


def _service_cidrs(snapshot: Snapshot, family: IPFamily) -> tuple[str, ...]:
    return tuple(
        sorted({cidr for each in snapshot.service_cidrs.values() for cidr in each.cidrs if family_of(cidr) is family})
    )


def frontends_of(plan: Plan) -> Iterable[tuple[ServicePlan, Frontend]]:
    """All frontends of a plan, ordered by Service port name."""
    for name in sorted(plan.services, key=lambda name: name.sort_key):
        service = plan.services[name]
        for frontend in service.frontends:
            yield service, frontend
