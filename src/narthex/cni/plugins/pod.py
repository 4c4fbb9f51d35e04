"""What every plugin that makes a pair wants inside the pod: settings, addresses, routes, all usable at once."""

from __future__ import annotations

from narthex.cni.plan import SysctlSetting
from narthex.model import packed_addresses as address
from narthex.model.links import AddAddress, AddRoute, SetUp
from narthex.model.packed_addresses import Network

TYPE_CHECKING = False
if TYPE_CHECKING:
    from narthex.cni.result import IPConfig, PodRoute
    from narthex.model.links import LinkChange

DEFAULTS = {4: Network(bytes(4), 0), 6: Network(bytes(16), 0)}
"""The networks that hold every address."""


def settings(interface: str, ips: tuple[IPConfig, ...], detect: bool) -> tuple[SysctlSetting, ...]:
    """Kernel settings of the pod's interface. `detect`: leave duplicate address detection on."""
    # No more than is of use: among many pods the kernel takes long to find one's settings.
    wanted = [SysctlSetting(f"net/ipv4/conf/{interface}/arp_notify", "1")]
    if any(address.version(ip.network.address) == 6 for ip in ips):
        wanted.append(SysctlSetting(f"net/ipv6/conf/{interface}/ndisc_notify", "1"))
        # Runtimes switch IPv6 off in namespaces that shall have none, which these shall.
        wanted.append(SysctlSetting(f"net/ipv6/conf/{interface}/disable_ipv6", "0", required=True))
        if not detect:
            wanted.append(SysctlSetting(f"net/ipv6/conf/{interface}/accept_dad", "0"))
    return tuple(wanted)


def addressed(interface: str, ips: tuple[IPConfig, ...], connected: bool, detect: bool) -> list[LinkChange]:
    """Addresses, and the link up. IPv6 comes after that, for a link that is down has no routes of that family."""
    adds = [AddAddress(interface, ip.network, connected, detect) for ip in ips]
    return [
        *(add for add in adds if address.version(add.network.address) == 4),
        SetUp(interface),
        *(add for add in adds if address.version(add.network.address) == 6),
    ]


def routed(interface: str, ips: tuple[IPConfig, ...], routes: tuple[PodRoute, ...]) -> list[LinkChange]:
    """Routes; one without a gateway goes to the first address's gateway of its family."""
    wanted: list[LinkChange] = []
    for route in routes:
        same = (ip for ip in ips if len(ip.network.address) == len(route.destination.address))
        gateway = route.gateway or next((ip.gateway for ip in same if ip.gateway), b"")
        if dict(route.numbers).get("scope") == _SCOPE_LINK:
            gateway = b""
        wanted.append(AddRoute(interface, route.destination, gateway, b"", route.numbers))
    return wanted


_SCOPE_LINK = 253


def by_gateway(interface: str, ips: tuple[IPConfig, ...]) -> list[LinkChange]:
    """Routes by which neighbours of the pod's network are reached by the gateway alone, and it by the link. For addresses
    that do not bring a route to their network."""
    wanted: list[LinkChange] = []
    for ip in ips:
        whole = 8 * len(ip.network.address)
        wanted.append(AddRoute(interface, Network(ip.gateway, whole), source=ip.network.address))
        if ip.network.prefix < whole:
            subnet = Network(ip.network.first, ip.network.prefix)
            wanted.append(AddRoute(interface, subnet, ip.gateway, ip.network.address))
    return wanted


def without_redirects(interface: str) -> tuple[SysctlSetting, ...]:
    """Settings of a pod that is not to be told of a shorter way to its neighbours."""
    links = (("ipv4", "all"), ("ipv4", interface), ("ipv6", interface))
    return tuple(SysctlSetting(f"net/{family}/conf/{link}/accept_redirects", "0") for family, link in links)


def forwarding(ips: tuple[IPConfig, ...]) -> tuple[SysctlSetting, ...]:
    """What makes the node a router for the families of these addresses."""
    paths = {4: "net/ipv4/ip_forward", 6: "net/ipv6/conf/all/forwarding"}
    families = sorted({address.version(ip.network.address) for ip in ips})
    return tuple(SysctlSetting(paths[family], "1", required=True) for family in families)
