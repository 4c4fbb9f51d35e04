"""The plugin `portmap`: host ports that lead to a pod, each with one owner."""

from __future__ import annotations

from narthex.cni import fields
from narthex.cni.errors import CANNOT_ADD, INVALID_CONFIG, NOT_AS_ADDED, TAKEN, CniError
from narthex.cni.kernel import locks, records
from narthex.cni.kernel.tables import ElementExistsError, owner_of
from narthex.cni.plan import SetElement, SysctlSetting
from narthex.cni.plugins import portmap
from narthex.cni.plugins.portmap import PortmapConfig, PortMapping, PortmapTarget
from narthex.cni.program.elements import ElementKind, remove_orphans, restore
from narthex.cni.program.node import apply_settings
from narthex.cni.request import valid_attachments
from narthex.cni.result import previous
from narthex.model.values import address_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping as Fields

    from narthex.cni.program.node import NodeContext
    from narthex.cni.request import CniRequest

_SETS = ("ports4", "ports6", "bound4", "bound6", "hairpin4", "hairpin6", "self4", "self6", "loopback4", "all4", "all6")


def add(node: NodeContext, request: CniRequest) -> None:
    """Perform the ADD: all of the pod's host ports or none. Raises CniError, OSError."""
    config, pod = portmap.read(request), _target(request)
    if config.mappings:
        with node.exclusive(locks.PORTS, request.attachment):
            _add(node, request, config, pod)


def _add(node: NodeContext, request: CniRequest, config: PortmapConfig, pod: PortmapTarget) -> None:
    _refuse_second(node, request)
    close(node, request.attachment)
    node.records.put(records.PORTS, request.attachment, _record(config, pod))
    try:
        if config.backend == "iptables":
            from narthex.cni.program import iptables as chains

            chains.open_ports(request, config, pod)
        else:
            _open(node, request.attachment, config, pod)
        for link in portmap.loopback_links(config, pod):
            apply_settings([SysctlSetting(f"net/ipv4/conf/{link}/route_localnet", "1", required=True)])
        if any(mapping.protocol == "udp" for mapping in config.mappings):
            _forget_flows(config, pod)
    except BaseException:
        close(node, request.attachment)
        raise


def _target(request: CniRequest) -> PortmapTarget:
    before = previous(request.config)
    if before is None:
        raise CniError(INVALID_CONFIG, "prevResult: portmap must be called as a chained plugin")
    return portmap.portmap_target(before)


def _refuse_second(node: NodeContext, request: CniRequest) -> None:
    record = node.records.get(records.PORTS, request.attachment)
    if record is None:
        return
    config, pod = of_record(record)
    owner = owner_of(request.attachment)
    if any(node.ports.has(one, owner) for one in portmap.elements(config, pod)):
        raise CniError(TAKEN, f"{request.container} already has host ports", "run DEL before a second ADD")


def _open(node: NodeContext, attachment: str, config: PortmapConfig, pod: PortmapTarget) -> None:
    """Add the elements; an owner that is certainly gone is removed. Raises CniError, OSError."""
    elements, guard = portmap.elements(config, pod), portmap.guard(portmap.loopback_links(config, pod))
    for _ in range(len(elements) + 1):
        try:
            node.ports.add(elements, owner_of(attachment), guard)
            return
        except ElementExistsError as taken:
            if not _makes_way(node, attachment, taken.owner):
                holder = _named(node, taken.owner)
                port = _port_of(taken.element.key, taken.element.set)
                raise CniError(TAKEN, f"host port {port} is taken by {holder}") from None
    raise CniError(TAKEN, "other pods keep allocating the host ports")


def _makes_way(node: NodeContext, own: str, owner: str) -> bool:
    """Remove the host ports of an attachment whose namespace is gone; return True if it was. Raises CniError, OSError.

    The caller holds the lock of attachment `own`. Two requests may want each other's ports, so neither waits for the other.
    """
    if owner == owner_of(own):
        # The record that described them was lost.
        _remove_all(node, owner)
        return True
    with node.exclusive(locks.PORTS, owner, at_once=True):
        for attachment, record in node.records.all(records.PORTS):
            if owner_of(attachment) == owner:
                pod = node.records.get(records.PODS, attachment)
                if pod is None or not records.is_gone(pod, node.names()):
                    return False
                _close(node, attachment, record)
                return True
        # Orphaned: a record is written before and removed after what it describes.
        _remove_all(node, owner)
        return True


def _remove_all(node: NodeContext, owner: str) -> None:
    node.ports.remove([held.element for held in node.ports.held(_SETS) if held.owner == owner], owner)


def _named(node: NodeContext, owner: str) -> str:
    for attachment, _ in node.records.all(records.PORTS):
        if owner_of(attachment) == owner:
            network, container, interface = attachment.split(":")
            return f"container {container} (network {network}, interface {interface})"
    return owner or "rules without an owner"


def _port_of(key: bytes, name: str) -> str:
    """Return the host port of an element in words."""
    bound = address_text(key[:-8]) + " " if name.startswith("bound") else ""
    numbers = {number: protocol for protocol, number in portmap.PROTOCOLS.items()}
    return f"{bound}{numbers.get(key[-8], key[-8])} {int.from_bytes(key[-4:-2], 'big')}"


def remove(node: NodeContext, request: CniRequest) -> None:
    """Perform the DEL; without a record, rules of the reference plugin are removed. Raises CniError, OSError."""
    with node.exclusive(locks.PORTS, request.attachment):
        if close(node, request.attachment):
            return
    if fields.items(fields.part(request.config, "runtimeConfig"), "portMappings"):
        from narthex.cni.program import iptables as chains

        chains.close_ports(request.network, request.container)


def close(node: NodeContext, attachment: str) -> bool:
    """Remove the rules of an attachment according to its record; return True if it had one. Raises OSError, CniError."""
    record = node.records.get(records.PORTS, attachment)
    if record is not None:
        _close(node, attachment, record)
    node.records.drop(records.PORTS, attachment)
    return record is not None


def _close(node: NodeContext, attachment: str, record: Fields[str, object]) -> None:
    if record.get("backend") == "iptables":
        from narthex.cni.program import iptables as chains

        network, container, _ = attachment.split(":")
        chains.close_ports(network, container)
    else:
        config, pod = of_record(record)
        node.ports.remove(portmap.elements(config, pod), owner_of(attachment))
        if any(mapping.protocol == "udp" for mapping in config.mappings):
            _forget_flows(config, pod, only_to_pod=True)
    node.records.drop(records.PORTS, attachment)


def check(node: NodeContext, request: CniRequest) -> None:
    """Perform the CHECK. Raises CniError if a mapping is missing."""
    config, pod = portmap.read(request), _target(request)
    if not config.mappings:
        return
    if config.backend == "iptables":
        from narthex.cni.program import iptables as chains

        good = chains.has_ports(request, pod)
    else:
        owner = owner_of(request.attachment)
        good = all(node.ports.has(one, owner) for one in portmap.elements(config, pod))
    if not good:
        raise CniError(NOT_AS_ADDED, f"host ports of container {request.container} are missing ({config.backend})")


def collect(node: NodeContext, request: CniRequest) -> None:
    """Perform the GC: remove the host ports without a valid attachment. Raises CniError, OSError."""
    for attachment in node.records.invalid(records.PORTS, request.network, valid_attachments(request)):
        with node.exclusive(locks.PORTS, attachment):
            close(node, attachment)
    remove_orphans(node, node.ports, ELEMENTS, request.network)


def status(node: NodeContext, request: CniRequest) -> None:
    """Perform the STATUS. Raises CniError if an ADD would fail."""
    backend = portmap.read(request).backend
    try:
        if backend == "nftables":
            node.ports.is_whole()
        else:
            from narthex.linux.run import run

            run(["iptables", "--version"], timeout=10)
    except OSError as error:
        raise CniError(CANNOT_ADD, f"portmap: {backend} cannot be used: {error}") from None


def _describe(record: Fields[str, object]) -> tuple[tuple[SetElement, ...], tuple[SetElement, ...]]:
    config, pod = of_record(record)
    return tuple(portmap.elements(config, pod)), portmap.guard(portmap.loopback_links(config, pod))


ELEMENTS = ElementKind(records.PORTS, locks.PORTS, _SETS, (portmap.GUARD,), _describe)


def resync(node: NodeContext) -> int:
    """Restore removed elements and remove orphaned ones; return their number. Raises OSError, CniError."""
    added = restore(node, node.ports, ELEMENTS, node.lasting(records.PORTS, locks.PORTS, _close))
    return added + len(remove_orphans(node, node.ports, ELEMENTS))


def _forget_flows(config: PortmapConfig, pod: PortmapTarget, only_to_pod: bool = False) -> int:
    """Remove conntrack entries of UDP host ports on this node's addresses; return their number. Raises OSError.

    UDP has no connection end, so an entry would keep a client off a new mapping, or on a deleted pod, for as long as it sends.
    `only_to_pod`: the entries that the pod answers, otherwise those that it does not.
    """
    # Imported here: only UDP ports need them, and they take longer to load than the rest of the plugin.
    from narthex.linux.addresses import own_addresses
    from narthex.linux.conntrack import ConntrackTable
    from narthex.model import IPFamily, Protocol

    removed = 0
    conntrack = ConntrackTable()
    own = {one.address for one in own_addresses()}
    for ip in pod.ips:
        family = IPFamily.IPV4 if len(ip) == 4 else IPFamily.IPV6
        towards = {
            (Protocol.UDP, one.host_port)
            for one in config.mappings
            if one.protocol == "udp" and portmap.applies(one, ip)
        }
        if not towards:
            continue
        text = address_text(ip)
        stale = [
            entry
            for entry in conntrack.entries(family, towards)
            if (entry.flow.destination in own or entry.flow.destination.startswith("127."))
            and (entry.flow.reply_source == text) is only_to_pod
        ]
        removed += sum(conntrack.remove(family, stale))
    return removed


def _record(config: PortmapConfig, pod: PortmapTarget) -> dict[str, object]:
    mappings = [
        {
            "protocol": one.protocol,
            "hostPort": one.host_port,
            "containerPort": one.port,
            "hostIP": address_text(one.host_ip) if one.host_ip else "",
        }
        for one in config.mappings
    ]
    return {
        "backend": config.backend,
        "mappings": mappings,
        "snat": config.snat,
        "masqAll": config.masquerade_all,
        "ips": [address_text(ip) for ip in pod.ips],
        "subnets": list(pod.subnets),
        "links": list(pod.links),
    }


def of_record(record: Fields[str, object]) -> tuple[PortmapConfig, PortmapTarget]:
    """Return configuration and target from a record. Raises CniError for an invalid one."""
    mappings = tuple(
        PortMapping(
            fields.text(one, "protocol"),
            fields.whole(one, "hostPort", 1, 65535) or 0,
            fields.whole(one, "containerPort", 1, 65535) or 0,
            fields.optional_ip(one, "hostIP"),
        )
        for one in fields.objects(record, "mappings")
    )
    config = PortmapConfig(
        mappings,
        fields.flag(record, "snat"),
        fields.flag(record, "masqAll"),
        fields.text(record, "backend"),
        ((), ()),
        0,
        "",
    )
    ips = tuple(fields.ip(one, "ips") for one in fields.texts(record, "ips"))
    return config, PortmapTarget(ips, fields.texts(record, "subnets"), fields.texts(record, "links"))
