"""The plugin `bridge`: pods on a bridge of the node. Its configuration, and the plan for one attachment."""

from __future__ import annotations

from narthex.cni import fields
from narthex.cni.errors import INVALID_CONFIG, UNSUPPORTED_FIELD, CniError
from narthex.cni.plan import AttachmentPlan, SysctlSetting
from narthex.cni.plugins import pod
from narthex.cni.request import ipam_of, is_interface
from narthex.cni.result import CniResult, Interface, IPConfig, PodRoute, read_dns
from narthex.model.links import (
    AddAddress,
    AddBridge,
    AddVeth,
    DeleteAddress,
    ForgetNeighbour,
    PortFlags,
    Promiscuous,
    SetHardwareAddress,
)
from narthex.model.values import Network, Value, address_number, ip_version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from narthex.cni.request import CniRequest
    from narthex.model.links import LinkChange

_MOST_MTU = 65535


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


class BridgeState(Value):
    """The existing link with the bridge's name."""

    kind: str = ""
    """Link kind; empty if there is no link."""
    mac: bytes = b""
    mtu: int = 0
    addresses: tuple[Network, ...] = ()


class VethIdentity(Value):
    """Names and MAC addresses chosen for an attachment."""

    name: str
    mac: bytes
    pod_mac: bytes
    bridge_mac: bytes = b""


def read(request: CniRequest) -> BridgeConfig:
    """Parse the configuration. Raises CniError with the field."""
    config = request.config
    if any(config.get(name) for name in ("vlan", "vlanTrunk")):
        message = "vlan and vlanTrunk are not supported: bridges of this plugin do not filter VLANs"
        raise CniError(UNSUPPORTED_FIELD, message, "use one bridge for each VLAN")
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
    )


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


class AddressConflict(CniError):
    """The bridge has an address of another network."""

    def __init__(self, bridge: str, has: Network, required: Network) -> None:
        message = f"{str(bridge)!r} already has an IP address different from {required}: {has}"
        super().__init__(INVALID_CONFIG, message, "forceAddress would replace it")


def plan(
    config: BridgeConfig, result: CniResult, state: BridgeState, veth: VethIdentity, interface: str
) -> AttachmentPlan:
    """Return the plan of an ADD.

    `result` is that of `completed`, `interface` the pod's. Raises CniError; AddressConflict if `forceAddress` would help.
    """
    if state.kind and state.kind != "bridge":
        raise CniError(INVALID_CONFIG, f"bridge: {config.bridge!r} already exists but is not a bridge")
    node: list[LinkChange] = []
    if not state.kind:
        node.append(AddBridge(config.bridge, veth.bridge_mac, config.mtu))
    if config.promiscuous:
        node.append(Promiscuous(config.bridge))
    node.append(AddVeth(veth.name, veth.mac, interface, veth.pod_mac, config.mtu, config.bridge))
    if config.hairpin or config.isolated:
        node.append(PortFlags(veth.name, config.hairpin, config.isolated))
    if config.is_gateway:
        for ip in result.ips:
            node += _gateway(config, ip, state)
    # The neighbor entry of a previous owner of the address may be stale.
    node += [ForgetNeighbour(config.bridge, ip.network.address) for ip in result.ips if state.kind]
    inside, pod_settings = [], pod.settings(interface, result.ips, config.detect)
    if not config.leave_down:
        inside = pod.addressed(interface, result.ips, not config.through_node, config.detect)
    if config.through_node:
        inside += pod.by_gateway(interface, result.ips)
        pod_settings += pod.without_redirects(interface)
    return AttachmentPlan(
        node=tuple(node),
        late_settings=(
            SysctlSetting(f"net/ipv6/conf/{veth.name}/accept_ra", "0"),
            *(pod.forwarding(result.ips) if config.is_gateway else ()),
        ),
        pod_settings=pod_settings,
        pod=(*inside, *pod.routed(interface, result.ips, result.routes)),
        announce=() if config.leave_down else (SetHardwareAddress(interface, veth.pod_mac),),
    )


def _gateway(config: BridgeConfig, ip: IPConfig, state: BridgeState) -> list[LinkChange]:
    """Return the changes that set the gateway address on the bridge, replacing others if allowed."""
    required = Network(ip.gateway, ip.network.prefix)
    if required in state.addresses:
        return []
    changes: list[LinkChange] = []
    for has in state.addresses:
        if len(has.address) != len(required.address):
            continue
        if len(has.address) == 16 and not has.overlaps(required):
            continue
        if not config.force_address:
            raise AddressConflict(config.bridge, has, required)
        changes.append(DeleteAddress(config.bridge, has))
    return [*changes, AddAddress(config.bridge, required)]


def answer(
    config: BridgeConfig, result: CniResult, state: BridgeState, veth: VethIdentity, request: CniRequest
) -> CniResult:
    """Return the result of an ADD: `result` with the three interfaces."""
    bridge_mac = state.mac or veth.bridge_mac
    return CniResult(
        (
            Interface(config.bridge, bridge_mac.hex(":")),
            Interface(veth.name, veth.mac.hex(":")),
            Interface(request.interface, veth.pod_mac.hex(":"), request.namespace),
        ),
        result.ips,
        result.routes,
        result.dns,
    )
