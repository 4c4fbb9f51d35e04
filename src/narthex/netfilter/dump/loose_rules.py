"""iptables rules outside a complete dump: lines of `iptables -S`, of `grep`, of `iptables -L`, or of a mail.

The lines are divided into blocks, each the print of one table by one command. A block whose command does not name table and
family gets the table that has its built-in chains and fits its rules, and the family of its addresses. Blocks of the same
table are joined chain by chain.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from narthex.model import BoundedProblems, IPFamily, omitted_text
from narthex.netfilter.ast import Chain, MarkOr, OmittedMatch, Rule, Table
from narthex.netfilter.cuts import gap_rule
from narthex.netfilter.dump.dump import DumpTable, Flavour
from narthex.netfilter.dump.transcript import ShellCommand
from narthex.netfilter.lazy import LazyChains, LineProblem
from narthex.netfilter.xtables.index import rule_or_text
from narthex.netfilter.xtables.listing import ChainListing, ListedRule
from narthex.netfilter.xtables.values import TABLES, builtin_chains, default_policy, hook_of

_TABLE_EVIDENCE = (
    ("raw", re.compile(r"-j (?:CT|NOTRACK|TRACE)\b")),
    ("mangle", re.compile(r"-j (?:TPROXY|TCPMSS|TOS|DSCP|TTL|CLASSIFY|CHECKSUM)\b")),
    (
        "nat",
        re.compile(
            r"-j (?:DNAT|SNAT|MASQUERADE|REDIRECT|NETMAP|DOCKER$|KUBE-(?:SVC|SEP|SVL|EXT|XLB|FW|MARK|NODEPORT|POSTROUTING))"
            r"|-A (?:PREROUTING|POSTROUTING|KUBE-(?:SVC|SEP|SVL|EXT|XLB|FW|MARK|NODEPORT|POSTROUTING)|CNI-)"
        ),
    ),
    (
        "filter",
        re.compile(
            r"-j (?:REJECT|DROP|KUBE-(?:FORWARD|FIREWALL|EXTERNAL-SERVICES|PROXY-FIREWALL))\b|\A(?>.*?--ctstate NEW ).*-j KUBE-SERVICES"
            r"|-A (?:INPUT|FORWARD|DOCKER-USER|DOCKER-ISOLATION\S*|KUBE-(?:FORWARD|FIREWALL|EXTERNAL-SERVICES|PROXY-FIREWALL))\b"
        ),
    ),
)
_ADDRESS_6 = re.compile(
    r"(?:^|[\s!\[])(?=[0-9a-f:]*:[0-9a-f]*:)[0-9a-f:]++(?:/\d++)?(?:[\s\]]|$)|icmp6-|ipv6-icmp|icmpv6"
)
_ADDRESS_4 = re.compile(r"(?:^|[\s!])\d{1,3}(?:\.\d{1,3}){3}(?:[/:\s]|$)|icmp-")
_SEARCHED = 400
"""Characters of a rule that are searched for an address; it is at the beginning."""

_MARK_CHAINS = {"KUBE-MARK-MASQ": 0x4000, "KUBE-MARK-DROP": 0x8000}
"""Chains of kube-proxy and kubelet that bug reports often omit, and the mark that they set by default."""


_GAP = gap_rule()


class _Entry:
    """The declaration of a chain (with a policy), or a rule."""

    __slots__ = ("chain", "line", "policy", "references", "rule", "table", "text")

    def __init__(
        self, chain: str, line: int, text: str, table: str, policy: str = "", rule: Rule | None = None
    ) -> None:
        self.chain, self.line, self.text, self.table, self.policy = chain, line, text, table, policy
        self.rule = rule
        self.references = 0

    @property
    def target(self) -> str:
        """The chain that the rule calls, or ""."""
        found = _TARGET.search(self.text) if self.rule is None else None
        return self.rule.target if self.rule is not None else found[1] if found else ""


class _Block:
    """The print of one table by one command."""

    def __init__(self, command: ShellCommand) -> None:
        self.command = command
        self.entries: list[_Entry] = []
        self.family = command.family
        self.bases: set[str] = set()
        """Built-in chains that are declared."""
        self.declared: set[str] = set()
        self.seen: set[str] = set()
        self.below = False
        """A rule, or a chain that is not built-in, was seen. A built-in chain then begins another table."""
        self.ruled = False
        self.listed = False
        """The block contains listings of `iptables -L`."""
        self.cut: list[int] = []
        """Numbers of the lines that say that lines were left out, from 1."""

    @property
    def loose(self) -> bool:
        """True if any of the rules may be missing: the output of a filter, or a selection."""
        selected = not (self.command.table or self.bases or self.listed)
        return bool(self.command.filtered) or not self.declared or selected

    def whole(self, table: str) -> bool:
        """Return True if all chains of the table were printed."""
        selected = self.command.filtered or self.command.chain or self.cut
        return not selected and self.bases >= set(builtin_chains(table))

    def begins_another(self, chain: str, *, base: bool, listed: bool) -> bool:
        """Return True if the declaration of a chain begins the print of another table."""
        if base:
            return self.below or chain in self.bases
        return not listed and (self.ruled or chain in self.declared)

    def evident_family(self) -> IPFamily | None:
        """Return the family of the addresses in the rules, None if there is none."""
        found = None
        for entry in self.entries:
            text = entry.text[:_SEARCHED]
            if _ADDRESS_6.search(text):
                return IPFamily.IPV6
            if found is None and _ADDRESS_4.search(text):
                found = IPFamily.IPV4
        return found

    def evident_table(self) -> str:
        """Return the only table that has the declared built-in chains and fits the rules, or ""."""
        # `security` has the chains of `filter`, and hardly any program uses it.
        exact = [name for name in TABLES if self.bases == set(builtin_chains(name))]
        if exact:
            return exact[0]
        fitting = {name for name in TABLES if self.bases <= set(builtin_chains(name))}
        found = {entry.table or _evident_table(entry) for entry in self.entries if not entry.policy} - {""}
        if len(found) == 1 and found <= fitting:
            return found.pop()
        return "filter" if "FORWARD" in self.bases and not found - fitting else ""


class LooseRules:
    """The rules of a text that are not part of a complete dump."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._notes: BoundedProblems[LineProblem] = BoundedProblems(lambda count: (0, omitted_text(count)))

    def __bool__(self) -> bool:
        """Return True if there is any rule or chain."""
        return bool(self._blocks)

    def _block(self, command: ShellCommand, chain: str = "", *, base: bool = False, listed: bool = False) -> _Block:
        """Return the block of the next line; `chain` is the chain that the line declares."""
        if self._blocks and self._blocks[-1].command is command:
            block = self._blocks[-1]
            if not chain or not block.begins_another(chain, base=base, listed=listed):
                return block
        self._blocks.append(_Block(command))
        return self._blocks[-1]

    def add_line(self, line: str, number: int, command: ShellCommand) -> None:
        """Add a line that CHAIN_OR_RULE matches and that the command printed."""
        bare = line.partition("] ")[2] if line.startswith("[") else line
        words = bare[1:].split(None, 3) if bare.startswith(":") else bare.split(None, 3)[1:]
        if not words:
            return
        chain = words[0]
        if bare.startswith((":", "-P", "-N")):
            policy = words[1] if len(words) > 1 and not bare.startswith("-N") else "-"
            base = policy != "-"
            block = self._block(command, chain, base=base)
            self._declare(block, chain, base=base)
            block.entries.append(_Entry(chain, number + 1, bare, command.table, policy))
            return
        block = self._block(command)
        block.below = block.ruled = True
        if (not command.table or command.filtered) and bare in block.seen:
            # Several `grep` commands for different chains print the rules between the chains twice.
            return
        block.seen.add(bare)
        if block.cut and block.cut[-1] >= block.entries[-1].line and block.entries[-1].chain != chain:
            block.entries.append(_Entry(chain, block.cut[-1], "", command.table, rule=_GAP))
        block.entries.append(_Entry(chain, number + 1, bare, command.table))

    def add_cut(self, number: int) -> None:
        """Add a line that says that lines were left out, after a rule or a chain."""
        if self._blocks and self._blocks[-1].entries:
            block = self._blocks[-1]
            last = block.entries[-1]
            block.cut.append(number + 1)
            if not last.policy:
                block.entries.append(_Entry(last.chain, number + 1, "", last.table, rule=_GAP))

    @staticmethod
    def _declare(block: _Block, chain: str, *, base: bool) -> None:
        block.declared.add(chain)
        if base:
            block.bases.add(chain)
        else:
            block.below = True

    def add_listing(self, listing: ChainListing, command: ShellCommand) -> None:
        """Add a chain of `iptables -L`."""
        base = listing.policy != "-"
        block = self._block(command, listing.chain, base=base, listed=True)
        block.listed = True
        self._declare(block, listing.chain, base=base)
        if not listing.whole:
            self._notes.append((listing.line, f"chain {listing.chain} is not listed completely"))
        declared = _Entry(listing.chain, listing.line, "", command.table, listing.policy)
        declared.references = listing.references
        block.entries.append(declared)
        for rule in listing.rules:
            self.add_listed_rule(listing.chain, rule, command, block)

    def add_listed_rule(self, chain: str, rule: ListedRule, command: ShellCommand, block: _Block | None = None) -> None:
        """Add a rule of a listing."""
        block = block or self._block(command)
        block.entries.append(_Entry(chain, rule.number, rule.text, command.table, rule=rule.rule))

    def tables(
        self, family: IPFamily | None, flavour: Flavour, origin: str
    ) -> Iterator[tuple[DumpTable, list[LineProblem]]]:
        """Yield the tables that the rules make up, each with notes about assumptions.

        Args:
            family: Family of rules whose text does not tell; None derives it from the blocks around them.
            flavour: Tool that printed the rules.
            origin: Name of the text.
        """
        self._assign_families(family)
        notes = [*self._notes, *self._assign_tables()]
        groups: dict[tuple[IPFamily, Flavour, str], list[_Block]] = {}
        for block in self._blocks:
            own = Flavour(f"iptables-{block.command.flavour}") if block.command.flavour else flavour
            for name in {entry.table for entry in block.entries} - {""}:
                groups.setdefault((block.family or IPFamily.IPV4, own, name), []).append(block)
        ordered = sorted(groups.items(), key=lambda each: (each[0][0].value, TABLES.index(each[0][2])))
        for (one, own, name), blocks in ordered:
            made, said = _joined(name, blocks, one, own, origin)
            yield made, notes + said
            notes = []

    def _assign_families(self, default: IPFamily | None) -> None:
        """Assign a family to every block.

        Blocks form rounds, in each of which no table is printed twice. A round without any address that repeats the tables of
        the round before is of IPv6: people do not print the tables of IPv4 twice.
        """
        rounds: list[list[_Block]] = []
        printed: set[tuple[str, ...]] = set()
        for block in self._blocks:
            key = tuple(sorted(block.bases))
            if not rounds or (key and key in printed):
                rounds.append([])
                printed = set()
            rounds[-1].append(block)
            if key:
                printed.add(key)
        before: set[tuple[str, ...]] = set()
        for one in rounds:
            evident = [block.evident_family() for block in one]
            known = {family for family in evident if family is not None}
            tables = {tuple(sorted(block.bases)) for block in one} - {()}
            repeated = IPFamily.IPV6 if tables and tables <= before else IPFamily.IPV4
            common = known.pop() if len(known) == 1 else None if known else repeated
            for block, family in zip(one, evident, strict=True):
                block.family = family or block.family or default or common or IPFamily.IPV4
            before |= tables

    def _assign_tables(self) -> list[LineProblem]:
        """Assign a table to every entry without one. Return notes about the assumptions."""
        unassigned: list[tuple[_Block, _Entry]] = []
        for block in self._blocks:
            if not any(not entry.table for entry in block.entries):
                continue
            table = block.evident_table()
            for entry in block.entries:
                if not entry.table:
                    entry.table = table or ("" if entry.policy else _evident_table(entry))
                    unassigned.append((block, entry))
        by_chain: dict[str, set[str]] = {}
        by_target: dict[str, set[str]] = {}
        for block in self._blocks:
            for entry in block.entries:
                if entry.table:
                    _learn(by_chain, by_target, entry)
        for _ in range(3):
            for _block, entry in unassigned:
                candidates = by_chain.get(entry.chain) or by_target.get(entry.chain, set())
                if not entry.table and len(candidates) == 1:
                    (entry.table,) = candidates
                    _learn(by_chain, by_target, entry)
        assumed: dict[str, int] = {}
        for block, entry in unassigned:
            if not entry.table and entry.policy:
                block.entries += [
                    _Entry(entry.chain, entry.line, entry.text, table, entry.policy)
                    for table in sorted(by_chain.get(entry.chain, ()))
                ]
            entry.table = entry.table or ("" if entry.policy else "nat")
            if entry.table and not entry.policy:
                assumed.setdefault(entry.table, entry.line)
        return [(line, f"the text does not name a table; table {table} is assumed") for table, line in assumed.items()]


_TARGET = re.compile(r"-j (\S+)")


def _learn(by_chain: dict[str, set[str]], by_target: dict[str, set[str]], entry: _Entry) -> None:
    """Add the table of an entry to the tables that have its chain, and to those that call the chains that it calls."""
    by_chain.setdefault(entry.chain, set()).add(entry.table)
    for target in (*_TARGET.findall(entry.text), *entry.text.split(None, 1)[:1]):
        by_target.setdefault(target, set()).add(entry.table)


def _evident_table(entry: _Entry) -> str:
    """Return the only table in which such a rule makes sense, or ""."""
    text = entry.text if entry.rule is None else f"-A {entry.chain} x -j {entry.text}"
    text = text.strip()
    return next((table for table, pattern in _TABLE_EVIDENCE if pattern.search(text)), "")


def _joined(
    name: str, blocks: list[_Block], family: IPFamily, flavour: Flavour, origin: str
) -> tuple[DumpTable, list[LineProblem]]:
    """Return the table that several prints of it make up, and notes about chains that were printed twice."""
    prints: dict[str, list[tuple[_Block, list[_Entry]]]] = {}
    for block in blocks:
        own: dict[str, list[_Entry]] = {}
        for entry in block.entries:
            if entry.table == name:
                own.setdefault(entry.chain, []).append(entry)
        for chain, entries in own.items():
            prints.setdefault(chain, []).extend((block, part) for part in _separate(entries))
    notes: list[LineProblem] = []
    counted: list[_Entry] = []
    for chain, found in prints.items():
        chosen, note = _chosen(chain, found)
        counted += chosen
        notes += note
    partial = "" if any(block.whole(name) for block in blocks) else _why_partial(name, blocks)
    partial = partial or _lost_references(name, counted)
    cut = any(block.cut for block in blocks)
    table, assumptions = _table(name, counted, family, flavour, partial, cut=cut)
    first = min(entry.line for entry in counted)
    notes += ((first, text) for text in assumptions)
    rules = _number(counted)
    return DumpTable(table=table, flavour=flavour, origin=origin, line=first, rules=rules, whole=not partial), notes


def _separate(entries: list[_Entry]) -> Iterator[list[_Entry]]:
    """Divide the entries of a chain where it is declared again, which happens if it is listed again."""
    part: list[_Entry] = []
    for entry in entries:
        if entry.policy and part and not part[0].text and not entry.text:
            yield part
            part = []
        part.append(entry)
    yield part


def _chosen(chain: str, found: list[tuple[_Block, list[_Entry]]]) -> tuple[list[_Entry], list[LineProblem]]:
    """Return the entries of a chain that count, and a note if it was printed more than once.

    Selections of `grep` complement each other. Of complete prints the first counts.
    """
    complete = [entries for block, entries in found if not block.loose]
    if len(found) > 1 and not complete:
        # The print with most of the rules has them in the right order.
        longest = max((entries for _, entries in found), key=len)
        found = [(found[0][0], longest), *found]
    if len(found) == 1 or not complete:
        seen: dict[str, _Entry] = {}
        for _, entries in found:
            for entry in entries:
                seen.setdefault(entry.text or f"{entry.policy} {entry.line}", entry)
        return (found[0][1] if len(found) == 1 else list(seen.values())), []
    chosen, *others = complete
    if not others:
        return chosen, []
    changed = ", with other rules" if any(_number(other) != _number(chosen) for other in others) else ""
    text = f"chain {chain} is printed again{changed}; the print in line {chosen[0].line} counts"
    return chosen, [(others[0][0].line, text)]


def _number(entries: list[_Entry]) -> int:
    return sum(1 for entry in entries if not entry.policy and entry.rule != _GAP)


def _why_partial(name: str, blocks: list[_Block]) -> str:
    """Return why rules of a table may be missing."""
    filters = list(dict.fromkeys(block.command.filtered for block in blocks if block.command.filtered))
    if filters:
        return f"the input contains only what `{filters[0]}` selected of table {name}"
    chains = list(dict.fromkeys(block.command.chain for block in blocks if block.command.chain))
    if chains and all(block.command.chain for block in blocks):
        return f"the input contains only chain {', '.join(chains[:5])} of table {name}"
    cut = next((line for block in blocks for line in block.cut), 0)
    if cut:
        return f"the text is cut in line {cut}, in table {name}"
    return f"the input contains only a part of table {name}"


def _lost_references(name: str, entries: list[_Entry]) -> str:
    """Return a chain that more rules call than a listing has, as a reason why rules may be missing."""
    called = Counter(entry.target for entry in entries)
    for entry in entries:
        if entry.references > called[entry.chain]:
            return (
                f"{entry.references} rules of table {name} call chain {entry.chain}, and the input has {called[entry.chain]} of "
                "them"
            )
    return ""


def _table(
    name: str, entries: list[_Entry], family: IPFamily, flavour: Flavour, partial: str, *, cut: bool
) -> tuple[Table, list[str]]:
    policies: dict[str, str] = {}
    rules: dict[str, list[_Entry]] = {}
    for entry in entries:
        if entry.policy:
            policies[entry.chain] = entry.policy
        else:
            rules.setdefault(entry.chain, []).append(entry)
    for chain in rules:
        policies.setdefault(chain, default_policy(name, chain))
    for chain in policies:
        if policies[chain] == "-":
            policies[chain] = default_policy(name, chain)
    assumed = _assumed_chains(policies, entries)
    policies.update(dict.fromkeys(assumed, "-"))

    def build(chain: str) -> Chain:
        """Parse a chain of the dump; mark chains that the dump lacks and chains that the dump may have cut off."""
        if chain in assumed:
            return Chain(name=chain, rules=(Rule((OmittedMatch(assumed[chain]), MarkOr(_MARK_CHAINS[chain]))),))
        parsed = tuple(entry.rule or rule_or_text(entry.text, family) for entry in rules.get(chain, ()))
        if cut and not parsed:
            parsed = (_GAP,)
        return Chain(name=chain, rules=parsed, hook=hook_of(name, chain, policies[chain]))

    texts = {entry.line: entry.text for entry in entries}
    chains = LazyChains(
        policies,
        build,
        tuple(chain for chain in policies if hook_of(name, chain) is not None),
        lambda chain: [entry.line for entry in rules.get(chain, ())],
        lambda line: texts[line],
    )
    legacy = flavour is Flavour.LEGACY
    return Table(family=family, name=name, chains=chains, legacy=legacy, partial=partial), list(assumed.values())


def _assumed_chains(policies: dict[str, str], entries: list[_Entry]) -> dict[str, str]:
    """Return the mark chains that rules call and the text omits, each with a note."""
    called = {
        name
        for name in _MARK_CHAINS
        if name not in policies
        and any(f"-j {name}" in entry.text or entry.text.split(None, 1)[:1] == [name] for entry in entries)
    }
    return {
        name: f"chain {name} is not listed; it is assumed to set mark bit {_MARK_CHAINS[name]:#x}, as kube-proxy writes it"
        for name in sorted(called)
    }
