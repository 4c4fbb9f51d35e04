"""Kubernetes objects, reduced to the fields that Narthex uses. `decode.py` makes them.

All are frozen and hold tuples and frozen mappings only, so that "unchanged" can be asked with `==` and remembered
with `is`. Addresses and networks are canonical (see `net`). `origin` says where an object was read
("web.yaml:12") and never takes part in comparison of behaviour.
"""

from __future__ import annotations

import msgspec

from narthex.model.names import NamespacedName
from narthex.model.net import IPFamily, Protocol
from narthex.model.selector import Requirement

Labels = tuple[tuple[str, str], ...]
"""Labels or annotations, sorted by key."""

Selector = tuple[Requirement, ...]
"""All must hold; an empty one selects everything."""


class Object(msgspec.Struct, frozen=True, kw_only=True):
    """What every object has."""

    name: str
    namespace: str = ""
    """Empty for kinds without namespace."""
    labels: Labels = ()
    annotations: Labels = ()
    uid: str = ""
    resource_version: str = ""
    deletion_timestamp: str = ""
    """RFC 3339, empty while the object is not being deleted."""
    origin: str = ""

    @property
    def key(self) -> NamespacedName:
        """Namespace and name."""
        return NamespacedName(self.namespace, self.name)

    def label(self, key: str) -> str | None:
        """The label's value, None when absent."""
        return next((value for name, value in self.labels if name == key), None)

    def annotation(self, key: str) -> str | None:
        """The annotation's value, None when absent."""
        return next((value for name, value in self.annotations if name == key), None)


class ServicePort(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One port of a Service."""

    name: str = ""
    protocol: Protocol = Protocol.TCP
    port: int
    target_port: int | str | None = None
    """Read by the lab's slice controller only, never by the proxy (row 1.7)."""
    node_port: int = 0
    """0: none."""


class LoadBalancerIngress(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One address in `status.loadBalancer.ingress` that has an `ip`."""

    ip: str
    proxy: bool = False
    """`ipMode: Proxy`: the address is not caught on the node (row 10.2)."""


class Service(Object, frozen=True, kw_only=True):
    """v1 Service."""

    type: str = "ClusterIP"
    """ClusterIP, NodePort, LoadBalancer or ExternalName."""
    cluster_ips: tuple[str, ...] = ()
    """`clusterIPs`, or `clusterIP` alone; ("None",) when headless; () when not yet allocated."""
    ip_families: tuple[IPFamily, ...] = ()
    ip_family_policy: str = ""
    external_ips: tuple[str, ...] = ()
    ingress: tuple[LoadBalancerIngress, ...] = ()
    ingress_names: tuple[str, ...] = ()
    """Host names in `status.loadBalancer.ingress`: a cloud's balancer has them."""
    source_ranges: tuple[str, ...] = ()
    """Valid `loadBalancerSourceRanges`; the ones that do not parse are left out with a warning (row 10.10)."""
    ports: tuple[ServicePort, ...] = ()
    selector: Labels = ()
    external_policy_local: bool = False
    internal_policy_local: bool = False
    affinity_seconds: int | None = None
    """Timeout of `sessionAffinity: ClientIP`; None without affinity."""
    health_check_node_port: int = 0
    publish_not_ready: bool = False
    external_name: str = ""
    load_balancer_class: str = ""
    load_balancer_ip: str = ""
    allocate_node_ports: bool = True
    traffic_distribution: str = ""

    @property
    def headless(self) -> bool:
        """`clusterIP: None`."""
        return self.cluster_ips[:1] == ("None",)


class EndpointPort(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One port of an EndpointSlice."""

    name: str = ""
    protocol: Protocol = Protocol.TCP
    port: int | None = None


class SliceEndpoint(msgspec.Struct, frozen=True, gc=False):
    """One endpoint of an EndpointSlice. Absent conditions have their meaning filled in (row 2.7)."""

    address: str
    """The first address; the others have no meaning (row 2.6)."""
    ready: bool = True
    serving: bool = True
    terminating: bool = False
    node_name: str = ""
    zone: str = ""
    hostname: str = ""
    for_zones: tuple[str, ...] = ()
    for_nodes: tuple[str, ...] = ()
    target: str = ""
    """Name of the Pod that `targetRef` points to, empty when it points to none."""


class EndpointSlice(Object, frozen=True, kw_only=True):
    """discovery.k8s.io/v1 EndpointSlice."""

    service_name: str = ""
    """Label `kubernetes.io/service-name`; empty: belongs to no Service (row 2.1)."""
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
    """What the machine's own interfaces have; no manifest says it, only a proxy that runs there and needs it."""
    taints: tuple[str, ...] = ()
    """Keys of `spec.taints`."""
    ready: bool = True
    """The condition Ready is True, or not there."""
    network_unavailable: bool = False
    """The condition NetworkUnavailable is True."""


class ServiceCIDR(Object, frozen=True, kw_only=True):
    """networking.k8s.io/v1 ServiceCIDR."""

    cidrs: tuple[str, ...] = ()


class ContainerPort(msgspec.Struct, frozen=True, kw_only=True):
    """One containerPort."""

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
    """Whom a pool is for. Namespaces (by name or selector) and Services must both be selected; none given: all are."""

    priority: int = 0
    """The lowest comes first, 0 last."""
    namespaces: tuple[str, ...] = ()
    namespace_selectors: tuple[Selector, ...] = ()
    service_selectors: tuple[Selector, ...] = ()


class IPAddressPool(Object, frozen=True, kw_only=True):
    """metallb.io/v1beta1 IPAddressPool. Whether its addresses can be used is for `lb/pools.py` to say."""

    addresses: tuple[str, ...] = ()
    """As written: networks, and ranges `first-last`."""
    auto_assign: bool = True
    avoid_buggy: bool = False
    """No IPv4 address that ends in .0 or .255."""
    allocation: ServiceAllocation | None = None


class L2Advertisement(Object, frozen=True, kw_only=True):
    """metallb.io/v1beta1 L2Advertisement. What is not given selects everything; of several selectors one is enough."""

    pools: tuple[str, ...] = ()
    pool_selectors: tuple[Selector, ...] = ()
    node_selectors: tuple[Selector, ...] = ()
    service_selectors: tuple[Selector, ...] = ()
    interfaces: tuple[str, ...] = ()


AnyObject = (
    Service | EndpointSlice | Node | ServiceCIDR | Pod | Deployment | Namespace | IPAddressPool | L2Advertisement
)
