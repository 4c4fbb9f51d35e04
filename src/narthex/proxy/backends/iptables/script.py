"""Changes as input for iptables-restore, and our rules in the output of iptables-save.

All programs write to the same tables. Ours are chains by their names and, in built-in chains, rules that only jump to
one of them. Nothing else is written: `--noflush` keeps what the input does not name.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping

import msgspec
from immutables import Map

from narthex.model import IPFamily
from narthex.netfilter.ast import Chain, CtState, Jump, Rule, Table, TouchedPart
from narthex.netfilter.xtables.parse import parse_save_text
from narthex.netfilter.xtables.print import chain_lines, chain_words, rule_text
from narthex.netfilter.xtables.values import builtin_chains
from narthex.proxy.backends.iptables import names
from narthex.proxy.backends.iptables.frame import guard_rule
from narthex.proxy.backends.iptables.rules import Rules, Sysctl, XtablesChanges, XtablesRules, pieces

_TO_FIREWALL = Rule((Jump(names.FIREWALL),))

Place = tuple[str, str]
"""Table and chain."""

COMMIT = "COMMIT\n"
"""The last block of a table."""
_BLOCK_LINES = 4096
"""About 400 kB: the tool works on one block while the next is made."""


class KernelChains(msgspec.Struct, frozen=True, kw_only=True):
    """The chains and jumps of a mode that a kernel holds."""

    family: IPFamily
    own: Mapping[str, Map[str, Rules]]
    """Our chains by table."""
    jumps: Mapping[Place, Rules]
    lines: Mapping[Place, tuple[str, ...]]
    """The same jumps as the tool printed them, without `-A CHAIN`: only this text reliably identifies the rule."""
    kept: frozenset[Place] = frozenset()
    """Our chains that rules of others use, and all that these chains use. They must stay."""
    shared_firewall: bool = False
    """KUBE-FIREWALL belongs to a kubelet, or has rules of others: it is never flushed or removed."""

    def without_own(self) -> KernelChains:
        """Return the same without our chains except KUBE-FIREWALL. Only a replacement depends on more."""
        guard = {name: rules for name, rules in self.own["filter"].items() if name == names.FIREWALL}
        return msgspec.structs.replace(self, own={**dict.fromkeys(self.own, Map()), "filter": Map(guard)})

    def rules(self, guarded: bool, sysctls: tuple[Sysctl, ...] = ()) -> XtablesRules | None:
        """Return our rules as values, with the kernel settings in force; None if there are no rules.

        `guarded`: a shared KUBE-FIREWALL counts as ours if it contains our guard.
        """
        own, jumps = dict(self.own), dict(self.jumps)
        if self.shared_firewall:
            holds = guarded and guard_rule() in own["filter"].get(names.FIREWALL, ())
            own["filter"] = own["filter"].delete(names.FIREWALL)
            if holds:
                own["filter"] = own["filter"].set(names.FIREWALL, (guard_rule(),))
            for place, rules in self.jumps.items():
                theirs = _TO_FIREWALL in rules
                plain = tuple(rule for rule in rules if rule != _TO_FIREWALL)
                jumps[place] = (*plain, _TO_FIREWALL) if theirs and holds else plain
        jumps = {place: rules for place, rules in jumps.items() if rules}
        if not jumps and not any(own.values()):
            return None
        return XtablesRules(self.family, own, Map(jumps), sysctls)


def find(text: str, family: IPFamily, owner: names.ChainOwnership = names.IPTABLES_CHAINS) -> KernelChains:
    """Return the owner's chains in the output of iptables-save, of one table or more. Raises SaveTextError."""
    tables = {table.name: table for table in parse_save_text(text, family).tables}
    printed = _builtin_lines(text, owner)
    own: dict[str, Map[str, Rules]] = {}
    jumps: dict[Place, Rules] = {}
    lines: dict[Place, tuple[str, ...]] = {}
    used: set[Place] = set()
    for name in names.OWN_TABLES:
        table = tables.get(name) or Table(family=family, name=name)
        own[name] = Map({chain.name: chain.rules for chain in table.chains.values() if owner.is_ours(name, chain.name)})
        for chain in table.chains.values():
            if chain.name in own[name]:
                continue
            ours = [_is_our_jump(name, chain, rule, owner) for rule in chain.rules]
            if any(ours):
                place = name, chain.name
                jumps[place] = tuple(rule for rule, mine in zip(chain.rules, ours, strict=True) if mine)
                lines[place] = tuple(line for line, mine in zip(printed[place], ours, strict=True) if mine)
            theirs = (rule for rule, mine in zip(chain.rules, ours, strict=True) if not mine)
            used.update((name, target) for target in (rule.target for rule in theirs) if target in own[name])
    return KernelChains(
        family=family,
        own=own,
        jumps=jumps,
        lines=lines,
        kept=_reachable(used, own),
        shared_firewall=_is_shared(own["filter"].get(names.FIREWALL), tables.get("mangle")),
    )


def _builtin_lines(text: str, owner: names.ChainOwnership) -> dict[Place, list[str]]:
    printed: dict[Place, list[str]] = {}
    table = ""
    for raw in text.split("\n"):
        line = raw.strip()
        if line.startswith("*"):
            table = line[1:]
            continue
        if line.startswith("["):
            line = line.partition("]")[2].lstrip()
        if line.startswith("-A "):
            _, chain, rule = line.split(" ", 2) if line.count(" ") > 1 else (*line.split(" ", 1), "")
            if not owner.is_ours(table, chain):
                printed.setdefault((table, chain), []).append(rule)
    return printed


def _is_our_jump(table: str, chain: Chain, rule: Rule, owner: names.ChainOwnership) -> bool:
    """Return True for a rule of a built-in chain that sends all packets, or all new ones, to one of our chains."""
    if chain.hook is None or not rule.expressions:
        return False
    *matches, last = rule.expressions
    return (
        isinstance(last, Jump)
        and last.chain in owner.entries.get(table, ())
        and all(isinstance(match, CtState) for match in matches)
    )


def _reachable(used: set[Place], own: Mapping[str, Map[str, Rules]]) -> frozenset[Place]:
    reached, waiting = set(used), list(used)
    while waiting:
        table, chain = waiting.pop()
        for target in (rule.target for rule in own[table].get(chain, ())):
            if (table, target) not in reached and target in own[table]:
                reached.add((table, target))
                waiting.append((table, target))
    return frozenset(reached)


def _is_shared(firewall: Rules | None, mangle: Table | None) -> bool:
    if firewall is None:
        return False
    kubelet = mangle is not None and any(chain in mangle.chains for chain in names.KUBELET_CHAINS)
    return kubelet or any(rule != guard_rule() for rule in firewall)


def needs_look(changes: XtablesChanges) -> bool:
    """Return True if the kernel must be read before the changes can be written."""
    touched = (*changes.written.get("filter", ()), *changes.removed.get("filter", ()))
    return changes.replace or changes.jumps is not None or names.FIREWALL in touched


def written_again(rules: XtablesRules, touched: Iterable[TouchedPart]) -> XtablesChanges | None:
    """Return changes that write the touched chains of ours again; None if these cannot be written without a look."""
    written: dict[str, dict[str, Rules]] = {}
    for part in touched:
        chains = rules.chains.get(part.table)
        if chains is None or part.chain not in chains:
            return None
        written.setdefault(part.table, {})[part.chain] = chains[part.chain]
    changes = XtablesChanges(family=rules.family, written=written)
    return None if needs_look(changes) else changes


def restore_blocks(
    changes: XtablesChanges, found: KernelChains | None = None, *, in_pieces: bool = False
) -> Iterator[str]:
    """Yield the text for `iptables-restore --noflush` in blocks of whole lines; nothing if there is nothing to do.

    Each block is made on demand, so that the tool can read meanwhile. Within a table, chains are created or flushed,
    jumps corrected, rules written, and unused chains removed last, when no rule refers to them (row 21.11). `found` is
    required if `needs_look` returns True.

    `in_pieces` writes table nat several times if it has many chains. This helps iptables on nf_tables and harms the legacy
    variant, which copies the whole table each time. One run of the tool for all pieces takes half of the time of many runs
    next to other busy programs.
    """
    assert found is not None or not needs_look(changes)
    early = pieces(changes.written.get("nat", {})) if in_pieces else []
    for piece in early:
        yield from _table_blocks("nat", XtablesChanges(family=changes.family, written={"nat": piece}), None)
    if early:
        changes = _without(changes, {chain for piece in early for chain in piece}, found)
    for table in names.OWN_TABLES:
        yield from _table_blocks(table, changes, found)


def _without(changes: XtablesChanges, early: set[str], found: KernelChains | None) -> XtablesChanges:
    """Return the remaining changes after some chains of table nat were written."""
    removed = changes.removed
    if changes.replace and found is not None:
        # By name: chains of the pieces are neither written again nor removed.
        removed = {
            table: tuple(sorted(chain for chain in found.own[table] if chain not in changes.written.get(table, {})))
            for table in names.OWN_TABLES
        }
    rest = {chain: rules for chain, rules in changes.written["nat"].items() if chain not in early}
    return msgspec.structs.replace(changes, replace=False, written={**changes.written, "nat": rest}, removed=removed)


def _table_blocks(table: str, changes: XtablesChanges, found: KernelChains | None) -> Iterator[str]:
    lines = _table_lines(table, changes, found)
    block = list(itertools.islice(lines, _BLOCK_LINES))
    if not block:
        return
    yield f"*{table}\n"
    while block:
        yield "\n".join((*block, ""))
        block = list(itertools.islice(lines, _BLOCK_LINES))
    yield COMMIT


def _table_lines(table: str, changes: XtablesChanges, found: KernelChains | None) -> Iterator[str]:
    written = changes.written.get(table, {})
    removed: Iterable[str] = changes.removed.get(table, ())
    if found is not None:
        if changes.replace:
            removed = sorted(name for name in found.own[table] if name not in written)
        removed = [name for name in removed if (table, name) not in found.kept]
        if table == "filter" and found.shared_firewall:
            removed = [name for name in removed if name != names.FIREWALL]
    shared = _shared_lines(table, written, found)
    if shared is not None:
        written = {name: rules for name, rules in written.items() if name != names.FIREWALL}
    for name in chain_words((*written, *removed)):
        yield f":{name} - [0:0]"
    if changes.jumps is not None and found is not None:
        yield from _jump_lines(table, changes, found)
    yield from shared or ()
    for name, rules in written.items():
        yield from chain_lines(name, rules, changes.family)
    for name in removed:
        yield f"-X {name}"


def _shared_lines(table: str, written: Mapping[str, Rules], found: KernelChains | None) -> list[str] | None:
    """Return the guard to append to a shared KUBE-FIREWALL; None if the chain is not shared."""
    if table != "filter" or found is None or not found.shared_firewall:
        return None
    held = found.own[table].get(names.FIREWALL, ())
    missing = [rule for rule in written.get(names.FIREWALL, ()) if rule not in held]
    return chain_lines(names.FIREWALL, missing, found.family)


def _jump_lines(table: str, changes: XtablesChanges, found: KernelChains) -> Iterator[str]:
    """Yield lines that put our jumps first in their built-in chains, in order. Correct ones stay in place."""
    assert changes.jumps is not None
    for chain in builtin_chains(table):
        place = table, chain
        want, have = changes.jumps.get(place, ()), found.jumps.get(place, ())
        printed = found.lines.get(place, ())
        if found.shared_firewall:
            theirs = _TO_FIREWALL in have
            want = tuple(rule for rule in want if rule != _TO_FIREWALL or not theirs)
            mine = [(rule, line) for rule, line in zip(have, printed, strict=True) if rule != _TO_FIREWALL]
            have, printed = tuple(rule for rule, _ in mine), tuple(line for _, line in mine)
        if want != have:
            yield from (f"-D {chain} {line}" for line in printed)
            yield from (f"-I {chain} {number}{rule_text(rule, found.family)}" for number, rule in enumerate(want, 1))
