"""The maps of socket load balancing as JSON: frontends, what the programs do for each class of senders, and endpoints."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from socket import AF_INET, AF_INET6, inet_ntop
from typing import Literal

import msgspec

from narthex.model import IPFamily
from narthex.proxy.backends.sockets.layout import (
    FRONTEND_VALUE,
    PROTOCOL_NUMBERS,
    SLOT_KEY,
    UNBOUND,
    Action,
    pool_number,
)
from narthex.proxy.backends.sockets.rows import KernelRows
from narthex.proxy.plan.ir import Scope

_PLACE = struct.Struct(">H")
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


class SocketDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="sockets"):
    """The maps of both families."""

    version: Literal[1] = 1
    frontends: tuple[SocketFrontend, ...] = ()

    def frontend(self, address: str, port: int, protocol: str) -> SocketFrontend | None:
        """Return the frontend with this address and port; `protocol` in any case."""
        place = (address, port, protocol.upper())
        return next((each for each in self.frontends if (each.address, each.port, each.protocol) == place), None)


def socket_document(rows: Mapping[IPFamily, KernelRows]) -> SocketDocument:
    """Return the content of the maps, sorted by address, port, and protocol."""
    found = [each for family, held in rows.items() for each in _frontends(family, held)]
    return SocketDocument(frontends=tuple(sorted(found, key=lambda each: (each.address, each.port, each.protocol))))


def _frontends(family: IPFamily, rows: KernelRows) -> list[SocketFrontend]:
    kind = AF_INET if family is IPFamily.IPV4 else AF_INET6
    slots: dict[int, dict[int, tuple[str, int]]] = {}
    for key, value in rows.slots.items():
        index, pool = SLOT_KEY.unpack(key)
        # Slots behind the count are not used, whatever they have.
        if index < rows.counts.get(pool, 0):
            slots.setdefault(pool, {})[index] = _place(kind, value)
    pools = {pool: tuple(sorted(held.values())) for pool, held in slots.items()}
    found = []
    for key, value in rows.frontends.items():
        pods, node, _, service = FRONTEND_VALUE.unpack(value)
        address, port = _place(kind, key)
        found.append(
            SocketFrontend(
                address=address,
                port=port,
                protocol=_PROTOCOLS[int.from_bytes(key[-2:], "little")],
                pods=_action(pods),
                node=_action(node),
                unbound_only=node >= Action.CLUSTER_UNBOUND,
                cluster=pools.get(pool_number(service, Scope.CLUSTER), ()),
                local=pools.get(pool_number(service, Scope.LOCAL), ()),
            )
        )
    return found


def _action(number: int) -> str:
    return _ACTIONS[Action(number - UNBOUND if number >= Action.CLUSTER_UNBOUND else number)]


def _place(kind: int, data: bytes) -> tuple[str, int]:
    return inet_ntop(kind, data[:-4]), _PLACE.unpack(data[-4:-2])[0]
