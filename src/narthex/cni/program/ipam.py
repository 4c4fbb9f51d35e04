"""IPAM: host-local in this process, other plugins as separate programs."""

from __future__ import annotations

from narthex.cni import fields
from narthex.cni.errors import CANNOT_ADD, INVALID_CONFIG, NOT_AS_ADDED, TAKEN, CniError
from narthex.cni.kernel import files, records
from narthex.cni.kernel.leases import IpamLeases
from narthex.cni.plugins import host_local as ipam
from narthex.cni.request import ADDRESS_ARGUMENTS, check_arguments, valid_attachments
from narthex.cni.result import CniResult, DNSConfig
from narthex.model import packed_addresses as address

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from narthex.cni.kernel.leases import LeaseOwner
    from narthex.cni.plugins.host_local import AllocatedAddresses, IpamConfig
    from narthex.cni.program.node import NodeContext
    from narthex.cni.request import CniRequest


def kind_of(request: CniRequest) -> str:
    """Return the configured IPAM plugin, or empty."""
    return fields.text(fields.part(request.config, "ipam"), "type", "ipam.")


def add(node: NodeContext, request: CniRequest) -> CniResult:
    """Perform the ADD of host-local. Raises CniError."""
    check_arguments(request, ADDRESS_ARGUMENTS)
    return allocate(node, request, "")


def allocate(node: NodeContext, request: CniRequest, link: str) -> CniResult:
    """Allocate the addresses of an attachment. `link` is the node's end of its veth pair, or empty. Raises CniError."""
    if kind_of(request) != "host-local":
        from narthex.cni.program import delegate

        return delegate.addresses(request)
    config = ipam.read(request)
    dns = _resolv_conf(config.resolv_conf) if config.resolv_conf else DNSConfig()
    pod = records.of_namespace(node.pod(request), request.namespace, link)
    leases = IpamLeases(config.directory)
    with leases.lock():
        _make_way(node, request, leases, everywhere=not link)
        choice = _choice(node, request, config, leases)
        given = [ip.network.address for ip in choice.ips]
        node.records.put(records.PODS, request.attachment, pod | {"ips": [address.text(one) for one in given]})
        try:
            for number, one in enumerate(given):
                leases.reserve(one, request.container, request.interface)
                leases.remember(number, one)
        except BaseException:
            leases.free(given)
            node.records.drop(records.PODS, request.attachment)
            raise
    return CniResult((), choice.ips, config.routes, dns)


def _make_way(node: NodeContext, request: CniRequest, leases: IpamLeases, everywhere: bool) -> None:
    """Ensure that the attachment has no addresses, releasing those from before the last boot.

    `everywhere`: search all reservations. A pod of another plugin is recognized by its interface, which exists.
    """
    record = node.records.get(records.PODS, request.attachment)
    among = None if everywhere else _addresses_of(record)
    mine = leases.those_of(request.container, request.interface, among)
    if not mine:
        return
    if record is None or not records.is_gone(record, node.names()):
        message = f"{address.text(mine[0])} has been allocated to {request.container}:{request.interface}"
        raise CniError(TAKEN, f"{message}, duplicate allocation is not allowed", "run DEL before a second ADD")
    leases.free(mine)


def _addresses_of(record: Mapping[str, object] | None) -> list[bytes]:
    """Return the addresses in a record."""
    said = record.get("ips") if record is not None else None
    found = []
    for text in said if isinstance(said, list) else ():
        try:
            found.append(address.packed(str(text)))
        except ValueError:
            continue
    return found


def _choice(node: NodeContext, request: CniRequest, config: IpamConfig, leases: IpamLeases) -> AllocatedAddresses:
    last = leases.last(len(config.sets))
    try:
        return ipam.choose(config, leases.taken(), last)
    except ipam.RangeExhausted:
        held = leases.held()
        _reclaim(node, request.network, leases, held)
        # Reservations without an owner were never completed.
        return ipam.choose(config, held.keys(), last)


def _reclaim(node: NodeContext, network: str, leases: IpamLeases, held: dict[bytes, LeaseOwner]) -> None:
    """Release the addresses of namespaces that are gone without a DEL."""
    names = node.names()
    gone = []
    for one, owner in held.items():
        attachment = f"{network}:{owner.container}:{owner.interface}"
        record = node.records.get(records.PODS, attachment) if records.split(attachment) else None
        if record is not None and records.is_gone(record, names):
            gone.append((one, attachment))
    leases.free(one for one, _ in gone)
    for one, attachment in gone:
        node.records.drop(records.PODS, attachment)
        del held[one]


def remove(node: NodeContext, request: CniRequest) -> None:
    """Release the addresses of an attachment, if any. Raises CniError, OSError."""
    if kind_of(request) != "host-local":
        from narthex.cni.program import delegate

        delegate.run(request, kind_of(request))
        return
    leases = IpamLeases(ipam.directory_of(request.config))
    if leases.exists():
        with leases.lock():
            record = node.records.get(records.PODS, request.attachment)
            among = _addresses_of(record) or None
            leases.free(leases.those_of(request.container, request.interface, among))
    node.records.drop(records.PODS, request.attachment)


def check(node: NodeContext, request: CniRequest) -> None:  # noqa: ARG001 - as all of its kind
    """Check that the attachment has an address. Raises CniError."""
    if kind_of(request) != "host-local":
        from narthex.cni.program import delegate

        delegate.run(request, kind_of(request))
        return
    leases = IpamLeases(ipam.read(request).directory)
    if leases.exists():
        with leases.lock():
            if leases.those_of(request.container, request.interface):
                return
    raise CniError(NOT_AS_ADDED, f"host-local: no address is reserved for {request.container}:{request.interface}")


def collect(node: NodeContext, request: CniRequest) -> None:
    """Release the addresses of all attachments that are not valid (GC). Raises CniError, OSError."""
    if kind_of(request) != "host-local":
        from narthex.cni.program import delegate

        delegate.run(request, kind_of(request))
        return
    valid = valid_attachments(request)
    leases = IpamLeases(ipam.directory_of(request.config))
    if leases.exists():
        with leases.lock():
            held = leases.held().items()
            leases.free([one for one, owner in held if not any(owner.is_of(*each) for each in valid)])
    for attachment, _ in node.records.invalid(records.PODS, request.network, valid):
        node.records.drop(records.PODS, attachment)


def status(node: NodeContext, request: CniRequest) -> None:
    """Check that an ADD would get an address. Raises CniError."""
    if kind_of(request) != "host-local":
        from narthex.cni.program import delegate

        delegate.run(request, kind_of(request))
        return
    config = ipam.read(request)
    leases = IpamLeases(config.directory)
    if not leases.exists():
        return
    with leases.lock():
        try:
            _choice(node, request, config, leases)
        except ipam.RangeExhausted as error:
            raise CniError(CANNOT_ADD, error.message, error.details) from None


def _resolv_conf(path: str) -> DNSConfig:
    data = files.read(path) if path.startswith("/") else None
    if data is None:
        raise CniError(INVALID_CONFIG, f"ipam.resolvConf: {path[:256]!r} cannot be read")
    servers: list[str] = []
    search: list[str] = []
    options: list[str] = []
    domain = ""
    for line in data.decode("utf-8", "replace").splitlines():
        words = line.split()
        if len(words) < 2 or words[0][0] in "#;":
            continue
        match words[0]:
            case "nameserver":
                servers.append(words[1])
            case "domain":
                domain = words[1]
            case "search":
                search += words[1:]
            case "options":
                options += words[1:]
    return DNSConfig(tuple(servers), domain, tuple(search), tuple(options))
