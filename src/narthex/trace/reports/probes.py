"""Packets that stand for all others: one for each way in, each class of sender, and all else that `evaluate` looks at.

Sources are found by intervals: among all networks that a plan asks about, each with its first address and the one
behind its last, there is a source in every set of addresses that the plan can tell apart. Those that are alike to every
plan in question are sent once.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from narthex.model.names import ServicePortName
from narthex.model.net import IPFamily, Protocol, contains, family_of, host_network, in_any, parsed_network
from narthex.model.packet import Host, Packet
from narthex.proxy.plan.ir import Endpoint, Forward, Frontend, Match, Plan, Sender, ServicePlan
from narthex.trace.evaluate import answers_node_ports, sender_of

STRANGERS = {IPFamily.IPV4: "198.51.100.7", IPFamily.IPV6: "2001:db8:c::7"}
"""An address outside, of those kept for documentation (RFC 5737, RFC 3849)."""

_UPLINKS = ("eth0", "wan0", "up0")
_PLAIN_PORT = 9
"""Where the search for a port that nobody has begins."""


class SamplePacket(msgspec.Struct, frozen=True, kw_only=True):
    """One packet, and what it stands for in words."""

    service: str
    """The Service port that it is meant for; empty for none."""
    arrival: str
    """The way in: "cluster IP", "node port on the node's primary address", …"""
    sender: Sender
    allowed: bool | None = None
    """Whether all plans' ranges hold the source; None where there are none."""
    itself: bool | None = None
    """The source is an endpoint of the Service port, on this node (True) or another (False); None: it is none."""
    beside: str = ""
    """Whatever else is special about the packet, in words."""
    packet: Packet

    @property
    def source(self) -> str:
        """What counts of the source beside its class, in words; mostly nothing."""
        words = {True: "in its source ranges", False: "in none of its source ranges", None: ""}[self.allowed]
        own = {True: "itself an endpoint, on this node", False: "itself an endpoint, on another node", None: ""}
        return "; ".join(filter(None, (words, own[self.itself], self.beside)))


class _Source(msgspec.Struct, frozen=True):
    """A sender without a destination."""

    address: str
    iif: str
    from_host: bool
    sender: Sender


class FrontendIndex:
    """A plan's frontends by what they match, so that a packet need not be held against all of them."""

    def __init__(self, plan: Plan) -> None:
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
        """The plan with no more Services than could concern the packet; `evaluate` says the same of both."""
        match = packet.destination, packet.protocol, packet.port
        if self._last is None or self._last[0] != match:
            near = [*self._by_address.get(packet.destination, ())]
            near += [owner for key in (match, (None, *match[1:])) if (owner := self._owners.get(key)) is not None]
            self._last = match, msgspec.structs.replace(self.plan, services={each.name: each for each in near})
        return self._last[1]

    def owner(self, match: Match) -> ServicePlan | None:
        """The Service port with a frontend of exactly this match."""
        return self._owners.get(match)

    def holders(self, address: str) -> Sequence[ServicePlan]:
        """The Service ports with a frontend of this address."""
        return self._by_address.get(address, ())

    @property
    def addresses(self) -> Iterable[str]:
        """All addresses that frontends have."""
        return self._by_address

    @property
    def node_ports(self) -> set[int]:
        """The numbers of all node ports."""
        return {port for address, _, port in self._owners if address is None}


class SamplePackets:
    """All packets worth sending at the plans of one node and family: `atlases` of which the first says who is who."""

    def __init__(self, atlases: Sequence[FrontendIndex], host: Host) -> None:
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
        """All Service ports, ordered."""
        return sorted({name for plan in self._plans for name in plan.services}, key=lambda name: name.sort_key)

    def shape(self, name: ServicePortName) -> Shape:
        """What the probes of a Service port are the same for."""
        return shape(self._services(name), self._plans, self._own, self._clashes)

    def of_service(self, name: ServicePortName) -> Iterator[SamplePacket]:
        """What arrives at a Service port's frontends."""
        services = self._services(name)
        for frontend in {frontend.match: frontend for each in services for frontend in each.frontends}.values():
            yield from self._of_frontend(services, frontend)

    def of_returning_clients(self, name: ServicePortName) -> Iterator[tuple[SamplePacket, SamplePacket]]:
        """Two packets of one client each to a Service port with affinity: every way in after every other."""
        service = self._plans[0].services.get(name)
        if service is None or service.affinity_seconds is None:
            return
        ways: dict[str, dict[Sender, SamplePacket]] = {}
        for frontend in service.frontends:
            for probe in self._of_frontend([service], frontend):
                forwarded = isinstance(frontend.decision(probe.sender), Forward) and probe.allowed is not False
                if forwarded and probe.itself is None:
                    ways.setdefault(probe.arrival, {}).setdefault(probe.sender, probe)
        for first in ways.values():
            for second in ways.values():
                yield from ((first[sender], second[sender]) for sender in first if sender in second)

    def places(self) -> Iterator[tuple[Shape, str, str, list[str]]]:
        """All addresses of frontends, ordered: what the probes of one are the same for, the address, what it is, and to
        which Service ports."""
        for address in sorted({address for atlas in self._atlases for address in atlas.addresses}):
            holders = self._holders(address)
            kinds = sorted(holders)
            known = tuple(in_any(plan.service_cidrs, address) for plan in self._plans)
            for kind in kinds:
                yield (kind, *kinds, address in self._own, known), address, kind, sorted(holders[kind])

    def of_place(self, address: str, kind: str) -> Iterator[SamplePacket]:
        """What arrives at a frontend's address and at no frontend."""
        checks = [check.port for plan in self._plans for check in plan.health_checks.values()]
        unknown, check = f"unknown port of the {kind}", "with the number of a health-check node port"
        aims = [(unknown, "", Protocol.TCP, self._free_port(address))]
        aims += [(unknown, check, Protocol.TCP, port) for port in checks[:1]]
        aims.append((f"ping of the {kind}", "", Protocol.ICMP, 0))
        for source in self._senders:
            for arrival, beside, protocol, number in aims:
                packet = _packet(source, address, number, protocol)
                yield SamplePacket(service="", arrival=arrival, sender=source.sender, beside=beside, packet=packet)

    def of_service_cidrs(self) -> Iterator[SamplePacket]:
        """What arrives at addresses that Services may get one day."""
        for cidr in sorted({cidr for plan in self._plans for cidr in plan.service_cidrs}):
            free = self._free_address(cidr)
            for source in self._senders if free else ():
                packet = _packet(source, free, _PLAIN_PORT, Protocol.TCP)
                yield SamplePacket(service="", arrival=f"a free address of {cidr}", sender=source.sender, packet=packet)

    def _services(self, name: ServicePortName) -> list[ServicePlan]:
        return [found for plan in self._plans if (found := plan.services.get(name)) is not None]

    def _clashes(self, frontend: Frontend) -> tuple[bool, ...]:
        """On which own addresses somebody else has a node port's number."""
        return tuple(
            any(atlas.owner((address, frontend.protocol, frontend.port)) for atlas in self._atlases)
            for address in self._own
        )

    def _of_frontend(self, services: Sequence[ServicePlan], frontend: Frontend) -> Iterator[SamplePacket]:
        endpoints = _endpoints(services)
        ranges = list(_ranges(services, frontend))
        networks = dict.fromkeys(cidr for cidrs in ranges for cidr in cidrs or ())
        edges = list(_edges(networks, self._family))
        beside = [_next(ip, endpoints) for ip in (*edges, *self._addresses) if ip in endpoints]
        everybody = [*self._general, *self._sources((*edges, *endpoints, *beside))]
        if frontend.address is not None and frontend.address not in self._own:
            everybody.append(self._made_here(frontend.address))
        for arrival, destination in self._destinations(frontend):
            seen = set()
            # Loopback addresses do not leave a machine, and nobody reaches them from outside.
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
                    beside="bound to that address" if source.address == frontend.address else "",
                    packet=_packet(source, destination, frontend.port, frontend.protocol),
                )

    def _destinations(self, frontend: Frontend) -> Iterator[tuple[str, str]]:
        """Where packets for a frontend go, with words for the way in: for a node port, the kinds of own addresses."""
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
        """All networks that the plans ask about whatever the Service: pods, and the node's own addresses."""
        pods = [cidr for plan in self._plans for cidr in plan.pods.cidrs]
        return [*pods, *map(host_network, self._own), self._family.loopback]

    def _sources(self, addresses: Iterable[str]) -> Iterator[_Source]:
        """Senders with these addresses, on each kind of interface that can matter."""
        for address in dict.fromkeys(addresses):
            own = address in self._own or contains(self._family.loopback, address)
            if own:
                yield self._made_here(address)
                continue
            for iif in self._interfaces():
                packet = Packet(source=address, destination=address, iif=iif)
                yield _Source(address, iif, False, sender_of(self._plans[0], packet, self._host))

    def _made_here(self, address: str) -> _Source:
        packet = Packet(source=address, destination=address, from_host=True)
        return _Source(address, "", True, sender_of(self._plans[0], packet, self._host))

    def _interfaces(self) -> Iterator[str]:
        """One that no pod is behind, and one that pods are behind where that tells them."""
        detectors = [plan.pods for plan in self._plans]
        inside = [f"{pods.interface_prefix}0"[:15] if pods.interface_prefix else pods.interface for pods in detectors]
        outside = next(name for name in _UPLINKS if name not in inside and not _begins(name, self._plans))
        return iter(dict.fromkeys((outside, *filter(None, inside))))

    def _holders(self, address: str) -> dict[str, set[str]]:
        """The Service ports at an address, by what people say it is to them."""
        found: dict[str, set[str]] = {}
        for atlas in self._atlases:
            for holder in atlas.holders(address):
                for frontend in holder.frontends:
                    if frontend.address == address:
                        found.setdefault(frontend.kind.value, set()).add(str(holder.name))
        return found

    def _free_port(self, address: str) -> int:
        taken = {
            frontend.port
            for atlas in self._atlases
            for holder in atlas.holders(address)
            for frontend in holder.frontends
        }
        taken |= {check.port for plan in self._plans for check in plan.health_checks.values()}
        if address in self._own:
            taken = taken.union(*(atlas.node_ports for atlas in self._atlases))
        return next(port for port in range(_PLAIN_PORT, 65536) if port not in taken)

    def _free_address(self, cidr: str) -> str:
        """An address of a ServiceCIDR that nobody has; empty when there is none."""
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
    """Addresses of which one lies in every set that the networks can tell apart, pleasant ones first."""
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
    """The addresses of a Service port's endpoints, and what kind each is."""
    found: dict[str, _Class] = {}
    for service in services:
        for pool, place in ((service.cluster, 1), (service.local, 2)):
            for endpoint in pool.endpoints if pool else ():
                before = found.get(endpoint.address, (False, False, False))
                now = endpoint.local, place == 1, place == 2
                found[endpoint.address] = before[0] or now[0], before[1] or now[1], before[2] or now[2]
    return found


def _next(address: str, endpoints: Container[str]) -> str:
    """The first address behind one that is no endpoint."""
    ip = ipaddress.ip_address(address)
    while str(ip) in endpoints:
        ip += 1
    return str(ip)


def _ranges(services: Iterable[ServicePlan], frontend: Frontend) -> Iterator[tuple[str, ...] | None]:
    """The ranges that each plan has for one frontend."""
    for service in services:
        for each in service.frontends:
            if each.match == frontend.match:
                yield each.allow_from


Shape = tuple[object, ...]
K = TypeVar("K")

_ENOUGH = 2
"""One endpoint of a kind, or several: more than several make no difference that words could tell."""


def shape(
    services: Sequence[ServicePlan], plans: Sequence[Plan], own: Collection[str], clash: Callable[[Frontend], K]
) -> Shape:
    """What a Service port has in several plans, without names and numbers.

    `own` are the node's addresses; `clash` says on which of them somebody else has a node port's number.
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
    """How many endpoints there are of each kind: one that differs in nothing that a plan can ask."""
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
    yield "resting", service.not_serving
