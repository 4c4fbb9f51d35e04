"""The desired kernel state that lets Pods reach the Pods of other nodes: devices, entries, and routes.

The structure is flannel's: for each peer, the first address of its subnet is the next hop, resolves to the MAC address of
its VXLAN device, and the FDB maps that to its public address.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from narthex.model import IPFamily, contains, parsed_network
from narthex.model.kernel_setting import KernelSetting
from narthex.overlay.net_conf import VXLAN, NetConf
from narthex.overlay.peers import OverlayPeer

OVERHEAD = {IPFamily.IPV4: 50, IPFamily.IPV6: 70}
"""VXLAN overhead in bytes by underlay family: Ethernet 14, VXLAN 8, UDP 8, IP 20 or 40.

flannel subtracts 50 for both, so full-size IPv6 packets do not fit the link.
"""


class ExternalInterface(msgspec.Struct, frozen=True, kw_only=True):
    """The link between the nodes, in one IP family."""

    link: str
    index: int
    address: str
    mtu: int


class VxlanDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A VXLAN device."""

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
    """Its address within the Pod network, without prefix."""


class OverlayNeighbor(msgspec.Struct, frozen=True):
    """A neighbor entry (ARP, NDP) of a device."""

    device: str
    address: str
    mac: str


class OverlayFdbEntry(msgspec.Struct, frozen=True):
    """An entry of the device's forwarding database (FDB)."""

    device: str
    mac: str
    via: str


class OverlayRoute(msgspec.Struct, frozen=True):
    """A route to the subnet of a peer."""

    destination: str
    via: str
    device: str
    onlink: bool = False


class DesiredState(msgspec.Struct, frozen=True, kw_only=True):
    """The complete desired state."""

    devices: tuple[VxlanDevice, ...] = ()
    neighbours: frozenset[OverlayNeighbor] = frozenset()
    forwards: frozenset[OverlayFdbEntry] = frozenset()
    routes: frozenset[OverlayRoute] = frozenset()
    settings: tuple[KernelSetting, ...] = ()


class KernelRoute(msgspec.Struct, frozen=True):
    """A route that the overlay did not add."""

    destination: str
    via: str
    link: int


def device_name(family: IPFamily, vni: int) -> str:
    """Return the name of a VXLAN device."""
    return f"flannel.{vni}" if family is IPFamily.IPV4 else f"flannel-v6.{vni}"


def family_of_device(name: str) -> IPFamily | None:
    """Return the IP family of a VXLAN device of any VNI by its name; None for other links."""
    begin, _, vni = name.partition(".")
    family = {"flannel": IPFamily.IPV4, "flannel-v6": IPFamily.IPV6}.get(begin)
    return family if vni.isascii() and vni.isdigit() else None


def gateway_of(subnet: str) -> str:
    """Return the next hop for a node: the first address of its subnet."""
    return str(parsed_network(subnet).network_address)


def pod_mtu(conf: NetConf, external: Mapping[IPFamily, ExternalInterface]) -> int:
    """Return the MTU for Pods of all families. Raises ValueError if the MTU of the link is too small."""
    return min(_inner_mtu(conf, family, interface) for family, interface in external.items())


def _inner_mtu(conf: NetConf, family: IPFamily, interface: ExternalInterface) -> int:
    if conf.backend.type != VXLAN:
        return interface.mtu
    found = (conf.backend.mtu or interface.mtu) - OVERHEAD[family]
    least = 68 if family is IPFamily.IPV4 else 1280
    if found < least:
        raise ValueError(
            f"interface {interface.link} takes packets of {interface.mtu} bytes: too few for {family.label} in vxlan"
        )
    return found


def is_on_link(address: str, kernel_routes: Iterable[KernelRoute], link: int) -> bool:
    """Return True if an address is reached over the link without a router."""
    matching = (route for route in kernel_routes if contains(route.destination, address))
    best = max(matching, key=lambda route: int(route.destination.rpartition("/")[2]), default=None)
    return best is not None and best.link == link and not best.via


def desired_state(
    conf: NetConf,
    subnets: Mapping[IPFamily, str],
    peers: Iterable[OverlayPeer],
    external: Mapping[IPFamily, ExternalInterface],
    macs: Mapping[IPFamily, str],
    kernel_routes: Iterable[KernelRoute],
    retained: Iterable[VxlanDevice] = (),
) -> tuple[DesiredState, tuple[str, ...]]:
    """Return the desired state, and the problems of peers that cannot be reached.

    `subnets`, `external`, and `macs` (of the VXLAN devices) are those of this node, by family; `kernel_routes` are its other
    routes. `retained` are devices of a previous configuration through which other nodes still send: packets to a peer that
    published vxlan take them until it publishes another backend. Raises ValueError if the link cannot carry the overlay.
    """
    backend, kernel_routes = conf.backend, tuple(kernel_routes)
    devices = (*(_devices(conf, subnets, external, macs) if backend.type == VXLAN else ()), *retained)
    tunnels = {device.family: device.name for device in reversed(devices)}
    neighbours, forwards, routes, problems = set(), set(), set(), []
    for peer in peers:
        interface = external[peer.family]
        # Any node forwards packets that arrive without a tunnel; through one, both need a device.
        name = tunnels.get(peer.family, "") if peer.mac else ""
        if (not name or backend.direct_routing) and is_on_link(peer.public_ip, kernel_routes, interface.index):
            routes.add(OverlayRoute(peer.subnet, peer.public_ip, interface.link))
        elif name:
            gateway = gateway_of(peer.subnet)
            neighbours.add(OverlayNeighbor(name, gateway, peer.mac))
            forwards.add(OverlayFdbEntry(name, peer.mac, peer.public_ip))
            routes.add(OverlayRoute(peer.subnet, gateway, name, onlink=True))
        else:
            problems.append(
                f"node {peer.node}: {peer.public_ip} is not on-link on {interface.link}: host-gw needs all nodes on "
                "one link without a router or NAT between them; use the backend vxlan"
            )
    desired = DesiredState(
        devices=devices,
        neighbours=frozenset(neighbours),
        forwards=frozenset(forwards),
        routes=frozenset(routes),
        settings=tuple(_settings(external, devices)),
    )
    return desired, tuple(problems)


def _devices(
    conf: NetConf,
    subnets: Mapping[IPFamily, str],
    external: Mapping[IPFamily, ExternalInterface],
    macs: Mapping[IPFamily, str],
) -> tuple[VxlanDevice, ...]:
    return tuple(
        VxlanDevice(
            name=device_name(family, conf.backend.vni),
            family=family,
            vni=conf.backend.vni,
            port=conf.backend.port,
            local=interface.address,
            link=interface.index,
            learning=conf.backend.learning,
            gbp=conf.backend.gbp,
            mac=macs[family],
            mtu=_inner_mtu(conf, family, interface),
            address=gateway_of(subnets[family]),
        )
        for family, interface in external.items()
    )


def _settings(families: Iterable[IPFamily], devices: Iterable[VxlanDevice]) -> Iterable[KernelSetting]:
    why = "the overlay"
    if IPFamily.IPV4 in families:
        yield KernelSetting("net/ipv4/ip_forward", 1, why)
    if IPFamily.IPV6 in families:
        yield KernelSetting("net/ipv6/conf/all/forwarding", 1, why)
    for device in devices:
        if device.family is IPFamily.IPV6:
            # Router advertisements of pods must not add routes on this node. ("/" stands for the "." of a name.)
            yield KernelSetting(f"net/ipv6/conf/{device.name}/accept_ra", 0, why)
