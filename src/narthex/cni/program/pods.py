"""The plugins that create a pod's interface: bridge, ptp, loopback. A failed ADD leaves nothing behind."""

from __future__ import annotations

import posix
import time

from narthex.cni.errors import INVALID_CONFIG, NOT_AS_ADDED, OTHER, CniError
from narthex.cni.kernel import locks, records
from narthex.cni.plugins import bridge, pod, ptp
from narthex.cni.program import ipam as addresses
from narthex.cni.program import masquerade
from narthex.cni.program.node import apply_settings
from narthex.cni.request import ADDRESS_ARGUMENTS, check_arguments, ipam_of, valid_attachments
from narthex.cni.result import CniResult, Interface, IPConfig, previous
from narthex.linux import failpoints
from narthex.linux.failpoints import failpoint
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

_PORT_SECONDS, _PORT_PAUSE = 2.5, 0.0002


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
        state = _bridge_state(node, config)
        plan = _plan_bridge(node, config, result, state, veth, request)
        _apply(node, request, plan, veth)
        if config.masquerade:
            masquerade.add(node, request, config.masquerade, result.ips)
        return bridge.answer(config, result, _bridge_state(node, config) if not state.kind else state, veth, request)
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
    some = posix.urandom(22)
    macs = [bytes((some[at] & 0xFC | 2, *some[at + 1 : at + 6])) for at in (4, 10, 16)]
    return bridge.VethIdentity(f"veth{some[:4].hex()}", macs[0], mac or macs[1], macs[2])


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


def _bridge_state(node: NodeContext, config: BridgeConfig) -> BridgeState:
    found = node.links.link(config.bridge)
    if found is None:
        return bridge.BridgeState()
    addresses = tuple(node.links.addresses(found.index)) if config.is_gateway else ()
    return bridge.BridgeState(found.kind or "physical", found.mac, found.mtu, addresses)


def _plan_bridge(
    node: NodeContext,
    config: BridgeConfig,
    result: CniResult,
    state: BridgeState,
    veth: VethIdentity,
    request: CniRequest,
) -> AttachmentPlan:
    try:
        return bridge.plan(config, result, state, veth, request.interface)
    except bridge.AddressConflict:
        found = node.links.link(config.bridge)
        if found is None or node.links.links(master=found.index):
            raise
    # A bridge without ports has no pods: its address is left over from another subnet of the node.
    named: dict[str, object] = {name: getattr(config, name) for name in config._fields} | {"force_address": True}
    return bridge.plan(type(config)(**named), result, state, veth, request.interface)  # type: ignore[arg-type]


def _apply(node: NodeContext, request: CniRequest, plan: AttachmentPlan, veth: VethIdentity) -> None:
    """Apply a plan: the node first, since the veth pair creates the pod's interface."""
    apply_settings(plan.node_settings)
    node.links.fulfil(plan.node, node.pod(request))
    failpoint(failpoints.CNI_LINKS)
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
    """Wait until the bridge forwards on a port: shortly after both ends are up, through a kernel work queue."""
    end = time.monotonic() + _PORT_SECONDS
    while True:
        found = node.links.link(name)
        if found is not None and found.forwards:
            return
        if time.monotonic() > end:
            raise CniError(OTHER, f"{name} is up, but its bridge does not forward on the port yet")
        time.sleep(_PORT_PAUSE)


def _undo(node: NodeContext, request: CniRequest, veth: VethIdentity, masqueraded: bool) -> None:
    """Revert an ADD. The veth name is unique to this ADD, so no other attachment is affected."""
    node.links.fulfil([DeleteLink(veth.name)])
    failpoint(failpoints.CNI_LINKS)
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
        failpoint(failpoints.CNI_LINKS)
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
    master, own = 0, ""
    if request.plugin == "bridge":
        config = bridge.read(request)
        own = config.bridge
        there = node.links.link(config.bridge)
        if there is None or there.kind != "bridge":
            raise _differs(f"there is no bridge {config.bridge}")
        master = there.index
        if config.is_gateway:
            gateways = {Network(ip.gateway, ip.network.prefix) for ip in before.ips if ip.gateway}
            for missing in gateways.difference(node.links.addresses(master)):
                raise _differs(f"bridge {config.bridge} has lost its address {missing}")
    for one in before.interfaces:
        if one.sandbox or (own and one.name == own):
            continue
        link = node.links.link(one.name)
        if link is None or link.kind != "veth":
            raise _differs(f"there is no veth {one.name} on the node")
        if link.master != master:
            raise _differs(f"{one.name} is not a port of the bridge")
        found[link.index] = link
    if not found:
        raise CniError(INVALID_CONFIG, "prevResult: the node's end of the pair is not in it")
    return found


def _check_pod(request: CniRequest, before: CniResult, ends: dict[int, LinkState]) -> None:
    links = RtNetlink()
    try:
        inner = links.link(request.interface)
        if inner is None or inner.kind != "veth" or inner.partner not in ends:
            raise _differs(f"there is no {request.interface} in {request.namespace} that leads to the node")
        expected = [one for one in before.interfaces if one.sandbox and one.name == request.interface]
        if not expected:
            raise CniError(INVALID_CONFIG, f"prevResult: {request.interface} is not in it")
        if expected[0].mac and expected[0].mac.lower() != inner.mac.hex(":"):
            raise _differs(f"{request.interface} has another hardware address: {inner.mac.hex(':')}")
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
        failpoint(failpoints.CNI_LINKS)


def status(node: NodeContext, request: CniRequest) -> None:
    """Perform the STATUS of bridge and ptp. Raises CniError if an ADD would fail."""
    if _masquerade_of(request) == "nftables":
        node.masquerade.is_whole()
    if ipam_of(request.config):
        addresses.status(node, request)
