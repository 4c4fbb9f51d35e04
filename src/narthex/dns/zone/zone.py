"""The names of a cluster as they are served: changes in, records out. One thread's."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from narthex.dns.message import names
from narthex.dns.message.wire import AAAA, TXT, A
from narthex.dns.zone.changes import Change
from narthex.dns.zone.records import NOTHING, Entry, Records

SCHEMA_VERSION = b"1.1.0"
SCHEMA_TTL = 28_800
"""Of `dns-version`, whatever else is configured (row D28)."""

_SVC, _POD, _VERSION = b"\x03svc", b"\x03pod", b"\x0bdns-version"
_HEX = frozenset(b"0123456789abcdef")
_V4, _V6 = b"\x07in-addr\x04arpa\0", b"\x03ip6\x04arpa\0"


Unknown = Literal["always", "unless a service"]


class Found(NamedTuple):
    """A name that exists."""

    records: Records
    service: bytes = b""
    """What SRV data lacks at the end, still without the zone."""
    ttl: int | None = None
    """None: the zone's."""


_EMPTY = Found(NOTHING)


class Zone:
    """Names below any forward zone, relative to it, and addresses below any reverse zone."""

    def __init__(self, pods: Literal["disabled", "insecure", "verified"] = "disabled") -> None:
        self._pods_mode = pods
        self._services: dict[bytes, Entry] = {}
        self._namespaces: set[bytes] = set()
        self._pods: dict[bytes, tuple[bytes, ...]] = {}
        self._cluster: dict[bytes, dict[bytes, None]] = {}
        """Services by their packed cluster IPs; manifests may give one to two."""
        self._endpoints: dict[bytes, dict[bytes, None] | bytes] = {}
        """Services by endpoints' addresses; mostly one, and then without a dict around it."""
        self.serial = 0
        self.synced = False

    def __len__(self) -> int:
        """Services that have a name."""
        return len(self._services)

    def apply(self, change: Change) -> None:
        """Take over what is new."""
        for key, made in change.services.items():
            self._forget(key)
            if made is not None:
                self._remember(key, made)
        for namespace, shown in change.namespaces.items():
            (self._namespaces.add if shown else self._namespaces.discard)(namespace)
        for address, holders in change.pods.items():
            if holders:
                self._pods[address] = holders
            else:
                self._pods.pop(address, None)
        self.serial = max(self.serial, change.serial)
        self.synced = self.synced or change.synced

    def find(self, relative: bytes) -> Found | None:
        """What a name has, in wire form, lower case, without the zone and the end. None: it does not exist (1.2)."""
        known = self._services.get(relative)
        if known is not None:
            return Found(known.own, relative)
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
        records = None if known is None else known.children().get(relative[: starts[-3]])
        return None if records is None else Found(records, service)

    @property
    def services(self) -> Mapping[bytes, Entry]:
        """Services by their own names, as they are at any time."""
        return self._services

    def unknown_below(self, tail: bytes) -> Unknown | None:
        """Whether no name exists that is one label in front of this one (relative, in lower case): until the next
        change, whatever the label is, or unless it makes a Service's name. None: that cannot be told so shortly."""
        starts = _starts(tail)
        top = tail[starts[-1] :] if starts else b""
        if not starts or top == _POD or tail == _SVC:
            return None
        if top != _SVC:
            return "always"
        if len(starts) == 2:
            return "unless a service"
        return "always" if tail[starts[-3] :] not in self._services else None

    def targets(self, name: bytes) -> tuple[bytes, ...] | None:
        """The names that an address in a reverse zone leads to, without the zone; `name` is whole (rows D25 to D27)."""
        address = reverse_address(name)
        return None if address is None else self.names_of(address) or None

    def names_of(self, address: bytes) -> tuple[bytes, ...]:
        """The names of a packed address: of Services, or else of endpoints."""
        services = self._cluster.get(address)
        if services:
            return tuple(services)
        return tuple(
            host + service for service in self._holders(address) for host in self._services[service].host(address)
        )

    def in_front_of(self, addresses: Iterable[bytes]) -> tuple[bytes, ...]:
        """Names of the Services that lead to one of these: the zone's servers, when they are ours (row D30)."""
        found: dict[bytes, None] = {}
        for address in addresses:
            for service in self._holders(address):
                made = self._services[service]
                hosts = made.host(address) if made.headless else [b""]
                found |= dict.fromkeys(host + service for host in hosts)
            found |= self._cluster.get(address, {})
        return tuple(found)

    def namespaces_of(self, address: bytes) -> tuple[bytes, ...]:
        """Namespaces (labels in wire form) of the pods with a packed address; known with `pods verified` only."""
        return self._pods.get(address, ())

    def _find_top(self, relative: bytes) -> Found | None:
        if relative in (b"", _SVC, _POD):
            return _EMPTY
        if relative == _VERSION:
            return Found(((TXT, (bytes((len(SCHEMA_VERSION),)) + SCHEMA_VERSION,)),), ttl=SCHEMA_TTL)
        return None

    def _find_pod(self, relative: bytes, starts: list[int], namespace: bytes) -> Found | None:
        if self._pods_mode == "disabled" or namespace not in self._namespaces:
            return None
        if len(starts) == 2:
            return _EMPTY
        if len(starts) != 3:
            return None
        address = undashed(relative[1 : starts[1]].decode("latin-1"))
        if address is None or (self._pods_mode == "verified" and namespace not in self._pods.get(address, ())):
            return None
        return Found((((A if len(address) == 4 else AAAA), (address,)),))

    def _holders(self, address: bytes) -> Iterable[bytes]:
        held = self._endpoints.get(address, ())
        return (held,) if isinstance(held, bytes) else held

    def _remember(self, key: bytes, made: Entry) -> None:
        self._services[key] = made
        for address in made.cluster:
            self._cluster.setdefault(address, {})[key] = None
        for address in made.endpoints:
            held = self._endpoints.get(address)
            if held is None:
                self._endpoints[address] = key
            else:
                self._endpoints[address] = {**({held: None} if isinstance(held, bytes) else held), key: None}

    def _forget(self, key: bytes) -> None:
        made = self._services.pop(key, None)
        if made is None:
            return
        for address in made.cluster:
            services = self._cluster[address]
            services.pop(key, None)
            if not services:
                del self._cluster[address]
        for address in made.endpoints:
            left = [each for each in self._holders(address) if each != key]
            if not left:
                del self._endpoints[address]
            else:
                self._endpoints[address] = left[0] if len(left) == 1 else dict.fromkeys(left)


def _starts(relative: bytes) -> list[int]:
    found = []
    at, end = 0, len(relative)
    while at < end:
        found.append(at)
        at += 1 + relative[at]
    return found


def undashed(text: str) -> bytes | None:
    """The packed address that a pod's label means; None when it means none."""
    for mark in (".", ":"):
        try:
            address = ipaddress.ip_address(text.replace("-", mark))
        except ValueError:
            continue
        return address.packed
    return None


def reverse_address(name: bytes) -> bytes | None:
    """The packed address of a whole name below in-addr.arpa or ip6.arpa, in lower case; None when it is none."""
    if name.endswith(_V4):
        labels = list(names.labels(name))[:-2]
        if len(labels) != 4:
            return None
        try:
            return ipaddress.IPv4Address(b".".join(reversed(labels)).decode("ascii")).packed
        except ValueError:
            return None
    if name.endswith(_V6):
        labels = list(names.labels(name))[:-2]
        if len(labels) != 32 or any(len(digit) != 1 for digit in labels):
            return None
        digits = b"".join(reversed(labels))
        return bytes.fromhex(digits.decode("ascii")) if set(digits) <= _HEX else None
    return None
