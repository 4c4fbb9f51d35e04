"""The plugins that create a pod's interface: bridge, ptp, loopback. A failed ADD leaves nothing behind."""

from __future__ import annotations

import posix

from narthex.cni.errors import INVALID_CONFIG, NOT_AS_ADDED, OTHER, CniError
from narthex.cni.kernel import locks, records
from narthex.cni.plugins import bridge, pod, ptp
from narthex.cni.program import ipam as addresses
from narthex.cni.program import masquerade
from narthex.cni.program.node import apply_settings
from narthex.cni.request import ADDRESS_ARGUMENTS, check_arguments, ipam_of, valid_attachments
from narthex.cni.result import CniResult, Interface, IPConfig, previous
from narthex.linux.failpoints import CNI_LINKS, failpoint
from narthex.linux.rtnetlink import RtNetlink
from narthex.model.links import AddRoute, DeleteLink, SetDown, SetUp
from narthex.model.values import Network

TYPE_CHECKING = False
if TYPE_CHECKING:
    from narthex.cni.plan import AttachmentPlan
    from narthex.cni.plugins.bridge import BridgeConfig, BridgeState, VethIdentity
    from narthex.cni.plugins.host_local import IpamConfig
    from narthex.cni.plugins.ptp import PtpConfig
    from narthex.cni.program.node import NodeContext
    from narthex.cni.request import CniRequest
    from narthex.linux.rtnetlink import LinkState
    from narthex.model.links import LinkChange

_PORT_SECONDS = 60.0
"""Until the kernel has noticed that both ends of a pair are up: a work queue that waits for the lock of all link changes,
which a machine that removes many namespaces holds for seconds."""


def add_bridge(node: NodeContext, request: CniRequest) -> CniResult:
    """Perform the ADD of `bridge`. Raises CniError, OSError."""
    config = bridge.read(request)
    check_arguments(request, ADDRESS_ARGUMENTS)
    ipam = addresses.read(request)
    with node.exclusive(locks.PODS, request.attachment):
        return _add_bridge(node, request, config, ipam)


def _add_bridge(node: NodeContext, request: CniRequest, config: BridgeConfig, ipam: IpamConfig | None) -> CniResult:
    veth = _new_veth(config.mac)
    allocated = _allocate(node, request, ipam, veth)
    try:
        result = bridge.completed(config, allocated, request)
        state = _bridge_state(node, config, config.is_gateway)
        plan = bridge.plan(config, result, state, veth, request.interface)
        _apply(node, request, plan, veth)
        if config.masquerade:
            masquerade.add(node, request, config.masquerade, result.ips)
        return bridge.answer(config, result, _bridge_state(node, config, False), veth, request)
    except BaseException:
        _undo(node, request, veth, bool(config.masquerade))
        raise


def add_ptp(node: NodeContext, request: CniRequest) -> CniResult:
    """Perform the ADD of `ptp`. Raises CniError, OSError."""
    config = ptp.read(request)
    check_arguments(request, ADDRESS_ARGUMENTS)
    ipam = addresses.read(request)
    with node.exclusive(locks.PODS, request.attachment):
        return _add_ptp(node, request, config, ipam)


def _add_ptp(node: NodeContext, request: CniRequest, config: PtpConfig, ipam: IpamConfig | None) -> CniResult:
    veth = _new_veth(pod.mac_of(request))
    allocated = _allocate(node, request, ipam, veth)
    try:
        result = ptp.completed(allocated, request)
        _apply(node, request, ptp.plan(config, result, veth, request.interface), veth)
        if config.masquerade:
            masquerade.add(node, request, config.masquerade, result.ips)
        return ptp.answer(result, veth, request)
    except BaseException:
        _undo(node, request, veth, bool(config.masquerade))
        raise


def add_loopback(node: NodeContext, request: CniRequest) -> CniResult:
    """Perform the ADD of `loopback`; the interface is always `lo`. Raises CniError, OSError."""
    with node.inside(request):
        links = RtNetlink()
        links.fulfil([SetUp("lo")])
        found = links.link("lo")
        links.close()
    mac = found.mac.hex(":") if found is not None else ""
    ips = [IPConfig(Network(bytes((127, 0, 0, 1)), 8), b"", 0), IPConfig(Network(bytes(15) + b"\1", 128), b"", 0)]
    return CniResult((Interface("lo", mac, request.namespace),), tuple(ips))


def _new_veth(mac: bytes | None) -> VethIdentity:
    """Return random names and MAC addresses (locally administered, unicast)."""
    some = posix.urandom(34)
    macs = [bytes((some[at] & 0xFC | 2, *some[at + 1 : at + 6])) for at in (4, 10, 16, 22, 28)]
    return bridge.VethIdentity(f"veth{some[:4].hex()}", macs[0], mac or macs[1], *macs[2:])


def _allocate(node: NodeContext, request: CniRequest, ipam: IpamConfig | None, veth: VethIdentity) -> CniResult:
    if ipam is not None:
        return addresses.allocate(node, request, ipam, veth.name)
    before = node.records.get(records.PODS, request.attachment)
    if before is None or before.get("link") not in node.names():
        record = records.of_namespace(node.pod(request), request.namespace, veth.name)
        node.records.put(records.PODS, request.attachment, record)
    if not ipam_of(request.config):
        return CniResult()
    from narthex.cni.program import delegate

    try:
        return delegate.addresses(request)
    except BaseException:
        if before is None:
            node.records.drop(records.PODS, request.attachment)
        raise


def _bridge_state(node: NodeContext, config: BridgeConfig, with_addresses: bool) -> BridgeState:
    found = node.links.link(config.bridge)
    if found is None:
        return bridge.BridgeState()
    gateway = node.links.link(config.gateway_link) if config.vlan else found
    addresses = tuple(node.links.addresses(gateway.index)) if gateway is not None and with_addresses else ()
    mac = gateway.mac if gateway is not None else b""
    return bridge.BridgeState(
        found.kind or "physical", found.mac, found.mtu, addresses, found.up, found.default_vlan, mac
    )


def _apply(node: NodeContext, request: CniRequest, plan: AttachmentPlan, veth: VethIdentity) -> None:
    """Apply a plan: the node first, since the veth pair creates the pod's interface."""
    apply_settings(plan.node_settings)
    node.links.fulfil(plan.node, node.pod(request))
    failpoint(CNI_LINKS)
    apply_settings(plan.late_settings)
    with node.inside(request):
        apply_settings(plan.pod_settings)
        links = RtNetlink()
        links.fulfil(plan.pod)
    if plan.announce:
        _await_port(node, veth.name)
        links.fulfil(plan.announce)
    links.close()


def _await_port(node: NodeContext, name: str) -> None:
    """Wait until a port of a bridge is operational. When it forwards is the bridge's decision: with STP, after 30 s."""
    found = node.links.await_operational(name, _PORT_SECONDS)
    if found is None or not found.operational:
        message = f"bridge port {name} does not come up: the kernel found no carrier within {_PORT_SECONDS:.0f} s"
        raise CniError(OTHER, message, "another program may have removed an end of the pair or set it down")


def _undo(node: NodeContext, request: CniRequest, veth: VethIdentity, masqueraded: bool) -> None:
    """Revert an ADD. The veth name is unique to this ADD, so no other attachment is affected."""
    node.links.fulfil([DeleteLink(veth.name)])
    failpoint(CNI_LINKS)
    record = node.records.get(records.PODS, request.attachment)
    if record is not None and record.get("link") != veth.name:
        # The attachment belongs to another ADD, which succeeded.
        return
    try:
        if masqueraded:
            masquerade.remove(node, request, False)
    finally:
        if ipam_of(request.config):
            addresses.release(node, request)
        node.records.drop(records.PODS, request.attachment)


def remove(node: NodeContext, request: CniRequest) -> None:
    """Perform the DEL of bridge and ptp; missing parts are ignored. Raises CniError, OSError."""
    with node.exclusive(locks.PODS, request.attachment):
        _remove(node, request)


def _remove(node: NodeContext, request: CniRequest) -> None:
    record = node.records.get(records.PODS, request.attachment)
    try:
        if record is not None and record.get("boot") == records.boot():
            node.links.fulfil([DeleteLink(str(record.get("link", "")))])
        else:
            # Another plugin created the pod's interface.
            _remove_inside(node, request, DeleteLink(request.interface))
        failpoint(CNI_LINKS)
        masquerade.remove(node, request, record is None and request.config.get("ipMasq") is True)
    finally:
        if ipam_of(request.config):
            addresses.release(node, request)
        node.records.drop(records.PODS, request.attachment)


def _remove_inside(node: NodeContext, request: CniRequest, change: LinkChange) -> None:
    if not request.namespace:
        return
    try:
        with node.inside(request):
            links = RtNetlink()
            links.fulfil([change])
            links.close()
    except CniError:
        # The namespace is gone, and the interface with it.
        return


def remove_loopback(node: NodeContext, request: CniRequest) -> None:
    """Perform the DEL of `loopback`. Raises OSError."""
    _remove_inside(node, request, SetDown("lo"))


def check(node: NodeContext, request: CniRequest) -> None:
    """Perform the CHECK of bridge and ptp. Raises CniError with the first difference."""
    before = previous(request.config)
    if before is None:
        raise CniError(INVALID_CONFIG, "prevResult: CHECK needs the result of ADD")
    if ipam_of(request.config):
        addresses.check(node, request)
    ends = _check_node(node, request, before)
    with node.inside(request):
        _check_pod(request, before, ends)
    masked_by = _masquerade_of(request)
    if masked_by:
        masquerade.check(node, request, masked_by, before.ips)


def _check_node(node: NodeContext, request: CniRequest, before: CniResult) -> dict[int, LinkState]:
    """Check the node's ends of the attachment; return them by index."""
    found: dict[int, LinkState] = {}
    master: int = 0
    own: tuple[str, ...] = ()
    if request.plugin == "bridge":
        config = bridge.read(request)
        own = config.bridge, config.gateway_link
        master = _check_bridge(node, config, before)
    for one in before.interfaces:
        if one.sandbox or one.name in own:
            continue
        link = node.links.link(one.name)
        if link is None or link.kind != "veth":
            raise _differs(f"there is no veth {one.name} on the node")
        if link.master != master:
            raise _differs(f"{one.name} is not a port of the bridge")
        found[link.index] = link
        _check_mac(one, link.mac)
    if not found:
        raise CniError(INVALID_CONFIG, "prevResult: the node's end of the pair is not in it")
    return found


def _check_bridge(node: NodeContext, config: BridgeConfig, before: CniResult) -> int:
    """Check the bridge and its gateway; return the index of the bridge."""
    there = node.links.link(config.bridge)
    if there is None or there.kind != "bridge":
        raise _differs(f"there is no bridge {config.bridge}")
    if there.promiscuous != config.promiscuous:
        raise _differs(f"bridge {config.bridge} is {'' if there.promiscuous else 'not '}in promiscuous mode")
    for one in before.interfaces:
        if one.name == config.bridge and not one.sandbox:
            _check_mac(one, there.mac)
    if config.is_gateway:
        gateway = node.links.link(config.gateway_link)
        if gateway is None:
            raise _differs(f"there is no interface {config.gateway_link}")
        gateways = {Network(ip.gateway, ip.network.prefix) for ip in before.ips if ip.gateway}
        for missing in gateways.difference(node.links.addresses(gateway.index)):
            raise _differs(f"{config.gateway_link} has lost its address {missing}")
    return there.index


def _check_mac(expected: Interface, mac: bytes) -> None:
    if expected.mac and expected.mac.lower() != mac.hex(":"):
        raise _differs(f"{expected.name} has another hardware address: {mac.hex(':')}")


def _check_pod(request: CniRequest, before: CniResult, ends: dict[int, LinkState]) -> None:
    links = RtNetlink()
    try:
        inner = links.link(request.interface)
        if inner is None or inner.kind != "veth" or inner.partner not in ends:
            raise _differs(f"there is no {request.interface} in {request.namespace} that leads to the node")
        expected = [one for one in before.interfaces if one.sandbox and one.name == request.interface]
        if not expected:
            raise CniError(INVALID_CONFIG, f"prevResult: {request.interface} is not in it")
        _check_mac(expected[0], inner.mac)
        for missing in {ip.network for ip in before.ips}.difference(links.addresses(inner.index)):
            raise _differs(f"{request.interface} has lost its address {missing}")
        _check_routes(links, before, inner)
    finally:
        links.close()


def _check_routes(links: RtNetlink, before: CniResult, inner: LinkState) -> None:
    for expected in pod.routed("", before.ips, before.routes):
        assert isinstance(expected, AddRoute)
        if "table" in dict(expected.numbers):
            continue
        network = Network(expected.destination.first, expected.destination.prefix)
        there = links.routes(4 if len(network.address) == 4 else 6)
        if not any(
            one.destination == network and one.gateway == expected.gateway and one.link == inner.index for one in there
        ):
            raise _differs(f"the route to {network} is missing")


def check_loopback(node: NodeContext, request: CniRequest) -> None:
    """Perform the CHECK of `loopback`. Raises CniError."""
    with node.inside(request):
        links = RtNetlink()
        found = links.link("lo")
        links.close()
    if found is None or not found.up:
        raise _differs("lo is down")


def _masquerade_of(request: CniRequest) -> str:
    return (bridge.read(request) if request.plugin == "bridge" else ptp.read(request)).masquerade


def _differs(what: str) -> CniError:
    return CniError(NOT_AS_ADDED, what)


def collect(node: NodeContext, request: CniRequest) -> None:
    """Perform the GC of bridge and ptp: remove links, rules, and addresses without a valid attachment. Raises CniError."""
    valid = valid_attachments(request)
    names = node.names()
    try:
        for attachment in node.records.invalid(records.PODS, request.network, valid):
            with node.exclusive(locks.PODS, attachment):
                remove_link(node, attachment, names)
        masquerade.collect(node, request, valid)
    finally:
        if ipam_of(request.config):
            addresses.collect(node, request)
        for attachment in node.records.invalid(records.PODS, request.network, valid):
            node.records.drop(records.PODS, attachment)


def remove_link(node: NodeContext, attachment: str, names: frozenset[str]) -> None:
    """Remove the node's end of an attachment, if it is one of the interfaces `names`. Raises OSError."""
    record = node.records.get(records.PODS, attachment)
    if record is not None and record.get("link") in names:
        node.links.fulfil([DeleteLink(str(record["link"]))])
        failpoint(CNI_LINKS)


def status(node: NodeContext, request: CniRequest) -> None:
    """Perform the STATUS of bridge and ptp. Raises CniError if an ADD would fail."""
    if _masquerade_of(request) == "nftables":
        node.masquerade.is_whole()
    if ipam_of(request.config):
        addresses.status(node, request)
