"""Computes plans from snapshots and the node's configuration, and reuses everything that did not change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet

import msgspec
from immutables import Map

from narthex.model import (
    NODE_PORT_WORDS,
    IPFamily,
    NamespacedName,
    Node,
    Service,
    ServicePortName,
    Slices,
    Snapshot,
    address,
    address_key,
    contains,
    family_of,
    host_network,
    is_zero_prefix,
    network,
)
from narthex.proxy.plan.ir import (
    FrontendConflict,
    FrontendKind,
    Lineage,
    Match,
    NodePorts,
    Plan,
    PodDetector,
    ServiceHealthCheck,
    ServicePlan,
)
from narthex.proxy.plan.select import ProxyLocation
from narthex.proxy.plan.service import Context, decide, health_check

ZONE_LABEL = "topology.kubernetes.io/zone"


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the configuration that decisions depend on, with the defaults of the mode filled in."""

    node_name: str
    detect_local_mode: str = "ClusterCIDR"
    """ClusterCIDR, NodeCIDR, BridgeInterface, InterfaceNamePrefix, or empty: no detection."""
    cluster_cidrs: tuple[str, ...] = ()
    """The first of each family counts (row 6.1)."""
    bridge_interface: str = ""
    interface_name_prefix: str = ""
    masquerade_all: bool = False
    masquerade_bit: int = 14
    node_port_addresses: tuple[str, ...] | None = None
    """None: all local addresses; otherwise networks and the words `primary`, `localhost`, and `all`, in any combination (row 9.13)."""
    strict_node_port_addresses: bool = False
    """A family that `node_port_addresses` does not name opens no node port (row 29.17)."""
    localhost_node_ports: bool = False
    relayed_node_ports: bool = False
    """Node ports answer on loopback through a relay if `node_port_addresses` names loopback (row 9.13)."""
    node_addresses: tuple[str, ...] = ()
    """See `Plan.node_addresses`, of both families; (): those of the Node object."""
    bind_address: str = ""
    """Names the node's address if it is set and not unspecified (row 15.6)."""
    allow_service_external_ips: bool = True
    strict_source_ranges: bool = False
    """`loadBalancerSourceRanges` applies to node ports and external IPs, too, not only to load balancer addresses (rows
    10.4, 29.16).
    """
    drop_invalid: bool = True
    """See `Plan.drop_invalid`."""


class _Decided(msgspec.Struct, frozen=True):
    """The decisions for one Service, and the objects that they were made from.

    Identical objects need no new decision. `claims` are the decisions as if no other Service existed.
    """

    service: Service
    slices: Slices | None
    claims: tuple[ServicePlan, ...]


class Planner:
    """Computes plans and keeps earlier decisions, so that a change costs what changed.

    `plan` is a function of the snapshot alone: any sequence of calls ends in the plan that a new Planner would compute.
    """

    def __init__(self, config: NodeConfig, family: IPFamily) -> None:
        self._config = config
        self._family = family
        self._context: Context | None = None
        self._decided: dict[NamespacedName, _Decided] = {}
        self._health: Map[NamespacedName, ServiceHealthCheck] = Map()
        self._claims = Claims()
        self._plan: Plan | None = None

    def plan(self, snapshot: Snapshot, changed: frozenset[NamespacedName] | None = None) -> Plan:
        """Return the plan for a snapshot; the identical Plan if nothing differs.

        `changed` names the Services that may differ since the last call; None: any may.
        """
        context = _context(self._config, self._family, snapshot)
        fresh = context != self._context
        self._context = context
        services, slices = snapshot.services, snapshot.slices
        ports: dict[ServicePortName, ServicePlan | None] = {}
        if changed is None or fresh:
            for name in [name for name in self._decided if name not in services]:
                self._forget(name, ports)
            for name, service in services.items():
                self._redecide(name, service, slices.get(name), fresh, ports)
        else:
            for name in changed:
                if (present := services.get(name)) is None:
                    self._forget(name, ports)
                else:
                    self._redecide(name, present, slices.get(name), fresh, ports)
        # All claims are known now, so what others claim, too, can be settled.
        for port in self._claims.take_doubtful():
            ports[port] = self._granted(port)
        return self._assemble(snapshot, ports)

    def _redecide(
        self,
        name: NamespacedName,
        service: Service,
        slices: Slices | None,
        fresh: bool,
        ports: dict[ServicePortName, ServicePlan | None],
    ) -> None:
        """Decide one Service again, and note which of its ports have another plan now, or none."""
        assert self._context is not None
        last = self._decided.get(name)
        if last is not None and not fresh and last.service is service and last.slices is slices:
            return
        ordered = slices.ordered if slices is not None else ()
        claims = decide(name, service, ordered, self._context)
        if service.health_check_node_port or name in self._health:
            self._note_health(name, health_check(service, ordered, self._context))
        before = last.claims if last is not None else ()
        if before and claims:
            # What is as before stays the identical object.
            known = {claim.name: claim for claim in before}
            claims = tuple([held if (held := known.get(claim.name)) == claim else claim for claim in claims])
        self._decided[name] = _Decided(service, slices, claims)
        self._note_claims(before, claims, ports)

    def _forget(self, name: NamespacedName, ports: dict[ServicePortName, ServicePlan | None]) -> None:
        last = self._decided.pop(name, None)
        if last is not None:
            self._note_health(name, None)
            self._note_claims(last.claims, (), ports)

    def _note_health(self, name: NamespacedName, check: ServiceHealthCheck | None) -> None:
        if self._health.get(name) == check:
            return
        self._health = self._health.delete(name) if check is None else self._health.set(name, check)

    def _note_claims(
        self,
        before: tuple[ServicePlan, ...],
        after: tuple[ServicePlan, ...],
        ports: dict[ServicePortName, ServicePlan | None],
    ) -> None:
        if before:
            kept = set(map(id, after))
            for claim in before:
                if id(claim) not in kept:
                    ports[claim.name] = None
                    self._claims.release(claim)
            known = set(map(id, before))
            after = tuple([claim for claim in after if id(claim) not in known])
        for claim in after:
            ports[claim.name] = claim
            self._claims.claim(claim)

    def _granted(self, name: ServicePortName) -> ServicePlan | None:
        """Return the port's plan without the frontends that other ports won; None if nothing is left."""
        decided = self._decided.get(name.service)
        claim = next((claim for claim in decided.claims if claim.name == name), None) if decided is not None else None
        if claim is None:
            return None
        frontends = tuple([front for front in claim.frontends if self._claims.has(claim, front.match)])
        if len(frontends) == len(claim.frontends):
            return claim
        return msgspec.structs.replace(claim, frontends=frontends) if frontends else None

    def _assemble(self, snapshot: Snapshot, ports: dict[ServicePortName, ServicePlan | None]) -> Plan:
        """Return a plan in which some ports differ from the last one; the last plan itself if none does."""
        assert self._context is not None
        last = self._plan
        services: Map[ServicePortName, ServicePlan] = last.services if last else Map()  # type: ignore[assignment]
        differing: Iterable[ServicePortName]
        if not services:
            services = Map({name: now for name, now in ports.items() if now is not None})
            differing = services
        elif ports:
            differing = [name for name, now in ports.items() if services.get(name) != now]
            mutation = services.mutate()
            for name in differing:
                now = ports[name]
                if now is None:
                    del mutation[name]
                else:
                    mutation[name] = now
            services = mutation.finish() if differing else services
        else:
            differing = ()
        plan = Plan(
            family=self._family,
            node_name=self._config.node_name,
            services=services,
            pods=pod_detector(self._config, self._family, _node(self._config, snapshot)),
            node_ports=_node_ports(self._config, self._family, self._context.node_ip),
            node_addresses=_node_addresses(self._config, self._family, _node(self._config, snapshot)),
            service_cidrs=_service_cidrs(snapshot, self._family),
            masquerade_mark=1 << self._config.masquerade_bit,
            drop_invalid=self._config.drop_invalid,
            conflicts=self._claims.conflicts(),
            health_checks=self._health,
            lineage=Lineage(last.lineage if last else None, frozenset(differing)),
        )
        if last is not None and not plan.lineage.changed and plan == last:
            return last
        self._plan = plan
        return plan


def plan_once(snapshot: Snapshot, config: NodeConfig, family: IPFamily) -> Plan:
    """Return the plan for one snapshot, from scratch."""
    return Planner(config, family).plan(snapshot)


def _node(config: NodeConfig, snapshot: Snapshot) -> Node | None:
    return snapshot.nodes.get(NamespacedName("", config.node_name))


def _context(config: NodeConfig, family: IPFamily, snapshot: Snapshot) -> Context:
    node = _node(config, snapshot)
    return Context(
        family=family,
        place=ProxyLocation(config.node_name, (node.label(ZONE_LABEL) or "") if node else ""),
        node_ip=_node_ip(config, family, node),
        detect_pods=pod_detector(config, family, node).enabled,
        masquerade_all=config.masquerade_all,
        external_ips=config.allow_service_external_ips,
        strict_source_ranges=config.strict_source_ranges,
    )


def _node_ip(config: NodeConfig, family: IPFamily, node: Node | None) -> str:
    """Return the node's primary address of a family: bindAddress, else InternalIP, else ExternalIP (row 15.6)."""
    if config.bind_address not in ("", "0.0.0.0", "::"):
        bound = address(config.bind_address)
        if family_of(bound) is family:
            return bound
    known = (*node.internal_ips, *node.external_ips) if node else ()
    return next((ip for ip in known if family_of(ip) is family), "")


def pod_detector(config: NodeConfig, family: IPFamily, node: Node | None) -> PodDetector:
    """Return how pods are recognized on a node; off for a family without a CIDR (row 6.2)."""
    detect = _DETECTORS.get(config.detect_local_mode)
    return detect(config, family, node) if detect else PodDetector()


_DETECTORS: Mapping[str, Callable[[NodeConfig, IPFamily, Node | None], PodDetector]] = {
    "ClusterCIDR": lambda config, family, _: PodDetector(cidrs=_of_family(config.cluster_cidrs, family)[:1]),
    "NodeCIDR": lambda _, family, node: PodDetector(cidrs=_of_family(node.pod_cidrs if node else (), family)),
    "BridgeInterface": lambda config, *_: PodDetector(interface=config.bridge_interface),
    "InterfaceNamePrefix": lambda config, *_: PodDetector(interface_prefix=config.interface_name_prefix),
}
"""By `detectLocalMode`."""


def _of_family(cidrs: Iterable[str], family: IPFamily) -> tuple[str, ...]:
    return tuple(cidr for cidr in cidrs if family_of(cidr) is family)


def _node_ports(config: NodeConfig, family: IPFamily, node_ip: str) -> NodePorts:
    """Return where node ports answer.

    A list that names networks of the other family only opens every address of this one (row 9.4), unless it is taken strictly (row 29.17).
    An unknown primary address fails closed, where kube-proxy opens everything (rows 9.5, 29.2).
    """
    cidrs = _node_port_networks(config, family, node_ip)
    localhost = config.localhost_node_ports and family is IPFamily.IPV4
    if localhost and cidrs is not None:
        localhost = any(contains(cidr, "127.0.0.1") or contains("127.0.0.0/8", cidr.split("/")[0]) for cidr in cidrs)
    return NodePorts(
        cidrs=cidrs, localhost=localhost, relayed=config.relayed_node_ports and _names_loopback(config, family)
    )


def _names_loopback(config: NodeConfig, family: IPFamily) -> bool:
    """Return True if `nodePortAddresses` names loopback itself, not only a larger network that contains it."""
    words = config.node_port_addresses or ()
    networks = [word for word in words if word not in NODE_PORT_WORDS and family_of(word) is family]
    return "localhost" in words or any(
        not is_zero_prefix(word) and contains(family.loopback, word.partition("/")[0]) for word in networks
    )


def _node_port_networks(config: NodeConfig, family: IPFamily, node_ip: str) -> tuple[str, ...] | None:
    """Return the networks where node ports answer; None for every address of the node."""
    words = config.node_port_addresses
    if words is None or "all" in words:
        return None
    own = [network(word) for word in words if word not in NODE_PORT_WORDS and family_of(word) is family]
    own += [host_network(node_ip)] if "primary" in words and node_ip else []
    own += [family.loopback] if "localhost" in words else []
    named = bool(own) or not NODE_PORT_WORDS.isdisjoint(words)
    if any(is_zero_prefix(cidr) for cidr in own) or not (named or config.strict_node_port_addresses):
        return None
    return tuple(dict.fromkeys(own))


def _node_addresses(config: NodeConfig, family: IPFamily, node: Node | None) -> tuple[str, ...]:
    named = (node.machine_ips or (*node.internal_ips, *node.external_ips)) if node else ()
    own = {ip for ip in config.node_addresses or named if family_of(ip) is family}
    return tuple(sorted((ip for ip in own if not contains(family.loopback, ip)), key=address_key))


def _service_cidrs(snapshot: Snapshot, family: IPFamily) -> tuple[str, ...]:
    return tuple(
        sorted({cidr for each in snapshot.service_cidrs.values() for cidr in each.cidrs if family_of(cidr) is family})
    )


_RANK = {
    FrontendKind.CLUSTER_IP: 0,
    FrontendKind.LOAD_BALANCER: 1,
    FrontendKind.EXTERNAL_IP: 2,
    FrontendKind.NODE_PORT: 3,
}
"""Precedence of claims. What the control plane allocated takes precedence over what the author of a Service wrote, so
that `externalIPs` cannot take over the ClusterIP of another Service (CVE-2020-8554).
"""
_KIND_OF_RANK = {rank: kind for kind, rank in _RANK.items()}


_Claim = tuple[int, tuple[str, str, str, str], ServicePlan]
"""Rank and name, by which the smallest wins, and the plan that claims."""


class Claims:
    """The claims of all Service ports, independent of the order of arrival.

    Nearly every match is claimed once; for these only the claiming plan is stored.
    """

    def __init__(self) -> None:
        self._single: dict[Match, ServicePlan] = {}
        self._contested: dict[Match, list[_Claim]] = {}
        """In order; two or more."""
        self._doubtful: set[ServicePortName] = set()

    def claim(self, service: ServicePlan) -> None:
        """Register all frontends of a Service port, whose earlier claims were released."""
        for frontend in service.frontends:
            match = frontend.address, frontend.protocol, frontend.port
            if match in self._contested:
                claims = self._contested[match] = sorted((*self._contested[match], _claim(match, service)), key=_order)
            elif (held := self._single.setdefault(match, service)) is not service:
                del self._single[match]
                claims = self._contested[match] = sorted((_claim(match, held), _claim(match, service)), key=_order)
            else:
                continue
            self._doubtful.update(holder.name for _, _, holder in claims)

    def release(self, service: ServicePlan) -> None:
        """Remove the claims that `claim` registered."""
        for frontend in service.frontends:
            match = frontend.address, frontend.protocol, frontend.port
            claims = self._contested.get(match)
            if claims is None:
                del self._single[match]
                continue
            self._doubtful.update(holder.name for _, _, holder in claims)
            left = [claim for claim in claims if claim[2] is not service]
            if len(left) > 1:
                self._contested[match] = left
            else:
                del self._contested[match]
                self._single[match] = left[0][2]

    def has(self, service: ServicePlan, match: Match) -> bool:
        """Return True if no other Service port has a better claim to the match."""
        claims = self._contested.get(match)
        return claims is None or claims[0][2] is service

    def take_doubtful(self) -> AbstractSet[ServicePortName]:
        """Return the Service ports that may have won or lost something since the last call."""
        doubtful, self._doubtful = self._doubtful, set()
        return doubtful

    def conflicts(self) -> tuple[FrontendConflict, ...]:
        """Return all matches that several Service ports claim, in order."""
        found = [
            FrontendConflict(match=match, kind=_KIND_OF_RANK[rank], winner=claims[0][2].name, loser=loser.name)
            for match, claims in self._contested.items()
            for rank, _, loser in claims[1:]
        ]
        return tuple(sorted(found, key=lambda c: (c.match[0] or "", c.match[1].value, c.match[2], c.loser.sort_key)))


def _claim(match: Match, service: ServicePlan) -> _Claim:
    kind = next(each.kind for each in service.frontends if each.match == match)
    return _RANK[kind], service.name.sort_key, service


def _order(claim: _Claim) -> tuple[int, tuple[str, str, str, str]]:
    return claim[0], claim[1]
