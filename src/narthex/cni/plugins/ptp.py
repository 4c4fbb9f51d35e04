"""The plugin `ptp`: a veth pair for each pod, with the node as router."""

from __future__ import annotations

from narthex.cni import fields
from narthex.cni.errors import INVALID_CONFIG, CniError
from narthex.cni.plan import AttachmentPlan, SysctlSetting
from narthex.cni.plugins import pod
from narthex.cni.plugins.bridge import VethIdentity, masquerade_of
from narthex.cni.request import ipam_of
from narthex.cni.result import CniResult, Interface, IPConfig, read_dns
from narthex.model.links import AddAddress, AddRoute, AddVeth, DeleteRoute
from narthex.model.values import Network, Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from narthex.cni.request import CniRequest
    from narthex.model.links import LinkChange


_HOST_SCOPE = (("scope", 254),)


class PtpConfig(Value):
    """Configuration of `ptp`."""

    masquerade: str
    mtu: int | None


def read(request: CniRequest) -> PtpConfig:
    """Parse the configuration. Raises CniError with the field."""
    if not ipam_of(request.config):
        raise fields.wrong("ipam.type", "no plugin name provided: ptp needs addresses")
    return PtpConfig(masquerade_of(request), fields.whole(request.config, "mtu", 0, 65535) or None)


def completed(given: CniResult, request: CniRequest) -> CniResult:
    """Return the IPAM result, bound to the pod's interface. Raises CniError without addresses, or for one without a gateway."""
    if not given.ips:
        raise CniError(INVALID_CONFIG, f"ipam: {ipam_of(request.config) or 'host-local'} returned no address")
    for ip in given.ips:
        if not ip.gateway:
            raise CniError(INVALID_CONFIG, f"ipam: {ip.network} has no gateway, and ptp needs one for each address")
    dns = read_dns(request.config) if request.config.get("dns") else given.dns
    return CniResult((), tuple(IPConfig(ip.network, ip.gateway, 1) for ip in given.ips), given.routes, dns)


def plan(config: PtpConfig, result: CniResult, veth: VethIdentity, interface: str) -> AttachmentPlan:
    """Return the plan of an ADD. `result` is that of `completed`."""
    node: list[LinkChange] = [AddVeth(veth.name, veth.mac, interface, veth.pod_mac, config.mtu)]
    # A gateway of the configured routes may be any address of the pod's network. Only then, neighbors are reached by the node.
    inside = pod.addressed(interface, result.ips, True, False)
    inside += pod.routed(interface, result.ips, result.routes)
    for ip in result.ips:
        whole = 8 * len(ip.network.address)
        gateway, own = Network(ip.gateway, whole), Network(ip.network.address, whole)
        node += [AddAddress(veth.name, gateway), AddRoute(veth.name, own, numbers=_HOST_SCOPE, replace=True)]
        if ip.network.prefix < whole:
            inside.append(DeleteRoute(interface, Network(ip.network.first, ip.network.prefix)))
    return AttachmentPlan(
        node=tuple(node),
        late_settings=(SysctlSetting(f"net/ipv6/conf/{veth.name}/accept_ra", "0"), *pod.forwarding(result.ips)),
        pod_settings=pod.settings(interface, result.ips, False),
        pod=(*inside, *pod.by_gateway(interface, result.ips)),
    )


def answer(result: CniResult, veth: VethIdentity, request: CniRequest) -> CniResult:
    """Return the result of an ADD: `result` with the two interfaces."""
    interfaces = (
        Interface(veth.name, veth.mac.hex(":")),
        Interface(request.interface, veth.pod_mac.hex(":"), request.namespace),
    )
    return CniResult(interfaces, result.ips, result.routes, result.dns)
