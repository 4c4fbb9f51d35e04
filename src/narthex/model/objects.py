"""Kubernetes objects, reduced to the fields that Narthex uses. Created by `model/decode`.

All objects are frozen and contain only tuples, so that `==` detects a change and `is` can be used for caching. Addresses
and networks are canonical (see `net`). `origin` is where an object was read ("web.yaml:12"); behavior never depends on it.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec

from narthex.model.net import IPFamily, Protocol
from narthex.model.selector import Requirement

Labels = tuple[tuple[str, str], ...]
"""Labels or annotations, sorted by key."""

Selector = tuple[Requirement, ...]
"""Requirements that must all be met; an empty selector selects everything."""


class Object(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that every object has."""

    name: str
    namespace: str = ""
    """Empty for cluster-scoped kinds."""
    labels: Labels = ()
    annotations: Labels = ()
    uid: str = ""
    resource_version: str = ""
    deletion_timestamp: str = ""
    """RFC 3339; empty unless the object is being deleted."""
    origin: str = ""

    @property
    def key(self) -> NamespacedName:
        """Namespace and name."""
        return NamespacedName(self.namespace, self.name)

    def label(self, key: str) -> str | None:
        """Return the value of a label, or None."""
        return next((value for name, value in self.labels if name == key), None)

    def annotation(self, key: str) -> str | None:
        """Return the value of an annotation, or None."""
        return next((value for name, value in self.annotations if name == key), None)


class ServicePort(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One port of a Service."""

    name: str = ""
    protocol: Protocol = Protocol.TCP
    port: int
    target_port: int | str | None = None
    """Used only by the lab's EndpointSlice controller, never by the proxy (row 1.7)."""
    node_port: int = 0
    """0 if there is none."""


class LoadBalancerIngress(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One address in `status.loadBalancer.ingress` that has an `ip`."""

    ip: str
    proxy: bool = False
    """`ipMode: Proxy`: the node does not capture traffic to the address (row 10.2)."""


class Service(Object, frozen=True, kw_only=True):
    """v1 Service."""

    type: str = "ClusterIP"
    """ClusterIP, NodePort, LoadBalancer, or ExternalName."""
    cluster_ips: tuple[str, ...] = ()
    """`clusterIPs`, or `clusterIP` alone; ("None",) if headless; () if not allocated yet."""
    ip_families: tuple[IPFamily, ...] = ()
    ip_family_policy: str = ""
    external_ips: tuple[str, ...] = ()
    ingress: tuple[LoadBalancerIngress, ...] = ()
    ingress_names: tuple[str, ...] = ()
    """Host names in `status.loadBalancer.ingress`, as cloud load balancers set them."""
    source_ranges: tuple[str, ...] = ()
    """Valid `loadBalancerSourceRanges`; invalid ones are dropped with a warning (row 10.10)."""
    ports: tuple[ServicePort, ...] = ()
    selector: Labels = ()
    external_policy_local: bool = False
    internal_policy_local: bool = False
    affinity_seconds: int | None = None
    """Timeout of `sessionAffinity: ClientIP`; None without session affinity."""
    health_check_node_port: int = 0
    publish_not_ready: bool = False
    external_name: str = ""
    load_balancer_class: str = ""
    load_balancer_ip: str = ""
    allocate_node_ports: bool = True
    traffic_distribution: str = ""

    @property
    def headless(self) -> bool:
        """True for `clusterIP: None`."""
        return self.cluster_ips[:1] == ("None",)


class EndpointPort(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One port of an EndpointSlice."""

    name: str = ""
    protocol: Protocol = Protocol.TCP
    port: int | None = None


class SliceEndpoint(msgspec.Struct, frozen=True, gc=False):
    """One endpoint of an EndpointSlice, with defaults for absent conditions (row 2.7)."""

    address: str
    """The first address; the others are not used (row 2.6)."""
    ready: bool = True
    serving: bool = True
    terminating: bool = False
    node_name: str = ""
    zone: str = ""
    hostname: str = ""
    for_zones: tuple[str, ...] = ()
    for_nodes: tuple[str, ...] = ()
    target: str = ""
    """Name of the Pod that `targetRef` refers to, or empty."""


class EndpointSlice(Object, frozen=True, kw_only=True):
    """discovery.k8s.io/v1 EndpointSlice."""

    service_name: str = ""
    """Label `kubernetes.io/service-name`; empty if the slice belongs to no Service (row 2.1)."""
    family: IPFamily | None = None
    """None for addressType FQDN."""
    ports: tuple[EndpointPort, ...] = ()
    endpoints: tuple[SliceEndpoint, ...] = ()

    @property
    def service(self) -> NamespacedName:
        """The Service that the slice belongs to."""
        return NamespacedName(self.namespace, self.service_name)


class Node(Object, frozen=True, kw_only=True):
    """v1 Node."""

    pod_cidrs: tuple[str, ...] = ()
    internal_ips: tuple[str, ...] = ()
    external_ips: tuple[str, ...] = ()
    machine_ips: tuple[str, ...] = ()
    """Addresses of the machine's interfaces. Not in the API; set by a proxy that runs on the node."""
    taints: tuple[str, ...] = ()
    """Keys of `spec.taints`."""
    ready: bool = True
    """True if the condition Ready is True or missing."""
    network_unavailable: bool = False
    """True if the condition NetworkUnavailable is True."""


class ServiceCIDR(Object, frozen=True, kw_only=True):
    """networking.k8s.io/v1 ServiceCIDR."""

    cidrs: tuple[str, ...] = ()


class ContainerPort(msgspec.Struct, frozen=True, kw_only=True):
    """One port of a container."""

    port: int
    name: str = ""
    protocol: Protocol = Protocol.TCP
    host_port: int = 0


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """One container of a Pod."""

    name: str
    image: str = ""
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    ports: tuple[ContainerPort, ...] = ()


class PodSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`spec` of a Pod or of a Pod template."""

    node_name: str = ""
    node_selector: Labels = ()
    host_network: bool = False
    hostname: str = ""
    hostname_override: str = ""
    """Host name inside the pod. The pod's DNS names follow `hostname` and `subdomain` all the same."""
    subdomain: str = ""
    containers: tuple[Container, ...] = ()


class Pod(Object, frozen=True, kw_only=True):
    """v1 Pod."""

    spec: PodSpec = PodSpec()
    phase: str = ""
    ready: bool = False
    ips: tuple[str, ...] = ()


class Deployment(Object, frozen=True, kw_only=True):
    """apps/v1 Deployment."""

    replicas: int = 1
    selector: Labels = ()
    """`matchLabels`."""
    template_labels: Labels = ()
    template: PodSpec = PodSpec()


class Namespace(Object, frozen=True, kw_only=True):
    """v1 Namespace."""


class ServiceAllocation(msgspec.Struct, frozen=True, kw_only=True):
    """Which Services may use a pool. Namespaces and Services must both be selected; an absent selector selects all."""

    priority: int = 0
    """Lower values are preferred; 0 has the lowest priority."""
    namespaces: tuple[str, ...] = ()
    namespace_selectors: tuple[Selector, ...] = ()
    service_selectors: tuple[Selector, ...] = ()


class IPAddressPool(Object, frozen=True, kw_only=True):
    """metallb.io/v1beta1 IPAddressPool. `lb/pools.py` validates its addresses."""

    addresses: tuple[str, ...] = ()
    """As written: networks, and ranges `first-last`."""
    auto_assign: bool = True
    avoid_buggy: bool = False
    """Skip IPv4 addresses that end in .0 or .255."""
    allocation: ServiceAllocation | None = None


class L2Advertisement(Object, frozen=True, kw_only=True):
    """metallb.io/v1beta1 L2Advertisement. An absent field selects everything; one matching selector of several suffices."""

    pools: tuple[str, ...] = ()
    pool_selectors: tuple[Selector, ...] = ()
    node_selectors: tuple[Selector, ...] = ()
    service_selectors: tuple[Selector, ...] = ()
    interfaces: tuple[str, ...] = ()


AnyObject = (
    Service | EndpointSlice | Node | ServiceCIDR | Pod | Deployment | Namespace | IPAddressPool | L2Advertisement
)


class NamespacedName(NamedTuple):
    """Namespace and name of an object; prints as `namespace/name`."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class ServicePortName(NamedTuple):
    """Identity of one Service port; port name and protocol both count (row 1.6)."""

    service: NamespacedName
    port: str
    """Name of the port, or empty."""
    protocol: Protocol

    def __str__(self) -> str:
        """Format as `namespace/name:port`, as kube-proxy prints and hashes it; an unnamed port has no colon."""
        return f"{self.service}:{self.port}" if self.port else str(self.service)

    @property
    def sort_key(self) -> tuple[str, str, str, str]:
        """Sort key for a total order by text."""
        return self.service.namespace, self.service.name, self.port, self.protocol.value


TRIGGER_TIME = "endpoints.kubernetes.io/last-change-trigger-time"
"""The annotation: when the pod or Service changed for which the slice was last written."""

_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)", re.ASCII)


def trigger_time(one: EndpointSlice) -> float | None:
    """Return the annotation's time in seconds since the epoch, or None if it is absent or not a time of RFC 3339."""
    text = one.annotation(TRIGGER_TIME)
    match = _TIME.fullmatch(text) if text else None
    if match is None:
        return None
    try:
        whole = datetime.fromisoformat(match[1] + (match[3] if match[3] != "Z" else "+00:00"))
    except ValueError:
        return None
    return (whole + timedelta(seconds=float(f"0.{match[2] or 0}"))).timestamp()
