"""The maps of socket load balancing as JSON: frontends, what the programs do for each class of senders, endpoints, counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from narthex.model import IPFamily, family_of
from narthex.proxy.backends.sockets.layout import (
    FRONTEND_VALUE,
    LEAST_CONNECTIONS,
    PROTOCOL_NUMBERS,
    SLOT_KEY,
    UNBOUND,
    Action,
    WatchFlag,
    counted_endpoint,
    place_of,
    pool_number,
)
from narthex.proxy.backends.sockets.rows import KernelRows
from narthex.proxy.plan.ir import Scope

_PROTOCOLS = {number: protocol.value for protocol, number in PROTOCOL_NUMBERS.items()}
_ACTIONS = {Action.LEAVE: "rules", Action.CLUSTER: "cluster", Action.LOCAL: "local", Action.REJECT: "reject"}


class SocketFrontend(msgspec.Struct, frozen=True, kw_only=True):
    """What a socket meets that connects to one address, port, and protocol."""

    address: str
    port: int
    protocol: str
    """`TCP` or `UDP`."""
    pods: str
    """For sockets of pods: `cluster` or `local` (the pool that an endpoint is drawn from), `reject`, or `rules`: left alone."""
    node: str
    """For sockets of the node itself."""
    unbound_only: bool = False
    """The node's sockets are sent to an endpoint only if they have no source address; the rules serve others."""
    cluster: tuple[tuple[str, int], ...] = ()
    """Endpoints of the pool `cluster`."""
    local: tuple[tuple[str, int], ...] = ()
    """Endpoints of the pool `local`: those of this node."""
    empty: int = 0
    """Slots of its pools that have no endpoint. A connection that draws one is left to the rules."""
    number: int = 0
    """Number of the Service port; 0: not known. Frontends of one Service port share pools and counters."""
    least_connections: bool = False
    """Of two endpoints that are drawn, the one with fewer open connections is chosen."""
    cluster_open: tuple[int, ...] = ()
    """With `least_connections`: open connections from this node to each endpoint of `cluster`."""
    local_open: tuple[int, ...] = ()

    @property
    def service(self) -> tuple[IPFamily, int]:
        """The Service port: each IP family has numbers of its own."""
        return family_of(self.address), self.number


class SocketConnections(msgspec.Struct, frozen=True, kw_only=True):
    """How often a connection to a Service port was sent to one endpoint."""

    number: int
    """Number of the Service port."""
    address: str
    port: int
    connections: int

    @property
    def service(self) -> tuple[IPFamily, int]:
        """The Service port, as of its frontends."""
        return family_of(self.address), self.number


class SocketDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="sockets"):
    """The maps of both families."""

    version: Literal[1] = 1
    frontends: tuple[SocketFrontend, ...] = ()
    connections: tuple[SocketConnections, ...] = ()
    ejected: tuple[tuple[str, int], ...] = ()
    """Endpoints that get no new TCP connections from this node's sockets, since connections failed."""
    hooks: tuple[str, ...] | None = None
    """Hooks to which a program is attached, such as `connect4`; None: not known."""

    def runs(self, hook: str) -> bool:
        """Return True if a program is attached to a hook, or if the hooks are not known."""
        return self.hooks is None or hook in self.hooks

    def frontend(self, address: str, port: int, protocol: str) -> SocketFrontend | None:
        """Return the frontend with this address and port; `protocol` in any case."""
        place = (address, port, protocol.upper())
        return next((each for each in self.frontends if (each.address, each.port, each.protocol) == place), None)

    def ejected_of(self, frontend: SocketFrontend) -> tuple[tuple[str, int], ...]:
        """Return the ejected endpoints that the Service port has sent connections to."""
        if not self.ejected or frontend.protocol != "TCP":
            return ()
        known = {(each.address, each.port) for each in self.connections if each.service == frontend.service}
        return tuple(each for each in self.ejected if each in known)


class PinnedSockets(msgspec.Struct, frozen=True, kw_only=True):
    """What is pinned for a node: the content of its maps, and the hooks of its programs."""

    rows: Mapping[IPFamily, KernelRows] = {}
    connections: Mapping[IPFamily, Mapping[bytes, int]] = {}
    """By the key of the counter."""
    opens: Mapping[IPFamily, Mapping[bytes, int]] = {}
    """Open connections where they are counted, likewise."""
    watched: Mapping[IPFamily, Mapping[bytes, int]] = {}
    """`WatchFlag` of endpoints that connections failed to reach."""
    hooks: tuple[str, ...] | None = None

    def __bool__(self) -> bool:
        return bool(self.rows)


def socket_document(pinned: PinnedSockets) -> SocketDocument:
    """Return the content of the maps, sorted by address, port, and protocol."""
    found = [
        each for family, held in pinned.rows.items() for each in _frontends(family, held, pinned.opens.get(family, {}))
    ]
    counted = [
        _connections(family, key, count) for family, held in pinned.connections.items() for key, count in held.items()
    ]
    ejected = [
        place_of(family, place)
        for family, held in pinned.watched.items()
        for place, flags in held.items()
        if flags & WatchFlag.EJECTED
    ]
    return SocketDocument(
        frontends=tuple(sorted(found, key=lambda each: (each.address, each.port, each.protocol))),
        connections=tuple(sorted(counted, key=lambda each: (each.number, each.address, each.port))),
        ejected=tuple(sorted(ejected)),
        hooks=pinned.hooks,
    )


def _connections(family: IPFamily, key: bytes, count: int) -> SocketConnections:
    number, address, port = counted_endpoint(family, key)
    return SocketConnections(number=number, address=address, port=port, connections=count)


def _frontends(family: IPFamily, rows: KernelRows, opens: Mapping[bytes, int]) -> list[SocketFrontend]:
    slots: dict[int, dict[int, tuple[str, int]]] = {}
    for key, value in rows.slots.items():
        index, pool = SLOT_KEY.unpack(key)
        # Slots behind the count are not used, whatever they have.
        if index < rows.counts.get(pool, 0):
            slots.setdefault(pool, {})[index] = place_of(family, value)
    pools = {pool: tuple(sorted(held.values())) for pool, held in slots.items()}
    found = []
    for key, value in rows.frontends.items():
        pods, node, _, service = FRONTEND_VALUE.unpack(value)
        address, port = place_of(family, key)
        numbers = [pool_number(service, scope) for scope in (Scope.CLUSTER, Scope.LOCAL)]
        cluster, local = (pools.get(each, ()) for each in numbers)
        least = max(pods, node) >= LEAST_CONNECTIONS
        found.append(
            SocketFrontend(
                address=address,
                port=port,
                protocol=_PROTOCOLS[int.from_bytes(key[-2:], "little")],
                pods=_action(pods),
                node=_action(node),
                unbound_only=node % LEAST_CONNECTIONS >= Action.CLUSTER_UNBOUND,
                cluster=cluster,
                local=local,
                empty=sum(rows.counts.get(each, 0) for each in numbers) - len(cluster) - len(local),
                number=service,
                least_connections=least,
                cluster_open=_open(family, service, cluster, opens) if least else (),
                local_open=_open(family, service, local, opens) if least else (),
            )
        )
    return found


def _open(
    family: IPFamily, service: int, endpoints: tuple[tuple[str, int], ...], opens: Mapping[bytes, int]
) -> tuple[int, ...]:
    """Return the open connections to each endpoint."""
    counts = {counted_endpoint(family, key): count for key, count in opens.items()}
    return tuple([counts.get((service, *endpoint), 0) for endpoint in endpoints])


def _action(number: int) -> str:
    number %= LEAST_CONNECTIONS
    return _ACTIONS[Action(number - UNBOUND if number >= Action.CLUSTER_UNBOUND else number)]
