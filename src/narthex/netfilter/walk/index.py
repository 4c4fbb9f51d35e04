"""Look-ups that a walk needs over and over: base chains by hook, elements by packet key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from narthex.model.net import IPFamily, address_key, family_of, network
from narthex.netfilter.ast.nodes import (
    Atom,
    Chain,
    Compare,
    ElementData,
    ElementKey,
    Field,
    Rule,
    Ruleset,
    Set,
    Table,
)
from narthex.netfilter.dump.lazy import base_chains

_NAT_PRIORITY = {"prerouting": -100, "output": -100, "postrouting": 100, "input": 100}
"""The kernel runs all nat chains of a hook at one fixed priority; their own only orders them among themselves
(nf_nat_register_fn, since 4.18)."""

_KEPT_INDEXES = 4
_LONG = 200
"""Rules of a chain that is worth an index."""

Span = tuple[float, float]
"""First and last priority."""
EVERY: Span = (float("-inf"), float("inf"))

Shape = tuple[int | None, ...]
"""Prefix length of each component that is a network, None for the others."""


class Elements:
    """Finds the element of a set that a key falls into, without looking at all of them."""

    def __init__(self, held: Set) -> None:
        self.set = held
        self._shapes: list[Shape] = []
        self._ranges: list[ElementKey] = []
        if held.interval:
            self._shapes, self._ranges = _shapes_of(held)

    def find(self, key: tuple[Atom, ...]) -> ElementKey | None:
        """The element's key as it stands in the set, None when there is none."""
        if key in self.set.elements:
            return key
        for shape in self._shapes:
            candidate = _masked(key, shape)
            if candidate in self.set.elements:
                return candidate
        return next((element for element in self._ranges if _in_ranges(element, key)), None)

    def data(self, element: ElementKey) -> ElementData:
        """What the element maps to."""
        return self.set.elements[element]


def _shapes_of(held: Set) -> tuple[list[Shape], list[ElementKey]]:
    shapes: set[Shape] = set()
    ranges: list[ElementKey] = []
    for key in held.elements:
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


def _masked(key: tuple[Atom, ...], shape: Shape) -> tuple[Atom, ...]:
    if len(key) != len(shape):
        return ()
    return tuple(part if bits is None else _network_text(part, bits) for part, bits in zip(key, shape, strict=True))


def _network_text(part: Atom, bits: int) -> Atom:
    if not isinstance(part, str) or bits > family_of(part).host_bits:
        return part
    return network(f"{part}/{bits}")


def _in_ranges(element: ElementKey, key: tuple[Atom, ...]) -> bool:
    return len(element) == len(key) and all(map(_in_range, element, key))


def _in_range(held: Atom, value: Atom) -> bool:
    if held == value or not isinstance(held, str):
        return held == value
    if "/" in held:
        return _network_text(value, int(held.rpartition("/")[2])) == held
    first, _, last = held.partition("-")
    if isinstance(value, int):
        return first.isdigit() and last.isdigit() and int(first) <= value <= int(last)
    try:
        return address_key(first) <= address_key(value) <= address_key(last)
    except ValueError:
        return False


class Fitting:
    """The rules of a long chain by the one address, or the one port, that they are for: kube-proxy's KUBE-SERVICES has
    two for each Service port, and a packet meets a handful."""

    def __init__(self, chain: Chain) -> None:
        self._every: list[int] = []
        self._held: dict[Atom, list[int]] = {}
        for number, rule in enumerate(chain.rules):
            key = _only(rule)
            if key is None:
                self._every.append(number)
            else:
                self._held.setdefault(key, []).append(number)

    def numbers(self, address: str, port: int) -> list[int]:
        """The numbers of all rules that a packet with this destination may match, in order."""
        more = [*self._held.get(address, ()), *self._held.get(port, ())]
        return sorted((*self._every, *more)) if more else self._every


def _only(rule: Rule) -> Atom | None:
    """The address, or else the port, that a packet must be for."""
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


class IndexedRuleset:
    """One family's base chains in the order in which the kernel calls them."""

    def __init__(self, ruleset: Ruleset, family: IPFamily) -> None:
        self._elements: dict[tuple[int, str], Elements | None] = {}
        self._fitting: dict[int, Fitting] = {}
        tables = [table for table in ruleset.tables if table.family in (None, family)]
        found = [(table, chain) for table in tables for chain in base_chains(table.chains)]
        # Of equal priorities the youngest comes first (nf_hook_entries_grow), and dumps have the oldest first.
        found.reverse()
        self._base = sorted(found, key=lambda pair: _call_order(pair[1]))

    def base_chains(self, hook: str, span: Span = EVERY) -> Iterator[tuple[Table, Chain]]:
        """The base chains of one hook, or those of them that the kernel calls at these priorities."""
        first, last = span
        return (
            pair
            for pair in self._base
            if pair[1].hook is not None and pair[1].hook.hook == hook and first <= _call_order(pair[1])[0] <= last
        )

    def numbers(self, chain: Chain, address: str, port: int) -> Sequence[int]:
        """The numbers of the rules of a chain that a packet with this destination may match."""
        if len(chain.rules) < _LONG:
            return range(len(chain.rules))
        known = self._fitting.get(id(chain))
        if known is None:
            known = self._fitting[id(chain)] = Fitting(chain)
        return known.numbers(address, port)

    def elements(self, table: Table, name: str) -> Elements | None:
        """A table's set or map by name, None when it is not there."""
        known = id(table), name
        if known not in self._elements:
            held = table.sets.get(name)
            self._elements[known] = None if held is None else Elements(held)
        return self._elements[known]


def _call_order(chain: Chain) -> tuple[int, int]:
    hook = chain.hook
    assert hook is not None
    if hook.type == "nat":
        return _NAT_PRIORITY.get(hook.hook, hook.priority), hook.priority
    return hook.priority, hook.priority


_recent: list[tuple[Ruleset, IPFamily, IndexedRuleset]] = []


def indexed(ruleset: Ruleset, family: IPFamily) -> IndexedRuleset:
    """The index of a ruleset. The last few are kept, since one ruleset is walked by many packets."""
    for known, known_family, index in _recent:
        if known is ruleset and known_family is family:
            return index
    index = IndexedRuleset(ruleset, family)
    _recent.insert(0, (ruleset, family, index))
    del _recent[_KEPT_INDEXES:]
    return index
