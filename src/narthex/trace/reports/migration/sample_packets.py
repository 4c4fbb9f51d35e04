"""Sample packets that represent all others: one for each arrival, class of sender, and other property that `evaluate` looks at.

Sources are found by intervals: the first address of each network that a plan mentions, and the one after its last, cover every set
of addresses that the plan can distinguish. Sources that are equal for all plans in question are sampled once.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from narthex.model import (
    Host,
    IPFamily,
    Packet,
    Protocol,
    ServicePortName,
    contains,
    family_of,
    host_network,
    in_any,
    parsed_network,
)
from narthex.proxy.plan.ir import Endpoint, Forward, Frontend, Match, Plan, Sender, ServicePlan
from narthex.trace.evaluate import answers_node_ports, sender_of

STRANGERS = {IPFamily.IPV4: "198.51.100.7", IPFamily.IPV6: "2001:db8:c::7"}
"""Outside addresses from those reserved for documentation (RFC 5737, RFC 3849)."""

_UPLINKS = ("eth0", "wan0", "up0")
_PLAIN_PORT = 9
"""First candidate for an unused port."""


class SamplePacket(msgspec.Struct, frozen=True, kw_only=True):
    """A packet and a description of what it represents."""

    service: str
    """The Service port of its destination; empty if there is none."""
    arrival: str
    """The kind of destination: "cluster IP", "node port on the node's primary address", …"""
    sender: Sender
    allowed: bool | None = None
    """True if the source ranges of all plans contain the source; None without source ranges."""
    itself: bool | None = None
    """The source is an endpoint of the Service port, on this node (True) or another (False); None: it is no endpoint.
    """
    special: str = ""
    """Anything else that is special about the packet, as text."""
    packet: Packet

    @property
    def source(self) -> str:
        """Relevant properties of the source in addition to its class, as text; usually empty."""
        words = {True: "in its source ranges", False: "in none of its source ranges", None: ""}[self.allowed]
        own = {True: "itself an endpoint, on this node", False: "itself an endpoint, on another node", None: ""}
        return "; ".join(filter(None, (words, own[self.itself], self.special)))


class _Source(msgspec.Struct, frozen=True):
    address: str
    iif: str
    from_host: bool
    sender: Sender


class FrontendIndex:
    """A plan's frontends by what they match."""

    def __init__(self, plan: Plan) -> None:
        """Index the frontends of a plan."""
        self.plan = plan
        self._owners: dict[Match, ServicePlan] = {}
        self._by_address: dict[str, list[ServicePlan]] = {}
        self._last: tuple[Match, Plan] | None = None
        for service in plan.services.values():
            for frontend in service.frontends:
                self._owners[frontend.match] = service
                if frontend.address is not None:
                    holders = self._by_address.setdefault(frontend.address, [])
                    if service not in holders[-1:]:
                        holders.append(service)

    def around(self, packet: Packet) -> Plan:
        """Return the plan with only the Services that could affect the packet, for which `evaluate` returns the same."""
        match = packet.destination, packet.protocol, packet.port
        if self._last is None or self._last[0] != match:
            near = [*self._by_address.get(packet.destination, ())]
            near += [owner for key in (match, (None, *match[1:])) if (owner := self._owners.get(key)) is not None]
            self._last = match, msgspec.structs.replace(self.plan, services={each.name: each for each in near})
        return self._last[1]

    def owner(self, match: Match) -> ServicePlan | None:
        """Return the Service port with a frontend of exactly this match."""
        return self._owners.get(match)

    def holders(self, address: str) -> Sequence[ServicePlan]:
        """Return the Service ports with a frontend at this address."""
        return self._by_address.get(address, ())

    @property
    def addresses(self) -> Iterable[str]:
        """All addresses of frontends."""
        return self._by_address

    @property
    def node_ports(self) -> set[int]:
        """All node port numbers."""
        return {port for address, _, port in self._owners if address is None}


class SamplePackets:
    """All packets that are relevant for the plans of one node and IP family; the first plan classifies senders."""

    def __init__(self, atlases: Sequence[FrontendIndex], host: Host) -> None:
        """Collect the addresses and networks that the plans mention."""
        self._atlases = atlases
        self._plans = [atlas.plan for atlas in atlases]
        self._family = self._plans[0].family
        self._own = [ip for ip in host.addresses if family_of(ip) is self._family]
        self._host = msgspec.structs.replace(host, addresses=tuple(self._own))
        self._general = list(
            self._sources((STRANGERS[self._family], *self._loopbacks(), *_edges(self._networks(), self._family)))
        )
        self._addresses = {source.address for source in self._general}
        first = {source.sender: source for source in reversed(self._general)}
        self._senders = [first[sender] for sender in Sender if sender in first]

    def names(self) -> list[ServicePortName]:
        """Return all Service ports in order."""
        return sorted({name for plan in self._plans for name in plan.services}, key=lambda name: name.sort_key)

    def shape(self, name: ServicePortName) -> Shape:
        """Return a key that is equal for Service ports with equal samples."""
        return shape(self._services(name), self._plans, self._own, self._clashes)

    def of_service(self, name: ServicePortName) -> Iterator[SamplePacket]:
        """Yield packets to the frontends of a Service port."""
        services = self._services(name)
        for frontend in {frontend.match: frontend for each in services for frontend in each.frontends}.values():
            yield from self._of_frontend(services, frontend)

    def of_returning_clients(self, name: ServicePortName) -> Iterator[tuple[SamplePacket, SamplePacket]]:
        """Yield pairs of packets of one client to a Service port with session affinity, for each pair of arrivals."""
        service = self._plans[0].services.get(name)
        if service is None or service.affinity_seconds is None:
            return
        samples: dict[str, dict[Sender, SamplePacket]] = {}
        for frontend in service.frontends:
            for probe in self._of_frontend([service], frontend):
                forwarded = isinstance(frontend.decision(probe.sender), Forward) and probe.allowed is not False
                if forwarded and probe.itself is None:
                    samples.setdefault(probe.arrival, {}).setdefault(probe.sender, probe)
        for first in samples.values():
            for second in samples.values():
                yield from ((first[sender], second[sender]) for sender in first if sender in second)

    def places(self) -> Iterator[tuple[Shape, str, str, list[str]]]:
        """Yield all addresses of frontends: a key that is equal for equal samples, the address, its kind, and its Service ports."""
        for address in sorted({address for atlas in self._atlases for address in atlas.addresses}):
            holders = self._holders(address)
            kinds = sorted(holders)
            known = tuple(in_any(plan.service_cidrs, address) for plan in self._plans)
            for kind in kinds:
                yield (kind, *kinds, address in self._own, known), address, kind, sorted(holders[kind])

    def of_place(self, address: str, kind: str) -> Iterator[SamplePacket]:
        """Yield packets to a frontend's address that match no frontend."""
        checks = [check.port for plan in self._plans for check in plan.health_checks.values()]
        unknown, check = f"unknown port of the {kind}", "with the number of a health-check node port"
        aims = [(unknown, "", Protocol.TCP, self._free_port(address))]
        aims += [(unknown, check, Protocol.TCP, port) for port in checks[:1]]
        aims.append((f"ping of the {kind}", "", Protocol.ICMP, 0))
        for source in self._senders:
            for arrival, special, protocol, number in aims:
                packet = _packet(source, address, number, protocol)
                yield SamplePacket(service="", arrival=arrival, sender=source.sender, special=special, packet=packet)

    def of_service_cidrs(self) -> Iterator[SamplePacket]:
        """Yield packets to addresses of ServiceCIDRs that no Service has."""
        for cidr in sorted({cidr for plan in self._plans for cidr in plan.service_cidrs}):
            free = self._free_address(cidr)
            for source in self._senders if free else ():
                packet = _packet(source, free, _PLAIN_PORT, Protocol.TCP)
                yield SamplePacket(service="", arrival=f"a free address of {cidr}", sender=source.sender, packet=packet)

    def _services(self, name: ServicePortName) -> list[ServicePlan]:
        return [found for plan in self._plans if (found := plan.services.get(name)) is not None]

    def _clashes(self, frontend: Frontend) -> tuple[bool, ...]:
        """Return for each own address whether another Service has a frontend with the number of this node port."""
        return tuple(
            any(atlas.owner((address, frontend.protocol, frontend.port)) for atlas in self._atlases)
            for address in self._own
        )

    def _of_frontend(self, services: Sequence[ServicePlan], frontend: Frontend) -> Iterator[SamplePacket]:
        endpoints = _endpoints(services)
        ranges = list(_ranges(services, frontend))
        networks = dict.fromkeys(cidr for cidrs in ranges for cidr in cidrs or ())
        edges = list(_edges(networks, self._family))
        special = [_next(ip, endpoints) for ip in (*edges, *self._addresses) if ip in endpoints]
        everybody = [*self._general, *self._sources((*edges, *endpoints, *special))]
        if frontend.address is not None and frontend.address not in self._own:
            everybody.append(self._source(frontend.address))
        for arrival, destination in self._destinations(frontend):
            seen = set()
            # Loopback addresses do not leave a machine, and can't be reached from outside.
            loopback = contains(self._family.loopback, destination)
            for source in everybody:
                if loopback is not contains(self._family.loopback, source.address):
                    continue
                allowed = tuple(cidrs is None or in_any(cidrs, source.address) for cidrs in ranges)
                itself = endpoints.get(source.address)
                alike = source.sender, source.from_host, allowed, itself, source.address == frontend.address
                if alike in seen:
                    continue
                seen.add(alike)
                yield SamplePacket(
                    service=str(services[0].name),
                    arrival=arrival,
                    sender=source.sender,
                    allowed=all(allowed) if networks else None,
                    itself=itself[0] if itself else None,
                    special="bound to that address" if source.address == frontend.address else "",
                    packet=_packet(source, destination, frontend.port, frontend.protocol),
                )

    def _destinations(self, frontend: Frontend) -> Iterator[tuple[str, str]]:
        """Yield destinations for a frontend with the kind of arrival; for a node port, one for each kind of own address."""
        if frontend.address is not None:
            yield frontend.kind.value, frontend.address
            return
        seen = set()
        for number, address in enumerate((*self._own, *self._loopbacks())):
            if any(atlas.owner((address, frontend.protocol, frontend.port)) for atlas in self._atlases):
                continue
            if contains(self._family.loopback, address):
                kind = f"loopback ({'::1' if self._family is IPFamily.IPV6 else '127.0.0.0/8'})"
            else:
                kind = "the node's first address" if number == 0 else "another address of the node"
            alike = kind, tuple(answers_node_ports(plan, address, self._host) for plan in self._plans)
            if alike not in seen:
                seen.add(alike)
                yield f"{frontend.kind.value} on {kind}", address

    def _loopbacks(self) -> Iterator[str]:
        loopback = self._family.loopback
        yield loopback.split("/")[0] if self._family is IPFamily.IPV6 else "127.0.0.1"
        listed = [cidr for plan in self._plans for cidr in plan.node_ports.cidrs or ()]
        yield from (ip for ip in _edges(listed, self._family) if contains(loopback, ip))

    def _networks(self) -> list[str]:
        """Return all networks that plans compare with for every Service: pods, and the node's own addresses."""
        pods = [cidr for plan in self._plans for cidr in plan.pods.cidrs]
        return [*pods, *map(host_network, self._own), self._family.loopback]

    def _sources(self, addresses: Iterable[str]) -> Iterator[_Source]:
        """Yield senders with these addresses, on each relevant kind of interface."""
        for address in dict.fromkeys(addresses):
            if address in self._own or contains(self._family.loopback, address):
                yield self._source(address)
            else:
                yield from (self._source(address, iif) for iif in self._interfaces())

    def _source(self, address: str, iif: str = "") -> _Source:
        """Return a sender on an interface, or on this node."""
        packet = Packet(source=address, destination=address, iif=iif, from_host=not iif)
        return _Source(address, iif, not iif, sender_of(self._plans[0], packet, self._host))

    def _interfaces(self) -> Iterator[str]:
        """Return an interface without pods, and those by which pods are detected."""
        detectors = [plan.pods for plan in self._plans]
        inside = [f"{pods.interface_prefix}0"[:15] if pods.interface_prefix else pods.interface for pods in detectors]
        outside = next(name for name in _UPLINKS if name not in inside and not _begins(name, self._plans))
        return iter(dict.fromkeys((outside, *filter(None, inside))))

    def _holders(self, address: str) -> dict[str, set[str]]:
        """Return the Service ports at an address, by the kind of frontend."""
        found: dict[str, set[str]] = {}
        for atlas in self._atlases:
            for holder in atlas.holders(address):
                for frontend in holder.frontends:
                    if frontend.address == address:
                        found.setdefault(frontend.kind.value, set()).add(str(holder.name))
        return found

    def _free_port(self, address: str) -> int:
        holders = [holder for atlas in self._atlases for holder in atlas.holders(address)]
        taken = {frontend.port for holder in holders for frontend in holder.frontends}
        taken |= {check.port for plan in self._plans for check in plan.health_checks.values()}
        if address in self._own:
            taken = taken.union(*(atlas.node_ports for atlas in self._atlases))
        return next(port for port in range(_PLAIN_PORT, 65536) if port not in taken)

    def _free_address(self, cidr: str) -> str:
        """Return an unused address of a ServiceCIDR; empty if there is none."""
        taken = {*self._own, *(address for atlas in self._atlases for address in atlas.addresses)}
        hosts = (str(ip) for ip in parsed_network(cidr).hosts())
        return next((ip for _, ip in zip(range(len(taken) + 1), hosts, strict=False) if ip not in taken), "")


def _begins(name: str, plans: Iterable[Plan]) -> bool:
    return any(plan.pods.interface_prefix and name.startswith(plan.pods.interface_prefix) for plan in plans)


def _packet(source: _Source, destination: str, port: int, protocol: Protocol) -> Packet:
    return Packet(
        source=source.address,
        destination=destination,
        port=port,
        protocol=protocol,
        iif=source.iif,
        from_host=source.from_host,
    )


def _edges(networks: Iterable[str], family: IPFamily) -> Iterator[str]:
    """Yield addresses so that every set that the networks distinguish contains one, ordinary ones first."""
    nets = [parsed_network(cidr) for cidr in dict.fromkeys(networks) if family_of(cidr.split("/")[0]) is family]
    most = 2**family.host_bits - 1
    for net in nets:
        first, last = int(net.network_address), int(net.broadcast_address)
        for number in (first + 10 if net.num_addresses > 16 else first, first, last + 1):
            if number > most:
                continue
            ip = (ipaddress.IPv4Address if family is IPFamily.IPV4 else ipaddress.IPv6Address)(number)
            if not (ip.is_multicast or ip.is_unspecified or ip.is_reserved):
                yield str(ip)


_Class = tuple[bool, bool, bool]
"""An endpoint as a client of its own Service: on this node, in the cluster pool, in the local pool."""


def _endpoints(services: Iterable[ServicePlan]) -> dict[str, _Class]:
    """Return the addresses of a Service port's endpoints with their classes."""
    found: dict[str, _Class] = {}
    for service in services:
        for number, pool in enumerate((service.cluster, service.local)):
            for endpoint in pool.endpoints if pool else ():
                before = found.get(endpoint.address, (False, False, False))
                found[endpoint.address] = (
                    before[0] or endpoint.local,
                    before[1] or number == 0,
                    before[2] or number == 1,
                )
    return found


def _next(address: str, endpoints: Container[str]) -> str:
    """Return the first address after this one that is no endpoint."""
    ip = ipaddress.ip_address(address)
    while str(ip) in endpoints:
        ip += 1
    return str(ip)


def _ranges(services: Iterable[ServicePlan], frontend: Frontend) -> Iterator[tuple[str, ...] | None]:
    """Yield the source ranges that each plan has for one frontend."""
    for service in services:
        for each in service.frontends:
            if each.match == frontend.match:
                yield each.allow_from


Shape = tuple[object, ...]
K = TypeVar("K")

_ENOUGH = 2
"""Counts are compared as one or several: more than several make no difference that a text could show."""


def shape(
    services: Sequence[ServicePlan], plans: Sequence[Plan], own: Collection[str], clash: Callable[[Frontend], K]
) -> Shape:
    """Return the properties of a Service port in several plans, without names and numbers.

    `own` are the node's addresses; `clash` returns on which of them another Service has the number of a node port.
    """
    ranges = [cidrs for service in services for frontend in service.frontends if (cidrs := frontend.allow_from)]
    ranges += [plan.pods.cidrs for plan in plans]
    return tuple(
        (
            service.name.protocol,
            service.affinity_seconds,
            tuple(_way_in(frontend, own, clash) for frontend in service.frontends),
            _endpoint_kinds(service, ranges, own),
        )
        for service in services
    )


def _way_in(frontend: Frontend, own: Collection[str], clash: Callable[[Frontend], K]) -> Shape:
    where = clash(frontend) if frontend.address is None else frontend.address in own
    return frontend.kind, where, frontend.allow_from, frontend.pod, frontend.node, frontend.other


def _endpoint_kinds(service: ServicePlan, ranges: Sequence[tuple[str, ...]], own: Collection[str]) -> Shape:
    """Count the endpoints of each kind; endpoints of a kind are equal for every plan."""
    held: dict[str, list[tuple[str, bool]]] = {}
    for place, endpoints in _places(service):
        for endpoint in endpoints:
            held.setdefault(endpoint.address, []).append((place, endpoint.local))
    kinds = Counter(
        (tuple(sorted(places)), address in own, tuple(in_any(cidrs, address) for cidrs in ranges))
        for address, places in held.items()
    )
    return tuple(sorted((kind, min(count, _ENOUGH)) for kind, count in kinds.items()))


def _places(service: ServicePlan) -> Iterable[tuple[str, tuple[Endpoint, ...]]]:
    yield "cluster", service.cluster.endpoints if service.cluster else ()
    yield "local", service.local.endpoints if service.local else ()
    yield "serving", service.serving
    yield "not serving", service.not_serving
