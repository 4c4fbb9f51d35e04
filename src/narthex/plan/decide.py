"""Service and its endpoints to frontends and decisions. All policy on traffic is in this file and in `select`.

For every way in, three cells say what happens to pods, to this node, and to all others (rows of groups 5 to 13).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from narthex.model.names import ServicePortName
from narthex.model.net import IPFamily, collapse, contains, family_of, host_network, is_zero_prefix
from narthex.model.objects import EndpointSlice, Service, ServicePort
from narthex.plan.ir import (
    Decision,
    Drop,
    Endpoint,
    Forward,
    Frontend,
    FrontendKind,
    HealthCheck,
    Reject,
    Scope,
    ServicePlan,
)
from narthex.plan.select import HEADLESS_LABEL, Candidate, Place, Selection, candidates, select

PROXY_NAME_LABEL = "service.kubernetes.io/service-proxy-name"
_NOT_OURS = frozenset({PROXY_NAME_LABEL, HEADLESS_LABEL})


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """What decisions depend on besides the Service: the node and its configuration, for one family."""

    family: IPFamily
    place: Place
    node_ip: str = ""
    """The node's primary address of the family, empty while unknown."""
    detect_pods: bool = True
    masquerade_all: bool = False
    external_ips: bool = True
    """Gate AllowServiceExternalIPs (row 11.4)."""
    strict_source_ranges: bool = False
    """See `NodeConfig.strict_source_ranges`."""


def decide(service: Service, slices: Iterable[EndpointSlice], context: Context) -> tuple[ServicePlan, ...]:
    """One plan for each port of the Service that can be reached over this family; () when none can."""
    address = cluster_ip(service, context.family)
    if not address:
        return ()
    slices = tuple(slices)
    plans = [_decide_port(service, port, address, slices, context) for port in service.ports]
    return tuple([plan for plan in plans if plan.frontends])


def cluster_ip(service: Service, family: IPFamily) -> str:
    """The Service's ClusterIP of the family; empty when the proxy has nothing to do with it (rows 1.1 to 1.5)."""
    if service.type == "ExternalName" or service.headless:
        return ""
    if any(key in _NOT_OURS for key, _ in service.labels):
        return ""
    if service.ip_families:
        for of, ip in zip(service.ip_families, service.cluster_ips, strict=False):
            if of is family and family_of(ip) is family:
                return ip
        return ""
    return next((ip for ip in service.cluster_ips[:1] if family_of(ip) is family), "")


def _decide_port(
    service: Service, port: ServicePort, address: str, slices: tuple[EndpointSlice, ...], context: Context
) -> ServicePlan:
    family = context.family
    external_ips = tuple(ip for ip in service.external_ips if family_of(ip) is family)
    balancers = tuple(entry.ip for entry in service.ingress if not entry.proxy and family_of(entry.ip) is family)
    external = bool(port.node_port or external_ips or balancers)
    external_local = external and service.external_policy_local
    found = candidates(slices, port, family, context.place)
    selection = select(
        found,
        context.place,
        cluster=not service.internal_policy_local or external,
        local=service.internal_policy_local or external_local,
    )
    inside = _inside_row(service, selection, context)
    outside = _outside_row(external_local, selection)
    ways: list[tuple[FrontendKind, str | None, int, tuple[str, ...] | None]] = [
        (FrontendKind.CLUSTER_IP, address, port.port, None)
    ]
    allow_from = _allow_from(service, balancers, context)
    beside = allow_from if context.strict_source_ranges else None
    if context.external_ips:
        ways += [(FrontendKind.EXTERNAL_IP, ip, port.port, beside) for ip in external_ips]
    ways += [(FrontendKind.LOAD_BALANCER, ip, port.port, allow_from) for ip in balancers]
    if port.node_port:
        ways.append((FrontendKind.NODE_PORT, None, port.node_port, beside))
    frontends: dict[tuple[str | None, int], Frontend] = {}
    for kind, to, number, allow_from in ways:
        pod, node, other = inside if kind is FrontendKind.CLUSTER_IP else outside
        frontend = Frontend(
            kind=kind,
            address=to,
            protocol=port.protocol,
            port=number,
            allow_from=allow_from,
            pod=pod,
            node=node,
            other=other,
        )
        frontends.setdefault((to, number), frontend)
    used = _scopes(frontends.values())
    return ServicePlan(
        name=ServicePortName(service.key, port.name, port.protocol),
        frontends=tuple(frontends.values()),
        cluster=selection.cluster if Scope.CLUSTER in used else None,
        local=selection.local if Scope.LOCAL in used else None,
        serving=_serving(found, selection),
        resting=tuple([each.endpoint for each in found if not (each.state.serving or each.state.ready)]),
        affinity_seconds=service.affinity_seconds,
    )


def health_check(service: Service, slices: Iterable[EndpointSlice], context: Context) -> HealthCheck | None:
    """What balancers are told of the Service on this node; None when it has no health check port (rows 16.1, 16.3)."""
    if service.type != "LoadBalancer" or not service.external_policy_local or not service.health_check_node_port:
        return None
    if not cluster_ip(service, context.family):
        return None
    slices = tuple(slices)
    ready = {
        found.endpoint.address
        for port in service.ports
        for found in candidates(slices, port, context.family, context.place)
        if found.endpoint.local and found.state.ready
    }
    return HealthCheck(service.health_check_node_port, len(ready))


def _serving(found: tuple[Candidate, ...], selection: Selection) -> tuple[Endpoint, ...]:
    """All that serve; the same tuple as the cluster pool's when that is all of them, as it mostly is."""
    serving = tuple([each.endpoint for each in found if each.state.ready or each.state.serving])
    if selection.cluster is not None and selection.cluster.endpoints == serving:
        return selection.cluster.endpoints
    return serving


def _inside_row(service: Service, selection: Selection, context: Context) -> tuple[Decision, Decision, Decision]:
    """The ClusterIP: cells for pods, this node, others (groups 5 and 8)."""
    scope = Scope.LOCAL if service.internal_policy_local else Scope.CLUSTER
    pool = selection.local if service.internal_policy_local else selection.cluster
    if pool is None:
        nothing: Decision = Drop() if selection.any_usable else Reject()
        return nothing, nothing, nothing
    strangers = Forward(scope, context.detect_pods or context.masquerade_all)
    return Forward(scope, context.masquerade_all), strangers, strangers


def _outside_row(external_local: bool, selection: Selection) -> tuple[Decision, Decision, Decision]:
    """Node port, external IP and balancer: cells for pods, this node, others (group 7)."""
    if not selection.any_usable:
        return Reject(), Reject(), Reject()
    if not external_local:
        everyone = Forward(Scope.CLUSTER, masquerade=True)
        return everyone, everyone, everyone
    # Pods and this node go on as if they had used the ClusterIP of a Service with Cluster policy: a balancer would
    # only bring them back, perhaps to another node (rows 7.3 and 7.4).
    others: Decision = Forward(Scope.LOCAL, masquerade=False) if selection.local else Drop()
    return Forward(Scope.CLUSTER, masquerade=False), Forward(Scope.CLUSTER, masquerade=True), others


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


def _scopes(frontends: Iterable[Frontend]) -> set[Scope]:
    return {
        cell.scope
        for frontend in frontends
        for cell in (frontend.pod, frontend.node, frontend.other)
        if isinstance(cell, Forward)
    }
