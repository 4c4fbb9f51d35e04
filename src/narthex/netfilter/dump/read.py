"""What a node's tools printed, of any of them and in any number of texts, as one thing that a packet can be walked through.

A text is told by its lines, not by its name: iptables-save, `iptables -S` and `-L`, `nft list ruleset` and its JSON, `ipset
save` and `list`, `ipvsadm -S -n` and `-L -n`; one behind the other, between prompts and prose of a bug report. What is
wrong with a line is said with its number, and the rest is read all the same. docs/reference/dumps.md has the list.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

import msgspec

from narthex.model.net import IPFamily, family_of
from narthex.netfilter.ast import AnyOf, Expression, InlineVerdictMap, Ruleset, Table, Unknown
from narthex.netfilter.ipset import IpSet
from narthex.netfilter.ipvs import ServerKey, VirtualServer
from narthex.netfilter.lazy import LazyChains
from narthex.netfilter.walk.state import KernelObjects
from narthex.netfilter.xtables.values import TABLES, builtin_chains

_BOUND = ("KUBE-IPVS-IPS", "KUBE-6-IPVS-IPS")


class DumpError(ValueError):
    """A text cannot be read; the message says which, in which line, and why."""


class Flavour(enum.Enum):
    """Which tool printed a table."""

    LEGACY = "iptables-legacy"
    NFT = "iptables-nft"
    XTABLES = "iptables"
    """One of the two; the text does not say which."""
    NFTABLES = "nft"


class DumpProblem(msgspec.Struct, frozen=True):
    """Something in a text that is wrong or left out."""

    origin: str
    line: int
    """From 1; 0 for the text as a whole."""
    text: str

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        return f"{self.origin}: {where}{self.text}" if self.origin else where + self.text


class DumpTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table of a dump, and where it stood."""

    table: Table
    flavour: Flavour
    origin: str = ""
    line: int = 0
    rules: int = 0
    """How many lines of the text are its rules."""
    whole: bool = True
    """False: some of its rules, as `grep` leaves them."""


class FamilyRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules of one family, and what acts objects them."""

    ruleset: Ruleset = Ruleset()
    objects: KernelObjects = KernelObjects()
    comments: tuple[str, ...] = ()
    """Lines that tools pass over."""


class Dump(msgspec.Struct, frozen=True, kw_only=True):
    """All that was read."""

    tables: tuple[DumpTable, ...] = ()
    sets: Mapping[str, IpSet] = {}
    servers: Mapping[ServerKey, VirtualServer] = {}
    marks: frozenset[int] = frozenset()
    """Packet marks that have a virtual server of IPVS."""
    comments: tuple[str, ...] = ()
    problems: tuple[DumpProblem, ...] = ()
    """Lines that are wrong: what stands there is not walked."""
    notes: tuple[DumpProblem, ...] = ()
    """What the text leaves out, or what was taken for something because it does not say."""

    def tables_of(self, family: IPFamily | None = None) -> tuple[DumpTable, ...]:
        """The tables of a family, those of both families among them; None: all."""
        return tuple(each for each in self.tables if family is None or each.table.family in (None, family))

    def for_family(self, family: IPFamily) -> FamilyRules:
        """What a packet of the family can meet.

        Addresses that have virtual servers count as bound: no dump of these tools says which the node has.
        """
        servers = {key: server for key, server in self.servers.items() if family_of(server.address) is family}
        named = (entry for name in _BOUND if name in self.sets for entry in self.sets[name].entries)
        bound = frozenset(ip for ip in (*named, *(key[0] for key in servers)) if family_of(ip) is family)
        objects = KernelObjects(sets=self.sets, servers=servers, bound=bound, marks=self.marks)
        ruleset = Ruleset(tuple(each.table for each in _without_twins(self.tables_of(family))))
        return FamilyRules(ruleset=ruleset, objects=objects, comments=self.comments)

    def locate(self, table: Table, chain: str, rule: int) -> tuple[str, int, str]:
        """Origin, line and text of a rule, counted from 0 in its chain; the line is 0 when it is not known."""
        held = next((each for each in self.tables if each.table is table), None)
        if held is None or not isinstance(table.chains, LazyChains):
            return (held.origin if held else "", 0, "")
        line, text = table.chains.place(chain, rule)
        return held.origin, line, text

    def check(self) -> tuple[DumpProblem, ...]:
        """Read every rule and set, walked or not; what of them is not understood, in the order of the text."""
        found = list(self.problems)
        for held in self.tables:
            for name, chain in held.table.chains.items():
                for number, rule in enumerate(chain.rules):
                    for text in _unknown(rule.expressions):
                        line = self.locate(held.table, name, number)[1]
                        where = f"table {held.table.name}, chain {name}, rule {number + 1}"
                        found.append(DumpProblem(held.origin, line, f"{where}: not understood: {text}"))
            found += (
                DumpProblem(held.origin, 0, f"set {one.name}: not understood: {one.unsupported}")
                for one in held.table.sets.values()
                if one.unsupported
            )
        found += (
            DumpProblem("", 0, f"ipset {one.name}: not understood: {one.unsupported}")
            for one in self.sets.values()
            if one.unsupported
        )
        return tuple(found)


def read(text: str | bytes, origin: str = "", family: IPFamily | None = None) -> Dump:
    """All that one text holds. `origin` names it in messages; `family` is that of iptables rules that do not say theirs,
    None tells it by their addresses. Never fails: what is wrong is among the problems."""
    from narthex.netfilter.dump.lines import read_lines

    return read_lines(text, origin, family)


def merge_dumps(dumps: Iterable[Dump]) -> Dump:
    """Several texts of one node as one."""
    found = tuple(dumps)
    return Dump(
        tables=tuple(each for one in found for each in one.tables),
        sets={name: held for one in found for name, held in one.sets.items()},
        servers={key: server for one in found for key, server in one.servers.items()},
        marks=frozenset(mark for one in found for mark in one.marks),
        comments=tuple(each for one in found for each in one.comments),
        problems=tuple(each for one in found for each in one.problems),
        notes=tuple(each for one in found for each in one.notes),
    )


def read_all(texts: Iterable[tuple[str, str]], family: IPFamily | None = None) -> Dump:
    """Pairs of a name, for messages, and a text, each of them whole. Raises DumpError for the first problem."""
    dump = merge_dumps(read(text, name, family) for name, text in texts)
    if dump.problems:
        raise DumpError(str(dump.problems[0]))
    return dump


def _without_twins(held: tuple[DumpTable, ...]) -> list[DumpTable]:
    """iptables-nft's tables are in both `iptables-save` and `nft list ruleset`; the first says more. A table that was
    printed twice counts once."""
    chosen: list[DumpTable] = []
    ours = {(each.table.family, each.table.name) for each in held if each.flavour is not Flavour.NFTABLES}
    seen: set[tuple[object, ...]] = set()
    for each in held:
        table = each.table
        if each.flavour is Flavour.NFTABLES:
            twin = (table.family, table.name) in ours and table.name in TABLES
            if twin and not set(builtin_chains(table.name)).isdisjoint(table.chains):
                continue
        key = (table.family, table.name, each.flavour)
        if each.whole and key in seen:
            continue
        if each.whole:
            seen.add(key)
        chosen.append(each)
    # nft lists all tables of nf_tables in the order in which they were made, which says whose chain is called first.
    made = {
        (each.table.family, each.table.name): number
        for number, each in enumerate(each for each in held if each.flavour is Flavour.NFTABLES)
    }
    return sorted(chosen, key=lambda each: made.get((each.table.family, each.table.name), -1))


def _unknown(expressions: tuple[Expression, ...]) -> Iterable[str]:
    for each in expressions:
        if isinstance(each, Unknown):
            yield each.text
        elif isinstance(each, AnyOf):
            for way in each.ways:
                yield from _unknown(way)
        elif isinstance(each, InlineVerdictMap):
            for matches, _ in each.arms:
                yield from _unknown(matches)
