"""Sets of the kernel facility ipset: values, and the text of `ipset save` and `ipset list`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

from narthex.model import IPFamily, address, network
from narthex.model.lines import MAX_LINE
from narthex.netfilter.ast import Unprintable

MAX_NAME = 31
"""Longest set name in bytes (IPSET_MAXNAMELEN without the terminating byte)."""
MAX_ENTRIES = 1_048_576
"""`maxelem` of the sets that Narthex creates. ipset's default of 65536 is too small for large clusters; the limit itself
uses no memory."""

_MAX_TEXT = 256 << 20
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,30}", re.ASCII)
_ENTRY = re.compile(r"[0-9A-Za-z.:,/-]{1,128}", re.ASCII)


class IpsetTextError(ValueError):
    """Text that is not the output of `ipset save`. The message contains the line number."""


class IpSet(msgspec.Struct, frozen=True):
    """A set with its entries as `ipset save` writes them: `10.110.0.7,tcp:80`, without /32 or /128."""

    name: str
    kind: str
    """The set type as ipset writes it: `hash:ip,port`, `bitmap:port`, …"""
    family: IPFamily
    """Address family. A bitmap of ports has none and uses IPV4."""
    entries: frozenset[str] = frozenset()
    unsupported: str = ""
    """The part of a foreign set that is not supported. Lookups in such a set have no answer."""

    @property
    def create(self) -> str:
        """Arguments of the `create` command for this set."""
        if self.kind == "bitmap:port":
            return f"{_name(self.name)} {self.kind} range 0-65535"
        family = "inet" if self.family is IPFamily.IPV4 else "inet6"
        return f"{_name(self.name)} {self.kind} family {family} maxelem {MAX_ENTRIES}"

    @property
    def dimensions(self) -> tuple[str, ...]:
        """The packet properties that the set type looks up ("ip", "net", "port"); empty for an unsupported type."""
        method, _, names = self.kind.partition(":")
        dimensions = tuple(names.split(","))
        known = method in ("hash", "bitmap") and {"ip", "net", "port"}.issuperset(dimensions)
        return dimensions if known else ()


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise Unprintable(f"{text!r} is not a valid ipset name")
    return text


# ---- `ipset save` --------------------------------------------------------------------------------------------------


def ipset_save_text(sets: Iterable[IpSet]) -> str:
    """Return the input of `ipset restore` for these sets, in order, with sorted entries. Raises Unprintable."""
    lines = []
    for ipset in sets:
        lines.append(f"create {ipset.create}")
        lines += (entry_line("add", ipset.name, entry) for entry in sorted(ipset.entries))
    return "".join(line + "\n" for line in lines)


def entry_line(verb: str, name: str, entry: str) -> str:
    """Return `add NAME ENTRY` or `del NAME ENTRY`. Raises Unprintable for an entry that is not a single word."""
    if not _ENTRY.fullmatch(entry):
        raise Unprintable(f"{entry!r} is not a valid ipset entry")
    return f"{verb} {_name(name)} {entry}"


def parse_ipsets(text: str) -> Mapping[str, IpSet]:
    """Parse the output of `ipset save` into sets by name. Raises IpsetTextError.

    A set of an unsupported type, or with an unsupported option, is kept and has a reason in `unsupported`.
    """
    if len(text) > _MAX_TEXT:
        raise IpsetTextError(f"the text has {len(text) >> 20} MiB; the limit is {_MAX_TEXT >> 20} MiB")
    headers: dict[str, IpSet] = {}
    entries: dict[str, list[str]] = {}
    unsupported: dict[str, str] = {}
    for number, raw in enumerate(text.split("\n"), 1):
        if len(raw) > MAX_LINE:
            raise IpsetTextError(f"line {number}: {raw[:120]!r}: longer than {MAX_LINE} characters")
        words = raw.split()
        if not words or words[0].startswith("#"):
            continue
        verb, name, *rest = (*words, "", "")[: max(len(words), 2)]
        if verb in ("create", "-N") and len(words) >= 3:
            headers[name] = _header(name, rest)
            entries[name] = []
        elif verb in ("add", "-A") and len(words) >= 3 and name in entries:
            entries[name].append(_canonical(rest[0]))
            if "nomatch" in rest[1:]:
                unsupported.setdefault(name, "an entry with nomatch")
        elif verb in ("add", "-A") and len(words) >= 3:
            raise IpsetTextError(f"line {number}: {raw[:120]!r}: the set {name} was not created before")
        elif raw.strip() != "COMMIT":
            raise IpsetTextError(f"line {number}: {raw[:120]!r} is not a line of `ipset save`")
    return {
        name: msgspec.structs.replace(
            header, entries=frozenset(entries[name]), unsupported=header.unsupported or unsupported.get(name, "")
        )
        for name, header in headers.items()
    }


_PLAIN_OPTIONS = {"family", "hashsize", "maxelem", "bucketsize", "initval", "range", "timeout", "size", "probes"}
_FLAGS = {"counters", "comment", "forceadd", "skbinfo"}


def _header(name: str, words: list[str]) -> IpSet:
    kind, options = words[0], iter(words[1:])
    unsupported = ""
    family = IPFamily.IPV4
    for option in options:
        if option in _FLAGS:
            continue
        value = next(options, "")
        if option == "family" and value == "inet6":
            family = IPFamily.IPV6
        if option not in _PLAIN_OPTIONS:
            unsupported = unsupported or f"option {option}"
    ipset = IpSet(name, kind, family, frozenset(), unsupported)
    return ipset if ipset.dimensions else IpSet(name, kind, family, frozenset(), f"kind {kind}")


def _canonical(entry: str) -> str:
    """Return an entry with its addresses in canonical form. Kernels spell IPv6 addresses in different ways."""
    parts = []
    for part in entry.split(","):
        base, slash, length = part.partition("/")
        try:
            parts.append(address(base) if not slash else network(f"{base}/{length}"))
        except ValueError:
            parts.append(part)
    return ",".join(parts)


# ---- `ipset list` --------------------------------------------------------------------------------------------------

_HEADERS = ("Revision:", "Size in memory:", "References:", "Number of entries:")


class IpsetListParser:
    """Parses the output of `ipset list` line by line."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._name = ""
        self._members = False
        self._typed = False

    def feed(self, line: str) -> bool:
        """Parse a line. Return False if it is not part of a listing."""
        if line.startswith("Name: "):
            self._name, self._members, self._typed = line[6:].strip(), False, False
            return True
        if not self._name:
            return False
        if line.startswith("Type: "):
            self._lines.append(f"create {self._name} {line[6:].strip()} ")
            self._typed = True
        elif line.startswith("Header: ") and self._typed:
            # Only one: a line that grows with each header costs the square of their number.
            self._typed = False
            self._lines[-1] += line[8:].strip()
        elif line == "Members:":
            self._members = True
        elif line.startswith(_HEADERS):
            pass
        elif self._members and line[0].isalnum() and ("." in line or ":" in line or "," in line or line.isdigit()):
            self._lines.append(f"add {self._name} {line}")
        else:
            self._name = ""
            return False
        return True

    def sets(self) -> Mapping[str, IpSet]:
        """Return the listed sets by name. Raises IpsetTextError."""
        return parse_ipsets("\n".join(self._lines))
