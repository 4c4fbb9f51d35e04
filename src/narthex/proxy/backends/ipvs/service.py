"""The virtual servers and set entries of one Service port."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from narthex.model import Protocol, in_any, is_zero_prefix, parsed_network
from narthex.netfilter.ipvs import RealServer, ServerKey, VirtualServer
from narthex.proxy.backends.ipvs import names
from narthex.proxy.backends.ipvs.frame import Mask
from narthex.proxy.plan.ir import Balancing, Drop, Forward, Frontend, FrontendKind, Plan, ServicePlan

SetEntry = tuple[str, str]
"""A set by its IPv4 name, and an entry of it in the format of `ipset save`."""


class IpvsServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What every virtual server depends on in addition to its Service."""

    scheduler: str
    node_ports: tuple[str, ...]
    """The addresses of the node at which node ports answer."""
    node_addresses: frozenset[str]
    """All addresses of the node: never bound a second time."""
    lacking: frozenset[str] = frozenset()
    """Schedulers that Services may request and the kernel does not have."""


def settings_of(plan: Plan, scheduler: str, lacking: frozenset[str] = frozenset()) -> IpvsServerSettings:
    """Return the settings of a plan."""
    cidrs = plan.node_ports.cidrs
    answering = tuple(ip for ip in plan.node_addresses if cidrs is None or in_any(cidrs, ip))
    return IpvsServerSettings(
        scheduler=scheduler, node_ports=answering, node_addresses=frozenset(plan.node_addresses), lacking=lacking
    )


class PlacedServer(msgspec.Struct, frozen=True, kw_only=True):
    """A virtual server at one address, and the set entries for its address and port."""

    server: VirtualServer
    entries: tuple[SetEntry, ...]


class IpvsFragment(msgspec.Struct, frozen=True, kw_only=True):
    """All objects of one Service port."""

    service: ServicePlan
    exact: Mapping[ServerKey, PlacedServer]
    """At the addresses of frontends."""
    node: Mapping[ServerKey, PlacedServer]
    """At the node's own addresses; an exact address of any Service takes precedence."""
    entries: frozenset[SetEntry]
    """Entries without a single address and port: node port numbers, endpoints of this node, addresses to bind."""
    mask: Mask | None
    """How the ClusterIP is masqueraded; None if it forwards nothing."""


def fragment(service: ServicePlan, settings: IpvsServerSettings) -> IpvsFragment:
    """Return the virtual servers and entries of a Service port."""
    exact: dict[ServerKey, PlacedServer] = {}
    node: dict[ServerKey, PlacedServer] = {}
    entries: set[SetEntry] = set(_loop_back(service))
    mask: Mask | None = None
    for frontend in service.frontends:
        server = _server(service, frontend, settings)
        if frontend.address is not None:
            way = _way(server, frontend, frontend.address)
            exact[way.server.key] = way
            if frontend.address not in settings.node_addresses:
                entries.add((names.IPVS_IPS, frontend.address))
        else:
            ways = [_way(server, frontend, address) for address in settings.node_ports]
            node.update((way.server.key, way) for way in ways)
            entries.update(_node_port(frontend) if ways else ())
        if frontend.kind is FrontendKind.CLUSTER_IP and isinstance(frontend.pod, Forward):
            mask = _mask(frontend)
    return IpvsFragment(service=service, exact=exact, node=node, entries=frozenset(entries), mask=mask)


SCHEDULERS = {Balancing.MAGLEV: "mh", Balancing.LEAST_CONNECTIONS: "lc"}
"""By request. The scheduler lc compares all endpoints, not two."""


def _server(service: ServicePlan, frontend: Frontend, settings: IpvsServerSettings) -> VirtualServer:
    """Return the virtual server of a frontend, without an address."""
    requested = SCHEDULERS.get(service.balancing)
    if requested in settings.lacking:
        requested = None
    return VirtualServer(
        address="",
        protocol=frontend.protocol,
        port=frontend.port,
        scheduler=requested or settings.scheduler,
        persistence_seconds=service.affinity_seconds,
        # A request is for clients, not for connections.
        hash_ports=requested is None and settings.scheduler == "mh",
        reals=_reals(service, frontend),
    )


def _reals(service: ServicePlan, frontend: Frontend) -> tuple[RealServer, ...]:
    """Return the pool for others, else the pool for pods and this node.

    IPVS has one pool per address (row 7.9). Without a pool, IPVS refuses (row 13.8).
    """
    cells = (frontend.other, frontend.pod, frontend.node)
    scope = next((cell.scope for cell in cells if isinstance(cell, Forward)), None)
    if scope is None:
        return ()
    # Pools are sorted as real servers are.
    return tuple(RealServer(endpoint.address, endpoint.port) for endpoint in service.pool(scope).endpoints)


def _way(server: VirtualServer, frontend: Frontend, address: str) -> PlacedServer:
    placed = msgspec.structs.replace(server, address=address)
    return PlacedServer(server=placed, entries=tuple(_entries(frontend, address)))


_SETS = {
    FrontendKind.CLUSTER_IP: (names.CLUSTER_IP,),
    FrontendKind.EXTERNAL_IP: (names.EXTERNAL_IP,),
    FrontendKind.LOAD_BALANCER: (names.LOAD_BALANCER_IP,),
    FrontendKind.NODE_PORT: (),
}
_LOCAL_SETS = {
    **_SETS,
    FrontendKind.EXTERNAL_IP: (names.EXTERNAL_IP_LOCAL,),
    FrontendKind.LOAD_BALANCER: (names.LOAD_BALANCER_IP, names.LOAD_BALANCER_IP_LOCAL),
}
_NODE_PORTS = {
    Protocol.TCP: (names.NODE_PORT_TCP, names.NODE_PORT_LOCAL_TCP),
    Protocol.UDP: (names.NODE_PORT_UDP, names.NODE_PORT_LOCAL_UDP),
}


def _entries(frontend: Frontend, address: str) -> Iterator[SetEntry]:
    at = f"{address},{frontend.protocol.lower}:{frontend.port}"
    local = _keeps_sources(frontend)
    for name in (_LOCAL_SETS if local else _SETS)[frontend.kind]:
        yield name, at
    if frontend.kind is FrontendKind.NODE_PORT and frontend.protocol is Protocol.SCTP:
        yield names.NODE_PORT_SCTP, at
        if local:
            yield names.NODE_PORT_LOCAL_SCTP, at
    if frontend.allow_from is not None:
        yield names.LOAD_BALANCER_IP_FW, at
        yield from _allowed(at, frontend.allow_from)
    cells = (frontend.pod, names.DROP_POD), (frontend.node, names.DROP_NODE), (frontend.other, names.DROP_OTHER)
    for cell, name in cells:
        if isinstance(cell, Drop):
            yield name, at


def _keeps_sources(frontend: Frontend) -> bool:
    """Return True for a Local policy: all connections but this node's own keep their source."""
    return isinstance(frontend.pod, Forward) and not frontend.pod.masquerade


def _allowed(at: str, networks: Iterable[str]) -> Iterator[SetEntry]:
    for cidr in networks:
        base, _, length = cidr.partition("/")
        if length == ("128" if ":" in cidr else "32"):
            yield names.LOAD_BALANCER_IP_SOURCE_IP, f"{at},{base}"
        elif is_zero_prefix(cidr):
            # Such a set holds no network of everything.
            for half in parsed_network(cidr).subnets():
                yield names.LOAD_BALANCER_IP_SOURCE_CIDR, f"{at},{half}"
        else:
            yield names.LOAD_BALANCER_IP_SOURCE_CIDR, f"{at},{cidr}"


def _node_port(frontend: Frontend) -> Iterator[SetEntry]:
    """Yield the number for the sets without addresses; there is none for SCTP."""
    if frontend.protocol in _NODE_PORTS:
        every, local = _NODE_PORTS[frontend.protocol]
        yield every, str(frontend.port)
        if _keeps_sources(frontend):
            yield local, str(frontend.port)


def _loop_back(service: ServicePlan) -> Iterator[SetEntry]:
    """Yield this node's endpoints, which may be selected for their own connections (row 12.4)."""
    protocol = service.name.protocol.lower
    for pool in service.pools.values():
        for endpoint in pool.endpoints:
            if endpoint.local:
                yield names.LOOP_BACK, f"{endpoint.address},{protocol}:{endpoint.port},{endpoint.address}"


def _mask(frontend: Frontend) -> Mask:
    cells = (frontend.pod, frontend.node, frontend.other)
    pod, node, other = (isinstance(cell, Forward) and cell.masquerade for cell in cells)
    return pod, node, other
