"""What the API server gives a Service that its manifest leaves open: cluster IPs, node ports, a health check port.

What a manifest asks for is served first, in the order of names; then what a Service had before; the rest is found
from a hash of the name, so that the same manifests get the same addresses in every lab.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Mapping

import msgspec

from narthex.lab.topology import SERVICE_CIDRS
from narthex.model.names import NamespacedName
from narthex.model.net import IPFamily, Protocol, family_of, parsed_network
from narthex.model.objects import Service, ServicePort
from narthex.model.problem import Problem

NODE_PORTS = range(30000, 32768)
_FIRST_ADDRESSES = 16
"""Addresses at the begin of a range that are never drawn: .1 is the API server's, .10 by custom the DNS server's."""

_CIDR = {family_of(cidr): cidr for cidr in SERVICE_CIDRS}
_PROTOCOLS = tuple(Protocol)

Services = Mapping[NamespacedName, Service]


def allocate(wanted: Services, before: Services) -> tuple[dict[NamespacedName, Service], tuple[Problem, ...]]:
    """The Services with everything filled in; `before` is the last result. A Service that asks for what an earlier
    name has asked for is left out and reported."""
    pool = _Pool()
    problems: list[Problem] = []
    accepted: list[Service] = []
    for _, service in sorted(wanted.items()):
        fault = pool.claim(service)
        if fault:
            problems.append(fault)
        else:
            accepted.append(service)
    for service in accepted:
        pool.claim_again(service, before.get(service.key))
    filled = {service.key: pool.fill(service, before.get(service.key)) for service in accepted}
    return filled, tuple(problems)


class _Pool:
    """What is taken, and by whom."""

    def __init__(self) -> None:
        self._addresses: dict[str, NamespacedName] = {}
        self._ports: dict[tuple[Protocol, int], NamespacedName] = {}

    def claim(self, service: Service) -> Problem | None:
        """Take all that the manifest asks for, or nothing and say why."""
        addresses = [address for address in service.cluster_ips if address != "None"]
        ports = [
            (port.protocol, port.node_port) for port in service.ports if port.node_port and _has_node_ports(service)
        ]
        for address in addresses:
            if owner := self._addresses.get(address):
                return _fault(
                    service, "spec.clusterIPs", f"{address} is taken by Service {owner}; choose another or none"
                )
        for protocol, port in ports:
            if owner := self._ports.get((protocol, port)):
                return _fault(
                    service,
                    "spec.ports[].nodePort",
                    f"{protocol.value} {port} is taken by Service {owner}; choose another",
                )
        self._addresses.update((address, service.key) for address in addresses)
        self._ports.update((port, service.key) for port in ports)
        if service.health_check_node_port and _wants_health_check(service):
            self._ports.setdefault((Protocol.TCP, service.health_check_node_port), service.key)
        return None

    def claim_again(self, service: Service, before: Service | None) -> None:
        """Keep what it had, where its manifest leaves it open and nobody asked for it."""
        if before is None:
            return
        if not service.cluster_ips:
            for address in before.cluster_ips:
                self._addresses.setdefault(address, service.key)
        for port in before.ports:
            if port.node_port:
                self._ports.setdefault((port.protocol, port.node_port), service.key)
        if before.health_check_node_port:
            self._ports.setdefault((Protocol.TCP, before.health_check_node_port), service.key)

    def fill(self, service: Service, before: Service | None) -> Service:
        """The Service as the API server would store it."""
        if service.type == "ExternalName":
            return service
        families = _families(service)
        had = before.cluster_ips if before is not None else ()
        addresses = service.cluster_ips
        if not service.headless:
            given = {family_of(address): address for address in addresses}
            addresses = tuple(given.get(family) or self._address(service, family, had) for family in families)
        service = msgspec.structs.replace(service, ip_families=families, cluster_ips=addresses)
        if _has_node_ports(service):
            old = {(port.name, port.protocol): port.node_port for port in before.ports} if before is not None else {}
            ports = tuple(self._with_node_port(service, port, old) for port in service.ports)
            service = msgspec.structs.replace(service, ports=ports)
        if _wants_health_check(service) and not service.health_check_node_port:
            preferred = before.health_check_node_port if before is not None else 0
            port_number = self._port(service, Protocol.TCP, "health check", preferred)
            service = msgspec.structs.replace(service, health_check_node_port=port_number)
        return service

    def _address(self, service: Service, family: IPFamily, had: tuple[str, ...]) -> str:
        for address in had:
            if address != "None" and family_of(address) is family and self._addresses.get(address) == service.key:
                return address
        network = parsed_network(_CIDR[family])
        room = min(network.num_addresses, 1 << 16) - _FIRST_ADDRESSES - 1
        start = _number(f"{service.key} {family.label}")
        for step in range(room):
            address = str(ipaddress.ip_address(int(network.network_address) + _FIRST_ADDRESSES + (start + step) % room))
            if address not in self._addresses:
                self._addresses[address] = service.key
                return address
        raise RuntimeError(f"no free address is left in {network} for Service {service.key}")

    def _with_node_port(
        self, service: Service, port: ServicePort, old: Mapping[tuple[str, Protocol], int]
    ) -> ServicePort:
        if port.node_port:
            return port
        number = self._port(service, port.protocol, port.name, old.get((port.name, port.protocol), 0))
        return msgspec.structs.replace(port, node_port=number)

    def _port(self, service: Service, protocol: Protocol, use: str, preferred: int) -> int:
        if preferred and self._ports.get((protocol, preferred)) == service.key:
            return preferred
        start = _number(f"{service.key} {use} {protocol.value}")
        for step in range(len(NODE_PORTS)):
            number = NODE_PORTS[(start + step) % len(NODE_PORTS)]
            if not any((other, number) in self._ports for other in _PROTOCOLS):
                self._ports[protocol, number] = service.key
                return number
        raise RuntimeError(f"no free node port is left for Service {service.key}")


def _families(service: Service) -> tuple[IPFamily, ...]:
    """The families the manifest names, else those of its addresses, else IPv4; both when the policy wants both."""
    given = service.ip_families or tuple(dict.fromkeys(family_of(ip) for ip in service.cluster_ips if ip != "None"))
    families = given or (IPFamily.IPV4,)
    if service.ip_family_policy in ("PreferDualStack", "RequireDualStack") and len(families) == 1:
        other = IPFamily.IPV6 if families[0] is IPFamily.IPV4 else IPFamily.IPV4
        return (*families, other)
    return families


def _has_node_ports(service: Service) -> bool:
    return service.type == "NodePort" or (service.type == "LoadBalancer" and service.allocate_node_ports)


def _wants_health_check(service: Service) -> bool:
    return service.type == "LoadBalancer" and service.external_policy_local


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _fault(service: Service, field: str, message: str) -> Problem:
    return Problem(
        origin=service.origin, object=f"Service {service.key}", field=field, message=message, severity="error"
    )
