"""What every plugin with a veth pair configures inside the pod: sysctls, addresses, routes, and the MAC address."""

from __future__ import annotations

from narthex.cni import fields
from narthex.cni.errors import INVALID_CONFIG, CniError
from narthex.cni.plan import SysctlSetting
from narthex.model.links import AddAddress, AddRoute, SetUp
from narthex.model.values import Network, ip_version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from narthex.cni.request import CniRequest
    from narthex.cni.result import IPConfig, PodRoute
    from narthex.model.links import LinkChange

DEFAULTS = {4: Network(bytes(4), 0), 6: Network(bytes(16), 0)}


def settings(interface: str, ips: tuple[IPConfig, ...], detect: bool) -> tuple[SysctlSetting, ...]:
    """Return the sysctls of the pod's interface. `detect`: keep duplicate address detection enabled."""
    # As few as possible: with many pods, sysctl lookups in the kernel are slow.
    found = [SysctlSetting(f"net/ipv4/conf/{interface}/arp_notify", "1")] if ips else []
    if any(ip_version(ip.network.address) == 6 for ip in ips):
        found.append(SysctlSetting(f"net/ipv6/conf/{interface}/ndisc_notify", "1"))
        # Runtimes disable IPv6 in namespaces without IPv6 addresses; this one has some.
        found.append(SysctlSetting(f"net/ipv6/conf/{interface}/disable_ipv6", "0", required=True))
        found.append(SysctlSetting(f"net/ipv6/conf/{interface}/keep_addr_on_down", "1"))
        if not detect:
            found.append(SysctlSetting(f"net/ipv6/conf/{interface}/accept_dad", "0"))
    return tuple(found)


def addressed(interface: str, ips: tuple[IPConfig, ...], connected: bool, detect: bool) -> list[LinkChange]:
    """Return the changes that add addresses and set the link up; IPv6 last, since a link that is down has no IPv6 routes."""
    adds = [AddAddress(interface, ip.network, connected, detect) for ip in ips]
    return [
        *(add for add in adds if ip_version(add.network.address) == 4),
        SetUp(interface),
        *(add for add in adds if ip_version(add.network.address) == 6),
    ]


def routed(interface: str, ips: tuple[IPConfig, ...], routes: tuple[PodRoute, ...]) -> list[LinkChange]:
    """Return the routes; one without a gateway uses that of the first address of its family."""
    changes: list[LinkChange] = []
    for route in routes:
        same = (ip for ip in ips if len(ip.network.address) == len(route.destination.address))
        gateway = route.gateway or next((ip.gateway for ip in same if ip.gateway), b"")
        if dict(route.numbers).get("scope") == _SCOPE_LINK:
            gateway = b""
        changes.append(AddRoute(interface, route.destination, gateway, b"", route.numbers))
    return changes


_SCOPE_LINK = 253


def by_gateway(interface: str, ips: tuple[IPConfig, ...]) -> list[LinkChange]:
    """Return the routes that lead to the pod's own network through the gateway, for addresses without a connected route."""
    changes: list[LinkChange] = []
    for ip in ips:
        whole = 8 * len(ip.network.address)
        changes.append(AddRoute(interface, Network(ip.gateway, whole), source=ip.network.address))
        if ip.network.prefix < whole:
            subnet = Network(ip.network.first, ip.network.prefix)
            changes.append(AddRoute(interface, subnet, ip.gateway, ip.network.address))
    return changes


def without_redirects(interface: str) -> tuple[SysctlSetting, ...]:
    """Return the sysctls that make a pod ignore ICMP redirects."""
    links = (("ipv4", "all"), ("ipv4", interface), ("ipv6", interface))
    return tuple(SysctlSetting(f"net/{family}/conf/{link}/accept_redirects", "0") for family, link in links)


def forwarding(ips: tuple[IPConfig, ...]) -> tuple[SysctlSetting, ...]:
    """Return the sysctls that enable forwarding on the node for the families of these addresses."""
    paths = {4: "net/ipv4/ip_forward", 6: "net/ipv6/conf/all/forwarding"}
    families = sorted({ip_version(ip.network.address) for ip in ips})
    return tuple(SysctlSetting(paths[family], "1", required=True) for family in families)


def mac_of(request: CniRequest) -> bytes | None:
    """Return the requested MAC address: from runtimeConfig, args, or CNI_ARGS, in this order."""
    config = request.config
    cni = fields.part(fields.part(config, "args"), "cni", "args.")
    for text in (
        fields.text(fields.part(config, "runtimeConfig"), "mac", "runtimeConfig."),
        fields.text(cni, "mac", "args.cni."),
        request.args.get("MAC", ""),
    ):
        if text:
            return _mac(text)
    return None


def _mac(text: str) -> bytes:
    parts = text.replace("-", ":").split(":")
    try:
        mac = bytes(int(part, 16) for part in parts if len(part) == 2)
    except ValueError:
        mac = b""
    if len(mac) != 6 or len(parts) != 6 or mac[0] & 1:
        raise CniError(INVALID_CONFIG, f"mac: {text[:32]!r} is not a hardware address of one interface")
    return mac
