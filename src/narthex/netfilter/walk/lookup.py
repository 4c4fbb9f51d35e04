"""Indexes that make a walk fast: base chains by hook, rules by destination, and set elements by packet key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import groupby

from narthex.model import IPFamily, address_key, family_of, network
from narthex.netfilter.ast import Atom, Chain, Compare, ElementData, ElementKey, Field, Rule, Ruleset, Set, Table
from narthex.netfilter.ipset import IpSet
from narthex.netfilter.lazy import base_chains
from narthex.netfilter.walk.assumed_rules import complete
from narthex.netfilter.walk.losses import LossSigns
from narthex.netfilter.walk.state import ALL_PRIORITIES, PriorityRange

_NAT_PRIORITY = {"prerouting": -100, "output": -100, "postrouting": 100, "input": 100}
"""The kernel runs all nat chains of a hook at one fixed priority. Their own priorities only order them among each other
(nf_nat_register_fn, since 4.18)."""

_CACHED_INDEXES = 4
_INDEXED_LENGTH = 200
"""Number of rules from which a chain gets an index."""

_Shape = tuple[int | None, ...]
"""Prefix length of each component of a key that is a network, None for the others."""

# ---- nft sets ------------------------------------------------------------------------------------------------------


class ElementIndex:
    """Finds the set element that contains a key without scanning all elements."""

    def __init__(self, indexed: Set) -> None:
        self.set = indexed
        self._shapes: list[_Shape] = []
        self._ranges: list[ElementKey] = []
        if indexed.interval:
            self._shapes, self._ranges = _shapes_of(indexed)

    def find(self, key: tuple[Atom, ...]) -> ElementKey | None:
        """Return the key of the matching element as written in the set, or None."""
        if key in self.set.elements:
            return key
        for shape in self._shapes:
            candidate = _masked(key, shape)
            if candidate in self.set.elements:
                return candidate
        return next((element for element in self._ranges if _in_ranges(element, key)), None)

    def data(self, element: ElementKey) -> ElementData:
        """Return the map value of an element."""
        return self.set.elements[element]


def _shapes_of(indexed: Set) -> tuple[list[_Shape], list[ElementKey]]:
    shapes: set[_Shape] = set()
    ranges: list[ElementKey] = []
    for key in indexed.elements:
        shape: list[int | None] = []
        for part in key:
            if isinstance(part, str) and "-" in part:
                ranges.append(key)
                break
            _, slash, length = part.partition("/") if isinstance(part, str) else ("", "", "")
            shape.append(int(length) if slash else None)
        else:
            shapes.add(tuple(shape))
    longest_first = sorted(shapes, key=lambda shape: [-1 if bits is None else bits for bits in shape], reverse=True)
    return longest_first, ranges


def _masked(key: tuple[Atom, ...], shape: _Shape) -> tuple[Atom, ...]:
    if len(key) != len(shape):
        return ()
    return tuple(part if bits is None else _network_text(part, bits) for part, bits in zip(key, shape, strict=True))


def _network_text(part: Atom, bits: int) -> Atom:
    if not isinstance(part, str) or bits > family_of(part).host_bits:
        return part
    return network(f"{part}/{bits}")


def _in_ranges(element: ElementKey, key: tuple[Atom, ...]) -> bool:
    return len(element) == len(key) and all(map(_in_range, element, key))


def _in_range(bound: Atom, value: Atom) -> bool:
    if bound == value or not isinstance(bound, str):
        return bound == value
    if "/" in bound:
        return _network_text(value, int(bound.rpartition("/")[2])) == bound
    first, _, last = bound.partition("-")
    if isinstance(value, int):
        return first.isdigit() and last.isdigit() and int(first) <= value <= int(last)
    try:
        return address_key(first) <= address_key(value) <= address_key(last)
    except ValueError:
        return False


# ---- ipsets --------------------------------------------------------------------------------------------------------

_PROTOCOLS_WITH_PORTS = ("tcp", "udp", "sctp", "udplite")


def ipset_fields(ipset: IpSet, sides: tuple[str, ...]) -> tuple[Field, ...]:
    """Return the packet fields that `--match-set` looks up, in the order of the entries.

    Raises ValueError for an unsupported set, and for sides that do not fit its type.
    """
    dimensions = ipset.dimensions
    if ipset.unsupported or not dimensions:
        raise ValueError(f"the set {ipset.name} is not understood: {ipset.unsupported or ipset.kind}")
    if len(sides) < len(dimensions):
        raise ValueError(f"the set {ipset.name} has {len(dimensions)} dimensions, and the rule names {len(sides)}")
    # The kernel ignores sides that exceed the number of dimensions.
    return tuple(
        field for dimension, side in zip(dimensions, sides, strict=False) for field in _fields(dimension, side)
    )


def _fields(dimension: str, side: str) -> tuple[Field, ...]:
    if dimension == "port":
        return Field.L4PROTO, Field.DPORT if side == "dst" else Field.SPORT
    return (Field.DADDR if side == "dst" else Field.SADDR,)


@lru_cache(maxsize=64)
def ipset_index(ipset: IpSet) -> ElementIndex:
    """Return an index of the entries for lookups with the values of `ipset_fields`."""
    keys = dict.fromkeys(key for entry in ipset.entries for key in _entry_keys(ipset, entry))
    return ElementIndex(Set(name=ipset.name, key=(), interval=True, elements=keys))


def _entry_keys(ipset: IpSet, entry: str) -> list[tuple[Atom, ...]]:
    dimensions = ipset.dimensions
    parts = entry.split(",")
    if len(parts) != len(dimensions):
        raise ValueError(f"the set {ipset.name} is not understood: {entry!r} does not fit {ipset.kind}")
    keys: list[tuple[Atom, ...]] = [()]
    for dimension, part in zip(dimensions, parts, strict=True):
        if dimension != "port":
            keys = [(*key, part) for key in keys]
            continue
        protocol, colon, port = part.rpartition(":")
        # A bitmap matches every protocol. In other types a port without a protocol is TCP.
        protocols = (protocol,) if colon else _PROTOCOLS_WITH_PORTS if ipset.kind.startswith("bitmap") else ("tcp",)
        number: Atom = int(port) if port.isdigit() else port
        keys = [(*key, name, number) for key in keys for name in protocols]
    return keys


# ---- chains --------------------------------------------------------------------------------------------------------


class RuleIndex:
    """The rules of a long chain by the single destination address or port that they match.

    kube-proxy's KUBE-SERVICES has two rules for each Service port, of which a packet can match only a few.
    """

    def __init__(self, chain: Chain) -> None:
        self._unkeyed: list[int] = []
        self._keyed: dict[Atom, list[int]] = {}
        for number, rule in enumerate(chain.rules):
            key = _destination_key(rule)
            if key is None:
                self._unkeyed.append(number)
            else:
                self._keyed.setdefault(key, []).append(number)

    def numbers(self, address: str, port: int) -> list[int]:
        """Return the numbers of the rules that a packet with this destination may match, in order."""
        keyed = [*self._keyed.get(address, ()), *self._keyed.get(port, ())]
        return sorted((*self._unkeyed, *keyed)) if keyed else self._unkeyed


def _destination_key(rule: Rule) -> Atom | None:
    """Return the destination address, or else the port, that a packet needs to match the rule."""
    port: Atom | None = None
    for each in rule.expressions:
        if isinstance(each, Compare) and not each.negate and len(each.values) == 1:
            value = each.values[0]
            if each.field is Field.DADDR and isinstance(value, str):
                base, _, bits = value.partition("/")
                if bits in ("", "128" if ":" in base else "32"):
                    return base
            elif each.field is Field.DPORT and isinstance(value, int):
                port = value
    return port


BaseChain = tuple[Table, Chain]


class RulesetIndex:
    """The base chains of one family in the kernel's call order, and indexes of chains and sets."""

    def __init__(self, ruleset: Ruleset, family: IPFamily) -> None:
        self._elements: dict[tuple[int, str], ElementIndex | None] = {}
        self._rules: dict[int, RuleIndex] = {}
        self.copied = ruleset.copied
        self._shifts: dict[int, Mapping[str, int]] = {}
        self._lost: dict[str, Callable[[], str]] = {}
        self._signs: list[LossSigns] = []
        tables = [
            self._completed(table) if ruleset.copied else table
            for table in ruleset.tables
            if table.family in (None, family)
        ]
        found = [(table, chain) for table in tables for chain in base_chains(table.chains)]
        # Of equal priorities the youngest comes first (nf_hook_entries_grow). Dumps list tables and the chains of a table with
        # the oldest first. A chain that was added to an older table (Narthex adds its base chains last), or a table that was
        # dormant, is younger than its place.
        found.reverse()
        self._base = sorted(found, key=lambda pair: _call_order(pair[1]))

    def _completed(self, table: Table) -> Table:
        completed = complete(table)
        self._shifts[id(completed.table)] = completed.shifts
        self._lost[table.name] = completed.lost
        if completed.signs is not None:
            self._signs.append(completed.signs)
        return completed.table

    @cached_property
    def lost(self) -> Mapping[str, str]:
        """The signs that lines are missing from a copied text, by table."""
        return {name: lost() for name, lost in self._lost.items()}

    def may_lack(self, address: str, port: int, *, own: bool) -> bool:
        """Return True if kube-proxy's rules could have one for this destination that a copied text lacks, though nothing shows it.

        They have none for endpoints and pods. `own` is True for an address of the node, which node ports are for.
        """
        return bool(self._signs) and (own or not any(signs.is_endpoint(address, port) for signs in self._signs))

    def shift(self, table: Table, chain: str) -> int:
        """Return the number of rules that complete a chain in front of those of its text."""
        shifts = self._shifts.get(id(table))
        return shifts.get(chain, 0) if shifts else 0

    def ranks(self, hook: str, priorities: PriorityRange = ALL_PRIORITIES) -> Iterator[Sequence[BaseChain]]:
        """Iterate over the base chains of a hook in call order, those of one rank together; `priorities` restricts them.

        The chains of one rank have the same priority, so that their order is that of their registration.
        """
        first, last = priorities
        held = (
            pair
            for pair in self._base
            if pair[1].hook is not None and pair[1].hook.hook == hook and first <= _call_order(pair[1])[0] <= last
        )
        return (tuple(rank) for _, rank in groupby(held, key=lambda pair: _call_order(pair[1])))

    def numbers(self, chain: Chain, address: str, port: int) -> Sequence[int]:
        """Return the numbers of the rules of a chain that a packet with this destination may match."""
        if len(chain.rules) < _INDEXED_LENGTH:
            return range(len(chain.rules))
        known = self._rules.get(id(chain))
        if known is None:
            known = self._rules[id(chain)] = RuleIndex(chain)
        return known.numbers(address, port)

    def elements(self, table: Table, name: str) -> ElementIndex | None:
        """Return the index of a set or map of a table, or None if it does not exist."""
        known = id(table), name
        if known not in self._elements:
            found = table.sets.get(name)
            self._elements[known] = None if found is None else ElementIndex(found)
        return self._elements[known]


def _call_order(chain: Chain) -> tuple[int, int]:
    hook = chain.hook
    assert hook is not None
    if hook.type == "nat":
        return _NAT_PRIORITY.get(hook.hook, hook.priority), hook.priority
    return hook.priority, hook.priority


_recent: list[tuple[Ruleset, IPFamily, RulesetIndex]] = []


def index_ruleset(ruleset: Ruleset, family: IPFamily) -> RulesetIndex:
    """Return the index of a ruleset. The most recent ones are cached, since many packets walk one ruleset."""
    for known, known_family, index in _recent:
        if known is ruleset and known_family is family:
            return index
    index = RulesetIndex(ruleset, family)
    _recent.insert(0, (ruleset, family, index))
    del _recent[_CACHED_INDEXES:]
    return index
