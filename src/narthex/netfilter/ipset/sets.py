"""Sets of the kernel's ipset facility: values, their text, and looking a packet up in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

import msgspec

from narthex.model.net import IPFamily, address, network
from narthex.netfilter.ast.nodes import Atom, Field, Set, Unprintable
from narthex.netfilter.walk.index import Elements

MAX_NAME = 31
"""Bytes that the kernel keeps of a set's name (IPSET_MAXNAMELEN without its end)."""
MAX_ENTRIES = 1_048_576
"""`maxelem` of the sets that we make: only a limit, no memory. ipset's default of 65536 is too few for large clusters."""

_MAX_TEXT = 256 << 20
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,30}", re.ASCII)
_ENTRY = re.compile(r"[0-9A-Za-z.:,/-]{1,128}", re.ASCII)


class IpsetTextError(ValueError):
    """The text is not what `ipset save` prints; the message says in which line."""


class IpSet(msgspec.Struct, frozen=True):
    """One set. Its entries are in the wording of `ipset save`: `10.110.0.7,tcp:80`, and no /32 or /128."""

    name: str
    kind: str
    """As ipset writes it: `hash:ip,port`, `bitmap:port`, …"""
    family: IPFamily
    """Of its addresses; a bitmap of ports has none, and says IPV4 in both families' rules."""
    entries: frozenset[str] = frozenset()
    strange: str = ""
    """Of other people's sets: what about it is not understood, so that no look-up in it can be answered."""

    @property
    def create(self) -> str:
        """The words behind `create` that make it, empty."""
        if self.kind == "bitmap:port":
            return f"{_name(self.name)} {self.kind} range 0-65535"
        family = "inet" if self.family is IPFamily.IPV4 else "inet6"
        return f"{_name(self.name)} {self.kind} family {family} maxelem {MAX_ENTRIES}"


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise Unprintable(f"{text!r} is not a set name that ipset takes")
    return text


# ---- text ----------------------------------------------------------------------------------------------------------


def save_text(sets: Iterable[IpSet]) -> str:
    """The sets as `ipset restore` reads them, in the order given, entries sorted. Raises Unprintable."""
    lines = []
    for held in sets:
        lines.append(f"create {held.create}")
        lines += (entry_line("add", held.name, entry) for entry in sorted(held.entries))
    return "".join(line + "\n" for line in lines)


def entry_line(verb: str, name: str, entry: str) -> str:
    """`add NAME ENTRY` or `del NAME ENTRY`. Raises Unprintable for an entry that could end its word."""
    if not _ENTRY.fullmatch(entry):
        raise Unprintable(f"{entry!r} is not an entry that ipset takes")
    return f"{verb} {_name(name)} {entry}"


def parse(text: str) -> Mapping[str, IpSet]:
    """Sets by name, from what `ipset save` prints. Raises IpsetTextError.

    A set of a kind, or with an option, that is not understood is kept and says so in `strange`.
    """
    if len(text) > _MAX_TEXT:
        raise IpsetTextError(f"{len(text) >> 20} MiB are more than the {_MAX_TEXT >> 20} MiB that are read")
    heads: dict[str, IpSet] = {}
    entries: dict[str, list[str]] = {}
    strange: dict[str, str] = {}
    for number, raw in enumerate(text.split("\n"), 1):
        words = raw.split()
        if not words or words[0].startswith("#"):
            continue
        verb, name, *rest = (*words, "", "")[: max(len(words), 2)]
        if verb in ("create", "-N") and len(words) >= 3:
            heads[name] = _head(name, rest)
            entries[name] = []
        elif verb in ("add", "-A") and len(words) >= 3 and name in entries:
            entries[name].append(_canonical(rest[0]))
            if "nomatch" in rest[1:]:
                strange.setdefault(name, "an entry with nomatch")
        elif verb in ("add", "-A") and len(words) >= 3:
            raise IpsetTextError(f"line {number}: {raw[:120]!r}: the set {name} was not created before")
        elif raw.strip() != "COMMIT":
            raise IpsetTextError(f"line {number}: {raw[:120]!r} is no line of `ipset save`")
    return {
        name: msgspec.structs.replace(
            head, entries=frozenset(entries[name]), strange=head.strange or strange.get(name, "")
        )
        for name, head in heads.items()
    }


_PLAIN_OPTIONS = {"family", "hashsize", "maxelem", "bucketsize", "initval", "range", "timeout", "size", "probes"}
_FLAGS = {"counters", "comment", "forceadd", "skbinfo"}


def _head(name: str, words: list[str]) -> IpSet:
    kind, options = words[0], words[1:]
    strange = "" if _dimensions(kind) else f"kind {kind}"
    family = IPFamily.IPV4
    while options:
        option, *options = options
        if option in _FLAGS:
            continue
        if option == "family" and options[:1] == ["inet6"]:
            family = IPFamily.IPV6
        if option not in _PLAIN_OPTIONS:
            strange = strange or f"option {option}"
        options = options[1:]
    return IpSet(name, kind, family, frozenset(), strange)


def _canonical(entry: str) -> str:
    """An entry as our own rendering words it: older kernels leave out `tcp:`, and addresses may be spelled freely."""
    parts = []
    for part in entry.split(","):
        base, slash, length = part.partition("/")
        try:
            parts.append(address(base) if not slash else network(f"{base}/{length}"))
        except ValueError:
            parts.append(part)
    return ",".join(parts)


# ---- looking up ----------------------------------------------------------------------------------------------------


def _dimensions(kind: str) -> tuple[str, ...]:
    """What a kind asks of a packet, in order; () for one that is not understood."""
    method, _, words = kind.partition(":")
    dimensions = tuple(words.split(","))
    known = method in ("hash", "bitmap") and {"ip", "net", "port"}.issuperset(dimensions)
    return dimensions if known else ()


def key_fields(held: IpSet, sides: tuple[str, ...]) -> tuple[Field, ...]:
    """The packet's fields that are looked up, in the entries' order. Raises ValueError for a set that is not understood
    and for sides that do not fit its kind."""
    dimensions = _dimensions(held.kind)
    if held.strange or not dimensions:
        raise ValueError(f"the set {held.name} is not understood: {held.strange or held.kind}")
    if len(sides) < len(dimensions):
        raise ValueError(f"the set {held.name} has {len(dimensions)} dimensions, and the rule names {len(sides)}")
    # A rule may name more sides than the set has; the kernel does not look at them.
    return tuple(
        field for dimension, side in zip(dimensions, sides, strict=False) for field in _fields(dimension, side)
    )


def _fields(dimension: str, side: str) -> tuple[Field, ...]:
    if dimension == "port":
        return Field.L4PROTO, Field.DPORT if side == "dst" else Field.SPORT
    return (Field.DADDR if side == "dst" else Field.SADDR,)


@lru_cache(maxsize=64)
def elements_of(held: IpSet) -> Elements:
    """The entries, ready for look-ups with the values of `key_fields`."""
    keys = dict.fromkeys(key for entry in held.entries for key in _keys(held, entry))
    return Elements(Set(name=held.name, key=(), interval=True, elements=keys))


_WITH_PORTS = ("tcp", "udp", "sctp", "udplite")


def _keys(held: IpSet, entry: str) -> Iterator[tuple[Atom, ...]]:
    """The keys that an entry stands for."""
    dimensions = _dimensions(held.kind)
    parts = entry.split(",")
    if len(parts) != len(dimensions):
        raise ValueError(f"the set {held.name} is not understood: {entry!r} does not fit {held.kind}")
    spread: list[tuple[Atom, ...]] = [()]
    for dimension, part in zip(dimensions, parts, strict=True):
        if dimension != "port":
            spread = [(*key, part) for key in spread]
            continue
        protocol, colon, port = part.rpartition(":")
        # A bitmap asks no protocol. Elsewhere a port alone is TCP's.
        protocols = (protocol,) if colon else _WITH_PORTS if held.kind.startswith("bitmap") else ("tcp",)
        number: Atom = int(port) if port.isdigit() else port
        spread = [(*key, name, number) for key in spread for name in protocols]
    yield from spread
