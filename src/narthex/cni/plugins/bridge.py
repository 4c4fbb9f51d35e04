"""The plugin `bridge`: pods on a bridge of the node. Its configuration, and the plan for one attachment."""

from __future__ import annotations

from binascii import crc32

from narthex.cni import fields
from narthex.cni.errors import INVALID_CONFIG, UNSUPPORTED_FIELD, CniError
from narthex.cni.plan import AttachmentPlan, SysctlSetting
from narthex.cni.plugins import pod
from narthex.cni.request import ipam_of, is_interface
from narthex.cni.result import CniResult, Interface, IPConfig, PodRoute, read_dns
from narthex.model.links import (
    AddAddress,
    AddBridge,
    AddPortVlans,
    AddVeth,
    DeleteAddress,
    DeletePortVlan,
    ForgetNeighbour,
    PortFlags,
    PortVlan,
    Promiscuous,
    SetHardwareAddress,
    SetUp,
)
from narthex.model.values import Network, Value, address_number, ip_version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from narthex.cni.request import CniRequest
    from narthex.model.links import LinkChange

_MOST_MTU, _MOST_VLAN = 65535, 4094
_NATIVE_VLAN = 1
"""VLAN of untagged packets in a new bridge, and on a port with `vlanTrunk` only."""


class BridgeConfig(Value):
    """Configuration of `bridge`."""

    bridge: str
    is_gateway: bool
    is_default_gateway: bool
    force_address: bool
    masquerade: str
    """Backend: `nftables`, `iptables`, or empty."""
    mtu: int | None
    hairpin: bool
    promiscuous: bool
    isolated: bool
    detect: bool
    """Perform duplicate address detection for IPv6 addresses."""
    leave_down: bool
    through_node: bool
    """Pods reach each other through the node's routing instead of as neighbors on the bridge."""
    mac: bytes | None
    vlan: int
    """VLAN of the pod's untagged packets; 0 for the bridge's own."""
    trunk: tuple[int, ...]
    """VLANs of the pod's tagged packets."""
    filtering: bool
    """A new bridge filters VLANs."""
    keep_default_vlan: bool

    @property
    def gateway_link(self) -> str:
        """The link that has the gateway addresses: the bridge, or with a VLAN, one end of a pair that leads to a port of it."""
        return f"{self.bridge}.{self.vlan}" if self.vlan else self.bridge


class BridgeState(Value):
    """The existing links with the names of the bridge and of its gateway."""

    kind: str = ""
    """Kind of the bridge's link; empty if there is no link."""
    mac: bytes = b""
    mtu: int = 0
    addresses: tuple[Network, ...] = ()
    """Addresses of the gateway's link, in the kernel's order."""
    up: bool = True
    default_vlan: int = 0
    gateway_mac: bytes = b""
    """Empty if the gateway's link does not exist."""


class VethIdentity(Value):
    """Names and MAC addresses chosen for an attachment."""

    name: str
    mac: bytes
    pod_mac: bytes
    bridge_mac: bytes = b""
    gateway_mac: bytes = b""
    gateway_port_mac: bytes = b""


def read(request: CniRequest) -> BridgeConfig:
    """Parse the configuration. Raises CniError with the field."""
    config = request.config
    if fields.flag(config, "macspoofchk"):
        raise CniError(UNSUPPORTED_FIELD, "macspoofchk is not supported", "leave it out")
    name = fields.text(config, "bridge") or "cni0"
    if not is_interface(name):
        raise fields.wrong("bridge", f"{name[:32]!r} is not an interface name")
    default, promiscuous = fields.flag(config, "isDefaultGateway"), fields.flag(config, "promiscMode")
    hairpin = fields.flag(config, "hairpinMode")
    if hairpin and promiscuous:
        raise fields.wrong("hairpinMode", "cannot set hairpin mode and promiscuous mode at the same time")
    down = fields.flag(config, "disableContainerInterface")
    if ipam_of(request.config) and down:
        raise fields.wrong("disableContainerInterface", "cannot be used with IPAM")
    gateway, through_node = fields.flag(config, "isGateway") or default, fields.flag(config, "throughNode")
    if through_node and not gateway:
        raise fields.wrong("throughNode", "needs isGateway: pods reach each other by the gateway then")
    vlan = fields.whole(config, "vlan", 0, _MOST_VLAN) or 0
    if vlan and gateway and not is_interface(f"{name}.{vlan}"):
        raise fields.wrong("vlan", f"{name}.{vlan}, the name of the gateway's interface, has more than 15 bytes")
    return BridgeConfig(
        name,
        gateway,
        default,
        fields.flag(config, "forceAddress"),
        masquerade_of(request),
        fields.whole(config, "mtu", 0, _MOST_MTU) or None,
        hairpin,
        promiscuous,
        fields.flag(config, "portIsolation"),
        fields.flag(config, "enabledad"),
        down,
        through_node,
        pod.mac_of(request),
        vlan,
        _trunk(request),
        bool(vlan) or config.get("vlanTrunk") is not None,
        fields.flag(config, "preserveDefaultVlan"),
    )


def _trunk(request: CniRequest) -> tuple[int, ...]:
    """Return the VLANs of `vlanTrunk`: entries with `id`, with `minID` and `maxID`, or with all three. Raises CniError."""
    found: set[int] = set()
    for number, one in enumerate(fields.objects(request.config, "vlanTrunk")):
        path = f"vlanTrunk[{number}]."
        first, last, single = (fields.whole(one, name, 1, _MOST_VLAN, path) for name in ("minID", "maxID", "id"))
        if (first is None) != (last is None):
            raise fields.wrong(path[:-1], "needs both minID and maxID, or neither")
        if first is not None and last is not None:
            if last < first:
                raise fields.wrong(path + "minID", f"{first} is greater than maxID {last}")
            found.update(range(first, last + 1))
        if single is not None:
            found.add(single)
    return tuple(sorted(found))


def masquerade_of(request: CniRequest) -> str:
    """Return the masquerading backend: `nftables`, `iptables`, or empty."""
    backend = fields.text(request.config, "ipMasqBackend") or "nftables"
    if backend not in ("nftables", "iptables"):
        raise fields.wrong("ipMasqBackend", f"{backend[:32]!r} is neither nftables nor iptables")
    return backend if fields.flag(request.config, "ipMasq") else ""


def completed(config: BridgeConfig, given: CniResult, dns_of: CniRequest) -> CniResult:
    """Return the IPAM result with gateways, default routes, and the configured DNS."""
    ips = []
    routes = list(given.routes)
    for ip in given.ips:
        gateway = ip.gateway or (_first_host(ip.network) if config.is_gateway else b"")
        ips.append(IPConfig(ip.network, gateway, 2))
        default = pod.DEFAULTS[ip_version(ip.network.address)]
        if config.is_default_gateway and not any(route.destination == default for route in routes):
            routes.append(PodRoute(default, gateway))
    dns = read_dns(dns_of.config) if dns_of.config.get("dns") else given.dns
    return CniResult((), tuple(ips), tuple(routes), dns)


def _first_host(network: Network) -> bytes:
    return (address_number(network.first) + 1).to_bytes(len(network.address), "big")


def plan(
    config: BridgeConfig, result: CniResult, state: BridgeState, veth: VethIdentity, interface: str
) -> AttachmentPlan:
    """Return the plan of an ADD. `result` is that of `completed`, `interface` the pod's. Raises CniError."""
    if state.kind and state.kind != "bridge":
        raise CniError(INVALID_CONFIG, f"bridge: {config.bridge!r} already exists but is not a bridge")
    node: list[LinkChange] = []
    if not state.kind:
        node.append(AddBridge(config.bridge, veth.bridge_mac, config.mtu, config.filtering))
    elif not state.up:
        node.append(SetUp(config.bridge))
    if config.promiscuous:
        node.append(Promiscuous(config.bridge))
    node.append(AddVeth(veth.name, veth.mac, interface, veth.pod_mac, config.mtu, config.bridge))
    if config.hairpin or config.isolated:
        node.append(PortFlags(veth.name, config.hairpin, config.isolated))
    node += _vlans(config, state, veth.name, config.trunk)
    if config.is_gateway:
        node += _gateway(config, result, state, veth)
    # The neighbor entry of a previous owner of the address may be stale.
    if state.kind and (not config.vlan or state.gateway_mac):
        node += [ForgetNeighbour(config.gateway_link, ip.network.address) for ip in result.ips]
    inside, pod_settings = [], pod.settings(interface, result.ips, config.detect)
    if not config.leave_down:
        inside = pod.addressed(interface, result.ips, not config.through_node, config.detect)
    if config.through_node:
        inside += pod.by_gateway(interface, result.ips)
        pod_settings += pod.without_redirects(interface)
    return AttachmentPlan(
        node=tuple(node),
        late_settings=(
            *(
                SysctlSetting(f"net/ipv6/conf/{link}/accept_ra", "0")
                for link in (config.bridge, *(one.name for one in node if isinstance(one, AddVeth)))
            ),
            *(pod.forwarding(result.ips) if config.is_gateway else ()),
        ),
        pod_settings=pod_settings,
        pod=(*inside, *pod.routed(interface, result.ips, result.routes)),
        announce=() if config.leave_down else (SetHardwareAddress(interface, veth.pod_mac),),
    )


def _vlans(config: BridgeConfig, state: BridgeState, port: str, trunk: tuple[int, ...]) -> list[LinkChange]:
    """Return the changes that make a port a member of its VLANs, in the reference plugin's order."""
    if not config.vlan and not trunk:
        return []
    changes: list[LinkChange] = []
    default = state.default_vlan if state.kind else _NATIVE_VLAN
    if default and not config.keep_default_vlan:
        changes.append(DeletePortVlan(port, default))
    native = PortVlan(config.vlan or _NATIVE_VLAN, native=True)
    tagged = tuple(map(PortVlan, trunk))
    return [*changes, AddPortVlans(port, (native, *tagged) if config.vlan else (*tagged, native))]


def _gateway(config: BridgeConfig, result: CniResult, state: BridgeState, veth: VethIdentity) -> list[LinkChange]:
    """Return the changes that set the gateway addresses, replacing others if allowed. Raises CniError."""
    changes: list[LinkChange] = []
    link, held = config.gateway_link, list(state.addresses)
    if config.vlan and not state.gateway_mac:
        port = gateway_port(link)
        mtu = state.mtu or config.mtu
        changes.append(AddVeth(port, veth.gateway_port_mac, link, veth.gateway_mac, mtu, config.bridge, shared=True))
        changes += [*_vlans(config, state, port, ()), SetUp(link)]
    for ip in result.ips:
        required = Network(ip.gateway, ip.network.prefix)
        # Like the reference plugin: the first address that is the required one, or that conflicts with it, decides.
        for has in tuple(held):
            if has == required:
                break
            if len(has.address) != len(required.address) or (len(has.address) == 16 and not has.overlaps(required)):
                continue
            if not config.force_address:
                message = f"{link!r} already has an IP address different from {required}: {has}"
                raise CniError(INVALID_CONFIG, message, "forceAddress would replace it")
            changes.append(DeleteAddress(link, has))
            held.remove(has)
        else:
            changes.append(AddAddress(link, required))
            held.append(required)
    if state.mac and not config.vlan and any(isinstance(one, AddAddress) for one in changes):
        # Until it is set, the hardware address of a bridge is the lowest one of its ports.
        changes.append(SetHardwareAddress(link, state.mac))
    return changes


def gateway_port(link: str) -> str:
    """Return the name of the bridge port that leads to the gateway of a VLAN: the same for concurrent requests."""
    return f"veth{crc32(link.encode()):08x}"


def answer(
    config: BridgeConfig, result: CniResult, state: BridgeState, veth: VethIdentity, request: CniRequest
) -> CniResult:
    """Return the result of an ADD: `result` with its interfaces. `state` is that after the ADD."""
    gateway = (Interface(config.gateway_link, state.gateway_mac.hex(":")),)
    return CniResult(
        (
            Interface(config.bridge, state.mac.hex(":")),
            Interface(veth.name, veth.mac.hex(":")),
            Interface(request.interface, veth.pod_mac.hex(":"), request.namespace),
            *(gateway if config.vlan and config.is_gateway and result.ips else ()),
        ),
        result.ips,
        result.routes,
        result.dns,
    )
