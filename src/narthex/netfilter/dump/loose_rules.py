"""iptables rules outside a complete dump: lines of `iptables -S`, of `grep`, of `iptables -L`, or of a mail.

A rule whose line does not name its table is assigned to the table that fits its content, with a note. If a chain is listed
twice, the first listing counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from narthex.model.lines import BoundedProblems, omitted_text
from narthex.model.net import IPFamily
from narthex.netfilter.ast import Chain, MarkOr, OmittedMatch, Rule, Table
from narthex.netfilter.dump.dump import DumpTable, Flavour
from narthex.netfilter.dump.transcript import ShellCommand
from narthex.netfilter.lazy import LazyChains, LineProblem
from narthex.netfilter.xtables.index import rule_or_text
from narthex.netfilter.xtables.listing import ChainListing, ListedRule
from narthex.netfilter.xtables.values import TABLES, default_policy, hook_of

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

_MARK_CHAINS = {"KUBE-MARK-MASQ": 0x4000, "KUBE-MARK-DROP": 0x8000}
"""Chains of kube-proxy and kubelet that bug reports often omit, and the mark that they set by default."""


class _Entry:
    """The declaration of a chain (with a policy), or a rule."""

    __slots__ = ("chain", "line", "policy", "rule", "table", "text")

    def __init__(
        self, chain: str, line: int, text: str, table: str, policy: str = "", rule: Rule | None = None
    ) -> None:
        self.chain, self.line, self.text, self.table, self.policy = chain, line, text, table, policy
        self.rule = rule


class LooseRules:
    """The rules of a text that are not part of a complete dump."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._listed: dict[tuple[str, str], int] = {}
        self._seen: set[tuple[str, str]] = set()
        self._notes: BoundedProblems[LineProblem] = BoundedProblems(lambda count: (0, omitted_text(count)))

    def add_line(self, line: str, number: int, command: ShellCommand) -> None:
        """Add a line that CHAIN_OR_RULE matches and that the command printed."""
        table = command.table
        bare = line.partition("] ")[2] if line.startswith("[") else line
        words = bare[1:].split() if bare.startswith(":") else bare.split()[1:]
        if not words:
            return
        if bare.startswith((":", "-P", "-N")):
            policy = words[1] if len(words) > 1 and not bare.startswith("-N") else "-"
            self._entries.append(_Entry(words[0], number + 1, bare, table, policy))
            return
        if (not table or command.filtered) and (bare, table) in self._seen:
            # Several `grep` commands for different chains print the rules between the chains twice.
            return
        self._seen.add((bare, table))
        self._entries.append(_Entry(words[0], number + 1, bare, table))

    def add_listing(self, listing: ChainListing, table: str) -> None:
        """Add a chain of `iptables -L`."""
        first = self._listed.setdefault((table or "?", listing.chain), listing.line)
        if first != listing.line:
            self._notes.append(
                (listing.line, f"chain {listing.chain} is listed again; the listing in line {first} counts")
            )
            return
        if not listing.whole:
            self._notes.append((listing.line, f"chain {listing.chain} is not listed completely"))
        self._entries.append(_Entry(listing.chain, listing.line, "", table, listing.policy))
        for rule in listing.rules:
            self.add_listed_rule(listing.chain, rule, table)

    def add_listed_rule(self, chain: str, rule: ListedRule, table: str) -> None:
        """Add a rule of a listing."""
        self._entries.append(_Entry(chain, rule.number, rule.text, table, rule=rule.rule))

    def tables(self, family: IPFamily, flavour: Flavour, origin: str) -> Iterator[tuple[DumpTable, list[LineProblem]]]:
        """Yield the tables that the rules make up, each with notes about assumptions."""
        notes = [*self._notes, *self._assign_tables()]
        for name in TABLES:
            own = [entry for entry in self._entries if entry.table == name]
            if not own:
                continue
            table, assumptions = _table(name, own, family, flavour)
            notes += ((own[0].line, text) for text in assumptions)
            rules = sum(1 for entry in own if not entry.policy)
            whole = "OUTPUT" in table.chains and not notes
            yield (
                DumpTable(table=table, flavour=flavour, origin=origin, line=own[0].line, rules=rules, whole=whole),
                notes,
            )
            notes = []

    def _assign_tables(self) -> list[LineProblem]:
        """Assign a table to every entry without one. Return notes about the assumptions."""
        unassigned = [entry for entry in self._entries if not entry.table]
        if not unassigned:
            return []
        for entry in unassigned:
            entry.table = "" if entry.policy else _evident_table(entry)
        by_chain: dict[str, set[str]] = {}
        by_target: dict[str, set[str]] = {}
        for entry in self._entries:
            if entry.table:
                by_chain.setdefault(entry.chain, set()).add(entry.table)
                _add_targets(by_target, entry)
        for _ in range(3):
            for entry in unassigned:
                if entry.table:
                    continue
                candidates = by_chain.get(entry.chain) or by_target.get(entry.chain, set())
                if len(candidates) == 1:
                    (entry.table,) = candidates
                    by_chain.setdefault(entry.chain, set()).add(entry.table)
                    _add_targets(by_target, entry)
        assumed: dict[str, int] = {}
        declared: list[_Entry] = []
        for entry in unassigned:
            if not entry.table and entry.policy:
                declared += [
                    _Entry(entry.chain, entry.line, entry.text, table, entry.policy)
                    for table in sorted(by_chain.get(entry.chain, ()))
                ]
            entry.table = entry.table or ("" if entry.policy else "nat")
            if entry.table and not entry.policy:
                assumed.setdefault(entry.table, entry.line)
        self._entries += declared
        return [(line, f"the text does not name a table; table {table} is assumed") for table, line in assumed.items()]


_TARGET = re.compile(r"-j (\S+)")


def _add_targets(tables: dict[str, set[str]], entry: _Entry) -> None:
    """Add the table of a rule to the tables that call a chain, by chain."""
    for target in (*_TARGET.findall(entry.text), *entry.text.split(None, 1)[:1]):
        tables.setdefault(target, set()).add(entry.table)


def _evident_table(entry: _Entry) -> str:
    """Return the only table in which such a rule makes sense, or ""."""
    text = entry.text if entry.rule is None else f"-A {entry.chain} x -j {entry.text}"
    text = text.strip()
    return next((table for table, pattern in _TABLE_EVIDENCE if pattern.search(text)), "")


def _table(name: str, entries: list[_Entry], family: IPFamily, flavour: Flavour) -> tuple[Table, list[str]]:
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
        if chain in assumed:
            return Chain(name=chain, rules=(Rule((OmittedMatch(assumed[chain]), MarkOr(_MARK_CHAINS[chain]))),))
        parsed = tuple(entry.rule or rule_or_text(entry.text, family) for entry in rules.get(chain, ()))
        return Chain(name=chain, rules=parsed, hook=hook_of(name, chain, policies[chain]))

    texts = {entry.line: entry.text for entry in entries}
    chains = LazyChains(
        policies,
        build,
        tuple(chain for chain in policies if hook_of(name, chain) is not None),
        lambda chain: [entry.line for entry in rules.get(chain, ())],
        lambda line: texts[line],
    )
    table = Table(family=family, name=name, chains=chains, legacy=flavour is Flavour.LEGACY)
    return table, list(assumed.values())


def _assumed_chains(policies: dict[str, str], entries: list[_Entry]) -> dict[str, str]:
    """Return the mark chains that rules call and the text omits, each with a note."""
    called = {
        name
        for name in _MARK_CHAINS
        if name not in policies
        and any(f"-j {name}" in entry.text or entry.text.split(None, 1)[:1] == [name] for entry in entries)
    }
    return {
        name: f"chain {name} is not listed; it is taken to set mark bit {_MARK_CHAINS[name]:#x}, as kube-proxy writes it"
        for name in sorted(called)
    }
