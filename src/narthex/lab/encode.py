"""Conversion of model objects to Kubernetes manifests, the inverse of `decode`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from narthex.model import (
    AnyObject,
    Container,
    EndpointSlice,
    IPAddressPool,
    L2Advertisement,
    Namespace,
    Node,
    Object,
    Pod,
    Selector,
    Service,
    ServiceCIDR,
    SliceEndpoint,
)

Manifest = dict[str, Any]

_METALLB = "metallb.io/v1beta1"
_OPERATORS = {"in": "In", "notin": "NotIn", "exists": "Exists", "absent": "DoesNotExist"}


def encode(obj: AnyObject) -> Manifest:
    """Return the manifest of an object without empty fields. Raises TypeError for kinds that only users write."""
    if isinstance(obj, Service):
        return _service(obj)
    if isinstance(obj, EndpointSlice):
        return _slice(obj)
    if isinstance(obj, Node):
        return _node(obj)
    if isinstance(obj, Pod):
        return _pod(obj)
    if isinstance(obj, Namespace):
        return _head("v1", "Namespace", obj)
    if isinstance(obj, ServiceCIDR):
        return {**_head("networking.k8s.io/v1", "ServiceCIDR", obj), "spec": {"cidrs": list(obj.cidrs)}}
    if isinstance(obj, IPAddressPool):
        return _pool(obj)
    if isinstance(obj, L2Advertisement):
        return _advertisement(obj)
    raise TypeError(f"{type(obj).__name__} is not written to manifests")


def _head(api_version: str, kind: str, obj: Object) -> Manifest:
    metadata = _filled(
        name=obj.name,
        namespace=obj.namespace,
        labels=dict(obj.labels),
        annotations=dict(obj.annotations),
        uid=obj.uid,
        deletionTimestamp=obj.deletion_timestamp,
    )
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}


def _filled(**fields: Any) -> Manifest:
    """Return the fields that are not empty."""
    return {name: value for name, value in fields.items() if value}


def _service(obj: Service) -> Manifest:
    ports = [
        {
            **_filled(name=port.name, nodePort=port.node_port, targetPort=port.target_port),
            "protocol": port.protocol.value,
            "port": port.port,
        }
        for port in obj.ports
    ]
    spec: Mapping[str, Any] = _filled(
        type=obj.type,
        clusterIP=next(iter(obj.cluster_ips), ""),
        clusterIPs=list(obj.cluster_ips),
        ipFamilies=[family.label for family in obj.ip_families],
        ipFamilyPolicy=obj.ip_family_policy,
        externalIPs=list(obj.external_ips),
        loadBalancerSourceRanges=list(obj.source_ranges),
        ports=ports,
        selector=dict(obj.selector),
        externalTrafficPolicy="Local" if obj.external_policy_local else "",
        internalTrafficPolicy="Local" if obj.internal_policy_local else "",
        healthCheckNodePort=obj.health_check_node_port,
        publishNotReadyAddresses=obj.publish_not_ready,
        externalName=obj.external_name,
        loadBalancerClass=obj.load_balancer_class,
        loadBalancerIP=obj.load_balancer_ip,
        trafficDistribution=obj.traffic_distribution,
    )
    affinity: Manifest = {}
    if obj.affinity_seconds is not None:
        config = {"clientIP": {"timeoutSeconds": obj.affinity_seconds}}
        affinity = {"sessionAffinity": "ClientIP", "sessionAffinityConfig": config}
    if not obj.allocate_node_ports:
        affinity["allocateLoadBalancerNodePorts"] = False
    ingress = [{"ip": entry.ip, "ipMode": "Proxy" if entry.proxy else "VIP"} for entry in obj.ingress]
    status = {"status": {"loadBalancer": {"ingress": ingress}}} if ingress else {}
    return {**_head("v1", "Service", obj), "spec": {**spec, **affinity}, **status}


def _slice(obj: EndpointSlice) -> Manifest:
    ports = [_filled(name=port.name, protocol=port.protocol.value, port=port.port) for port in obj.ports]
    return {
        **_head("discovery.k8s.io/v1", "EndpointSlice", obj),
        "addressType": obj.family.label if obj.family is not None else "FQDN",
        "ports": ports,
        "endpoints": [_endpoint(obj, endpoint) for endpoint in obj.endpoints],
    }


def _endpoint(obj: EndpointSlice, endpoint: SliceEndpoint) -> Manifest:
    hints = _filled(
        forZones=[{"name": zone} for zone in endpoint.for_zones],
        forNodes=[{"name": node} for node in endpoint.for_nodes],
    )
    target = {"kind": "Pod", "namespace": obj.namespace, "name": endpoint.target} if endpoint.target else None
    conditions = {"ready": endpoint.ready, "serving": endpoint.serving, "terminating": endpoint.terminating}
    return {
        "addresses": [endpoint.address],
        "conditions": conditions,
        **_filled(
            nodeName=endpoint.node_name, zone=endpoint.zone, hostname=endpoint.hostname, hints=hints, targetRef=target
        ),
    }


def _node(obj: Node) -> Manifest:
    addresses = [{"type": "InternalIP", "address": ip} for ip in obj.internal_ips]
    addresses += [{"type": "ExternalIP", "address": ip} for ip in obj.external_ips]
    spec = _filled(
        podCIDR=next(iter(obj.pod_cidrs), ""),
        podCIDRs=list(obj.pod_cidrs),
        taints=[{"key": key, "effect": "NoSchedule"} for key in obj.taints],
    )
    conditions = [] if obj.ready else [{"type": "Ready", "status": "False"}]
    conditions += [{"type": "NetworkUnavailable", "status": "True"}] if obj.network_unavailable else []
    status = _filled(conditions=conditions)
    return {**_head("v1", "Node", obj), "spec": spec, "status": {"addresses": addresses, **status}}


def _pod(obj: Pod) -> Manifest:
    spec = _filled(
        nodeName=obj.spec.node_name,
        nodeSelector=dict(obj.spec.node_selector),
        hostNetwork=obj.spec.host_network,
        hostname=obj.spec.hostname,
        hostnameOverride=obj.spec.hostname_override,
        subdomain=obj.spec.subdomain,
        containers=[_container(container) for container in obj.spec.containers],
    )
    status = _filled(
        phase=obj.phase,
        podIP=next(iter(obj.ips), ""),
        podIPs=[{"ip": ip} for ip in obj.ips],
        conditions=[{"type": "Ready", "status": "True" if obj.ready else "False"}],
    )
    return {**_head("v1", "Pod", obj), "spec": spec, "status": status}


def _container(container: Container) -> Manifest:
    ports = [
        {
            **_filled(name=port.name, hostPort=port.host_port),
            "containerPort": port.port,
            "protocol": port.protocol.value,
        }
        for port in container.ports
    ]
    return _filled(
        name=container.name,
        image=container.image,
        command=list(container.command),
        args=list(container.args),
        ports=ports,
    )


def _pool(obj: IPAddressPool) -> Manifest:
    spec: Manifest = {"addresses": list(obj.addresses), **_filled(avoidBuggyIPs=obj.avoid_buggy)}
    if not obj.auto_assign:
        spec["autoAssign"] = False
    if obj.allocation is not None:
        spec["serviceAllocation"] = _filled(
            priority=obj.allocation.priority,
            namespaces=list(obj.allocation.namespaces),
            namespaceSelectors=_selectors(obj.allocation.namespace_selectors),
            serviceSelectors=_selectors(obj.allocation.service_selectors),
        )
    return {**_head(_METALLB, "IPAddressPool", obj), "spec": spec}


def _advertisement(obj: L2Advertisement) -> Manifest:
    spec = _filled(
        ipAddressPools=list(obj.pools),
        ipAddressPoolSelectors=_selectors(obj.pool_selectors),
        nodeSelectors=_selectors(obj.node_selectors),
        serviceSelectors=_selectors(obj.service_selectors),
        interfaces=list(obj.interfaces),
    )
    return {**_head(_METALLB, "L2Advertisement", obj), "spec": spec}


def _selectors(selectors: Iterable[Selector]) -> list[Manifest]:
    return [
        {
            "matchExpressions": [
                {"key": each.key, "operator": _OPERATORS[each.operator], **_filled(values=list(each.values))}
                for each in selector
            ]
        }
        for selector in selectors
    ]
