"""The names of a cluster as a worker serves them: applies changes and looks up names and addresses. Not thread-safe."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from narthex.dns.message import names
from narthex.dns.message.wire import AAAA, TXT, A
from narthex.dns.zone.changes import ZoneChange
from narthex.dns.zone.records import NO_RECORDS, Records, ServiceRecords

SCHEMA_VERSION = b"1.1.0"
SCHEMA_TTL = 28_800
"""TTL of `dns-version` in seconds, independent of the settings (row D28)."""

_SVC, _POD, _VERSION, _DNS = b"\x03svc", b"\x03pod", b"\x0bdns-version", b"\x03dns"
_PIN, _PREFER = b"\x03pin\x05_zone", b"\x06prefer\x05_zone"
_HEX = frozenset(b"0123456789abcdef")
_IN_ADDR, _IP6 = names.wire("in-addr.arpa"), names.wire("ip6.arpa")

NxdomainScope = Literal["always", "unless a service"]


class ExistingName(msgspec.Struct, frozen=True):
    """The records of a name that exists."""

    records: Records
    service: bytes = b""
    """Relative name that completes the targets in the data of SRV records."""
    ttl: int | None = None
    """None: that of the settings."""


_EMPTY = ExistingName(NO_RECORDS)


class Zone:
    """The names of a cluster, relative to any forward zone, and the addresses of any reverse zone."""

    def __init__(self, pods: Literal["disabled", "insecure", "verified"] = "disabled", *, zonal: bool = False) -> None:
        """`pods` and `zonal` are the options of plugin `kubernetes`."""
        self._zonal = zonal
        self._answers_pods, self._verifies_pods = pods != "disabled", pods == "verified"
        self._services: dict[bytes, ServiceRecords] = {}
        self._namespaces: set[bytes] = set()
        self._pods: dict[bytes, tuple[bytes, ...]] = {}
        self._cluster: dict[bytes, dict[bytes, None]] = {}
        """Services by packed cluster IP; manifests may give the same address to two."""
        self._endpoints: dict[bytes, dict[bytes, None] | bytes] = {}
        """Services by packed address of an endpoint; mostly one, which is then stored without a dict."""
        self.serial = 0
        self.synced = False

    def apply(self, change: ZoneChange) -> None:
        """Apply a change."""
        for key, records in change.services.items():
            self._remove(key)
            if records is not None:
                self._add(key, records)
        for namespace, shown in change.namespaces.items():
            (self._namespaces.add if shown else self._namespaces.discard)(namespace)
        for address, holders in change.pods.items():
            if holders:
                self._pods[address] = holders
            else:
                self._pods.pop(address, None)
        self.serial = max(self.serial, change.serial)
        self.synced = self.synced or change.synced

    def find(self, relative: bytes) -> ExistingName | None:
        """Return the records of a name, or None if it does not exist (row 1.2).

        `relative` is in wire form and lower case, without the zone and the root.
        """
        known = self._services.get(relative)
        if known is not None:
            return ExistingName(known.own, relative)
        starts = _starts(relative)
        top = relative[starts[-1] :] if starts else b""
        if len(starts) <= 1:
            return self._find_top(relative)
        namespace = relative[starts[-2] : starts[-1]]
        if top == _POD:
            return self._find_pod(relative, starts, namespace)
        if top != _SVC:
            return None
        if len(starts) == 2:
            return _EMPTY if namespace in self._namespaces else None
        service = relative[starts[-3] :]
        known = self._services.get(service)
        if known is None:
            return None
        before = relative[: starts[-3]]
        records = known.children().get(before)
        if records is None and self._zonal and known.headless:
            records = _in_topology_zone(known, before)
        return None if records is None else ExistingName(records, service)

    @property
    def services(self) -> Mapping[bytes, ServiceRecords]:
        """Services by relative name; a live view."""
        return self._services

    def nxdomain_scope(self, tail: bytes) -> NxdomainScope | None:
        """Return which names of one label before `tail` (relative, in lower case) do not exist until the next change.

        Either all of them, or all that are not the name of a Service. None: neither holds.
        """
        starts = _starts(tail)
        top = tail[starts[-1] :] if starts else b""
        if not starts or top == _POD or tail in (_SVC, _DNS):
            return None
        if top != _SVC:
            return "always"
        if len(starts) == 2:
            return "unless a service"
        return "always" if tail[starts[-3] :] not in self._services else None

    def pointer_targets(self, name: bytes) -> tuple[bytes, ...] | None:
        """Return the relative targets of the PTR records of a whole reverse name, or None (rows D25 to D27)."""
        address = reverse_address(name)
        return None if address is None else self.names_of(address) or None

    def names_of(self, address: bytes) -> tuple[bytes, ...]:
        """Return the relative names of a packed address: of Services, or else of endpoints."""
        services = self._cluster.get(address)
        if services:
            return tuple(services)
        return tuple(
            host + service
            for service in self._services_of_endpoint(address)
            for host in self._services[service].host_names(address)
        )

    def services_with_endpoints(self, addresses: Iterable[bytes]) -> tuple[bytes, ...]:
        """Return the relative names of the Services that lead to one of the addresses.

        For the addresses of this server, these are the name servers of the zone (row D30).
        """
        found: dict[bytes, None] = {}
        for address in addresses:
            for service in self._services_of_endpoint(address):
                records = self._services[service]
                hosts = records.host_names(address) if records.headless else [b""]
                found |= dict.fromkeys(host + service for host in hosts)
            found |= self._cluster.get(address, {})
        return tuple(found)

    def namespaces_of(self, address: bytes) -> tuple[bytes, ...]:
        """Return the namespaces (labels in wire form) of the pods with a packed address; requires `pods verified`."""
        return self._pods.get(address, ())

    def _find_top(self, relative: bytes) -> ExistingName | None:
        if relative in (b"", _SVC, _POD):
            return _EMPTY
        if relative == _VERSION:
            return ExistingName(((TXT, (bytes((len(SCHEMA_VERSION),)) + SCHEMA_VERSION,)),), ttl=SCHEMA_TTL)
        return None

    def _find_pod(self, relative: bytes, starts: list[int], namespace: bytes) -> ExistingName | None:
        if not self._answers_pods or namespace not in self._namespaces:
            return None
        if len(starts) == 2:
            return _EMPTY
        if len(starts) != 3:
            return None
        address = undashed(relative[1 : starts[1]].decode("latin-1"))
        if address is None or (self._verifies_pods and namespace not in self._pods.get(address, ())):
            return None
        return ExistingName((((A if len(address) == 4 else AAAA), (address,)),))

    def _services_of_endpoint(self, address: bytes) -> Iterable[bytes]:
        held = self._endpoints.get(address, ())
        return (held,) if isinstance(held, bytes) else held

    def _add(self, key: bytes, records: ServiceRecords) -> None:
        self._services[key] = records
        for address in records.cluster:
            self._cluster.setdefault(address, {})[key] = None
        for address in records.endpoints:
            held = self._endpoints.get(address)
            if held is None:
                self._endpoints[address] = key
            else:
                self._endpoints[address] = {**({held: None} if isinstance(held, bytes) else held), key: None}

    def _remove(self, key: bytes) -> None:
        records = self._services.pop(key, None)
        if records is None:
            return
        for address in records.cluster:
            services = self._cluster[address]
            services.pop(key, None)
            if not services:
                del self._cluster[address]
        for address in records.endpoints:
            left = [each for each in self._services_of_endpoint(address) if each != key]
            if not left:
                del self._endpoints[address]
            else:
                self._endpoints[address] = left[0] if len(left) == 1 else dict.fromkeys(left)


def _in_topology_zone(records: ServiceRecords, before: bytes) -> Records | None:
    """Return the records of `ZONE.pin._zone` or `ZONE.prefer._zone` of a headless Service, or None for other names.

    A zone without endpoints has none; with `prefer`, those of the Service.
    """
    for end, otherwise in ((_PIN, NO_RECORDS), (_PREFER, records.own)):
        if names.within(before + b"\0", end + b"\0") and before != end:
            found = records.in_zone(before[: -len(end)])
            return otherwise if found is None else found
    return None


def _starts(relative: bytes) -> list[int]:
    """Return the offsets of the labels of a relative name."""
    found = []
    at, end = 0, len(relative)
    while at < end:
        found.append(at)
        at += 1 + relative[at]
    return found


def undashed(text: str) -> bytes | None:
    """Return the packed address that the label of a pod encodes, or None."""
    for mark in (".", ":"):
        try:
            address = ipaddress.ip_address(text.replace("-", mark))
        except ValueError:
            continue
        return address.packed
    return None


def reverse_address(name: bytes) -> bytes | None:
    """Return the packed address of a whole name in in-addr.arpa or ip6.arpa, in lower case, or None."""
    if name.endswith(_IN_ADDR):
        labels = list(names.labels(name))[:-2]
        if len(labels) != 4:
            return None
        try:
            return ipaddress.IPv4Address(b".".join(reversed(labels)).decode("ascii")).packed
        except ValueError:
            return None
    if name.endswith(_IP6):
        labels = list(names.labels(name))[:-2]
        if len(labels) != 32 or any(len(digit) != 1 for digit in labels):
            return None
        digits = b"".join(reversed(labels))
        return bytes.fromhex(digits.decode("ascii")) if set(digits) <= _HEX else None
    return None
