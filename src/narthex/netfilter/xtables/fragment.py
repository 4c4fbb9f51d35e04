"""Rules that stand in no whole dump: lines of `iptables -S`, of `grep`, of `iptables -L`, of a mail.

A line that does not say its table gets the one that fits what it does, and that is noted. Chains that are listed twice
count as they were listed first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from narthex.model.net import IPFamily
from narthex.netfilter.ast import Chain, MarkOr, OmittedMatch, Rule, Table
from narthex.netfilter.dump.read import DumpTable, Flavour
from narthex.netfilter.dump.transcript import Command
from narthex.netfilter.lazy import LazyChains
from narthex.netfilter.xtables.index import Trouble, rule_or_text
from narthex.netfilter.xtables.listing import Line, Listing
from narthex.netfilter.xtables.values import TABLES, builtin_chains, hook_of

CHAIN_OR_RULE = re.compile(r"(?:\[\d+:\d+\] )?-[ANP] \S|:\S+ (?:-|[A-Z]+)(?: \[|$)")
"""A line of a dump, of `iptables -S`, or one that `grep` has left of them."""

_EVIDENCE = (
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
            r"-j (?:REJECT|DROP|KUBE-(?:FORWARD|FIREWALL|EXTERNAL-SERVICES|PROXY-FIREWALL))\b|--ctstate NEW .*-j KUBE-SERVICES"
            r"|-A (?:INPUT|FORWARD|DOCKER-USER|DOCKER-ISOLATION\S*|KUBE-(?:FORWARD|FIREWALL|EXTERNAL-SERVICES|PROXY-FIREWALL))\b"
        ),
    ),
)


_WELL_KNOWN = {"KUBE-MARK-MASQ": 0x4000, "KUBE-MARK-DROP": 0x8000}
"""Chains of kube-proxy and kubelet that people rarely list, and the mark that they set (unless a flag says otherwise)."""


class _Entry:
    """A chain's declaration, or a rule."""

    __slots__ = ("chain", "line", "policy", "rule", "table", "text")

    def __init__(self, chain: str, line: int, text: str, table: str, policy: str = "") -> None:
        self.chain, self.line, self.text, self.table, self.policy = chain, line, text, table, policy
        self.rule: Rule | None = None


class Fragment:
    """All loose rules of a text."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = lines
        self._entries: list[_Entry] = []
        self._listed: dict[tuple[str, str], int] = {}
        self._seen: set[tuple[str, str]] = set()
        self._notes: list[Trouble] = []

    def take(self, line: str, number: int, command: Command) -> None:
        """A line that CHAIN_OR_RULE matches, and the command before it."""
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
            # Whoever greps for one chain after the other meets the rules between them twice.
            return
        self._seen.add((bare, table))
        self._entries.append(_Entry(words[0], number + 1, bare, table))

    def listed(self, listing: Listing, table: str) -> None:
        """A chain of `iptables -L`."""
        name = table or "?"
        before = self._listed.setdefault((name, listing.chain), listing.line)
        if before != listing.line:
            said = f"chain {listing.chain} is listed again; it is taken as it stands in line {before}"
            self._notes.append((listing.line, said))
            return
        if not listing.whole:
            self._notes.append((listing.line, f"chain {listing.chain} is not listed whole"))
        self._entries.append(_Entry(listing.chain, listing.line, "", table, listing.policy))
        for line in listing.rules:
            self.line(listing.chain, line, table)

    def line(self, chain: str, line: Line, table: str) -> None:
        """One rule of a listing."""
        entry = _Entry(chain, line.number, line.text, table)
        entry.rule = line.rule
        self._entries.append(entry)

    def tables(self, family: IPFamily, flavour: Flavour, origin: str) -> Iterator[tuple[DumpTable, list[Trouble]]]:
        """The tables that the loose rules make, each with what was taken for something."""
        notes = list(self._notes)
        notes += self._settle_tables()
        for name in TABLES:
            own = [entry for entry in self._entries if entry.table == name]
            if not own:
                continue
            table, supposed = _table(name, own, family, flavour)
            notes += ((own[0].line, text) for text in supposed)
            rules = sum(1 for entry in own if not entry.policy)
            whole = all(chain in table.chains for chain in ("OUTPUT",)) and not notes
            held = DumpTable(table=table, flavour=flavour, origin=origin, line=own[0].line, rules=rules, whole=whole)
            yield held, notes
            notes = []

    def _settle_tables(self) -> list[Trouble]:
        """Give every entry a table; what was taken for something, is said."""
        unsaid = [entry for entry in self._entries if not entry.table]
        if not unsaid:
            return []
        for entry in unsaid:
            entry.table = "" if entry.policy else _evident(entry)
        by_chain: dict[str, set[str]] = {}
        for entry in self._entries:
            if entry.table:
                by_chain.setdefault(entry.chain, set()).add(entry.table)
        for _ in range(3):
            for entry in unsaid:
                if entry.table:
                    continue
                found = by_chain.get(entry.chain, set())
                if not found:
                    found = {
                        other.table
                        for other in self._entries
                        if other.table and (f"-j {entry.chain}" in other.text or other.text.startswith(entry.chain))
                    }
                if len(found) == 1:
                    (entry.table,) = found
                    by_chain.setdefault(entry.chain, set()).add(entry.table)
        taken: dict[str, int] = {}
        declared: list[_Entry] = []
        for entry in unsaid:
            if not entry.table and entry.policy:
                declared += [
                    _Entry(entry.chain, entry.line, entry.text, table, entry.policy)
                    for table in sorted(by_chain.get(entry.chain, ()))
                ]
            entry.table = entry.table or ("" if entry.policy else "nat")
            if entry.table and not entry.policy:
                taken.setdefault(entry.table, entry.line)
        self._entries += declared
        return [(line, f"no table is said here; what fits is taken for table {table}") for table, line in taken.items()]


def _evident(entry: _Entry) -> str:
    text = entry.text if entry.rule is None else f"-A {entry.chain} x -j {entry.text}"
    text = text.strip()
    return next((table for table, pattern in _EVIDENCE if pattern.search(text)), "")


def _table(name: str, entries: list[_Entry], family: IPFamily, flavour: Flavour) -> tuple[Table, list[str]]:
    policies: dict[str, str] = {}
    rules: dict[str, list[_Entry]] = {}
    for entry in entries:
        if entry.policy:
            policies[entry.chain] = entry.policy
        else:
            rules.setdefault(entry.chain, []).append(entry)
    for chain in rules:
        policies.setdefault(chain, "ACCEPT" if chain in builtin_chains(name) else "-")
    for chain in policies:
        if chain in builtin_chains(name) and policies[chain] == "-":
            policies[chain] = "ACCEPT"

    supposed = _supposed(policies, entries)
    policies.update(dict.fromkeys(supposed, "-"))

    def make(chain: str) -> Chain:
        if chain in supposed:
            return Chain(name=chain, rules=(Rule((OmittedMatch(supposed[chain]), MarkOr(_WELL_KNOWN[chain]))),))
        own = rules.get(chain, ())
        made = tuple(entry.rule or rule_or_text(entry.text, family) for entry in own)
        return Chain(name=chain, rules=made, hook=hook_of(name, chain, policies[chain]))

    texts = {entry.line: entry.text for entry in entries}
    chains = LazyChains(
        policies,
        make,
        tuple(chain for chain in policies if hook_of(name, chain) is not None),
        lambda chain: [entry.line for entry in rules.get(chain, ())],
        lambda line: texts[line],
    )
    table = Table(family=family, name=name, chains=chains, legacy=flavour is Flavour.LEGACY)
    return table, list(supposed.values())


def _supposed(policies: dict[str, str], entries: list[_Entry]) -> dict[str, str]:
    """Well-known chains that rules call and the text leaves out, and what is said of that."""
    called = {
        name
        for name in _WELL_KNOWN
        if name not in policies
        and any(f"-j {name}" in entry.text or entry.text.split()[:1] == [name] for entry in entries)
    }
    return {
        name: f"chain {name} is not listed; it is taken to set mark bit {_WELL_KNOWN[name]:#x}, as kube-proxy writes it"
        for name in sorted(called)
    }
