"""Changes from the current to the desired kernel state: as few as possible, in an order that never misroutes packets.

Everything on our own devices is ours. Of other routes, only those that we added and that are unchanged since: `made` has
them, and the caller persists it across restarts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import TypeVar

import msgspec

from narthex.model import IPFamily, contains
from narthex.overlay.desired import (
    DesiredState,
    OverlayFdbEntry,
    OverlayNeighbor,
    OverlayRoute,
    VxlanDevice,
    gateway_of,
)
from narthex.overlay.net_conf import VXLAN
from narthex.overlay.peers import within


class ObservedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A link with the name of one of our devices, as the kernel has it."""

    name: str
    index: int
    kind: str
    up: bool
    mac: str
    mtu: int
    vni: int = 0
    port: int = 0
    local: str = ""
    link: int = 0
    learning: bool = False
    gbp: bool = False
    addresses: tuple[str, ...] = ()
    """Addresses of global scope, with prefix length."""


class OverlayState(msgspec.Struct, frozen=True, kw_only=True):
    """The current kernel state."""

    devices: Mapping[str, ObservedDevice] = {}
    neighbours: frozenset[OverlayNeighbor] = frozenset()
    """Permanent neighbor entries on our devices."""
    forwards: frozenset[OverlayFdbEntry] = frozenset()
    """Permanent FDB entries of our devices that point to another machine."""
    routes: frozenset[OverlayRoute] = frozenset()
    """All routes of the main table with a named link, including those of other programs."""


class DeleteDevice(msgspec.Struct, frozen=True):
    """Delete a link with everything on it."""

    name: str
    why: str


class AddDevice(msgspec.Struct, frozen=True):
    """Add a VXLAN device and set it up."""

    device: VxlanDevice


class SetDevice(msgspec.Struct, frozen=True):
    """Set the MAC address and MTU of a device, and set it up."""

    device: VxlanDevice


class AddDeviceAddress(msgspec.Struct, frozen=True):
    """Add an address to a device."""

    device: str
    address: str


class RemoveDeviceAddress(msgspec.Struct, frozen=True):
    """Remove an address from a device."""

    device: str
    address: str


class PutEntry(msgspec.Struct, frozen=True):
    """Add or replace an entry."""

    entry: OverlayNeighbor | OverlayFdbEntry | OverlayRoute


class RemoveEntry(msgspec.Struct, frozen=True):
    """Remove an entry."""

    entry: OverlayNeighbor | OverlayFdbEntry | OverlayRoute


_Entry = TypeVar("_Entry", OverlayNeighbor, OverlayFdbEntry, OverlayRoute)

OverlayChange = DeleteDevice | AddDevice | SetDevice | AddDeviceAddress | RemoveDeviceAddress | PutEntry | RemoveEntry


def plan_changes(
    desired: DesiredState, current: OverlayState, networks: Iterable[str], made: frozenset[OverlayRoute]
) -> tuple[OverlayChange, ...]:
    """Return the ordered changes. `networks` are the Pod networks; `made` are our routes over other links.

    VXLAN devices of a previous configuration, which `current` has and `desired` has not, are deleted.
    """
    networks = tuple(networks)
    steps, fresh = _device_changes(desired.devices, current.devices, networks)
    ours = {device.name for device in desired.devices}
    destinations = {route.destination for route in desired.routes}
    stale_routes = [
        route
        for route in current.routes
        if route.device not in fresh
        and (
            route in made
            or (route.device in ours and route.onlink and any(within(route.destination, one) for one in networks))
        )
        and route.destination not in destinations
    ]
    steps += map(RemoveEntry, sorted(stale_routes, key=str))
    steps += map(PutEntry, _missing(desired.neighbours, current.neighbours, fresh))
    steps += map(PutEntry, _missing(desired.forwards, current.forwards, fresh))
    # Routes come last, so that no packet is routed before its neighbor and FDB entries exist.
    steps += _route_changes(desired.routes, current.routes, fresh)
    places = {(one.device, one.address) for one in desired.neighbours}
    macs = {(one.device, one.mac) for one in desired.forwards}
    stale: list[OverlayNeighbor | OverlayFdbEntry] = [
        one for one in current.neighbours if one.device in ours - fresh and (one.device, one.address) not in places
    ]
    stale += [one for one in current.forwards if one.device in ours - fresh and (one.device, one.mac) not in macs]
    steps += map(RemoveEntry, sorted(stale, key=str))
    left = (held.name for held in current.devices.values() if held.kind == VXLAN and held.name not in ours)
    # After the routes that replace those through them.
    steps += (DeleteDevice(name, "it is of a previous configuration") for name in sorted(left))
    return tuple(steps)


def incompatible(device: VxlanDevice, held: ObservedDevice) -> str:
    """Return why a link cannot be changed into the device; empty if it can."""
    if held.kind != "vxlan":
        return f"it is of kind {held.kind or 'unknown'}, not vxlan"
    for name, here, there in (
        ("VNI", device.vni, held.vni),
        ("port", device.port, held.port),
        ("local address", device.local, held.local),
        ("link", device.link, held.link),
        ("learning", device.learning, held.learning),
        ("GBP", device.gbp, held.gbp),
    ):
        if here != there:
            return f"its {name} is {there}, not {here}"
    return ""


def retained_device(held: ObservedDevice, family: IPFamily, subnet: str) -> VxlanDevice:
    """Return a device of a previous configuration as one that stays as it is; `subnet` is this node's."""
    return VxlanDevice(
        name=held.name,
        family=family,
        vni=held.vni,
        port=held.port,
        local=held.local,
        link=held.link,
        learning=held.learning,
        gbp=held.gbp,
        mac=held.mac,
        mtu=held.mtu,
        address=gateway_of(subnet),
    )


def own_address(device: VxlanDevice) -> str:
    """Return the address of a device with a host prefix, so that it adds no connected route."""
    return f"{device.address}/{device.family.host_bits}"


def _addresses(device: VxlanDevice, held: ObservedDevice, networks: tuple[str, ...]) -> list[OverlayChange]:
    own = own_address(device)
    steps: list[OverlayChange] = [
        RemoveDeviceAddress(device.name, one)
        for one in held.addresses
        if one != own and any(contains(network, one.partition("/")[0]) for network in networks)
    ]
    return [*steps, *([] if own in held.addresses else [AddDeviceAddress(device.name, own)])]


def _device_changes(
    desired: Sequence[VxlanDevice], current: Mapping[str, ObservedDevice], networks: tuple[str, ...]
) -> tuple[list[OverlayChange], set[str]]:
    """Return the changes of devices and their addresses, and the names of devices that are new and so have nothing on them."""
    steps: list[OverlayChange] = []
    fresh = set()
    for device in desired:
        held = current.get(device.name)
        why = incompatible(device, held) if held is not None else ""
        if held is not None and not why:
            if (held.mac, held.mtu, held.up) != (device.mac, device.mtu, True):
                steps.append(SetDevice(device))
            steps += _addresses(device, held, networks)
            continue
        if why:
            steps.append(DeleteDevice(device.name, why))
        fresh.add(device.name)
        steps += [AddDevice(device), AddDeviceAddress(device.name, own_address(device))]
    return steps, fresh


def _route_changes(
    desired: frozenset[OverlayRoute], current: frozenset[OverlayRoute], fresh: set[str]
) -> Iterator[OverlayChange]:
    links: dict[str, set[str]] = {}
    for route in current:
        links.setdefault(route.destination, set()).add(route.device)
    for route in _missing(desired, current, fresh):
        yield from _put_route(route, links.get(route.destination, set()) - {route.device})


def _put_route(route: OverlayRoute, others: Set[str]) -> tuple[OverlayChange, ...]:
    """Return the changes that put a route without losing a packet. `others` are other links that lead to its destination.

    The kernel refuses an IPv6 gateway that another device leads to, even for a route onlink. A peer that returns from host-gw to
    vxlan has its gateway in the subnet itself, so the gateway gets a route of its own for the moment.
    """
    if not others or not route.onlink or ":" not in route.via:
        return (PutEntry(route),)
    gateway = OverlayRoute(f"{route.via}/128", "", route.device)
    return PutEntry(gateway), PutEntry(route), RemoveEntry(gateway)


def _missing(desired: frozenset[_Entry], current: frozenset[_Entry], fresh: set[str]) -> list[_Entry]:
    return sorted((one for one in desired if one not in current or one.device in fresh), key=str)
