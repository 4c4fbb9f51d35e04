"""The plugins that give a pod its interface: bridge, ptp, loopback. Each sequence leaves nothing when it fails."""

from __future__ import annotations

import posix
import time

from narthex.cni.errors import INVALID_CONFIG, NOT_AS_ADDED, OTHER, CniError
from narthex.cni.kernel import namespaces, records
from narthex.cni.plugins import bridge, pod, ptp
from narthex.cni.program import ipam as addresses
from narthex.cni.program import masquerade
from narthex.cni.request import check_arguments, valid_attachments
from narthex.cni.result import CniResult, Interface, IPConfig, previous
from narthex.linux.rtnetlink import RtNetlink
from narthex.model.links import AddRoute, DeleteLink, SetDown, SetUp
from narthex.model.packed_addresses import Network

TYPE_CHECKING = False
if TYPE_CHECKING:
    from narthex.cni.plan import AttachmentPlan
    from narthex.cni.plugins.bridge import BridgeConfig, BridgeState, VethIdentity
    from narthex.cni.program.node import NodeContext
    from narthex.cni.request import CniRequest
    from narthex.linux.rtnetlink import Link

_PORT_SECONDS, _PORT_PAUSE = 2.5, 0.0002
KNOWN_ARGUMENTS = ("IP", "MAC")


def add_bridge(node: NodeContext, request: CniRequest) -> CniResult:
    """ADD of `bridge`. Raises CniError, OSError."""
    config = bridge.read(request)
    check_arguments(request, KNOWN_ARGUMENTS)
    made = _made(config.mac)
    given = _given(node, request, made)
    try:
        result = bridge.completed(config, given, request)
        state = _bridge_state(node, config)
        wanted = _bridge_wishes(node, config, result, state, made, request)
        _fulfil(node, request, wanted, made)
        if config.masquerade:
            masquerade.add(node, request, config.masquerade, result.ips)
        return bridge.answer(config, result, _bridge_state(node, config) if not state.kind else state, made, request)
    except BaseException:
        _undo(node, request, made, bool(config.masquerade))
        raise


def add_ptp(node: NodeContext, request: CniRequest) -> CniResult:
    """ADD of `ptp`. Raises CniError, OSError."""
    config = ptp.read(request)
    check_arguments(request, KNOWN_ARGUMENTS)
    made = _made(bridge.mac_of(request))
    given = _given(node, request, made)
    try:
        result = ptp.completed(given, request)
        _fulfil(node, request, ptp.plan(config, result, made, request.interface), made)
        if config.masquerade:
            masquerade.add(node, request, config.masquerade, result.ips)
        return ptp.answer(result, made, request)
    except BaseException:
        _undo(node, request, made, bool(config.masquerade))
        raise


def add_loopback(node: NodeContext, request: CniRequest) -> CniResult:
    """ADD of `loopback`: whatever the interface is called, it is `lo`. Raises CniError, OSError."""
    with node.inside(request):
        links = RtNetlink()
        links.fulfil([SetUp("lo")])
        found = links.link("lo")
        links.close()
    mac = found.mac.hex(":") if found is not None else ""
    ips = [IPConfig(Network(bytes((127, 0, 0, 1)), 8), b"", 0), IPConfig(Network(bytes(15) + b"\1", 128), b"", 0)]
    return CniResult((Interface("lo", mac, request.namespace),), tuple(ips))


def _made(mac: bytes | None) -> VethIdentity:
    """Names and hardware addresses by chance; locally administered, for one interface."""
    some = posix.urandom(22)
    macs = [bytes((some[at] & 0xFC | 2, *some[at + 1 : at + 6])) for at in (4, 10, 16)]
    return bridge.VethIdentity(f"veth{some[:4].hex()}", macs[0], mac or macs[1], macs[2])


def _given(node: NodeContext, request: CniRequest, made: VethIdentity) -> CniResult:
    if bridge.has_ipam(request):
        return addresses.add(node, request, made.veth)
    record = records.of_namespace(node.pod(request), request.namespace, made.veth)
    if node.records.get(records.PODS, request.attachment) is None:
        node.records.put(records.PODS, request.attachment, record)
    return CniResult()


def _bridge_state(node: NodeContext, config: BridgeConfig) -> BridgeState:
    found = node.links.link(config.bridge)
    if found is None:
        return bridge.BridgeState()
    addresses = tuple(node.links.addresses(found.index)) if config.is_gateway else ()
    return bridge.BridgeState(found.kind or "physical", found.mac, found.mtu, addresses)


def _bridge_wishes(
    node: NodeContext,
    config: BridgeConfig,
    result: CniResult,
    state: BridgeState,
    made: VethIdentity,
    request: CniRequest,
) -> AttachmentPlan:
    try:
        return bridge.plan(config, result, state, made, request.interface)
    except bridge.AddressConflict:
        found = node.links.link(config.bridge)
        if found is None or node.links.links(master=found.index):
            raise
    # A bridge without ports serves nobody: its address is left over from another range of the node.
    named: dict[str, object] = {name: getattr(config, name) for name in config._fields} | {"force_address": True}
    return bridge.plan(type(config)(**named), result, state, made, request.interface)  # type: ignore[arg-type]


def _fulfil(node: NodeContext, request: CniRequest, wanted: AttachmentPlan, made: VethIdentity) -> None:
    """Node first, for the pod's interface comes with the node's end."""
    namespaces.apply_settings(wanted.node_settings)
    node.links.fulfil(wanted.node, node.pod(request))
    namespaces.apply_settings(wanted.late_settings)
    with node.inside(request):
        namespaces.apply_settings(wanted.pod_settings)
        links = RtNetlink()
        links.fulfil(wanted.pod)
        if wanted.announce:
            _await_port(node, made.veth)
        links.fulfil(wanted.announce)
        links.close()


def _await_port(node: NodeContext, veth: str) -> None:
    """Wait until the bridge passes packets of a port: a moment after both ends are up, by a work queue of the kernel."""
    end = time.monotonic() + _PORT_SECONDS
    while True:
        found = node.links.link(veth)
        if found is not None and found.forwards:
            return
        if time.monotonic() > end:
            raise CniError(OTHER, f"{veth} is up, but its bridge has not begun to forward")
        time.sleep(_PORT_PAUSE)


def _undo(node: NodeContext, request: CniRequest, made: VethIdentity, masqueraded: bool) -> None:
    """Take back what an ADD has made. The pair's name is of this ADD alone, so nobody else loses a link."""
    node.links.fulfil([DeleteLink(made.veth)])
    record = node.records.get(records.PODS, request.attachment)
    if record is not None and record.get("link") != made.veth:
        # The attachment is another ADD's, which succeeded.
        return
    try:
        if masqueraded:
            masquerade.remove(node, request, False)
    finally:
        if bridge.has_ipam(request):
            addresses.remove(node, request)
        node.records.drop(records.PODS, request.attachment)


def remove(node: NodeContext, request: CniRequest) -> None:
    """DEL of bridge and ptp. Whatever is gone already is as it shall be. Raises CniError, OSError."""
    record = node.records.get(records.PODS, request.attachment)
    try:
        if record is not None and record.get("boot") == namespaces.boot():
            node.links.fulfil([DeleteLink(str(record.get("link", "")))])
        else:
            _remove_inside(node, request)
        masquerade.remove(node, request, record is None and request.config.get("ipMasq") is True)
    finally:
        if bridge.has_ipam(request):
            addresses.remove(node, request)
        node.records.drop(records.PODS, request.attachment)


def _remove_inside(node: NodeContext, request: CniRequest) -> None:
    """Remove the pod's interface of an attachment that another plugin has made."""
    if not request.namespace:
        return
    try:
        with node.inside(request):
            links = RtNetlink()
            links.fulfil([DeleteLink(request.interface)])
            links.close()
    except CniError:
        # The namespace is gone, and the interface with it.
        return


def remove_loopback(node: NodeContext, request: CniRequest) -> None:
    """DEL of `loopback`. Raises OSError."""
    if not request.namespace:
        return
    try:
        with node.inside(request):
            links = RtNetlink()
            links.fulfil([SetDown("lo")])
            links.close()
    except CniError:
        return


def check(node: NodeContext, request: CniRequest) -> None:
    """CHECK of bridge and ptp. Raises CniError with the first difference."""
    before = previous(request.config)
    if before is None:
        raise CniError(INVALID_CONFIG, "prevResult: CHECK needs the result of ADD")
    if bridge.has_ipam(request):
        addresses.check(node, request)
    ends = _check_node(node, request, before)
    with node.inside(request):
        _check_pod(request, before, ends)
    on_bridge = request.plugin == "bridge"
    masked_by = bridge.read(request).masquerade if on_bridge else ptp.read(request).masquerade
    if masked_by:
        masquerade.check(node, request, masked_by, before.ips)


def _check_node(node: NodeContext, request: CniRequest, before: CniResult) -> dict[int, Link]:
    """The node's ends of the attachment by index, after a look at them."""
    found: dict[int, Link] = {}
    master = 0
    if request.plugin == "bridge":
        config = bridge.read(request)
        there = node.links.link(config.bridge)
        if there is None or there.kind != "bridge":
            raise _differs(f"there is no bridge {config.bridge}")
        master = there.index
        if config.is_gateway:
            gateways = {Network(ip.gateway, ip.network.prefix) for ip in before.ips if ip.gateway}
            for missing in gateways.difference(node.links.addresses(master)):
                raise _differs(f"bridge {config.bridge} has lost its address {missing}")
    for one in before.interfaces:
        if one.sandbox or (request.plugin == "bridge" and one.name == bridge.read(request).bridge):
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


def _check_pod(request: CniRequest, before: CniResult, ends: dict[int, Link]) -> None:
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


def _check_routes(links: RtNetlink, before: CniResult, inner: Link) -> None:
    for wanted in pod.routed("", before.ips, before.routes):
        assert isinstance(wanted, AddRoute)
        if "table" in dict(wanted.numbers):
            continue
        network = Network(wanted.destination.first, wanted.destination.prefix)
        there = links.routes(4 if len(network.address) == 4 else 6)
        if not any(
            one.destination == network and one.gateway == wanted.gateway and one.link == inner.index for one in there
        ):
            raise _differs(f"the route to {network} is missing")


def check_loopback(node: NodeContext, request: CniRequest) -> None:
    """CHECK of `loopback`. Raises CniError."""
    with node.inside(request):
        links = RtNetlink()
        found = links.link("lo")
        links.close()
    if found is None or not found.up:
        raise _differs("lo is down")


def _differs(what: str) -> CniError:
    return CniError(NOT_AS_ADDED, what)


def collect(node: NodeContext, request: CniRequest) -> None:
    """GC of bridge and ptp: links, rules and addresses of all attachments that are not valid. Raises CniError."""
    valid = valid_attachments(request)
    names = node.names()
    try:
        for attachment, record in node.records.all(records.PODS, request.network):
            if tuple(attachment.split(":")[1:]) not in valid and record.get("link") in names:
                node.links.fulfil([DeleteLink(str(record["link"]))])
        masquerade.collect(node, request, valid)
    finally:
        if bridge.has_ipam(request):
            addresses.collect(node, request)
        addresses.drop_invalid(node, request, records.PODS, valid)


def status(node: NodeContext, request: CniRequest) -> None:
    """STATUS of bridge and ptp. Raises CniError when an ADD would fail."""
    masked_by = (bridge.read(request) if request.plugin == "bridge" else ptp.read(request)).masquerade
    if masked_by == "nftables":
        node.masquerade.is_whole()
    if bridge.has_ipam(request):
        addresses.status(node, request)
