"""Hypothesis strategies: clusters and packets that are possible, and odd on purpose.

Few names and addresses are drawn from, so that Services collide, endpoints are shared, packets hit something, and
pods talk to themselves. Over one address plan with `build`.
"""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st

from narthex.model import (
    AnyObject,
    Delete,
    EndpointPort,
    EndpointSlice,
    Event,
    IPFamily,
    LoadBalancerIngress,
    NamespacedName,
    Packet,
    Protocol,
    Service,
    ServiceCIDR,
    ServicePort,
    SliceEndpoint,
    Upsert,
)
from narthex.proxy.plan.balancing import LOAD_BALANCING
from narthex.proxy.plan.planner import NodeConfig
from narthex.testing.build import NODE, NODE_IPS, node

SERVICE_NAMES = tuple(NamespacedName("shop", name) for name in ("a", "b", "c", "d"))
CLUSTER_IPS = {
    IPFamily.IPV4: ("10.110.0.1", "10.110.0.2", "10.110.0.3"),
    IPFamily.IPV6: ("fd6e::1", "fd6e::2", "fd6e::3"),
}
EXTERNAL_IPS = {
    IPFamily.IPV4: ("203.0.113.1", "203.0.113.2", "10.20.0.11"),
    IPFamily.IPV6: ("2001:db8:1b::1", "2001:db8:1b::2", "fd20::11"),
}
PODS = {
    IPFamily.IPV4: ("10.64.1.10", "10.64.1.11", "10.64.2.10", "10.64.2.11", "10.20.0.11"),
    IPFamily.IPV6: ("fd64:0:0:1::10", "fd64:0:0:1::11", "fd64:0:0:2::10", "fd64:0:0:2::11", "fd20::11"),
}
CLIENTS = {
    IPFamily.IPV4: ("198.51.100.7", "10.64.1.200", "10.64.2.200", "10.20.0.11", "10.20.1.11"),
    IPFamily.IPV6: ("2001:db8:c::7", "fd64:0:0:1::200", "fd64:0:0:2::200", "fd20::11", "fd20:0:0:1::11"),
}
RANGES = ("198.51.100.0/24", "198.51.100.7/32", "10.64.0.0/12", "10.20.0.0/16", "0.0.0.0/0", "2001:db8:c::/64", "::/0")
PORTS = (80, 81)
NODE_PORTS = (0, 30080, 30081)
PORT_NAMES = ("http", "web", "")
ZONES = ("", "east", "west")

families = st.sampled_from(list(IPFamily))
_BALANCING = tuple(((LOAD_BALANCING, value),) for value in ("maglev", "maglev", "least-connections", "unknown"))
protocols = st.sampled_from([Protocol.TCP, Protocol.UDP, Protocol.SCTP])


@st.composite
def services(draw: st.DrawFn) -> Service:
    """Draw a Service of any type, policy, family, and affinity."""
    key = draw(st.sampled_from(SERVICE_NAMES))
    own = draw(st.sampled_from([(IPFamily.IPV4,), (IPFamily.IPV6,), (IPFamily.IPV4, IPFamily.IPV6)]))
    headless = draw(st.integers(0, 9)) == 0
    labels = draw(st.sampled_from([(), (), (), (("service.kubernetes.io/service-proxy-name", "other"),)]))
    external = st.sampled_from(EXTERNAL_IPS[IPFamily.IPV4] + EXTERNAL_IPS[IPFamily.IPV6])
    ingress = st.builds(LoadBalancerIngress, ip=external, proxy=st.booleans())
    port = st.builds(
        ServicePort,
        name=st.sampled_from(PORT_NAMES),
        protocol=protocols,
        port=st.sampled_from(PORTS),
        node_port=st.sampled_from(NODE_PORTS),
    )
    return Service(
        namespace=key.namespace,
        name=key.name,
        labels=labels,
        type=draw(st.sampled_from(["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"])),
        cluster_ips=("None",) if headless else tuple(draw(st.sampled_from(CLUSTER_IPS[family])) for family in own),
        ip_families=own,
        external_ips=tuple(draw(st.lists(external, max_size=2, unique=True))),
        ingress=tuple(draw(st.lists(ingress, max_size=2))),
        source_ranges=tuple(draw(st.lists(st.sampled_from(RANGES), max_size=2, unique=True))),
        ports=tuple(draw(st.lists(port, min_size=1, max_size=3, unique_by=lambda p: (p.name, p.protocol)))),
        external_policy_local=draw(st.booleans()),
        internal_policy_local=draw(st.booleans()),
        health_check_node_port=draw(st.sampled_from([0, 0, 32080])),
        affinity_seconds=draw(st.sampled_from([None, None, 10, 10800])),
        annotations=draw(st.sampled_from([(), (), *_BALANCING])),
    )


@st.composite
def slices(draw: st.DrawFn) -> EndpointSlice:
    """Draw an EndpointSlice of one of the Services, in any condition."""
    key = draw(st.sampled_from(SERVICE_NAMES))
    family = draw(families)
    hints = st.lists(st.sampled_from(ZONES[1:]), max_size=2, unique=True).map(tuple)
    endpoint = st.builds(
        SliceEndpoint,
        address=st.sampled_from(PODS[family]),
        ready=st.booleans(),
        serving=st.booleans(),
        terminating=st.booleans(),
        node_name=st.sampled_from([NODE, "worker-b", ""]),
        for_zones=hints,
        for_nodes=st.sampled_from([(), (), (NODE,), ("worker-b",)]),
    )
    port = st.builds(
        EndpointPort, name=st.sampled_from(PORT_NAMES), protocol=protocols, port=st.sampled_from([8080, 9090, None])
    )
    return EndpointSlice(
        namespace=key.namespace,
        name=f"{key.name}-{draw(st.integers(1, 2))}",
        service_name=draw(st.sampled_from([key.name, key.name, key.name, ""])),
        family=family,
        ports=tuple(draw(st.lists(port, min_size=1, max_size=3))),
        endpoints=tuple(draw(st.lists(endpoint, max_size=4))),
    )


nodes = st.builds(lambda zone: node(zone=zone), st.sampled_from(ZONES))
service_cidrs = st.builds(ServiceCIDR, name=st.just("kubernetes"), cidrs=st.just(("10.110.0.0/16", "fd6e::/108")))
objects: st.SearchStrategy[AnyObject] = st.one_of(services(), services(), slices(), slices(), nodes, service_cidrs)


@st.composite
def events(draw: st.DrawFn) -> Event:
    """Draw the addition, change, or deletion of an object."""
    obj = draw(objects)
    if draw(st.integers(0, 3)) == 0:
        return Delete(type(obj).__name__, obj.key)
    return Upsert(obj)


@st.composite
def served_services(draw: st.DrawFn) -> tuple[Event, ...]:
    """Draw a Service together with endpoints for all of its ports, most of which are ready."""
    made = msgspec.structs.replace(
        draw(services()), labels=(), type=draw(st.sampled_from(["ClusterIP", "NodePort", "LoadBalancer"]))
    )
    ports = tuple(
        EndpointPort(name=port.name, protocol=port.protocol, port=draw(st.sampled_from([8080, 9090])))
        for port in made.ports
    )
    found: list[Event] = [Upsert(made)]
    for family in made.ip_families:
        addresses = draw(st.lists(st.sampled_from(PODS[family]), min_size=1, max_size=4, unique=True))
        endpoints = tuple(
            SliceEndpoint(
                address=address,
                ready=draw(st.integers(0, 3)) > 0,
                serving=True,
                terminating=draw(st.integers(0, 3)) == 0,
                node_name=draw(st.sampled_from([NODE, "worker-b"])),
            )
            for address in addresses
        )
        name = f"{made.name}-{family.value}"
        found.append(
            Upsert(
                EndpointSlice(
                    namespace=made.namespace,
                    name=name,
                    service_name=made.name,
                    family=family,
                    ports=ports,
                    endpoints=endpoints,
                )
            )
        )
    return tuple(found)


changes: st.SearchStrategy[list[Event]] = st.lists(
    st.one_of(events().map(lambda event: (event,)), served_services(), served_services()), max_size=4
).map(lambda parts: [event for part in parts for event in part])
"""Events of one turn: whole Services with endpoints, and single objects that may fit or not."""

configs = st.builds(
    NodeConfig,
    node_name=st.just(NODE),
    detect_local_mode=st.sampled_from(["ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix", ""]),
    cluster_cidrs=st.sampled_from([(), ("10.64.0.0/12",), ("10.64.0.0/12", "fd64::/48")]),
    bridge_interface=st.just("cni0"),
    interface_name_prefix=st.just("veth"),
    masquerade_all=st.booleans(),
    masquerade_bit=st.sampled_from([14, 14, 0, 31]),
    node_port_addresses=st.sampled_from(
        [
            None,
            ("primary",),
            ("10.20.1.0/24",),
            ("10.20.0.0/16", "fd20::/64"),
            ("0.0.0.0/0", "::/0"),
            ("primary", "localhost", "10.20.1.0/24"),
        ]
    ),
    strict_node_port_addresses=st.booleans(),
    node_addresses=st.just(NODE_IPS),
    allow_service_external_ips=st.sampled_from([True, True, False]),
    strict_source_ranges=st.sampled_from([False, False, True]),
)


@st.composite
def packets(draw: st.DrawFn, family: IPFamily) -> Packet:
    """Draw a first packet to an address that is, or almost is, a frontend."""
    of_family = (
        CLUSTER_IPS[family] + EXTERNAL_IPS[family] + tuple(ip for ip in NODE_IPS if (":" in ip) == (family.value == 6))
    )
    unused = ("10.110.9.9",) if family is IPFamily.IPV4 else ("fd6e::99",)
    source = draw(st.sampled_from(CLIENTS[family] + PODS[family]))
    from_host = source in NODE_IPS
    return Packet(
        source=source,
        destination=draw(st.sampled_from(of_family + unused)),
        port=draw(st.sampled_from(PORTS + NODE_PORTS[1:] + (8080,))),
        protocol=draw(protocols),
        iif="" if from_host else draw(st.sampled_from(["cni0", "veth1", "eth0"])),
        from_host=from_host,
    )
