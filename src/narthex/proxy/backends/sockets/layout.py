"""The BPF maps of socket load balancing: which there are, and how keys and values are laid out.

For each IP family, numbers in the byte order of the machine unless said otherwise:

| map | key | value |
| --- | --- | --- |
| frontends | address, port (network order), protocol, 0 | action for pods, action for the node, 0, 0, number of the Service port |
| pools | number of the pool | count of its endpoints |
| slots | index, number of the pool | address, port (network order), 0 |
| counts | number of the Service port, endpoint | connections, per processor |
| origins | cookie of the UDP socket, endpoint | frontend |
| peers | cookie of the TCP socket, modulo the size | cookie, endpoint, frontend |
| flows | cookie of the socket, frontend | endpoint, number of the pool, index |
| opens | number of the Service port, endpoint | open connections, for Service ports that ask for the least |
| held | cookie of the socket | key of `opens` in which the socket is counted |
| watched | endpoint | failures reported, `WatchFlag` |

The number of a pool is that of its Service port, times two, plus one for the pool of this node's own endpoints.
A change of the endpoints writes a slot and, if their number changes, the count, however many frontends lead to the pool.

Two maps remember the frontend of a socket. A UDP socket needs it for each datagram, so that a map of the least recently used
keeps it. To add an element to such a map takes longer than the rest of the program. A TCP socket needs its frontend only for
`getpeername`, so that it is in an array, where a newer socket may take its place.
"""

from __future__ import annotations

import enum
import struct
import sys
from collections.abc import Mapping
from socket import AF_INET, AF_INET6, inet_ntop

import msgspec

from narthex.bpf import NO_PREALLOCATION, MapKind, MapSpec
from narthex.model import IPFamily, Protocol
from narthex.proxy.plan.ir import Reject, Scope
from narthex.proxy.plan.sockets import LeftToRules, SocketDecision, SocketForward


class Action(enum.IntEnum):
    """What a program does for one class of senders."""

    LEAVE = 0
    CLUSTER = 1
    LOCAL = 2
    REJECT = 3
    CLUSTER_UNBOUND = 4
    LOCAL_UNBOUND = 5


def action_of(decision: SocketDecision) -> int:
    """Return the action of a decision, with LEAST_CONNECTIONS if the endpoint is chosen like that."""
    match decision:
        case SocketForward(scope, unbound_only, least_connections):
            plain = Action.CLUSTER if scope is Scope.CLUSTER else Action.LOCAL
            return plain + UNBOUND * unbound_only + LEAST_CONNECTIONS * least_connections
        case Reject():
            return Action.REJECT
        case LeftToRules():
            return Action.LEAVE
    raise TypeError(f"{decision!r} is no decision of sockets")


UNBOUND = Action.CLUSTER_UNBOUND - Action.CLUSTER
"""Difference of an action for sockets without a source address from the same action for all sockets."""
LEAST_CONNECTIONS = 8
"""Added to an action that uses a pool: of two endpoints that are drawn, the one with fewer open connections is chosen."""

ADDRESS_SIZES = {IPFamily.IPV4: 4, IPFamily.IPV6: 16}
PROTOCOL_NUMBERS = {Protocol.TCP: 6, Protocol.UDP: 17}

FRONTEND_VALUE = struct.Struct("=BBHI")
COUNT = struct.Struct("=I")
SLOT_KEY = struct.Struct("=II")
"""Index, and number of the pool."""
OPEN_COUNT = struct.Struct("=Q")
WATCHED = struct.Struct("=II")
"""Failures that were reported since the process last wrote the element, and flags."""
_MOST_WATCHED = 1 << 12


class WatchFlag(enum.IntFlag):
    """What is known of an endpoint that connections failed to reach."""

    ON_TRIAL = 1
    """The start of the next connection is reported; the program then clears this."""
    EJECTED = 2
    """It gets no new sockets in some Service port. For those who look at the map; programs don't use it."""


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """How much the maps of a family hold. More needs other maps."""

    services: int = 1 << 13
    frontends: int = 1 << 13
    slots: int = 1 << 16
    sockets: int = 1 << 16
    """Connections of each protocol whose frontend is remembered, a power of two."""

    def at_least(self, services: int, frontends: int, slots: int) -> Capacity:
        """Return this capacity, or one with room for twice as much as is needed."""
        return Capacity(
            services=_room(self.services, services),
            frontends=_room(self.frontends, frontends),
            slots=_room(self.slots, slots),
            sockets=self.sockets,
        )


def _room(held: int, needed: int) -> int:
    return held if needed <= held else 1 << (2 * needed - 1).bit_length()


class FamilyMaps(msgspec.Struct, frozen=True, kw_only=True):
    """The maps of one family."""

    family: IPFamily
    frontends: MapSpec
    pools: MapSpec
    slots: MapSpec
    counts: MapSpec
    origins: MapSpec
    peers: MapSpec
    flows: MapSpec
    opens: MapSpec
    held: MapSpec
    watched: MapSpec

    @property
    def all(self) -> tuple[MapSpec, ...]:
        """Every map."""
        lookups = self.frontends, self.pools, self.slots
        sockets = self.origins, self.peers, self.flows
        return *lookups, self.counts, *sockets, self.opens, self.held, self.watched

    @property
    def place_size(self) -> int:
        """Bytes of an address, a port, and two more."""
        return ADDRESS_SIZES[self.family] + 4


def family_maps(family: IPFamily, capacity: Capacity) -> FamilyMaps:
    """Return the maps of a family."""
    place = ADDRESS_SIZES[family] + 4
    number = "4" if family is IPFamily.IPV4 else "6"

    def spec(name: str, kind: MapKind, key: int, value: int, entries: int, flags: int = 0) -> MapSpec:
        """Return the specification of a map of this family."""
        return MapSpec(
            name=f"nx_{name}{number}", kind=kind, key_size=key, value_size=value, max_entries=entries, flags=flags
        )

    return FamilyMaps(
        family=family,
        frontends=spec("fronts", MapKind.HASH, place, FRONTEND_VALUE.size, capacity.frontends, NO_PREALLOCATION),
        pools=spec("pools", MapKind.ARRAY, 4, COUNT.size, 2 * capacity.services),
        slots=spec("slots", MapKind.HASH, SLOT_KEY.size, place, capacity.slots, NO_PREALLOCATION),
        counts=spec("counts", MapKind.PERCPU_HASH, 4 + place, 8, capacity.slots, NO_PREALLOCATION),
        origins=spec("origins", MapKind.LRU_HASH, 8 + place, place, capacity.sockets),
        peers=spec("peers", MapKind.ARRAY, 4, 8 + 2 * place, capacity.sockets),
        flows=spec("flows", MapKind.LRU_HASH, 8 + place, place + 8, capacity.sockets // 4),
        opens=spec("opens", MapKind.HASH, 4 + place, 8, capacity.slots, NO_PREALLOCATION),
        held=spec("held", MapKind.HASH, 8, 4 + place, capacity.sockets, NO_PREALLOCATION),
        watched=spec("watched", MapKind.HASH, place, WATCHED.size, _MOST_WATCHED, NO_PREALLOCATION),
    )


def pool_number(service: int, scope: Scope) -> int:
    """Return the number of a pool."""
    return 2 * service + (scope is Scope.LOCAL)


def place_of(family: IPFamily, data: bytes) -> tuple[str, int]:
    """Return the address and the port of a value, or of a frontend's key."""
    kind = AF_INET if family is IPFamily.IPV4 else AF_INET6
    return inet_ntop(kind, data[:-4]), int.from_bytes(data[-4:-2], "big")


def counted_endpoint(family: IPFamily, key: bytes) -> tuple[int, str, int]:
    """Return the number of the Service port, and the endpoint's address and port, of a counter's key."""
    return int.from_bytes(key[:4], sys.byteorder), *place_of(family, key[4:])


MapsByFamily = Mapping[IPFamily, FamilyMaps]
