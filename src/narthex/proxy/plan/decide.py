"""Service and its endpoints to frontends and decisions. All policy on traffic is in this file and in `select`.

For every way in, three cells say what happens to pods, to this node, and to all others (rows of groups 5 to 13).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import msgspec

from narthex.model.names import NamespacedName, ServicePortName
from narthex.model.net import IPFamily, collapse, contains, family_of, host_network, is_zero_prefix
from narthex.model.objects import EndpointSlice, Service, ServicePort, SliceEndpoint
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
from narthex.proxy.plan.select import (
    HEADLESS_LABEL,
    Candidates,
    ProxyLocation,
    Selection,
    candidates,
    is_ready,
    select,
)

PROXY_NAME_LABEL = "service.kubernetes.io/service-proxy-name"
_NOT_OURS = frozenset({PROXY_NAME_LABEL, HEADLESS_LABEL})


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """What decisions depend on besides the Service: the node and its configuration, for one family."""

    family: IPFamily
    place: ProxyLocation
    node_ip: str = ""
    """The node's primary address of the family, empty while unknown."""
    detect_pods: bool = True
    masquerade_all: bool = False
    external_ips: bool = True
    """Gate AllowServiceExternalIPs (row 11.4)."""
    strict_source_ranges: bool = False
    """See `NodeConfig.strict_source_ranges`."""


class _Ways(msgspec.Struct, frozen=True):
    """What all ports of a Service have in common."""

    key: NamespacedName
    address: str
    """The ClusterIP."""
    external_ips: tuple[str, ...]
    balancers: tuple[str, ...]
    allow_from: tuple[str, ...] | None


def decide(
    key: NamespacedName, service: Service, slices: tuple[EndpointSlice, ...], context: Context
) -> tuple[ServicePlan, ...]:
    """One plan for each port of the Service that can be reached over this family; () when none can. `key` is the Service's,
    so that many plans hold one and the same."""
    family = context.family
    address = cluster_ip(service, family)
    if not address:
        return ()
    balancers: tuple[str, ...] = ()
    if service.ingress:
        balancers = tuple([each.ip for each in service.ingress if not each.proxy and family_of(each.ip) is family])
    ways = _Ways(
        key,
        address,
        tuple([ip for ip in service.external_ips if family_of(ip) is family]) if service.external_ips else (),
        balancers,
        _allow_from(service, balancers, context) if service.source_ranges else None,
    )
    return tuple([_decide_port(service, port, ways, slices, context) for port in service.ports])


def cluster_ip(service: Service, family: IPFamily) -> str:
    """The Service's ClusterIP of the family; empty when the proxy has nothing to do with it (rows 1.1 to 1.5)."""
    found = _cluster_ip(service.cluster_ips, service.ip_families, family)
    if not found or service.type == "ExternalName" or service.headless:
        return ""
    for key, _ in service.labels:
        if key in _NOT_OURS:
            return ""
    return found


def _cluster_ip(ips: tuple[str, ...], families: tuple[IPFamily, ...], family: IPFamily) -> str:
    """Asked of every Service in both families; most have one address."""
    if not families:
        return ips[0] if ips and family_of(ips[0]) is family else ""
    for of, ip in zip(families, ips, strict=False):
        if of is family and family_of(ip) is family:
            return ip
    return ""


def _decide_port(
    service: Service, port: ServicePort, ways: _Ways, slices: tuple[EndpointSlice, ...], context: Context
) -> ServicePlan:
    external = bool(port.node_port or ways.external_ips or ways.balancers)
    external_local = external and service.external_policy_local
    found = candidates(slices, port, context.family, context.place)
    selection = select(
        found,
        context.place,
        cluster=not service.internal_policy_local or external,
        local=service.internal_policy_local or external_local,
    )
    row = _inside_row(service, selection, context)
    frontends: tuple[Frontend, ...] = (_frontend(FrontendKind.CLUSTER_IP, ways.address, port, port.port, None, row),)
    used = row.scopes
    if external:
        row = _outside_row(external_local, selection)
        if others := _outside(frontends[0], port, ways, row, context):
            frontends += others
            used |= row.scopes
    return ServicePlan(
        name=ServicePortName(ways.key, port.name, port.protocol),
        frontends=frontends,
        cluster=selection.cluster if Scope.CLUSTER in used else None,
        local=selection.local if Scope.LOCAL in used else None,
        serving=_serving(found, selection),
        resting=() if found.all_ready else found.where(_is_resting).endpoints,
        affinity_seconds=service.affinity_seconds,
    )


def _outside(inside: Frontend, port: ServicePort, ways: _Ways, row: _Row, context: Context) -> tuple[Frontend, ...]:
    """The ways in besides the ClusterIP; of two for one address and port the first counts."""
    beside = ways.allow_from if context.strict_source_ranges else None
    found: dict[tuple[str | None, int], Frontend] = {(inside.address, inside.port): inside}
    external_ips = ways.external_ips if context.external_ips else ()
    wishes = [(FrontendKind.EXTERNAL_IP, ip, port.port, beside) for ip in external_ips]
    wishes += [(FrontendKind.LOAD_BALANCER, ip, port.port, ways.allow_from) for ip in ways.balancers]
    for kind, to, number, allow_from in wishes:
        if (to, number) not in found:
            found[to, number] = _frontend(kind, to, port, number, allow_from, row)
    if port.node_port:
        found[None, port.node_port] = _frontend(FrontendKind.NODE_PORT, None, port, port.node_port, beside, row)
    return tuple(found.values())[1:]


class _Row:
    """What becomes of pods, this node, others. Rows are few, so each is made once."""

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
    """What balancers are told of the Service on this node; None when it has no health check port (rows 16.1, 16.3)."""
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


def _is_resting(state: SliceEndpoint) -> bool:
    return not (state.serving or state.ready)


def _serving(found: Candidates, selection: Selection) -> tuple[Endpoint, ...]:
    """All that serve; the same tuple as the cluster pool's when that is all of them, as it mostly is."""
    serving = found.endpoints if found.all_ready else found.where(_is_serving).endpoints
    if selection.cluster is not None and selection.cluster.endpoints == serving:
        return selection.cluster.endpoints
    return serving


def _inside_row(service: Service, selection: Selection, context: Context) -> _Row:
    """The ClusterIP: cells for pods, this node, others (groups 5 and 8)."""
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
    """Node port, external IP and balancer: cells for pods, this node, others (group 7)."""
    if not selection.any_usable:
        return _REJECTED
    if not external_local:
        return _MASKED_FOR_ALL
    # Pods and this node go on as if they had used the ClusterIP of a Service with Cluster policy: a balancer would
    # only bring them back, perhaps to another node (rows 7.3 and 7.4).
    return _KEPT_LOCAL if selection.local else _LOCAL_MISSING


_MASKED = Forward(Scope.CLUSTER, masquerade=True)
_PLAIN = Forward(Scope.CLUSTER, masquerade=False)
_MASKED_FOR_ALL = _Row(_MASKED, _MASKED, _MASKED)
_KEPT_LOCAL = _Row(_PLAIN, _MASKED, Forward(Scope.LOCAL, masquerade=False))
_LOCAL_MISSING = _Row(_PLAIN, _MASKED, Drop())


def _allow_from(service: Service, balancers: tuple[str, ...], context: Context) -> tuple[str, ...] | None:
    """Who may use the balancer addresses, by the ranges of their own family (rows 10.3 to 10.9); under strict source
    ranges, the node port and external IPs too."""
    ranges = tuple(cidr for cidr in service.source_ranges if family_of(cidr) is context.family)
    if not ranges or any(is_zero_prefix(cidr) for cidr in ranges):
        return None
    if context.node_ip and any(contains(cidr, context.node_ip) for cidr in ranges):
        # A process on this node that talks to an address bound here has such an address as its source (row 10.6).
        ranges += tuple(host_network(ip) for ip in balancers)
    return collapse(ranges)
