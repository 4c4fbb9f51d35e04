"""IPAM: host-local in this process, other plugins as separate programs.

Reservations are files in the format of the reference host-local plugin, so that a node can switch between both:
`DIRECTORY/ADDRESS` has container ID and interface, `last_reserved_ip.N` the last address of range set N, and `lock` is
locked by readers and writers.
"""

from __future__ import annotations

from narthex.cni.errors import CANNOT_ADD, INVALID_CONFIG, NOT_AS_ADDED, TAKEN, CniError
from narthex.cni.kernel import files, locks, records
from narthex.cni.plugins import host_local as ipam
from narthex.cni.request import ADDRESS_ARGUMENTS, check_arguments, ipam_of, valid_attachments
from narthex.cni.result import CniResult, DNSConfig
from narthex.model.values import Value, address_text, packed_address

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from narthex.cni.plugins.host_local import AllocatedAddresses, IpamConfig
    from narthex.cni.program.node import NodeContext
    from narthex.cni.request import CniRequest


def _delegated(request: CniRequest) -> bool:
    """Run the configured IPAM plugin if it is not host-local; return True then. Raises CniError."""
    if request.plugin == "host-local":
        return False
    plugin = ipam_of(request.config)
    if plugin != "host-local":
        from narthex.cni.program import delegate

        delegate.run(request, plugin)
    return plugin != "host-local"


def add(node: NodeContext, request: CniRequest) -> CniResult:
    """Perform the ADD of host-local. Raises CniError."""
    check_arguments(request, ADDRESS_ARGUMENTS)
    config = ipam.read(request)
    with node.exclusive(locks.IPAM, request.attachment):
        return allocate(node, request, config, "")


def read(request: CniRequest) -> IpamConfig | None:
    """Parse the configuration of host-local; None if another plugin assigns addresses, which must exist, or none.

    Raises CniError.
    """
    plugin = ipam_of(request.config)
    if plugin == "host-local":
        return ipam.read(request)
    if plugin:
        from narthex.cni.program import delegate

        delegate.find(request.path, plugin)
    return None


def allocate(node: NodeContext, request: CniRequest, config: IpamConfig, link: str) -> CniResult:
    """Allocate the addresses of an attachment. `link` is the node's end of its veth pair, or empty. Raises CniError."""
    dns = _resolv_conf(config.resolv_conf) if config.resolv_conf else DNSConfig()
    pod = records.of_namespace(node.pod(request), request.namespace, link)
    leases = IpamLeases(config.directory)
    with leases.lock():
        _make_way(node, request, leases, everywhere=not link)
        choice = _choice(node, request, config, leases)
        given = [ip.network.address for ip in choice.ips]
        node.records.put(records.PODS, request.attachment, pod | {"ips": [address_text(one) for one in given]})
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
        message = f"{address_text(mine[0])} has been allocated to {request.container}:{request.interface}"
        raise CniError(TAKEN, f"{message}, duplicate allocation is not allowed", "run DEL before a second ADD")
    leases.free(mine)


def _addresses_of(record: Mapping[str, object] | None) -> list[bytes]:
    said = record.get("ips") if record is not None else None
    found = []
    for text in said if isinstance(said, list) else ():
        try:
            found.append(packed_address(str(text)))
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
    """Perform the DEL of host-local. Raises CniError, OSError."""
    with node.exclusive(locks.IPAM, request.attachment):
        release(node, request)


def release(node: NodeContext, request: CniRequest) -> None:
    """Release the addresses of an attachment, if any. Raises CniError, OSError."""
    if _delegated(request):
        return
    leases = IpamLeases(ipam.directory_of(request.config))
    if leases.exists():
        with leases.lock():
            record = node.records.get(records.PODS, request.attachment)
            among = _addresses_of(record) or None
            leases.free(leases.those_of(request.container, request.interface, among))
            leases.remove_unfinished()
    node.records.drop(records.PODS, request.attachment)


def check(node: NodeContext, request: CniRequest) -> None:  # noqa: ARG001 - as all of its kind
    """Check that the attachment has an address. Raises CniError."""
    if _delegated(request):
        return
    leases = IpamLeases(ipam.read(request).directory)
    if leases.exists():
        with leases.lock():
            if leases.those_of(request.container, request.interface):
                return
    raise CniError(NOT_AS_ADDED, f"host-local: no address is reserved for {request.container}:{request.interface}")


def collect(node: NodeContext, request: CniRequest) -> None:
    """Release the addresses of all attachments that are not valid (GC). Raises CniError, OSError."""
    if _delegated(request):
        return
    valid = valid_attachments(request)
    leases = IpamLeases(ipam.directory_of(request.config))
    if leases.exists():
        with leases.lock():
            held = leases.held().items()
            leases.free([one for one, owner in held if not any(owner.is_of(*each) for each in valid)])
            leases.remove_unfinished()
    for attachment in node.records.invalid(records.PODS, request.network, valid):
        node.records.drop(records.PODS, attachment)


def status(node: NodeContext, request: CniRequest) -> None:
    """Check that an ADD would get an address. Raises CniError."""
    if _delegated(request):
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


TYPE_CHECKING = False

_LAST = "last_reserved_ip."
_UNFINISHED = ".unfinished"
"""One name suffices: writers hold the lock."""


class LeaseOwner(Value):
    """The attachment that holds an address."""

    container: str
    interface: str
    """Empty in files of plugins before 2019."""

    def is_of(self, container: str, interface: str) -> bool:
        """Return True if this is the attachment."""
        return self.container == container and self.interface in ("", interface)


_FEW = 16


class ReservedAddressSet:
    """Membership test for reserved addresses.

    The next address is nearly always free, so the first lookups check single files; further ones use a list that is read once.
    """

    def __init__(self, leases: IpamLeases) -> None:
        self._leases = leases
        self._asked = 0
        self._all: set[bytes] = set()

    def __contains__(self, one: object) -> bool:
        """Return True if the address is reserved. Raises OSError."""
        self._asked += 1
        if self._asked <= _FEW:
            return isinstance(one, bytes) and self._leases.has(one)
        if self._asked == _FEW + 1:
            self._all = self._leases.all()
        return one in self._all


class IpamLeases:
    """Reservations of one network. Except where noted, methods require the lock."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def lock(self) -> files.Lock:
        """Return the lock, creating the directory if needed. Raises OSError."""
        files.make_directory(self._directory)
        return files.Lock(f"{self._directory}/lock")

    def taken(self) -> ReservedAddressSet:
        """Return the reserved addresses, for membership tests."""
        return ReservedAddressSet(self)

    def all(self) -> set[bytes]:
        """Return all reserved addresses. Raises OSError."""
        found = set()
        for name in files.names(self._directory):
            try:
                found.add(packed_address(name))
            except ValueError:
                continue
        return found

    def held(self) -> dict[bytes, LeaseOwner]:
        """Return all reservations with their owners. Raises OSError."""
        every = ((one, self.owner(one)) for one in self.all())
        return {one: owner for one, owner in every if owner is not None}

    def owner(self, one: bytes) -> LeaseOwner | None:
        """Return the owner of an address, or None; an empty file was never completed. Raises OSError."""
        data = files.read(f"{self._directory}/{address_text(one)}")
        if not data or not data.strip():
            return None
        container, _, interface = data.decode("utf-8", "replace").strip().partition("\r\n")
        return LeaseOwner(container, interface)

    def those_of(self, container: str, interface: str, among: Iterable[bytes] | None = None) -> list[bytes]:
        """Return the addresses of an attachment, searching `among` or all reservations. Raises OSError."""
        every = self.all() if among is None else among
        owners = ((one, self.owner(one)) for one in every)
        return [one for one, owner in owners if owner is not None and owner.is_of(container, interface)]

    def last(self, sets: int) -> dict[int, bytes]:
        """Return the last assigned address of each range set. Raises OSError."""
        found = {}
        for number in range(sets):
            data = files.read(f"{self._directory}/{_LAST}{number}")
            try:
                found[number] = packed_address((data or b"").decode("ascii", "replace").strip())
            except ValueError:
                continue
        return found

    def reserve(self, one: bytes, container: str, interface: str) -> None:
        """Reserve an address for an attachment. Raises OSError."""
        files.write(self._directory, address_text(one), f"{container}\r\n{interface}".encode(), _UNFINISHED)

    def remember(self, number: int, one: bytes) -> None:
        """Store the last assigned address of a range set. Raises OSError."""
        files.write(self._directory, f"{_LAST}{number}", address_text(one).encode(), _UNFINISHED)

    def free(self, addresses: Iterable[bytes]) -> None:
        """Release addresses; they may be free already. Raises OSError."""
        for one in addresses:
            files.remove(f"{self._directory}/{address_text(one)}")

    @property
    def unfinished(self) -> str:
        """Path of the file that a writer uses. Without one, it is that of a writer that was killed."""
        return f"{self._directory}/{_UNFINISHED}"

    def has_unfinished(self) -> bool:
        """Return True if there is the file of a writer. Raises OSError."""
        return files.read(self.unfinished) is not None

    def remove_unfinished(self) -> None:
        """Remove the file of a writer that was killed, if there is one. Raises OSError."""
        files.remove(self.unfinished)

    def has(self, one: bytes) -> bool:
        """Return True if an address is reserved. Raises OSError."""
        return files.read(f"{self._directory}/{address_text(one)}") is not None

    def exists(self) -> bool:
        """Return True if the network ever assigned an address. Needs no lock.

        Old plugins did not leave a lock file behind.
        """
        return files.is_directory(self._directory)
