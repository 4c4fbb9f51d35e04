"""What a scenario means to the planner and to a packet: configuration, snapshot, and how a connection arrives."""

from __future__ import annotations

from collections.abc import Iterable, Set

import msgspec

from narthex.model import (
    AnyObject,
    Disposition,
    EndpointSlice,
    Host,
    IPFamily,
    Node,
    Packet,
    Protocol,
    Service,
    ServiceCIDR,
    Snapshot,
    Store,
    Synced,
    Upsert,
    contains,
    family_of,
    in_any,
)
from narthex.proxy.kernel.dataplanes import DATAPLANES
from narthex.proxy.plan.ir import Deviation
from narthex.proxy.plan.planner import NodeConfig, pod_detector
from narthex.testing.findings import End
from narthex.testing.scenario import Scenario, ScenarioConnection, ScenarioFlow


def node_config(scenario: Scenario, mode: str) -> NodeConfig:
    """Return the node's configuration with the defaults of the mode (rows 9.1, 9.9)."""
    config = scenario.config
    words = config.node_port_addresses
    if words is None and DATAPLANES[mode].primary_node_ports:
        words = ("primary",)
    localhost = config.localhost_node_ports if config.localhost_node_ports is not None else True
    return NodeConfig(
        node_name=scenario.node_name,
        detect_local_mode=config.detect_local_mode,
        cluster_cidrs=config.cluster_cidrs,
        bridge_interface=config.bridge_interface,
        interface_name_prefix=config.interface_name_prefix,
        masquerade_all=config.masquerade_all,
        node_port_addresses=words,
        node_addresses=scenario.node_ips,
        localhost_node_ports=localhost and DATAPLANES[mode].localhost_node_ports,
        allow_service_external_ips=config.gate("AllowServiceExternalIPs") is not False,
        strict_source_ranges=config.gate("NarthexStrictSourceRanges") is True,
        strict_node_port_addresses=config.gate("NarthexStrictNodePortAddresses") is True,
    )


def snapshot(scenario: Scenario) -> Snapshot:
    """Return a snapshot of all objects, including the Node."""
    store = Store()
    node = Node(
        name=scenario.node_name, labels=scenario.labels, pod_cidrs=scenario.pod_cidrs, internal_ips=scenario.node_ips
    )
    store.apply(Upsert(node))
    for obj in scenario.objects:
        seen = _through_gates(obj, scenario)
        if seen is not None:
            store.apply(Upsert(seen))
    return store.apply(Synced())


def _through_gates(obj: AnyObject, scenario: Scenario) -> AnyObject | None:
    """Return the object without the fields that a feature gate disables, or None if the gate disables the whole kind."""
    gate = scenario.config.gate
    if isinstance(obj, ServiceCIDR) and gate("MultiCIDRServiceAllocator") is False:
        return None
    if isinstance(obj, Service) and gate("LoadBalancerIPMode") is False:
        return msgspec.structs.replace(
            obj, ingress=tuple(msgspec.structs.replace(each, proxy=False) for each in obj.ingress)
        )
    if isinstance(obj, EndpointSlice) and gate("PreferSameTrafficDistribution") is False:
        return msgspec.structs.replace(
            obj, endpoints=tuple(msgspec.structs.replace(each, for_nodes=()) for each in obj.endpoints)
        )
    return obj


def balancer_addresses(scenario: Scenario) -> frozenset[str]:
    """Addresses that only a Service has: a packet from one of them was made by a process on this node."""
    found: set[str] = set()
    for service in scenario.services:
        found.update(service.external_ips)
        found.update(entry.ip for entry in service.ingress)
        found.update(ip for ip in service.cluster_ips if ip != "None")
    return frozenset(found)


def from_host(scenario: Scenario, connection: ScenarioConnection) -> bool:
    """Return True if a process on the node makes the connection."""
    source = connection.source
    if contains(family_of(source).loopback, source):
        return True
    if connection.iface:
        return connection.iface == "lo"
    return source in scenario.node_ips or source in balancer_addresses(scenario)


def pod_interface(scenario: Scenario) -> str:
    """Return the interface of this node's pods, for flows that name none."""
    mode = next(iter(scenario.modes))
    return pod_detector(node_config(scenario, mode), IPFamily.IPV4, None).pod_interface or "cni0"


def uplink(scenario: Scenario) -> str:
    """Return the interface of everything else, which never looks like an interface of pods."""
    config = scenario.config
    prefix = config.interface_name_prefix or "\0"
    taken = {pod_interface(scenario), config.bridge_interface}
    return next(name for name in ("eth0", "wan0", "up0") if name not in taken and not name.startswith(prefix))


def is_local_pod(scenario: Scenario, address: str) -> bool:
    """Return True if an address belongs to a pod of this node, by its range or by a slice."""
    if address in scenario.node_ips:
        return False
    return in_any(scenario.pod_cidrs, address) or any(
        endpoint.address == address and endpoint.node_name == scenario.node_name
        for obj in scenario.objects
        if isinstance(obj, EndpointSlice)
        for endpoint in obj.endpoints
    )


def home_interface(scenario: Scenario, address: str) -> str:
    """Return the interface to which an address is routed."""
    return pod_interface(scenario) if is_local_pod(scenario, address) else uplink(scenario)


def arrival(scenario: Scenario, connection: ScenarioConnection) -> str:
    """Return the interface on which a connection arrives, or an empty text for one of the node's own."""
    if from_host(scenario, connection):
        return ""
    return connection.iface or home_interface(scenario, connection.source)


def packet_of(scenario: Scenario, connection: ScenarioConnection) -> Packet:
    """Return the first packet of a connection."""
    return Packet(
        source=connection.source,
        destination=connection.destination,
        port=connection.port,
        protocol=connection.protocol,
        iif=arrival(scenario, connection),
        from_host=from_host(scenario, connection),
    )


def host_of(scenario: Scenario, connection: ScenarioConnection) -> Host:
    """Return the node as the connection meets it; an address from which a host process sends is one of the node's."""
    own = scenario.node_ips
    source = connection.source
    if from_host(scenario, connection) and source not in own and not contains(family_of(source).loopback, source):
        own = (*own, source)
    return Host(addresses=own)


def families_of(connections: tuple[ScenarioConnection, ...]) -> tuple[IPFamily, ...]:
    """Return the families that connections use, IPv4 first."""
    used = {family_of(connection.destination) for connection in connections}
    return tuple(family for family in IPFamily if family in used)


def as_declared(flows: Iterable[ScenarioFlow], deviations: Set[Deviation]) -> tuple[ScenarioFlow, ...]:
    """Return the flows with the outcomes that a backend with these deviations must produce."""
    return tuple(
        msgspec.structs.replace(flow, expect=frozenset(_end(end, flow.protocol, deviations) for end in flow.expect))
        for flow in flows
    )


def _end(end: End, protocol: Protocol, deviations: Set[Deviation]) -> End:
    what, place, rewritten = end
    if what is not Disposition.DELIVERED:
        return end
    if Deviation.NO_SCTP in deviations and protocol is Protocol.SCTP:
        return Disposition.REJECTED, None, False
    return what, place, rewritten or Deviation.RELAYED in deviations
