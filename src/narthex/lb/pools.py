"""Address pools as ranges of numbers: which are usable, which are refused and why, and how much of them is used.

Addresses are never enumerated. A refused pool assigns no addresses, and assigned ones stay: a configuration mistake must
not remove a working address.
"""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

import msgspec

from narthex.lb.resources import selects_pool
from narthex.lb.service_status import AllocationDecision, status_addresses
from narthex.model import (
    IPAddressPool,
    IPFamily,
    L2Advertisement,
    Labels,
    NamespacedName,
    Service,
    Snapshot,
    address_key,
    family_of,
    host_network,
    network,
    parsed_network,
    quoted,
)
from narthex.model.validate import any_address

_FORBIDDEN = (
    ("0.0.0.0/8", "addresses that mean no host"),
    ("127.0.0.0/8", "loopback addresses"),
    ("169.254.0.0/16", "link-local addresses"),
    ("224.0.0.0/4", "multicast addresses"),
    ("240.0.0.0/4", "reserved addresses, the broadcast address among them"),
    ("::/127", "the unspecified and the loopback address"),
    ("::ffff:0:0/96", "IPv4 addresses written as IPv6"),
    ("fe80::/10", "link-local addresses"),
    ("ff00::/8", "multicast addresses"),
)
_BUGGY_ENDS = (0, 255)


class AddressRange(msgspec.Struct, frozen=True, order=True):
    """Consecutive addresses of one family, as numbers; both ends inclusive."""

    version: int
    first: int
    last: int
    text: str
    """As written by the user."""

    @property
    def family(self) -> IPFamily:
        """IP family of the range."""
        return IPFamily(self.version)

    @property
    def size(self) -> int:
        """Number of addresses."""
        return self.last - self.first + 1

    def meets(self, other: AddressRange) -> bool:
        """Return True if the ranges overlap."""
        return self.version == other.version and self.first <= other.last and other.first <= self.last

    def holds(self, key: tuple[int, int]) -> bool:
        """Return True if the range contains the address with this `address_key`."""
        return self.version == key[0] and self.first <= key[1] <= self.last


class AddressPool(msgspec.Struct, frozen=True):
    """A usable pool."""

    object: IPAddressPool
    ranges: tuple[AddressRange, ...]
    """Sorted, without overlap."""

    @property
    def name(self) -> str:
        """Name of the pool, as annotations refer to it."""
        return self.object.name

    @property
    def families(self) -> frozenset[IPFamily]:
        """IP families of the addresses."""
        return frozenset(each.family for each in self.ranges)

    @property
    def size(self) -> int:
        """Number of addresses that the pool can assign."""
        return sum(each.size - (_buggy(each) if self.object.avoid_buggy else 0) for each in self.ranges)

    def holds(self, address: str) -> bool:
        """Return True if the pool contains a canonical address."""
        return any(each.holds(address_key(address)) for each in self.ranges)

    def avoids(self, address: str) -> bool:
        """Return True if the pool contains the address but does not assign it (`avoidBuggyIPs`, row M2)."""
        version, number = address_key(address)
        return self.object.avoid_buggy and version == 4 and number & 255 in _BUGGY_ENDS

    def lowest_free(self, family: IPFamily, taken: Container[int], start: int = 0) -> int | None:
        """Return the first address of a family from `start` on that is not in `taken`, as a number; None if there is none."""
        skip = self.object.avoid_buggy and family is IPFamily.IPV4
        for each in self.ranges:
            if each.family is not family or each.last < start:
                continue
            number = max(each.first, start)
            while number <= each.last:
                if number not in taken and not (skip and number & 255 in _BUGGY_ENDS):
                    return number
                number += 1
        return None


class RefusedPool(msgspec.Struct, frozen=True):
    """A pool that cannot be used."""

    object: IPAddressPool
    reason: str
    """What is wrong, and how to fix it."""


class Pools(msgspec.Struct, frozen=True):
    """All pools."""

    accepted: tuple[AddressPool, ...] = ()
    """Sorted by name."""
    refused: tuple[RefusedPool, ...] = ()

    def of(self, address: str) -> AddressPool | None:
        """Return the usable pool that contains an address, or None."""
        return next((pool for pool in self.accepted if pool.holds(address)), None)

    def named(self, name: str) -> AddressPool | None:
        """Return the usable pool of this name, or None."""
        return next((pool for pool in self.accepted if pool.name == name), None)

    def refusal_of(self, name: str) -> RefusedPool | None:
        """Return the refused pool of this name, or None."""
        return next((each for each in self.refused if each.object.name == name), None)


class ReservedAddresses(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses that the cluster uses otherwise, and for what."""

    networks: Mapping[str, str] = {}
    """Canonical networks of Pods and Services, with their purpose."""
    addresses: Mapping[str, str] = {}
    """Canonical addresses, such as those of nodes, with their purpose."""


NOTHING_RESERVED = ReservedAddresses()


def validate_pools(objects: Iterable[IPAddressPool], reserved: ReservedAddresses = NOTHING_RESERVED) -> Pools:
    """Accept or refuse each pool. If two pools overlap, the first one by name is accepted."""
    accepted: list[AddressPool] = []
    refused: list[RefusedPool] = []
    foreign = _Foreign(reserved)
    for each in sorted(objects, key=lambda pool: (pool.name, pool.namespace)):
        try:
            ranges = _ranges(each.addresses)
            _check_names(each, accepted)
            _check_overlap(ranges, accepted)
            foreign.check(ranges)
        except ValueError as error:
            refused.append(RefusedPool(each, str(error)))
        else:
            accepted.append(AddressPool(each, ranges))
    return Pools(tuple(accepted), tuple(refused))


def pool_containing(pools: Iterable[IPAddressPool], address: str) -> IPAddressPool | None:
    """Return the pool whose written ranges contain an address, even if it is refused; the first one by name."""
    key = address_key(address)
    for each in sorted(pools, key=lambda pool: (pool.name, pool.namespace)):
        if any(range_.holds(key) for range_ in _readable(each.addresses)):
            return each
    return None


def may_contain(pool: IPAddressPool, address: str) -> bool:
    """Return True if a pool may be meant to contain an address: its ranges do, or one of them is invalid."""
    ranges, key = _readable(pool.addresses), address_key(address)
    return len(ranges) < len(pool.addresses) or any(range_.holds(key) for range_ in ranges)


def address_text(family: IPFamily, number: int) -> str:
    """Return the canonical text of an address number."""
    return str(ipaddress.IPv4Address(number) if family is IPFamily.IPV4 else ipaddress.IPv6Address(number))


def read_range(text: str) -> AddressRange:
    """Parse `10.0.0.0/24` or `10.0.0.5-10.0.0.9`. Raises ValueError with the problem and its fix."""
    first, dash, last = (part.strip() for part in text.partition("-"))
    found = _between(text, first, last) if dash else _network(text.strip())
    for cidr, what in _FORBIDDEN:
        if found.meets(_of_network(cidr)):
            raise ValueError(f"{quoted(text)} holds {what} (of {cidr}), which are not reachable: leave them out")
    return found


def _between(text: str, first: str, last: str) -> AddressRange:
    try:
        low, high = any_address(first), any_address(last)
    except ValueError:
        raise ValueError(f"{quoted(text)} is not a range such as 10.0.0.5-10.0.0.9") from None
    if family_of(low) is not family_of(high):
        raise ValueError(f"{quoted(text)} begins as {family_of(low).label} and ends as {family_of(high).label}")
    (version, start), (_, end) = address_key(low), address_key(high)
    if end < start:
        raise ValueError(f"{quoted(text)} ends before it begins: write {high}-{low}")
    return AddressRange(version, start, end, f"{low}-{high}")


def _network(text: str) -> AddressRange:
    base, slash, length = text.partition("/")
    try:
        if not slash:
            host = any_address(base)
            raise ValueError(f"{quoted(text)} has no prefix length: write {host}/{family_of(host).host_bits}")
        host, canonical = any_address(base), network(text)
    except ValueError as error:
        if "prefix length" in str(error):
            raise
        raise ValueError(f"{quoted(text)} is not a network such as 10.0.0.0/24 or a range 10.0.0.5-10.0.0.9") from None
    if int(length) == 0:
        raise ValueError(f"{quoted(text)} is all addresses there are: write the network that is yours")
    if canonical.partition("/")[0] != host:
        one = f"{host}/{family_of(host).host_bits}"
        raise ValueError(f"{quoted(text)} has bits of a host: write {canonical}, or {one} for one address")
    return _of_network(canonical)


@lru_cache(maxsize=4096)
def _of_network(cidr: str) -> AddressRange:
    parsed = parsed_network(cidr)
    return AddressRange(parsed.version, int(parsed.network_address), int(parsed.broadcast_address), cidr)


def _ranges(texts: Sequence[str]) -> tuple[AddressRange, ...]:
    """Return all ranges of a pool, sorted. Raises ValueError."""
    if not texts:
        raise ValueError("it has no addresses: write spec.addresses")
    found = sorted(read_range(text) for text in texts)
    for one, two in itertools.pairwise(found):
        if one.meets(two):
            raise ValueError(f"its own {one.text} and {two.text} overlap: write each address once")
    return tuple(found)


@lru_cache(maxsize=1024)
def _readable(texts: tuple[str, ...]) -> tuple[AddressRange, ...]:
    found = []
    for text in texts:
        try:
            found.append(read_range(text))
        except ValueError:
            # validate_pools reports the error.
            continue
    return tuple(found)


def _check_names(pool: IPAddressPool, accepted: Iterable[AddressPool]) -> None:
    for other in accepted:
        if other.name == pool.name:
            raise ValueError(f"{other.object.key} has its name, too: annotations would mean both; rename one")


def _check_overlap(ranges: Sequence[AddressRange], accepted: Iterable[AddressPool]) -> None:
    for pool in accepted:
        for mine, other in itertools.product(ranges, pool.ranges):
            if mine.meets(other):
                raise ValueError(f"{mine.text} overlaps {other.text} of pool {pool.name}: take it out of one of them")


class _Foreign:
    """The reserved addresses, prepared for checking many pools."""

    def __init__(self, reserved: ReservedAddresses) -> None:
        self._networks = [(_of_network(cidr), purpose) for cidr, purpose in sorted(reserved.networks.items())]
        self._addresses = [(address_key(each), each, purpose) for each, purpose in sorted(reserved.addresses.items())]

    def check(self, ranges: Sequence[AddressRange]) -> None:
        """Raise `ValueError` if a range meets a network or an address that another purpose uses.

        The message names the purpose and the ranges that remain.
        """
        for mine in ranges:
            for network_, purpose in self._networks:
                if mine.meets(network_):
                    raise ValueError(f"{mine.text} overlaps {network_.text}, {purpose}: take other addresses")
            for key, text, purpose in self._addresses:
                if mine.holds(key):
                    left = " and ".join(_without(mine, key[1]))
                    instead = f"leave it out: {left}" if left else "take another address"
                    raise ValueError(f"{mine.text} holds {text}, {purpose}: {instead}")


def _without(range_: AddressRange, number: int) -> Iterator[str]:
    for first, last in ((range_.first, number - 1), (number + 1, range_.last)):
        if first <= last:
            yield f"{address_text(range_.family, first)}-{address_text(range_.family, last)}"


def _buggy(range_: AddressRange) -> int:
    """Return the number of addresses in a range that end in .0 or .255."""
    if range_.family is not IPFamily.IPV4:
        return 0
    return sum((range_.last - end) // 256 - (range_.first - 1 - end) // 256 for end in _BUGGY_ENDS)


class PoolUse(msgspec.Struct, frozen=True, kw_only=True):
    """Usage of one pool, for output and metrics."""

    name: str
    addresses: tuple[str, ...]
    """As written by the user."""
    total: int = 0
    in_use: int = 0
    """Number of its addresses that Services have, whichever controller assigned them."""
    services: tuple[str, ...] = ()
    auto_assign: bool = True
    advertisements: tuple[str, ...] = ()
    refused: str = ""
    """Why the pool cannot be used; empty if it can."""


def reserved_addresses(snapshot: Snapshot, cluster_cidrs: Iterable[str] = ()) -> ReservedAddresses:
    """Return the addresses that no pool may contain: those of Pods, Services, and nodes.

    `cluster_cidrs` are the Pod networks, if configured.
    """
    networks = dict.fromkeys(cluster_cidrs, "where pods are (--cluster-cidr)")
    addresses: dict[str, str] = {}
    for _, node in sorted(snapshot.nodes.items()):
        for cidr in node.pod_cidrs:
            networks.setdefault(cidr, f"the pods of node {node.name}")
        for address in (*node.internal_ips, *node.external_ips):
            addresses.setdefault(address, f"an address of node {node.name}")
    for _, each in sorted(snapshot.service_cidrs.items()):
        for cidr in each.cidrs:
            networks.setdefault(cidr, f"the Services' range (ServiceCIDR {each.name})")
    if not snapshot.service_cidrs:
        # API servers before 1.31 do not expose the range; the cluster IPs show it.
        for _, service in sorted(snapshot.services.items()):
            for address in service.cluster_ips:
                if address != "None":
                    networks.setdefault(host_network(address), f"the cluster IP of {service.key}")
    return ReservedAddresses(networks=networks, addresses=addresses)


def namespace_labels(snapshot: Snapshot) -> Mapping[str, Labels]:
    """Return the labels of each namespace by name."""
    return {key.name: namespace.labels for key, namespace in snapshot.namespaces.items()}


def usage(
    pools: Pools,
    services: Iterable[Service],
    decisions: Mapping[NamespacedName, AllocationDecision],
    advertisements: Iterable[L2Advertisement] = (),
) -> tuple[PoolUse, ...]:
    """Return the usage of all pools by name. An address counts from the decision until no status contains it."""
    users: dict[str, set[str]] = {}
    for service in services:
        decision = decisions.get(service.key)
        for address in {*status_addresses(service), *(decision.addresses if decision is not None else ())}:
            users.setdefault(address, set()).add(str(service.key))
    by_pool: dict[str, list[str]] = {}
    for address in users:
        if (pool := pools.of(address)) is not None:
            by_pool.setdefault(pool.name, []).append(address)
    ads = sorted(advertisements, key=lambda each: each.key)
    found = [
        PoolUse(
            name=pool.name,
            addresses=pool.object.addresses,
            total=pool.size,
            in_use=len(by_pool.get(pool.name, ())),
            services=tuple(sorted({user for address in by_pool.get(pool.name, ()) for user in users[address]})),
            auto_assign=pool.object.auto_assign,
            advertisements=tuple(each.name for each in ads if selects_pool(each, pool.object)),
        )
        for pool in pools.accepted
    ]
    found += [
        PoolUse(
            name=each.object.name,
            addresses=each.object.addresses,
            auto_assign=each.object.auto_assign,
            refused=each.reason,
        )
        for each in pools.refused
    ]
    return tuple(sorted(found, key=lambda use: use.name))
