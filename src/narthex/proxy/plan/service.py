"""Decisions for the ports of a Service. All traffic policy is in this file and in `select`.

For each frontend, three decisions say what happens to packets of pods, of this node, and of others (rows of groups 5 to
13).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import msgspec

from narthex.model import (
    EndpointSlice,
    IPFamily,
    NamespacedName,
    Service,
    ServicePort,
    ServicePortName,
    SliceEndpoint,
    collapse,
    contains,
    family_of,
    host_network,
    is_zero_prefix,
)
from narthex.proxy.plan.balancing import balancing_of
from narthex.proxy.plan.ir import (
    Decision,
    Drop,
    Endpoint,
    Forward,
    Frontend,
    FrontendKind,
    Reject,
    Scope,
    ServiceHealthCheck,
    ServicePlan,
)
from narthex.proxy.plan.select import HEADLESS_LABEL, Candidates, ProxyLocation, Selection, candidates, is_ready, select

PROXY_NAME_LABEL = "service.kubernetes.io/service-proxy-name"
_NOT_OURS = frozenset({PROXY_NAME_LABEL, HEADLESS_LABEL})


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """What decisions depend on in addition to the Service: the node and its configuration, for one family."""

    family: IPFamily
    place: ProxyLocation
    node_ip: str = ""
    """The node's primary address of the family, empty if unknown."""
    detect_pods: bool = True
    masquerade_all: bool = False
    external_ips: bool = True
    """Gate AllowServiceExternalIPs (row 11.4)."""
    strict_source_ranges: bool = False
    """See `NodeConfig.strict_source_ranges`."""


class _Addresses(msgspec.Struct, frozen=True):
    key: NamespacedName
    address: str
    """The ClusterIP."""
    external_ips: tuple[str, ...]
    load_balancer_ips: tuple[str, ...]
    allow_from: tuple[str, ...] | None


def decide(
    key: NamespacedName, service: Service, slices: tuple[EndpointSlice, ...], context: Context
) -> tuple[ServicePlan, ...]:
    """Return one plan for each port of the Service that is reachable over this family; () if none is.

    `key` is the name of the Service, passed in so that many plans share one object.
    """
    family = context.family
    address = cluster_ip(service, family)
    if not address:
        return ()
    load_balancer_ips: tuple[str, ...] = ()
    if service.ingress:
        load_balancer_ips = tuple(
            [each.ip for each in service.ingress if not each.proxy and family_of(each.ip) is family]
        )
    addresses = _Addresses(
        key,
        address,
        tuple([ip for ip in service.external_ips if family_of(ip) is family]) if service.external_ips else (),
        load_balancer_ips,
        _allow_from(service, load_balancer_ips, context) if service.source_ranges else None,
    )
    return tuple([_decide_port(service, port, addresses, slices, context) for port in service.ports])


def cluster_ip(service: Service, family: IPFamily) -> str:
    """Return the Service's ClusterIP of the family; empty if the proxy does not handle the Service (rows 1.1 to 1.5)."""
    found = _cluster_ip(service.cluster_ips, service.ip_families, family)
    if not found or service.type == "ExternalName" or service.headless:
        return ""
    for key, _ in service.labels:
        if key in _NOT_OURS:
            return ""
    return found


def _cluster_ip(ips: tuple[str, ...], families: tuple[IPFamily, ...], family: IPFamily) -> str:
    """Return the address of the family. Called for every Service in both families; most have one address."""
    if not families:
        return ips[0] if ips and family_of(ips[0]) is family else ""
    for of, ip in zip(families, ips, strict=False):
        if of is family and family_of(ip) is family:
            return ip
    return ""


def _decide_port(
    service: Service, port: ServicePort, addresses: _Addresses, slices: tuple[EndpointSlice, ...], context: Context
) -> ServicePlan:
    external = bool(port.node_port or addresses.external_ips or addresses.load_balancer_ips)
    external_local = external and service.external_policy_local
    found = candidates(slices, port, context.family, context.place)
    selection = select(
        found,
        context.place,
        cluster=not service.internal_policy_local or external,
        local=service.internal_policy_local or external_local,
    )
    row = _inside_row(service, selection, context)
    frontends: tuple[Frontend, ...] = (
        _frontend(FrontendKind.CLUSTER_IP, addresses.address, port, port.port, None, row),
    )
    used = row.scopes
    if external:
        row = _outside_row(external_local, selection)
        if others := _outside(frontends[0], port, addresses, row, context):
            frontends += others
            used |= row.scopes
    return ServicePlan(
        name=ServicePortName(addresses.key, port.name, port.protocol),
        frontends=frontends,
        cluster=selection.cluster if Scope.CLUSTER in used else None,
        local=selection.local if Scope.LOCAL in used else None,
        serving=_serving(found, selection),
        not_serving=() if found.all_ready else found.where(_is_not_serving).endpoints,
        affinity_seconds=service.affinity_seconds,
        balancing=balancing_of(service),
    )


def _outside(
    inside: Frontend, port: ServicePort, addresses: _Addresses, row: _Row, context: Context
) -> tuple[Frontend, ...]:
    """Return the frontends other than the ClusterIP; of two for one address and port the first counts."""
    other_sources = addresses.allow_from if context.strict_source_ranges else None
    found: dict[tuple[str | None, int], Frontend] = {(inside.address, inside.port): inside}
    external_ips = addresses.external_ips if context.external_ips else ()
    exact = [(FrontendKind.EXTERNAL_IP, ip, port.port, other_sources) for ip in external_ips]
    exact += [(FrontendKind.LOAD_BALANCER, ip, port.port, addresses.allow_from) for ip in addresses.load_balancer_ips]
    for kind, to, number, allow_from in exact:
        if (to, number) not in found:
            found[to, number] = _frontend(kind, to, port, number, allow_from, row)
    if port.node_port:
        found[None, port.node_port] = _frontend(FrontendKind.NODE_PORT, None, port, port.node_port, other_sources, row)
    return tuple(found.values())[1:]


class _Row:
    """Decisions for pods, this node, and others. There are few distinct rows, so each object is created once."""

    __slots__ = ("node", "other", "pod", "scopes")

    def __init__(self, pod: Decision, node: Decision, other: Decision) -> None:
        self.pod, self.node, self.other = pod, node, other
        self.scopes = frozenset([cell.scope for cell in (pod, node, other) if isinstance(cell, Forward)])
        """Of the pools that it needs."""


def _frontend(
    kind: FrontendKind, to: str | None, port: ServicePort, number: int, allow_from: tuple[str, ...] | None, row: _Row
) -> Frontend:
    return Frontend(
        kind=kind,
        address=to,
        protocol=port.protocol,
        port=number,
        allow_from=allow_from,
        pod=row.pod,
        node=row.node,
        other=row.other,
    )


def health_check(service: Service, slices: Iterable[EndpointSlice], context: Context) -> ServiceHealthCheck | None:
    """Return the health check of the Service on this node; None without a health check port (rows 16.1, 16.3)."""
    if service.type != "LoadBalancer" or not service.external_policy_local or not service.health_check_node_port:
        return None
    if not cluster_ip(service, context.family):
        return None
    slices = tuple(slices)
    ready = {
        endpoint.address
        for port in service.ports
        for endpoint in candidates(slices, port, context.family, context.place).where(is_ready).endpoints
        if endpoint.local
    }
    return ServiceHealthCheck(service.health_check_node_port, len(ready))


def _is_serving(state: SliceEndpoint) -> bool:
    return state.ready or state.serving


def _is_not_serving(state: SliceEndpoint) -> bool:
    return not (state.serving or state.ready)


def _serving(found: Candidates, selection: Selection) -> tuple[Endpoint, ...]:
    """Return all serving endpoints; usually the tuple of the cluster pool."""
    serving = found.endpoints if found.all_ready else found.where(_is_serving).endpoints
    if selection.cluster is not None and selection.cluster.endpoints == serving:
        return selection.cluster.endpoints
    return serving


def _inside_row(service: Service, selection: Selection, context: Context) -> _Row:
    """Return the decisions for the ClusterIP (groups 5 and 8)."""
    scope = Scope.LOCAL if service.internal_policy_local else Scope.CLUSTER
    pool = selection.local if service.internal_policy_local else selection.cluster
    if pool is None:
        return _DROPPED if selection.any_usable else _REJECTED
    return _sent_inside(scope, context.masquerade_all, context.detect_pods or context.masquerade_all)


_DROPPED = _Row(Drop(), Drop(), Drop())
_REJECTED = _Row(Reject(), Reject(), Reject())


@cache
def _sent_inside(scope: Scope, pods_masked: bool, strangers_masked: bool) -> _Row:
    strangers = Forward(scope, strangers_masked)
    return _Row(Forward(scope, pods_masked), strangers, strangers)


def _outside_row(external_local: bool, selection: Selection) -> _Row:
    """Return the decisions for node port, external IP, and load balancer IP (group 7)."""
    if not selection.any_usable:
        return _REJECTED
    if not external_local:
        return _MASKED_FOR_ALL
    # Pods and this node go on as if they had used the ClusterIP of a Service with Cluster policy: a load balancer would
    # only bring them back, perhaps to another node (rows 7.3 and 7.4).
    return _KEPT_LOCAL if selection.local else _LOCAL_MISSING


_MASKED = Forward(Scope.CLUSTER, masquerade=True)
_PLAIN = Forward(Scope.CLUSTER, masquerade=False)
_MASKED_FOR_ALL = _Row(_MASKED, _MASKED, _MASKED)
_KEPT_LOCAL = _Row(_PLAIN, _MASKED, Forward(Scope.LOCAL, masquerade=False))
_LOCAL_MISSING = _Row(_PLAIN, _MASKED, Drop())


def _allow_from(service: Service, load_balancer_ips: tuple[str, ...], context: Context) -> tuple[str, ...] | None:
    """Return the allowed sources for load balancer addresses, by the ranges of their family (rows 10.3 to 10.9).

    Under strict source ranges they apply to node ports and external IPs, too.
    """
    ranges = tuple(cidr for cidr in service.source_ranges if family_of(cidr) is context.family)
    if not ranges or any(is_zero_prefix(cidr) for cidr in ranges):
        return None
    if context.node_ip and any(contains(cidr, context.node_ip) for cidr in ranges):
        # A process on this node that talks to an address bound here has such an address as its source (row 10.6).
        ranges += tuple(host_network(ip) for ip in load_balancer_ips)
    return collapse(ranges)
