"""Plugin `hosts`: names and addresses of a hosts file, and of lines in the Corefile."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

import msgspec

from narthex.dns.corefile.settings import HostsSettings
from narthex.dns.message import names, wire
from narthex.dns.message.query import Query
from narthex.dns.message.response import local_response
from narthex.model import address

_IN_ADDR, _IP6 = names.wire("in-addr.arpa"), names.wire("ip6.arpa")


class HostsTable(msgspec.Struct, frozen=True):
    """The entries of a hosts file. Names are in wire form and lower case."""

    addresses: dict[bytes, tuple[bytes, ...]]
    """Packed addresses by name."""
    pointers: dict[bytes, tuple[bytes, ...]]
    """Names by reverse name."""

    def __len__(self) -> int:
        """Return the number of entries as CoreDNS counts them: each address of each name."""
        return sum(map(len, self.addresses.values())) + sum(map(len, self.pointers.values()))


def parse_hosts(lines: Iterable[str]) -> HostsTable:
    """Parse lines of `ADDRESS NAME...`; `#` starts a comment. Lines without a valid address or name are ignored."""
    addresses: dict[bytes, dict[bytes, None]] = {}
    pointers: dict[bytes, dict[bytes, None]] = {}
    for line in lines:
        words = line.split("#", 1)[0].split()
        packed = _packed(words[0]) if len(words) > 1 else None
        if packed is None:
            continue
        for word in words[1:]:
            name = names.wire_or_none(word)
            if name is not None:
                addresses.setdefault(name, {})[packed] = None
                pointers.setdefault(_reverse_name(packed), {})[name] = None
    return HostsTable(
        {name: tuple(found) for name, found in addresses.items()},
        {name: tuple(found) for name, found in pointers.items()},
    )


class HostsPlugin:
    """Answers from the entries of the Corefile and of a file, whose lines `load` replaces."""

    def __init__(self, settings: HostsSettings) -> None:
        self.settings = settings
        self._zones = names.lower_zones(settings.zones)
        self._fallthrough = names.lower_zones(settings.fallthrough or ())
        self._inline = parse_hosts(settings.inline)
        self._file = HostsTable({}, {})

    def __len__(self) -> int:
        """Return the number of entries of the file and the Corefile."""
        return len(self._inline) + len(self._file)

    def load(self, lines: Iterable[str]) -> None:
        """Replace the entries of the file."""
        self._file = parse_hosts(lines)

    def answer(self, query: Query) -> bytes | None:
        """Return the response, or None if the next plugin is to answer.

        A name without addresses of the queried family gets an empty answer. An unknown name gets SERVFAIL: without an SOA
        record, a denial would have no negative TTL (as in CoreDNS).
        """
        if not names.within_any(query.name, self._zones):
            return None
        size = wire.ADDRESS_SIZES.get(query.qtype)
        # Entries of the Corefile replace those of the file for the same name.
        addresses = self._inline.addresses.get(query.name) or self._file.addresses.get(query.name)
        pointers: tuple[bytes, ...] = ()
        if self.settings.reverse:
            pointers = self._inline.pointers.get(query.name) or self._file.pointers.get(query.name) or ()
        if addresses is None and not pointers:
            if names.within_any(query.name, self._fallthrough):
                return None
            return local_response(query, wire.SERVFAIL)
        found = pointers if query.qtype == wire.PTR else tuple(each for each in addresses or () if len(each) == size)
        records = [(query.qtype, self.settings.ttl, data) for data in found]
        return local_response(query, wire.NOERROR, records, authoritative=True)


def _packed(word: str) -> bytes | None:
    try:
        return ipaddress.ip_address(address(word.split("%", 1)[0])).packed
    except ValueError:
        return None


def _reverse_name(packed: bytes) -> bytes:
    if len(packed) == 4:
        return b"".join(names.label(str(byte)) for byte in reversed(packed)) + _IN_ADDR
    return b"".join(names.label(digit) for digit in reversed(packed.hex())) + _IP6
