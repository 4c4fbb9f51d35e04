"""The content of dumps: tables with their origin, ipsets, and virtual servers of IPVS."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from narthex.model import BoundedProblems, IPFamily, family_of, omitted_text
from narthex.netfilter.ast import AnyOf, Chain, Expression, InlineVerdictMap, Ruleset, Table, Unknown
from narthex.netfilter.describe import describe_rule
from narthex.netfilter.ipset import IpSet
from narthex.netfilter.ipvs import ServerKey, VirtualServer
from narthex.netfilter.lazy import LazyChains, base_chains
from narthex.netfilter.walk.state import KernelObjects
from narthex.netfilter.xtables.values import TABLES, builtin_chains

_BOUND_ADDRESS_SETS = ("KUBE-IPVS-IPS", "KUBE-6-IPVS-IPS")


class Flavour(enum.Enum):
    """The tool that printed a table."""

    LEGACY = "iptables-legacy"
    NFT = "iptables-nft"
    XTABLES = "iptables"
    """iptables-legacy or iptables-nft; the text does not tell."""
    NFTABLES = "nft"


class DumpProblem(msgspec.Struct, frozen=True):
    """An error in a dump, or an assumption about something that it omits."""

    origin: str
    line: int
    """Line number, starting at 1; 0 for the text as a whole."""
    text: str

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        return f"{self.origin}: {where}{self.text}" if self.origin else where + self.text


class GapKind(enum.Enum):
    """What is missing from the input."""

    TABLE = "table"
    """A table is not in the input."""
    RULES = "rules"
    """Chains and rules may be missing anywhere in a table: the output was filtered."""
    CUT = "cut"
    """The text is cut here, and what follows in the chain, set, or table is missing."""
    FILE = "file"
    """A file could not be used at all."""


class DumpGap(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is missing from the input, as far as the text shows it."""

    kind: GapKind
    family: IPFamily | None = None
    """None for both families."""
    table: str = ""
    """Name of the table. Empty if the gap is not in a table, or in any table."""
    chain: str = ""
    """The only chain that has the gap, if that is known."""
    flavour: Flavour = Flavour.XTABLES
    origin: str = ""
    line: int = 0
    text: str
    """A clause: what is missing, and why."""
    command: str = ""
    """The command that prints what is missing, if there is one."""

    def __str__(self) -> str:
        return str(DumpProblem(self.origin, self.line, self.text))


class DumpTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table of a dump, and its position."""

    table: Table
    flavour: Flavour
    origin: str = ""
    line: int = 0
    rules: int = 0
    """Number of lines of the text that are rules of the table."""
    whole: bool = True
    """False if the text contains only some of the rules, such as the output of `grep`."""


class WalkInput(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a dump that a packet of one family can meet."""

    ruleset: Ruleset = Ruleset()
    objects: KernelObjects = KernelObjects()
    comments: tuple[str, ...] = ()
    """Comment lines of the dump."""
    gaps: tuple[DumpGap, ...] = ()
    """What is missing from the input for this family, with the tables that it does not contain."""
    dump: Dump | None = None
    """The dump that has the positions of the rules."""

    def place(self, table: str, chain: str, rule: int | None, what: str = "") -> tuple[str, str]:
        """Return position ("nat.txt:214") and text of a rule, both empty if not known.

        `rule` is its number in the chain, from 0. Both iptables-legacy and iptables-nft may have the chain; `what`, the rule
        as text, distinguishes the two.
        """
        having = [each for each in self.ruleset.tables if each.name == table and chain in each.chains]
        if not having or rule is None or self.dump is None:
            return "", ""
        alike = (each for each in having[1:] and having if _printed(each.chains[chain], rule) == what)
        origin, line, text = self.dump.locate(next(alike, having[0]), chain, rule)
        return (f"{origin}:{line}" if line else ""), text

    @property
    def copied(self) -> Ruleset:
        """The rules as those of a text that a person copied, which may lack parts."""
        kinds = (GapKind.TABLE, GapKind.RULES, GapKind.CUT)
        absent = {gap.table: gap.text for gap in self.gaps if gap.kind in kinds and gap.table and not gap.chain}
        return msgspec.structs.replace(self.ruleset, copied=True, absent=absent)


class Dump(msgspec.Struct, frozen=True, kw_only=True):
    """The content of one or more dumps of a node."""

    tables: tuple[DumpTable, ...] = ()
    sets: Mapping[str, IpSet] = {}
    servers: Mapping[ServerKey, VirtualServer] = {}
    marks: frozenset[int] = frozenset()
    """Packet marks that have a virtual server of IPVS."""
    comments: tuple[str, ...] = ()
    problems: tuple[DumpProblem, ...] = ()
    """Lines with errors. Their content is not part of the dump."""
    notes: tuple[DumpProblem, ...] = ()
    """Information that the text omits, and the assumptions made instead."""
    gaps: tuple[DumpGap, ...] = ()
    """What is missing, without the tables that the input does not contain (see `for_family`)."""
    complete: frozenset[tuple[IPFamily, Flavour]] = frozenset()
    """The families and tools of which the input has all tables: a save or a listing without the name of a table."""

    def for_family(self, family: IPFamily) -> WalkInput:
        """Return everything that a packet of the family can meet.

        The addresses of virtual servers count as bound, since none of the tools prints the addresses of the node.
        """
        servers = {key: server for key, server in self.servers.items() if family_of(server.address) is family}
        named = (entry for name in _BOUND_ADDRESS_SETS if name in self.sets for entry in self.sets[name].entries)
        bound = frozenset(ip for ip in (*named, *(key[0] for key in servers)) if family_of(ip) is family)
        objects = KernelObjects(sets=self.sets, servers=servers, bound=bound, marks=self.marks)
        tables = tuple(each for each in self.tables if each.table.family in (None, family))
        ruleset = Ruleset(tuple(_without_duplicates(tables)))
        # Another print of the same table may be complete.
        partial = {table.name for table in ruleset.tables if table.partial}
        own = (
            each for each in self.gaps if each.family in (None, family) and (not each.table or each.table in partial)
        )
        gaps = (*own, *self._absent_tables(family))
        return WalkInput(ruleset=ruleset, objects=objects, comments=self.comments, gaps=gaps, dump=self)

    def _absent_tables(self, family: IPFamily) -> Iterator[DumpGap]:
        """Yield the tables of iptables that kube-proxy uses and that the input does not contain."""
        held = {each.table.name for each in self.tables if _is_xtables(each) and each.table.family is family}
        tool = "ip6tables" if family is IPFamily.IPV6 else "iptables"
        complete = any(one is family for one, _ in self.complete)
        for name in _USED_TABLES if held else ():
            if name in held or (complete and name not in _KUBE_PROXY_TABLES):
                continue
            yield DumpGap(
                kind=GapKind.TABLE,
                family=family,
                table=name,
                text=f"table {name} of {tool} is not in the input",
                command=f"{tool}-save -t {name}",
            )

    def locate(self, table: Table, chain: str, rule: int) -> tuple[str, int, str]:
        """Return origin, line, and text of a rule, given its number from 0. The line is 0 if it is unknown."""
        joined = table.chains.sources.get(chain) if isinstance(table.chains, JoinedChains) else None
        found = joined or next((each for each in self.tables if each.table is table), None)
        if found is None:
            return "", 0, ""
        return found.origin, *_located(found.table, chain, rule)

    def check(self) -> tuple[DumpProblem, ...]:
        """Parse every rule and set. Return the problems and everything that is not understood, in text order."""
        problems: BoundedProblems[DumpProblem] = BoundedProblems(lambda count: DumpProblem("", 0, omitted_text(count)))
        problems.extend(self.problems)
        for each in self.tables:
            for name, chain in each.table.chains.items():
                for number, rule in enumerate(chain.rules):
                    for text in _unknown(rule.expressions):
                        line = _located(each.table, name, number)[0]
                        where = f"table {each.table.name}, chain {name}, rule {number + 1}"
                        problems.append(DumpProblem(each.origin, line, f"{where}: not understood: {text}"))
            problems.extend(
                DumpProblem(each.origin, 0, f"set {one.name}: not understood: {one.unsupported}")
                for one in each.table.sets.values()
                if one.unsupported
            )
        problems.extend(
            DumpProblem("", 0, f"ipset {one.name}: not understood: {one.unsupported}")
            for one in self.sets.values()
            if one.unsupported
        )
        return tuple(problems)


def _printed(chain: Chain, rule: int) -> str:
    return describe_rule(chain.rules[rule]) if rule < len(chain.rules) else ""


def _located(table: Table, chain: str, rule: int) -> tuple[int, str]:
    return table.chains.locate(chain, rule) if isinstance(table.chains, LazyChains) else (0, "")


def merge_dumps(dumps: Iterable[Dump]) -> Dump:
    """Merge several dumps of one node."""
    merged = tuple(dumps)
    return Dump(
        tables=tuple(each for one in merged for each in one.tables),
        sets={name: ipset for one in merged for name, ipset in one.sets.items()},
        servers={key: server for one in merged for key, server in one.servers.items()},
        marks=frozenset(mark for one in merged for mark in one.marks),
        comments=tuple(each for one in merged for each in one.comments),
        problems=tuple(each for one in merged for each in one.problems),
        notes=tuple(each for one in merged for each in one.notes),
        gaps=tuple(each for one in merged for each in one.gaps),
        complete=frozenset(each for one in merged for each in one.complete),
    )


_KUBE_PROXY_TABLES = ("nat", "filter")
"""Tables that always have rules of kube-proxy. The tools print the others only if a program created them."""


_USED_TABLES = ("raw", "mangle", *_KUBE_PROXY_TABLES)
"""Tables that programs use; `security` is for SELinux alone."""


def _is_xtables(held: DumpTable) -> bool:
    """Return True for a table of iptables, whichever tool printed it."""
    table = held.table
    if held.flavour is not Flavour.NFTABLES:
        return True
    return table.name in TABLES and not set(builtin_chains(table.name)).isdisjoint(table.chains)


class JoinedChains(LazyChains):
    """The chains of a table that was printed several times, each from the first print that has its rules."""

    def __init__(self, prints: tuple[DumpTable, ...]) -> None:
        self.sources: dict[str, DumpTable] = {}
        for each in prints:
            for name in each.table.chains:
                if name not in self.sources or (
                    self.sources[name].table.partial and _longer(each, self.sources[name], name)
                ):
                    self.sources[name] = each
        bases = dict.fromkeys(chain.name for each in prints for chain in base_chains(each.table.chains))
        super().__init__(
            self.sources, lambda name: self.sources[name].table.chains[name], tuple(bases), lambda _: [], str
        )

    def locate(self, chain: str, rule: int) -> tuple[int, str]:
        """Return the line number and the text of a rule in the print that the chain is from."""
        held = self.sources.get(chain)
        return _located(held.table, chain, rule) if held is not None else (0, "")


def _longer(one: DumpTable, other: DumpTable, chain: str) -> bool:
    return len(one.table.chains[chain].rules) > len(other.table.chains[chain].rules)


def _without_duplicates(tables: tuple[DumpTable, ...]) -> list[Table]:
    """Return every table once, in kernel order.

    Several tools, or one tool several times, may have printed a table of iptables. What iptables printed has more
    information than what nft printed. A print that does not name its variant is of the variant that has the same chains.
    """
    prints: dict[tuple[object, ...], list[DumpTable]] = {}
    variants: dict[tuple[object, ...], dict[Flavour, DumpTable]] = {}
    for each in tables:
        if each.flavour in (Flavour.LEGACY, Flavour.NFT):
            variants.setdefault((each.table.family, each.table.name), {}).setdefault(each.flavour, each)
    saved = {(each.table.family, each.table.name) for each in tables if each.flavour is not Flavour.NFTABLES}
    for each in tables:
        key = (each.table.family, each.table.name)
        if each.flavour is Flavour.NFTABLES and key in saved and _is_xtables(each):
            continue
        prints.setdefault((*key, _variant(each, variants.get(key, {}))), []).append(each)
    # nft lists all tables in the order of their creation, which decides whose chain is called first.
    created = {
        (each.table.family, each.table.name): number
        for number, each in enumerate(each for each in tables if each.flavour is Flavour.NFTABLES)
    }
    joined = map(_joined, prints.values())
    return sorted(joined, key=lambda table: created.get((table.family, table.name), -1))


def _variant(held: DumpTable, variants: Mapping[Flavour, DumpTable]) -> Flavour:
    """Return the variant of iptables that has a table. `variants` are the prints of it that name their variant."""
    if held.flavour is not Flavour.XTABLES or not variants:
        return held.flavour
    if len(variants) == 1:
        return next(iter(variants))
    return max(variants, key=lambda one: len(set(variants[one].table.chains) & set(held.table.chains)))


def _joined(prints: list[DumpTable]) -> Table:
    """Return the table that several prints show."""
    if len(prints) == 1:
        return prints[0].table
    ordered = tuple(sorted(prints, key=lambda each: bool(each.table.partial)))
    sets = {name: one for each in reversed(ordered) for name, one in each.table.sets.items()}
    return msgspec.structs.replace(ordered[0].table, chains=JoinedChains(ordered), sets=sets)


def _unknown(expressions: tuple[Expression, ...]) -> Iterable[str]:
    for each in expressions:
        if isinstance(each, Unknown):
            yield each.text
        elif isinstance(each, AnyOf):
            for alternative in each.alternatives:
                yield from _unknown(alternative)
        elif isinstance(each, InlineVerdictMap):
            for matches, _ in each.arms:
                yield from _unknown(matches)
