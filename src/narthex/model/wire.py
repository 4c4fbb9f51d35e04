"""Wire types: the JSON structure of Kubernetes objects, reduced to the fields that Narthex reads.

Fields have the API's names. Every field may be absent or null, as in Go's decoder; required fields are checked when the
wire type is converted to an object. Maps are untyped (`Any`), so that an error can name the key.
"""

from __future__ import annotations

from typing import Any

import msgspec


class WireTypeMeta(msgspec.Struct):
    """`apiVersion` and `kind`."""

    apiVersion: str | None = None
    kind: str | None = None


class WireMeta(msgspec.Struct):
    """`metadata`."""

    name: str | None = None
    namespace: str | None = None
    labels: Any = None
    annotations: Any = None
    uid: str | None = None
    resourceVersion: str | None = None
    deletionTimestamp: Any = None
    """RFC 3339 text; a datetime when read by PyYAML."""


class WireNamed(msgspec.Struct):
    """The fields that identify any object."""

    kind: str | None = None
    metadata: WireMeta | None = None


class WireServicePort(msgspec.Struct, gc=False):
    """`spec.ports[]` of a Service."""

    name: str | None = None
    protocol: str | None = None
    port: int | None = None
    targetPort: int | str | None = None
    nodePort: int | None = None


class WireClientIP(msgspec.Struct):
    """`spec.sessionAffinityConfig.clientIP`."""

    timeoutSeconds: int | None = None


class WireAffinityConfig(msgspec.Struct):
    """`spec.sessionAffinityConfig`."""

    clientIP: WireClientIP | None = None


class WireServiceSpec(msgspec.Struct):
    """`spec` of a Service."""

    type: str | None = None
    clusterIP: str | None = None
    clusterIPs: list[str] | None = None
    ipFamilies: list[str] | None = None
    ipFamilyPolicy: str | None = None
    externalIPs: list[str] | None = None
    loadBalancerSourceRanges: list[str] | None = None
    ports: list[WireServicePort] | None = None
    selector: Any = None
    externalTrafficPolicy: str | None = None
    internalTrafficPolicy: str | None = None
    sessionAffinity: str | None = None
    sessionAffinityConfig: WireAffinityConfig | None = None
    healthCheckNodePort: int | None = None
    publishNotReadyAddresses: bool | None = None
    externalName: str | None = None
    loadBalancerClass: str | None = None
    loadBalancerIP: str | None = None
    allocateLoadBalancerNodePorts: bool | None = None
    trafficDistribution: str | None = None


class WireIngress(msgspec.Struct):
    """`status.loadBalancer.ingress[]`."""

    ip: str | None = None
    ipMode: str | None = None
    hostname: str | None = None


class WireLoadBalancer(msgspec.Struct):
    """`status.loadBalancer`."""

    ingress: list[WireIngress] | None = None


class WireServiceStatus(msgspec.Struct):
    """`status` of a Service."""

    loadBalancer: WireLoadBalancer | None = None


class WireService(msgspec.Struct):
    """v1 Service."""

    metadata: WireMeta | None = None
    spec: WireServiceSpec | None = None
    status: WireServiceStatus | None = None


class WireEndpointPort(msgspec.Struct, gc=False):
    """`ports[]` of an EndpointSlice."""

    name: str | None = None
    protocol: str | None = None
    port: int | None = None


class WireConditions(msgspec.Struct, gc=False):
    """`endpoints[].conditions`."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class WireHint(msgspec.Struct, gc=False):
    """`endpoints[].hints.forZones[]` and `forNodes[]`."""

    name: str | None = None


class WireHints(msgspec.Struct, gc=False):
    """`endpoints[].hints`."""

    forZones: list[WireHint] | None = None
    forNodes: list[WireHint] | None = None


class WireReference(msgspec.Struct, gc=False):
    """`endpoints[].targetRef`."""

    kind: str | None = None
    name: str | None = None


class WireEndpoint(msgspec.Struct, gc=False):
    """`endpoints[]`."""

    addresses: list[str] | None = None
    conditions: WireConditions | None = None
    nodeName: str | None = None
    zone: str | None = None
    hostname: str | None = None
    hints: WireHints | None = None
    targetRef: WireReference | None = None


class WireEndpointSlice(msgspec.Struct):
    """discovery.k8s.io/v1 EndpointSlice."""

    metadata: WireMeta | None = None
    addressType: str | None = None
    ports: list[WireEndpointPort] | None = None
    endpoints: list[WireEndpoint] | None = None


class WireTaint(msgspec.Struct):
    """`spec.taints[]` of a Node."""

    key: str | None = None


class WireNodeSpec(msgspec.Struct):
    """`spec` of a Node."""

    podCIDR: str | None = None
    podCIDRs: list[str] | None = None
    taints: list[WireTaint] | None = None


class WireNodeAddress(msgspec.Struct):
    """`status.addresses[]` of a Node."""

    type: str | None = None
    address: str | None = None


class WireNodeCondition(msgspec.Struct):
    """`status.conditions[]` of a Node."""

    type: str = ""
    status: str = ""


class WireNodeStatus(msgspec.Struct):
    """`status` of a Node."""

    addresses: list[WireNodeAddress] | None = None
    conditions: list[WireNodeCondition] | None = None


class WireNode(msgspec.Struct):
    """v1 Node."""

    metadata: WireMeta | None = None
    spec: WireNodeSpec | None = None
    status: WireNodeStatus | None = None


class WireServiceCIDRSpec(msgspec.Struct):
    """`spec` of a ServiceCIDR."""

    cidrs: list[str] | None = None


class WireServiceCIDR(msgspec.Struct):
    """networking.k8s.io/v1 ServiceCIDR."""

    metadata: WireMeta | None = None
    spec: WireServiceCIDRSpec | None = None


class WireContainerPort(msgspec.Struct):
    """`ports[]` of a container."""

    containerPort: int | None = None
    name: str | None = None
    protocol: str | None = None
    hostPort: int | None = None


class WireContainer(msgspec.Struct):
    """`containers[]`."""

    name: str | None = None
    image: str | None = None
    command: list[str] | None = None
    args: list[str] | None = None
    ports: list[WireContainerPort] | None = None


class WirePodSpec(msgspec.Struct):
    """`spec` of a Pod or of a template."""

    nodeName: str | None = None
    nodeSelector: Any = None
    hostNetwork: bool | None = None
    hostname: str | None = None
    hostnameOverride: str | None = None
    subdomain: str | None = None
    containers: list[WireContainer] | None = None


class WirePodIP(msgspec.Struct):
    """`status.podIPs[]`."""

    ip: str | None = None


class WirePodCondition(msgspec.Struct):
    """`status.conditions[]`."""

    type: str | None = None
    status: str | None = None


class WirePodStatus(msgspec.Struct):
    """`status` of a Pod."""

    phase: str | None = None
    podIP: str | None = None
    podIPs: list[WirePodIP] | None = None
    conditions: list[WirePodCondition] | None = None


class WirePod(msgspec.Struct):
    """v1 Pod."""

    metadata: WireMeta | None = None
    spec: WirePodSpec | None = None
    status: WirePodStatus | None = None


class WireLabelSelector(msgspec.Struct):
    """`spec.selector` of a Deployment, and selectors of other kinds."""

    matchLabels: Any = None
    matchExpressions: list[Any] | None = None


class WirePodTemplate(msgspec.Struct):
    """`spec.template` of a Deployment."""

    metadata: WireMeta | None = None
    spec: WirePodSpec | None = None


class WireDeploymentSpec(msgspec.Struct):
    """`spec` of a Deployment."""

    replicas: int | None = None
    selector: WireLabelSelector | None = None
    template: WirePodTemplate | None = None


class WireDeployment(msgspec.Struct):
    """apps/v1 Deployment."""

    metadata: WireMeta | None = None
    spec: WireDeploymentSpec | None = None


class WireNamespace(msgspec.Struct):
    """v1 Namespace."""

    metadata: WireMeta | None = None


class WireServiceAllocation(msgspec.Struct):
    """`spec.serviceAllocation` of an IPAddressPool."""

    priority: int | None = None
    namespaces: list[str] | None = None
    namespaceSelectors: list[WireLabelSelector] | None = None
    serviceSelectors: list[WireLabelSelector] | None = None


class WireIPAddressPoolSpec(msgspec.Struct):
    """`spec` of an IPAddressPool."""

    addresses: list[str] | None = None
    autoAssign: bool | None = None
    avoidBuggyIPs: bool | None = None
    serviceAllocation: WireServiceAllocation | None = None


class WireIPAddressPool(msgspec.Struct):
    """metallb.io/v1beta1 IPAddressPool."""

    metadata: WireMeta | None = None
    spec: WireIPAddressPoolSpec | None = None


class WireL2AdvertisementSpec(msgspec.Struct):
    """`spec` of an L2Advertisement."""

    ipAddressPools: list[str] | None = None
    ipAddressPoolSelectors: list[WireLabelSelector] | None = None
    nodeSelectors: list[WireLabelSelector] | None = None
    serviceSelectors: list[WireLabelSelector] | None = None
    interfaces: list[str] | None = None


class WireL2Advertisement(msgspec.Struct):
    """metallb.io/v1beta1 L2Advertisement."""

    metadata: WireMeta | None = None
    spec: WireL2AdvertisementSpec | None = None


AnyWire = (
    WireService
    | WireEndpointSlice
    | WireNode
    | WireServiceCIDR
    | WirePod
    | WireDeployment
    | WireNamespace
    | WireIPAddressPool
    | WireL2Advertisement
)
