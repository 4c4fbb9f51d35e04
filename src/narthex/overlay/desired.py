"""What the kernel of a node must have so that its pods reach the others': devices, entries and routes, as data.

The forms are flannel's, entry by entry: on each node one address per peer's subnet (the subnet's first) stands for the
peer, resolves to the hardware address of its vxlan device, and that leads to its public address.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from narthex.model.kernel_setting import KernelSetting
from narthex.model.net import IPFamily, contains, parsed_network
from narthex.overlay.net_conf import VXLAN, NetConf
from narthex.overlay.peers import OverlayPeer

OVERHEAD = {IPFamily.IPV4: 50, IPFamily.IPV6: 70}
"""Bytes that vxlan puts around a pod's packet, by the family between the nodes: Ethernet 14, vxlan 8, UDP 8, IP 20 or 40.
flannel counts 50 for both, which leaves IPv6 packets of full size too long for the link."""


class ExternalInterface(msgspec.Struct, frozen=True, kw_only=True):
    """The link between the nodes, in one family."""

    link: str
    index: int
    address: str
    mtu: int


class VxlanDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A vxlan device."""

    name: str
    family: IPFamily
    vni: int
    port: int
    local: str
    link: int
    """Index of the link between the nodes."""
    learning: bool
    gbp: bool
    mac: str
    mtu: int
    address: str
    """The one of the pod networks that is on it, without a prefix."""


class OverlayNeighbor(msgspec.Struct, frozen=True):
    """Who has an address behind a device."""

    device: str
    address: str
    mac: str


class OverlayFdbEntry(msgspec.Struct, frozen=True):
    """Where a hardware address is: an entry of the device's forwarding table (FDB)."""

    device: str
    mac: str
    via: str


class OverlayRoute(msgspec.Struct, frozen=True):
    """The way to a subnet."""

    destination: str
    via: str
    device: str
    onlink: bool = False


class DesiredState(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    devices: tuple[VxlanDevice, ...] = ()
    neighbours: frozenset[OverlayNeighbor] = frozenset()
    forwards: frozenset[OverlayFdbEntry] = frozenset()
    routes: frozenset[OverlayRoute] = frozenset()
    settings: tuple[KernelSetting, ...] = ()
    """Kernel settings."""


class KernelRoute(msgspec.Struct, frozen=True):
    """A route that is not the overlay's: where packets go, and whether straight."""

    destination: str
    via: str
    link: int


def device_name(family: IPFamily, vni: int) -> str:
    """The name of a vxlan device."""
    return f"flannel.{vni}" if family is IPFamily.IPV4 else f"flannel-v6.{vni}"


def gateway_of(subnet: str) -> str:
    """The address that stands for a node: its subnet's first."""
    return str(parsed_network(subnet).network_address)


def pod_mtu(conf: NetConf, outers: Mapping[IPFamily, ExternalInterface]) -> int:
    """The longest packet that pods may send, of any family. Raises ValueError when the link is too narrow."""
    return min(_inner_mtu(conf, family, outer) for family, outer in outers.items())


def _inner_mtu(conf: NetConf, family: IPFamily, outer: ExternalInterface) -> int:
    if conf.backend.type != VXLAN:
        return outer.mtu
    found = (conf.backend.mtu or outer.mtu) - OVERHEAD[family]
    least = 68 if family is IPFamily.IPV4 else 1280
    if found < least:
        raise ValueError(
            f"interface {outer.link} takes packets of {outer.mtu} bytes: too few for {family.label} in vxlan"
        )
    return found


def is_on_link(address: str, ways: Iterable[KernelRoute], link: int) -> bool:
    """Whether an address is reached over the link without a router."""
    best: KernelRoute | None = None
    for way in ways:
        if contains(way.destination, address) and (best is None or _length(way) > _length(best)):
            best = way
    return best is not None and best.link == link and not best.via


def _length(way: KernelRoute) -> int:
    return int(way.destination.rpartition("/")[2])


def desired_state(
    conf: NetConf,
    subnets: Mapping[IPFamily, str],
    peers: Iterable[OverlayPeer],
    outers: Mapping[IPFamily, ExternalInterface],
    macs: Mapping[IPFamily, str],
    ways: Iterable[KernelRoute],
) -> tuple[DesiredState, tuple[str, ...]]:
    """What this node must have, and what is wrong with peers that cannot be reached. Raises ValueError when the link
    cannot carry the overlay.

    `subnets`, `outers` and `macs` (of the vxlan devices) are this node's own, by family; `ways` are its other routes.
    """
    backend, ways = conf.backend, tuple(ways)
    devices = []
    if backend.type == VXLAN:
        for family, outer in outers.items():
            devices.append(
                VxlanDevice(
                    name=device_name(family, backend.vni),
                    family=family,
                    vni=backend.vni,
                    port=backend.port,
                    local=outer.address,
                    link=outer.index,
                    learning=backend.learning,
                    gbp=backend.gbp,
                    mac=macs[family],
                    mtu=_inner_mtu(conf, family, outer),
                    address=gateway_of(subnets[family]),
                )
            )
    neighbours, forwards, routes, problems = set(), set(), set(), []
    for peer in peers:
        outer = outers[peer.family]
        direct = backend.type != VXLAN or backend.direct_routing
        if direct and is_on_link(peer.public_ip, ways, outer.index):
            routes.add(OverlayRoute(peer.subnet, peer.public_ip, outer.link))
        elif backend.type == VXLAN:
            name, gateway = device_name(peer.family, backend.vni), gateway_of(peer.subnet)
            neighbours.add(OverlayNeighbor(name, gateway, peer.mac))
            forwards.add(OverlayFdbEntry(name, peer.mac, peer.public_ip))
            routes.add(OverlayRoute(peer.subnet, gateway, name, onlink=True))
        else:
            problems.append(
                f"node {peer.node}: {peer.public_ip} is not reached straight over {outer.link}: host-gw needs all nodes on "
                "one link without a router or NAT between them; use the backend vxlan"
            )
    made = DesiredState(
        devices=tuple(devices),
        neighbours=frozenset(neighbours),
        forwards=frozenset(forwards),
        routes=frozenset(routes),
        settings=tuple(_settings(outers, devices)),
    )
    return made, tuple(problems)


def _settings(families: Iterable[IPFamily], devices: Iterable[VxlanDevice]) -> Iterable[KernelSetting]:
    why = "the overlay"
    if IPFamily.IPV4 in families:
        yield KernelSetting("net/ipv4/ip_forward", 1, why)
    if IPFamily.IPV6 in families:
        yield KernelSetting("net/ipv6/conf/all/forwarding", 1, why)
    for device in devices:
        if device.family is IPFamily.IPV6:
            # Routers of the pods' making must not give this node routes. ("/" stands for the "." of a name.)
            yield KernelSetting(f"net/ipv6/conf/{device.name}/accept_ra", 0, why)
