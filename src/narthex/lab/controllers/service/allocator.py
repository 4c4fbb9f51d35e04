"""Cluster IPs and node ports in use, and ranges to allocate from.

Allocation is deterministic: a hash of the Service's name selects the value. The lower band of a range is reserved for values
that users request; allocation uses it only when the rest is full (KEP-3070 for addresses, KEP-3668 for ports).
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Collection, Container, Iterator, Mapping
from typing import Any

import msgspec

from narthex.lab.api.errors import StatusError
from narthex.lab.api.registry import Registry
from narthex.lab.controllers.objects import Object, ObjectKey, integer_or, is_terminating, key_of, spec_of
from narthex.lab.topology import SERVICE_CIDRS

_TAKEN = "provided IP is already allocated"
PORT_TAKEN = "provided port is already allocated"
_PROTOCOLS = ("TCP", "UDP", "SCTP")

_Claim = int | tuple[str, int]
"""An address as a number, or a protocol and a port."""


class ServiceAllocations:
    """Addresses and node ports of all Services in a registry. Those of a deleted Service are free at once."""

    def __init__(self) -> None:
        self._version = -1
        self._owners: dict[_Claim, ObjectKey] = {}
        self._claims: dict[ObjectKey, tuple[_Claim, ...]] = {}
        self._ranges: dict[str, list[tuple[str, AllocationRange]]] = {}

    def sync(self, registry: Registry) -> None:
        """Apply the changes since the last call."""
        if registry.version == self._version:
            return
        try:
            changes = list(registry.changes_since(self._version)) if self._version >= 0 else None
        except StatusError:
            changes = None
        if changes is None:
            self._owners.clear()
            self._claims.clear()
            for service in registry.list("Service"):
                self._put(key_of(service), service)
        for change in changes or ():
            if change.kind == "Service":
                self._put(ObjectKey(*change.key), change.after)
        if changes is None or any(change.kind == "ServiceCIDR" for change in changes):
            self._ranges = _ranges(registry.list("ServiceCIDR"))
        self._version = registry.version

    def _put(self, key: ObjectKey, service: Object | None) -> None:
        for claim in self._claims.pop(key, ()):
            if self._owners.get(claim) == key:
                del self._owners[claim]
        if service is not None:
            claims = tuple(_claims(service))
            self._claims[key] = claims
            self._owners.update(dict.fromkeys(claims, key))

    def families(self) -> tuple[str, ...]:
        """Return the families with ServiceCIDRs, the cluster's primary family first."""
        return tuple(self._ranges)

    def address_error(self, text: str, key: ObjectKey) -> str:
        """Return the reason why a Service cannot have the address it requests, empty if it can."""
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return f"{text!r} is not an IP address"
        ranges = self._ranges.get(f"IPv{address.version}", [])
        if not any(int(address) in each for _, each in ranges):
            valid = ", ".join(cidr for cidr, _ in ranges)
            return f"the provided IP ({text}) is not in the valid range. The range of valid IPs is {valid}"
        return _TAKEN if self._owners.get(int(address), key) != key else ""

    def allocate_address(self, key: ObjectKey, family: str) -> str | None:
        """Return a free address for the Service, None if the ranges are full."""
        for _, each in self._ranges.get(family, ()):
            picked = each.pick(f"{key} {family}", self._owners)
            if picked is not None:
                return str(ipaddress.IPv4Address(picked) if family == "IPv4" else ipaddress.IPv6Address(picked))
        return None

    def port_error(self, protocol: str, port: int, key: ObjectKey) -> str:
        """Return the reason why a Service cannot have the node port it requests, empty if it can."""
        if port not in NODE_PORTS:
            last = NODE_PORTS.stop - 1
            return f"provided port is not in the valid range. The range of valid ports is {NODE_PORTS.start}-{last}"
        return PORT_TAKEN if self._owners.get((protocol, port), key) != key else ""

    def allocate_port(self, seed: str, desired: Mapping[int, Collection[str]]) -> int | None:
        """Return a node port that is free for all protocols and not in `desired`, None if the range is full."""
        return _PORTS.pick(seed, _UsedPorts(self._owners, desired))


class _UsedPorts:
    """Container of the ports in use for any protocol."""

    def __init__(self, owners: Mapping[_Claim, ObjectKey], desired: Mapping[int, Collection[str]]) -> None:
        self._owners = owners
        self._desired = desired

    def __contains__(self, port: object) -> bool:
        return port in self._desired or any((protocol, port) in self._owners for protocol in _PROTOCOLS)


def address_numbers(service: Object) -> Iterator[int]:
    """Yield the cluster IPs of a Service as integers."""
    spec = spec_of(service)
    for address in spec.get("clusterIPs") or ([spec["clusterIP"]] if spec.get("clusterIP") else []):
        if address != "None":
            try:
                yield int(ipaddress.ip_address(address))
            except ValueError:
                continue


def _claims(service: Object) -> Iterator[_Claim]:
    spec = spec_of(service)
    if spec.get("type") == "ExternalName":
        return
    yield from address_numbers(service)
    for port in spec.get("ports") or ():
        if integer_or(port.get("nodePort")):
            yield port.get("protocol") or "TCP", port["nodePort"]
    if integer_or(spec.get("healthCheckNodePort")):
        yield "TCP", spec["healthCheckNodePort"]


def _ranges(objects: list[Object]) -> dict[str, list[tuple[str, AllocationRange]]]:
    """Return the ranges of each family, the cluster's own first. Terminating ServiceCIDRs are left out (KEP-1880)."""
    living = sorted(
        (each for each in objects if not is_terminating(each)),
        key=lambda each: (each["metadata"]["name"] != "kubernetes", each["metadata"]["name"]),
    )
    cidrs = [cidr for each in living for cidr in spec_of(each).get("cidrs") or ()]
    found: dict[str, list[tuple[str, AllocationRange]]] = {}
    for cidr in cidrs if objects else SERVICE_CIDRS:
        try:
            each = address_range(cidr)
        except ValueError:
            continue
        found.setdefault("IPv6" if ":" in cidr else "IPv4", []).append((cidr, each))
    return found


NODE_PORTS = range(30000, 32768)


class AllocationRange(msgspec.Struct, frozen=True):
    """A range of integers that starts with a band reserved for static values."""

    first: int
    count: int
    static: int

    def pick(self, seed: str, taken: Container[Any]) -> int | None:
        """Return a free number derived from `seed`, None if all are taken."""
        start = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big")
        for base, count in ((self.static, self.count - self.static), (0, self.static)):
            for step in range(count):
                number = self.first + base + (start + step) % count
                if number not in taken:
                    return number
        return None

    def __contains__(self, number: int) -> bool:
        return self.first <= number < self.first + self.count


def address_range(cidr: str) -> AllocationRange:
    """Return the allocatable addresses of a network: without the first, and without the last of an IPv4 network."""
    network = ipaddress.ip_network(cidr)
    count = min(network.num_addresses, 1 << 64) - (2 if network.version == 4 else 1)
    return AllocationRange(
        int(network.network_address) + 1, max(0, count), _static(count, smallest=16, largest=256, share=16)
    )


def port_range() -> AllocationRange:
    """Return the range of node ports with upstream's static band."""
    static = _static(len(NODE_PORTS), smallest=16, largest=128, share=32)
    return AllocationRange(NODE_PORTS.start, len(NODE_PORTS), static)


def _static(count: int, *, smallest: int, largest: int, share: int) -> int:
    if count < smallest:
        return 0
    return max(smallest, min(largest, count // share))


_PORTS = port_range()
