"""The shapes in which Kubernetes sends objects, reduced to the fields that Narthex reads.

Fields carry the API's own names. Everything may be absent or null, as in Go's decoder; what must be there is checked
when the shape becomes an object. Maps are left open (`Any`), so that a fault in them can name its key.
"""

from __future__ import annotations

from typing import Any

import msgspec


class TypeMeta(msgspec.Struct):
    """What tells kinds apart."""

    apiVersion: str | None = None
    kind: str | None = None


class Meta(msgspec.Struct):
    """`metadata`."""

    name: str | None = None
    namespace: str | None = None
    labels: Any = None
    annotations: Any = None
    uid: str | None = None
    resourceVersion: str | None = None
    deletionTimestamp: Any = None
    """Text; PyYAML makes a datetime of it unless told otherwise."""


class Named(msgspec.Struct):
    """What tells any object from others."""

    kind: str | None = None
    metadata: Meta | None = None


class ServicePort(msgspec.Struct, gc=False):
    """`spec.ports[]` of a Service."""

    name: str | None = None
    protocol: str | None = None
    port: int | None = None
    targetPort: int | str | None = None
    nodePort: int | None = None


class ClientIP(msgspec.Struct):
    """`spec.sessionAffinityConfig.clientIP`."""

    timeoutSeconds: int | None = None


class AffinityConfig(msgspec.Struct):
    """`spec.sessionAffinityConfig`."""

    clientIP: ClientIP | None = None


class ServiceSpec(msgspec.Struct):
    """`spec` of a Service."""

    type: str | None = None
    clusterIP: str | None = None
    clusterIPs: list[str] | None = None
    ipFamilies: list[str] | None = None
    ipFamilyPolicy: str | None = None
    externalIPs: list[str] | None = None
    loadBalancerSourceRanges: list[str] | None = None
    ports: list[ServicePort] | None = None
    selector: Any = None
    externalTrafficPolicy: str | None = None
    internalTrafficPolicy: str | None = None
    sessionAffinity: str | None = None
    sessionAffinityConfig: AffinityConfig | None = None
    healthCheckNodePort: int | None = None
    publishNotReadyAddresses: bool | None = None
    externalName: str | None = None
    loadBalancerClass: str | None = None
    loadBalancerIP: str | None = None
    allocateLoadBalancerNodePorts: bool | None = None
    trafficDistribution: str | None = None


class Ingress(msgspec.Struct):
    """`status.loadBalancer.ingress[]`."""

    ip: str | None = None
    ipMode: str | None = None
    hostname: str | None = None


class LoadBalancer(msgspec.Struct):
    """`status.loadBalancer`."""

    ingress: list[Ingress] | None = None


class ServiceStatus(msgspec.Struct):
    """`status` of a Service."""

    loadBalancer: LoadBalancer | None = None


class Service(msgspec.Struct):
    """v1 Service."""

    metadata: Meta | None = None
    spec: ServiceSpec | None = None
    status: ServiceStatus | None = None


class EndpointPort(msgspec.Struct, gc=False):
    """`ports[]` of an EndpointSlice."""

    name: str | None = None
    protocol: str | None = None
    port: int | None = None


class Conditions(msgspec.Struct, gc=False):
    """`endpoints[].conditions`."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Hint(msgspec.Struct, gc=False):
    """`endpoints[].hints.forZones[]` and `forNodes[]`."""

    name: str | None = None


class Hints(msgspec.Struct, gc=False):
    """`endpoints[].hints`."""

    forZones: list[Hint] | None = None
    forNodes: list[Hint] | None = None


class Reference(msgspec.Struct, gc=False):
    """`endpoints[].targetRef`."""

    kind: str | None = None
    name: str | None = None


class Endpoint(msgspec.Struct, gc=False):
    """`endpoints[]`."""

    addresses: list[str] | None = None
    conditions: Conditions | None = None
    nodeName: str | None = None
    zone: str | None = None
    hostname: str | None = None
    hints: Hints | None = None
    targetRef: Reference | None = None


class EndpointSlice(msgspec.Struct):
    """discovery.k8s.io/v1 EndpointSlice."""

    metadata: Meta | None = None
    addressType: str | None = None
    ports: list[EndpointPort] | None = None
    endpoints: list[Endpoint] | None = None


class Taint(msgspec.Struct):
    """`spec.taints[]` of a Node."""

    key: str | None = None


class NodeSpec(msgspec.Struct):
    """`spec` of a Node."""

    podCIDR: str | None = None
    podCIDRs: list[str] | None = None
    taints: list[Taint] | None = None


class NodeAddress(msgspec.Struct):
    """`status.addresses[]` of a Node."""

    type: str | None = None
    address: str | None = None


class NodeCondition(msgspec.Struct):
    """One of a Node's conditions."""

    type: str = ""
    status: str = ""


class NodeStatus(msgspec.Struct):
    """`status` of a Node."""

    addresses: list[NodeAddress] | None = None
    conditions: list[NodeCondition] | None = None


class Node(msgspec.Struct):
    """v1 Node."""

    metadata: Meta | None = None
    spec: NodeSpec | None = None
    status: NodeStatus | None = None


class ServiceCIDRSpec(msgspec.Struct):
    """`spec` of a ServiceCIDR."""

    cidrs: list[str] | None = None


class ServiceCIDR(msgspec.Struct):
    """networking.k8s.io/v1 ServiceCIDR."""

    metadata: Meta | None = None
    spec: ServiceCIDRSpec | None = None


class ContainerPort(msgspec.Struct):
    """`ports[]` of a container."""

    containerPort: int | None = None
    name: str | None = None
    protocol: str | None = None
    hostPort: int | None = None


class Container(msgspec.Struct):
    """`containers[]`."""

    name: str | None = None
    image: str | None = None
    command: list[str] | None = None
    args: list[str] | None = None
    ports: list[ContainerPort] | None = None


class PodSpec(msgspec.Struct):
    """`spec` of a Pod or of a template."""

    nodeName: str | None = None
    nodeSelector: Any = None
    hostNetwork: bool | None = None
    hostname: str | None = None
    subdomain: str | None = None
    containers: list[Container] | None = None


class PodIP(msgspec.Struct):
    """`status.podIPs[]`."""

    ip: str | None = None


class PodCondition(msgspec.Struct):
    """`status.conditions[]`."""

    type: str | None = None
    status: str | None = None


class PodStatus(msgspec.Struct):
    """`status` of a Pod."""

    phase: str | None = None
    podIP: str | None = None
    podIPs: list[PodIP] | None = None
    conditions: list[PodCondition] | None = None


class Pod(msgspec.Struct):
    """v1 Pod."""

    metadata: Meta | None = None
    spec: PodSpec | None = None
    status: PodStatus | None = None


class LabelSelector(msgspec.Struct):
    """`spec.selector` of a Deployment, and selectors of other kinds."""

    matchLabels: Any = None
    matchExpressions: list[Any] | None = None


class PodTemplate(msgspec.Struct):
    """`spec.template` of a Deployment."""

    metadata: Meta | None = None
    spec: PodSpec | None = None


class DeploymentSpec(msgspec.Struct):
    """`spec` of a Deployment."""

    replicas: int | None = None
    selector: LabelSelector | None = None
    template: PodTemplate | None = None


class Deployment(msgspec.Struct):
    """apps/v1 Deployment."""

    metadata: Meta | None = None
    spec: DeploymentSpec | None = None


class Namespace(msgspec.Struct):
    """v1 Namespace."""

    metadata: Meta | None = None


class ServiceAllocation(msgspec.Struct):
    """`spec.serviceAllocation` of an IPAddressPool."""

    priority: int | None = None
    namespaces: list[str] | None = None
    namespaceSelectors: list[LabelSelector] | None = None
    serviceSelectors: list[LabelSelector] | None = None


class IPAddressPoolSpec(msgspec.Struct):
    """`spec` of an IPAddressPool."""

    addresses: list[str] | None = None
    autoAssign: bool | None = None
    avoidBuggyIPs: bool | None = None
    serviceAllocation: ServiceAllocation | None = None


class IPAddressPool(msgspec.Struct):
    """metallb.io/v1beta1 IPAddressPool."""

    metadata: Meta | None = None
    spec: IPAddressPoolSpec | None = None


class L2AdvertisementSpec(msgspec.Struct):
    """`spec` of an L2Advertisement."""

    ipAddressPools: list[str] | None = None
    ipAddressPoolSelectors: list[LabelSelector] | None = None
    nodeSelectors: list[LabelSelector] | None = None
    serviceSelectors: list[LabelSelector] | None = None
    interfaces: list[str] | None = None


class L2Advertisement(msgspec.Struct):
    """metallb.io/v1beta1 L2Advertisement."""

    metadata: Meta | None = None
    spec: L2AdvertisementSpec | None = None


AnyWire = Service | EndpointSlice | Node | ServiceCIDR | Pod | Deployment | Namespace | IPAddressPool | L2Advertisement
