"""Plugin `hosts`: names and addresses of a file as /etc/hosts, and of lines in the Corefile itself."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

import msgspec

from narthex.dns.corefile.settings import Hosts as Settings
from narthex.dns.corefile.settings import Zones
from narthex.dns.interfaces import Query
from narthex.dns.message import names, wire
from narthex.dns.message.response import made
from narthex.model import net

_V4, _V6 = b"\x07in-addr\x04arpa\0", b"\x03ip6\x04arpa\0"


class Table(msgspec.Struct, frozen=True):
    """What the lines say. Names in wire form and lower case."""

    addresses: dict[bytes, tuple[bytes, ...]]
    """Packed addresses by name."""
    pointers: dict[bytes, tuple[bytes, ...]]
    """Names by reverse name."""

    def __len__(self) -> int:
        """Entries, as CoreDNS counts them: each address of each name."""
        return sum(map(len, self.addresses.values())) + sum(map(len, self.pointers.values()))


def parse(lines: Iterable[str]) -> Table:
    """Read lines of `ADDRESS NAME...`; `#` begins a comment. Lines without a usable address or name are passed over."""
    addresses: dict[bytes, dict[bytes, None]] = {}
    pointers: dict[bytes, dict[bytes, None]] = {}
    for line in lines:
        words = line.split("#", 1)[0].split()
        packed = _packed(words[0]) if len(words) > 1 else None
        if packed is None:
            continue
        for word in words[1:]:
            name = _name(word)
            if name is not None:
                addresses.setdefault(name, {})[packed] = None
                pointers.setdefault(_reverse(packed), {})[name] = None
    return Table(
        {name: tuple(found) for name, found in addresses.items()},
        {name: tuple(found) for name, found in pointers.items()},
    )


class Hosts:
    """Answers from a table. `lines` of the file may be given anew at any time; those of the Corefile stay."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._zones = _wired(settings.zones)
        self._through = None if settings.fallthrough is None else _wired(settings.fallthrough)
        self._inline = parse(settings.inline)
        self._file = Table({}, {})

    def __len__(self) -> int:
        """Entries of the file and the Corefile."""
        return len(self._inline) + len(self._file)

    def load(self, lines: Iterable[str]) -> None:
        """The file's lines are these now."""
        self._file = parse(lines)

    def answer(self, query: Query) -> bytes | None:
        """The response; None: the question is for whoever comes next.

        A name that is there but has no address of the family asked gets an empty answer, so that nobody looks further.
        One that is not there gets SERVFAIL: without an SOA nobody could say for how long it is not (as CoreDNS).
        """
        if not any(names.within(query.name, zone) for zone in self._zones):
            return None
        size = {wire.A: 4, wire.AAAA: 16}.get(query.qtype)
        # What the Corefile itself says of a name takes the place of what the file says.
        addresses = self._inline.addresses.get(query.name) or self._file.addresses.get(query.name)
        pointers: tuple[bytes, ...] = ()
        if self.settings.reverse:
            pointers = self._inline.pointers.get(query.name) or self._file.pointers.get(query.name) or ()
        if addresses is None and not pointers:
            if self._through is not None and any(names.within(query.name, zone) for zone in self._through):
                return None
            return made(query, wire.SERVFAIL)
        found = pointers if query.qtype == wire.PTR else tuple(each for each in addresses or () if len(each) == size)
        records = [(query.qtype, self.settings.ttl, data) for data in found]
        return made(query, wire.NOERROR, records, authoritative=True)


def _wired(zones: Zones) -> tuple[bytes, ...]:
    return tuple(names.wire(zone).lower() for zone in zones)


def _packed(word: str) -> bytes | None:
    try:
        return ipaddress.ip_address(net.address(word.split("%", 1)[0])).packed
    except ValueError:
        return None


def _name(word: str) -> bytes | None:
    try:
        return names.wire(word).lower()
    except ValueError:
        return None


def _reverse(packed: bytes) -> bytes:
    if len(packed) == 4:
        return b"".join(_label(str(byte)) for byte in reversed(packed)) + _V4
    return b"".join(_label(digit) for digit in reversed(packed.hex())) + _V6


def _label(text: str) -> bytes:
    return bytes((len(text),)) + text.encode("ascii")
