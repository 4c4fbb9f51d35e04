"""Builders for tests: short calls that make objects over one address plan.

Node `worker-a` is 10.20.0.11; its pods are 10.64.1.0/24 of 10.64.0.0/12; Services live in 10.110.0.0/16. The IPv6
twins are fd20::11, fd64:0:0:1::/64 of fd64::/48, and fd6e::/108. Outside clients are 198.51.100.0/24.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from narthex.model import (
    AnyObject,
    EndpointPort,
    EndpointSlice,
    Host,
    IPFamily,
    LoadBalancerIngress,
    NamespacedName,
    Node,
    Packet,
    Protocol,
    Service,
    ServicePort,
    ServicePortName,
    SliceEndpoint,
    Snapshot,
    Store,
    Synced,
    Upsert,
    address,
    family_of,
    split_port,
)
from narthex.proxy.plan.ir import Plan
from narthex.proxy.plan.planner import NodeConfig, plan_once

NODE = "worker-a"
NODE_IPS = ("10.20.0.11", "10.20.1.11", "fd20::11", "fd20:0:0:1::11")
HOST = Host(addresses=NODE_IPS)
CONFIG = NodeConfig(
    node_name=NODE,
    cluster_cidrs=("10.64.0.0/12", "fd64::/48"),
    node_port_addresses=("primary",),
    node_addresses=NODE_IPS,
)


def name(text: str) -> NamespacedName:
    """Return `shop/web` as a NamespacedName."""
    namespace, _, plain = text.partition("/")
    return NamespacedName(namespace, plain)


def port_name(text: str, protocol: Protocol = Protocol.TCP) -> ServicePortName:
    """Return `shop/web:http` as a ServicePortName."""
    service_name, _, port = text.partition(":")
    return ServicePortName(name(service_name), port, protocol)


def service(text: str, *ips: str, port: int = 80, node_port: int = 0, **fields: object) -> Service:
    """Return a Service `namespace/name` with these cluster IPs and, unless `ports` is given, one TCP port named `http`."""
    fields.setdefault("ports", (ServicePort(name="http", port=port, node_port=node_port),))
    ingress = fields.pop("balancers", ())
    assert isinstance(ingress, Iterable)
    key = name(text)
    return msgspec.convert(
        Service(
            namespace=key.namespace,
            name=key.name,
            cluster_ips=ips,
            ip_families=tuple(family_of(ip) for ip in ips if ip != "None"),
            ingress=tuple(LoadBalancerIngress(ip=ip) for ip in ingress),
            **fields,  # type: ignore[arg-type]
        ),
        Service,
    )


def endpoint(text: str, node: str = NODE, **fields: object) -> SliceEndpoint:
    """Return an endpoint on a node."""
    return SliceEndpoint(address=address(text), node_name=node, **fields)  # type: ignore[arg-type]


def endpoint_slice(
    text: str,
    *endpoints: SliceEndpoint,
    port: int = 80,
    suffix: str = "1",
    ports: tuple[EndpointPort, ...] | None = None,
    family: IPFamily | None = None,
    labels: tuple[tuple[str, str], ...] = (),
) -> EndpointSlice:
    """Return a slice of the Service `namespace/name` with, unless `ports` is given, one TCP port named `http`."""
    key = name(text)
    return EndpointSlice(
        namespace=key.namespace,
        name=f"{key.name}-{suffix}",
        labels=labels,
        service_name=key.name,
        family=family or (family_of(endpoints[0].address) if endpoints else IPFamily.IPV4),
        ports=ports if ports is not None else (EndpointPort(name="http", port=port),),
        endpoints=endpoints,
    )


def node(node_name: str = NODE, zone: str = "", **fields: object) -> Node:
    """Return the Node of the address plan."""
    fields.setdefault("pod_cidrs", ("10.64.1.0/24", "fd64:0:0:1::/64"))
    fields.setdefault("internal_ips", NODE_IPS)
    labels = (("topology.kubernetes.io/zone", zone),) if zone else ()
    return Node(name=node_name, labels=labels, **fields)  # type: ignore[arg-type]


def snapshot(*objects: AnyObject, with_node: bool = True) -> Snapshot:
    """Return a complete snapshot of these objects, with the Node of the address plan unless they contain a Node."""
    store = Store()
    if with_node and not any(isinstance(obj, Node) for obj in objects):
        store.apply(Upsert(node()))
    for obj in objects:
        store.apply(Upsert(obj))
    return store.apply(Synced())


def plan(*objects: AnyObject, family: IPFamily = IPFamily.IPV4, **config: object) -> Plan:
    """Return the plan for these objects on the node of the address plan; `config` replaces fields of CONFIG."""
    return plan_once(snapshot(*objects), msgspec.structs.replace(CONFIG, **config), family)


def packet(source: str, destination: str, protocol: Protocol = Protocol.TCP, iif: str = "") -> Packet:
    """Return a packet from an address to `address:port`, sent by the node itself if the source is an address of the node."""
    where, port = split_port(destination)
    return Packet(
        source=address(source),
        destination=where,
        port=port,
        protocol=protocol,
        iif=iif,
        from_host=source in NODE_IPS or source.startswith("127."),
    )
