"""host-local IPAM: configuration, and the choice of addresses. Reservations are stored by `program/ipam.py`.

Configuration and choice match the reference plugin: each range set provides one address, the next one after the last
assigned, so that a freed address is reused as late as possible.
"""

from __future__ import annotations

from narthex.cni import fields
from narthex.cni.errors import CANNOT_ADD, INVALID_CONFIG, TAKEN, CniError
from narthex.cni.result import IPConfig, read_routes
from narthex.model.values import Network, Value, address_number, address_text, ip_version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from narthex.cni.fields import Fields
    from narthex.cni.request import CniRequest
    from narthex.cni.result import PodRoute

DATA_DIR = "/var/lib/cni/networks"
_ONE_PER_FAMILY = ("0.1.0", "0.2.0")


class IpamRange(Value):
    """Addresses of one subnet, from `start` to `end` inclusive."""

    subnet: Network
    start: bytes
    end: bytes
    gateway: bytes

    def holds(self, one: bytes) -> bool:
        """Return True if an address is in the range."""
        return len(one) == len(self.start) and self.start <= one <= self.end


class IpamConfig(Value):
    """Configuration of host-local."""

    sets: tuple[tuple[IpamRange, ...], ...]
    """Each range set provides one address."""
    requested: tuple[bytes, ...]
    routes: tuple[PodRoute, ...]
    resolv_conf: str
    directory: str


def directory_of(config: Mapping[str, object]) -> str:
    """Return the directory of a network's reservations: all that DEL needs of a possibly invalid configuration. Raises CniError."""
    if config.get("ipam") is None:
        raise fields.wrong("ipam", "IPAM config missing 'ipam' key")
    ipam = fields.part(config, "ipam")
    return f"{fields.directory(ipam, 'dataDir', 'ipam.', DATA_DIR)}/{fields.text(config, 'name')}"


def read(request: CniRequest) -> IpamConfig:
    """Parse the configuration for ADD or CHECK. Raises CniError with the field."""
    directory = directory_of(request.config)
    ipam = fields.part(request.config, "ipam")
    runtime = fields.part(request.config, "runtimeConfig")
    sets = [
        *_range_sets(runtime, "ipRanges", "runtimeConfig."),
        *([(_range(ipam, "ipam."),)] if fields.text(ipam, "subnet", "ipam.") else []),
        *_range_sets(ipam, "ranges", "ipam."),
    ]
    if not sets:
        raise fields.wrong("ipam.ranges", "no IP ranges specified")
    _refuse_overlap(sets)
    families = [ip_version(one[0].start) for one in sets]
    if request.version in _ONE_PER_FAMILY and len(families) != len(set(families)):
        raise fields.wrong("ipam.ranges", f"CNI version {request.version} does not support more than 1 per family")
    resolv_conf = fields.text(ipam, "resolvConf", "ipam.")
    routes = read_routes(ipam, "ipam.")
    if request.version in _ONE_PER_FAMILY:
        # The results of these versions have routes of the families with an address only.
        routes = tuple(one for one in routes if ip_version(one.destination.address) in families)
    return IpamConfig(tuple(sets), _requested(request, runtime), routes, resolv_conf, directory)


def _range_sets(fields_: Fields, name: str, path: str) -> list[tuple[IpamRange, ...]]:
    sets = []
    for number, one in enumerate(fields.items(fields_, name, path)):
        here = f"{path}{name}[{number}]"
        if not isinstance(one, list) or not one:
            raise fields.wrong(here, "must be a list of at least one range")
        ranges = []
        for place_in_set, each in enumerate(one):
            if not isinstance(each, dict):
                raise fields.wrong(f"{here}[{place_in_set}]", "must be an object")
            ranges.append(_range(each, f"{here}[{place_in_set}]."))
        if len({len(each.start) for each in ranges}) > 1:
            raise fields.wrong(here, "mixed address families")
        sets.append(tuple(ranges))
    return sets


def _range(fields_: Fields, path: str) -> IpamRange:
    subnet = fields.network(fields.text(fields_, "subnet", path), path + "subnet")
    bits = 8 * len(subnet.address)
    if subnet.address != subnet.first:
        raise fields.wrong(path + "subnet", f"has host bits set: {Network(subnet.first, subnet.prefix)} is meant?")
    if subnet.prefix > bits - 2:
        raise fields.wrong(path + "subnet", f"{subnet} is too small to allocate from")
    first = _next(subnet.first)
    # The last IPv4 address is the broadcast address; the last IPv6 address is a normal one.
    last = subnet.last if bits == 128 else _next(subnet.last, -1)
    start, end, gateway = (fields.optional_ip(fields_, name, path) for name in ("rangeStart", "rangeEnd", "gateway"))
    for name, value in (("rangeStart", start), ("rangeEnd", end)):
        if value and not first <= value <= last:
            raise fields.wrong(path + name, f"{address_text(value)} is not an address for hosts of {subnet}")
    if gateway and len(gateway) != len(first):
        raise fields.wrong(path + "gateway", f"is not of the family of {subnet}")
    if start and end and start > end:
        raise fields.wrong(path + "rangeStart", f"{address_text(start)} is behind rangeEnd {address_text(end)}")
    return IpamRange(subnet, start or first, end or last, gateway or first)


def _refuse_overlap(sets: list[tuple[IpamRange, ...]]) -> None:
    ranges = [one for each in sets for one in each]
    for number, one in enumerate(ranges):
        for other in ranges[:number]:
            if one.holds(other.start) or other.holds(one.start):
                raise fields.wrong("ipam.ranges", f"the ranges of {other.subnet} and {one.subnet} overlap")


def _requested(request: CniRequest, runtime: Fields) -> tuple[bytes, ...]:
    """Return the requested addresses: CNI_ARGS, args.cni.ips, runtimeConfig.ips; prefix lengths are ignored."""
    cni = fields.part(fields.part(request.config, "args"), "cni", "args.")
    texts = (
        *filter(None, [request.args.get("IP", "")]),
        *fields.texts(cni, "ips", "args.cni."),
        *fields.texts(runtime, "ips", "runtimeConfig."),
    )
    return tuple(dict.fromkeys(fields.ip(text.partition("/")[0], "the address asked for") for text in texts))


class AllocatedAddresses(Value):
    """The addresses of an attachment: the i-th one is of the i-th range set."""

    ips: tuple[IPConfig, ...]


def choose(ipam: IpamConfig, taken: Container[bytes], last: Mapping[int, bytes]) -> AllocatedAddresses:
    """Choose an address of each range set. Raises CniError; nothing must be reserved then.

    `taken` are reserved addresses, `last` the last assigned one of each range set.
    """
    left = list(ipam.requested)
    ips = []
    for number, ranges in enumerate(ipam.sets):
        asked = next((one for one in left if any(each.holds(one) for each in ranges)), None)
        if asked is not None:
            left.remove(asked)
            ips.append(_asked(asked, ranges, taken))
        else:
            ips.append(_free(number, ranges, taken, last.get(number)))
    if left:
        names = ", ".join(map(address_text, left))
        raise CniError(INVALID_CONFIG, f"failed to allocate all requested IPs: {names} is in no range")
    return AllocatedAddresses(tuple(ips))


def _asked(one: bytes, ranges: tuple[IpamRange, ...], taken: Container[bytes]) -> IPConfig:
    home = next(each for each in ranges if each.holds(one))
    if one == home.gateway:
        raise CniError(INVALID_CONFIG, f"requested IP {address_text(one)} is the gateway of {home.subnet}")
    if one in taken:
        raise CniError(TAKEN, f"requested IP address {address_text(one)} is not available in {_described(ranges)}")
    return IPConfig(Network(one, home.subnet.prefix), home.gateway)


def _free(number: int, ranges: tuple[IpamRange, ...], taken: Container[bytes], last: bytes | None) -> IPConfig:
    """Return the first free address after the last assigned one, wrapping around through all ranges."""
    at = next((path for path, each in enumerate(ranges) if last is not None and each.holds(last)), None)
    begin = 0 if at is None else at
    for turn in range(len(ranges) + 1):
        home = ranges[(begin + turn) % len(ranges)]
        first, final = home.start, home.end
        if turn == 0 and at is not None and last is not None:
            if last == home.end:
                continue
            first = _next(last)
        elif turn == len(ranges):
            if at is None or last is None:
                break
            final = last
        found = _first_free(first, final, home.gateway, taken)
        if found is not None:
            return IPConfig(Network(found, home.subnet.prefix), home.gateway)
    raise RangeExhausted(number, _described(ranges))


def _first_free(first: bytes, final: bytes, gateway: bytes, taken: Container[bytes]) -> bytes | None:
    size = len(first)
    for value in range(address_number(first), address_number(final) + 1):
        one = value.to_bytes(size, "big")
        if one != gateway and one not in taken:
            return one
    return None


class RangeExhausted(CniError):
    """All addresses of a range set are reserved."""

    def __init__(self, number: int, ranges: str) -> None:
        message = f"no IP addresses available in range set {number}: {ranges}"
        super().__init__(CANNOT_ADD, message, "every address is reserved; GC, or DEL of pods that are gone, frees some")


def _described(ranges: tuple[IpamRange, ...]) -> str:
    return ",".join(f"{address_text(one.start)}-{address_text(one.end)}" for one in ranges)


def _next(one: bytes, step: int = 1) -> bytes:
    return (address_number(one) + step).to_bytes(len(one), "big")
