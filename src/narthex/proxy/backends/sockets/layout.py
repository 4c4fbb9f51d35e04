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

PIN_DIRECTORY = "/sys/fs/bpf/narthex"
"""Where maps, programs, and links are pinned, in a directory for each network namespace."""


class Action(enum.IntEnum):
    """What a program does for one class of senders."""

    LEAVE = 0
    CLUSTER = 1
    LOCAL = 2
    REJECT = 3
    CLUSTER_UNBOUND = 4
    LOCAL_UNBOUND = 5


def action_of(decision: SocketDecision) -> Action:
    """Return the action of a decision."""
    match decision:
        case SocketForward(scope, unbound_only):
            plain = Action.CLUSTER if scope is Scope.CLUSTER else Action.LOCAL
            return Action(plain + UNBOUND) if unbound_only else plain
        case Reject():
            return Action.REJECT
        case LeftToRules():
            return Action.LEAVE
    raise TypeError(f"{decision!r} is no decision of sockets")


UNBOUND = Action.CLUSTER_UNBOUND - Action.CLUSTER
"""Difference of an action for sockets without a source address from the same action for all sockets."""

ADDRESS_SIZES = {IPFamily.IPV4: 4, IPFamily.IPV6: 16}
PROTOCOL_NUMBERS = {Protocol.TCP: 6, Protocol.UDP: 17}

FRONTEND_VALUE = struct.Struct("=BBHI")
COUNT = struct.Struct("=I")
SLOT_KEY = struct.Struct("=II")
"""Index, and number of the pool."""


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

    @property
    def all(self) -> tuple[MapSpec, ...]:
        """Every map."""
        return self.frontends, self.pools, self.slots, self.counts, self.origins, self.peers, self.flows

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
