"""Completes a copied text with what kube-proxy always writes.

A text that a person copied may be a fragment: the output of `grep`, a single chain, a table that ends in the middle. Where such
a text lacks a part of kube-proxy's structure, the walk takes it as kube-proxy writes it, and says so (`Assumed`). Where the
text contradicts the structure, a line is missing or the node has that fault, and the walk decides nothing (`RuleGap`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from narthex.netfilter import ast
from narthex.netfilter.lazy import LazyChains, base_chains
from narthex.netfilter.nft.print import priority_number
from narthex.netfilter.walk.losses import LossSigns, maps_of
from narthex.netfilter.walk.structure import (
    KUBE_PROXY_TABLE,
    NEW,
    NFT_CHAINS,
    NFT_JUMPS,
    NFT_NAT,
    NFT_PRIORITIES,
    XTABLES_CHAINS,
    XTABLES_JUMPS,
    StandardJump,
)
from narthex.netfilter.xtables.values import hook_of


class CompletedTable(NamedTuple):
    """A table with the parts of kube-proxy's structure that its text lacks."""

    table: ast.Table
    shifts: Mapping[str, int]
    """The number of rules that were put before those of the text, by chain."""
    lost: Callable[[], str] = str
    """Returns the sign that lines of the text are missing, or ""."""
    signs: LossSigns | None = None
    """The structure of the text; None for a table that is not of kube-proxy."""


def complete(table: ast.Table) -> CompletedTable:
    """Return a table of a copied text, completed. Chains are built when they are accessed, as before."""
    if table.name in XTABLES_JUMPS and table.family is not None:
        return _Completion(table, XTABLES_JUMPS[table.name], XTABLES_CHAINS).result()
    if table.name == KUBE_PROXY_TABLE:
        return _Completion(table, NFT_JUMPS, NFT_CHAINS).result()
    return CompletedTable(table, {})


class _Completion:
    """Completes one table."""

    def __init__(
        self,
        table: ast.Table,
        jumps: tuple[StandardJump, ...],
        contents: Mapping[str, tuple[tuple[ast.Expression, ...], ...]],
    ) -> None:
        self._table = table
        self._jumps = jumps
        self._contents = contents
        self._nft = table.name == KUBE_PROXY_TABLE
        self._words = f"table {table.name}"
        self._signs = LossSigns(table)
        self._bases = [chain for chain in base_chains(table.chains) if chain.hook is not None]
        self._made: dict[str, ast.Chain] = {}
        self._before: dict[str, list[ast.Rule]] = {}
        """Rules to put in front of the chains of the text."""
        self._shifts: dict[str, int] = {}
        self._lacks_jump = ""
        """A jump that kube-proxy always writes and that the text lacks."""

    def result(self) -> CompletedTable:
        """Return the completed table."""
        if not (self._nft or any(name.startswith("KUBE-") for name in self._table.chains)):
            return CompletedTable(self._table, {})
        for name, rules in self._contents.items():
            if name not in self._table.chains and self._has_maps(rules):
                text = f"chain {name} of {self._words} is not in the input; it is assumed to be as kube-proxy writes it"
                self._made[name] = ast.Chain(name=name, rules=self._standard(text, rules))
        if (
            self._table.name == "nat"
            and "KUBE-NODEPORTS" in self._table.chains
            and "KUBE-SERVICES" not in self._table.chains
        ):
            text = f"chain KUBE-SERVICES of {self._words} is not in the input; it is assumed to have no rule but the last, which calls KUBE-NODEPORTS"
            last = ast.Rule((ast.IsLocal(ast.Field.DADDR), ast.Jump("KUBE-NODEPORTS")))
            self._made["KUBE-SERVICES"] = ast.Chain(name="KUBE-SERVICES", rules=(_assumed(text), last))
        for jump in self._jumps:
            self._complete_jump(jump)
        names = (*self._table.chains, *(name for name in self._made if name not in self._table.chains))
        bases = (*(chain.name for chain in self._bases), *(each.name for each in self._made.values() if each.hook))
        self._shifts |= {name: len(chain.rules) for name, chain in self._made.items()}
        chains = LazyChains(names, self._build, bases, lambda _: [], lambda _: "")
        return CompletedTable(
            msgspec.structs.replace(self._table, chains=chains),
            self._shifts,
            lambda: self._lacks_jump or self._signs.lost,
            self._signs,
        )

    def _standard(self, text: str, rules: tuple[tuple[ast.Expression, ...], ...]) -> tuple[ast.Rule, ...]:
        """Return what kube-proxy writes into a chain. Whatever passes it assumes that, also if no rule matches."""
        sets = self._table.sets
        kept = (rule for rule in rules if all(each.name in sets for each in rule if isinstance(each, ast.InSet)))
        return (_assumed(text), *map(ast.Rule, kept))

    def _has_maps(self, rules: tuple[tuple[ast.Expression, ...], ...]) -> bool:
        return maps_of(rules[:1]) <= set(self._table.sets)

    def _known(self, name: str) -> bool:
        return name in self._table.chains or name in self._made

    def _complete_jump(self, jump: StandardJump) -> None:
        if not self._known(jump.target) or (jump.unless and self._known(jump.unless)):
            return
        bases = [chain for chain in self._bases if self._is_base(chain, jump)]
        if any(jump.target in chain.targets for chain in bases):
            return
        matches = (NEW,) if jump.new else ()
        if not bases or self._table.partial:
            text = (
                f"nothing in the input calls {jump.target} of {self._words} in {jump.hook.lower()}; the jump is assumed to be "
                "there, as kube-proxy writes it"
            )
            self._add(jump, bases, _assumed(text, *matches, ast.Jump(jump.target)))
        elif (
            self._table.name == "filter"
            and (jump.hook, jump.target) == ("FORWARD", "KUBE-SERVICES")
            and any(jump.target in each.targets for each in self._bases)
        ):
            for rule in self._refusals(jump) if jump.target in self._table.chains else ():
                self._add(jump, bases, rule)
        elif self._table.name == "nat" or self._nft or self._is_needed(jump):
            text = (
                f"{self._words} does not call {jump.target} in {jump.hook.lower()}, and kube-proxy always does: a line is "
                "missing, or the node has this fault"
            )
            self._lacks_jump = self._lacks_jump or text
            self._add(jump, bases, ast.Rule((ast.RuleGap(text), *matches, ast.Jump(jump.target))))

    def _is_needed(self, jump: StandardJump) -> bool:
        """Return True for a jump of table filter that a base chain lacks: others have it, or nothing calls its target."""
        if any(jump.target in each.targets for each in self._bases):
            return not jump.since or "KUBE-PROXY-FIREWALL" in self._table.chains
        return not any(jump.target in self._table.chains[name].targets for name in self._table.chains)

    def _refusals(self, jump: StandardJump) -> Iterator[ast.Rule]:
        """Yield what KUBE-SERVICES refuses, for a FORWARD that does not call it as kube-proxy since 1.14 does.

        Only for a packet that it refuses it matters whether a line is missing.
        """
        text = f"{self._words} does not call {jump.target} in {jump.hook.lower()}, and kube-proxy does: a line may be missing"
        for rule in self._table.chains[jump.target].rules:
            if rule.expressions and isinstance(rule.expressions[-1], (ast.RejectPacket, ast.DropPacket)):
                *matches, verdict = rule.expressions
                yield ast.Rule((NEW, *matches, ast.RuleGap(text), verdict))

    def _is_base(self, chain: ast.Chain, jump: StandardJump) -> bool:
        assert chain.hook is not None
        if not self._nft:
            return chain.name == jump.hook
        return chain.hook.hook == jump.hook and (chain.hook.type == "nat") == (jump.target in NFT_NAT)

    def _add(self, jump: StandardJump, bases: list[ast.Chain], rule: ast.Rule) -> None:
        """Put a rule in front of the base chain, which is made if the text has none."""
        if bases:
            self._before.setdefault(bases[0].name, []).append(rule)
            self._shifts[bases[0].name] = len(self._before[bases[0].name])
            return
        name, hook = jump.hook, hook_of(self._table.name, jump.hook)
        if self._nft:
            nat = jump.target in NFT_NAT
            name = f"{'nat' if nat else 'filter'}-{jump.hook}" + (
                "-pre-dnat" if jump.target == "firewall-check" else ""
            )
            priority = priority_number(NFT_PRIORITIES.get(jump.target, "filter").split())
            hook = ast.Hook(type="nat" if nat else "filter", hook=jump.hook, priority=priority)
            if name in self._table.chains:
                # The text's chain of this name has another hook.
                name += "-2"
        held = self._made.get(name)
        rules = (*held.rules, rule) if held is not None else (rule,)
        self._made[name] = ast.Chain(name=name, rules=rules, hook=hook)

    def _build(self, name: str) -> ast.Chain:
        made = self._made.get(name)
        if made is not None:
            return made
        chain = self._table.chains[name]
        rules = self._contents.get(name)
        if rules is not None and not chain.rules:
            text = (
                f"chain {name} of {self._words} has no rule in the input; it is assumed to be as kube-proxy writes it"
            )
            return msgspec.structs.replace(chain, rules=self._standard(text, rules))
        before = [
            *self._before.get(name, ()),
            *self._contradictions(chain),
            *self._signs.lost_dispatch(chain),
            *self._signs.doubtful(chain),
        ]
        after = [*self._node_ports(chain)]
        if not before and not after:
            return chain
        self._shifts[name] = len(before)
        return msgspec.structs.replace(chain, rules=(*before, *chain.rules, *after))

    def _contradictions(self, chain: ast.Chain) -> Iterator[ast.Rule]:
        """Yield a gap if a chain lacks rules that kube-proxy writes into every such chain."""
        what = self._signs.flaw(chain)
        if what:
            yield ast.Rule(
                (ast.RuleGap(f"chain {chain.name} of {self._words} {what}: lines of the input are missing"),)
            )

    def _node_ports(self, chain: ast.Chain) -> Iterator[ast.Rule]:
        """Yield the last rule of KUBE-SERVICES, which calls KUBE-NODEPORTS, if the text lacks it.

        kube-proxy leaves it out on a node without an address for node ports.
        """
        if chain.name != "KUBE-SERVICES" or self._table.name != "nat" or "KUBE-NODEPORTS" not in self._table.chains:
            return
        if "KUBE-NODEPORTS" in chain.targets:
            return
        text = f"nothing in the input calls KUBE-NODEPORTS of {self._words}"
        local, jump = ast.IsLocal(ast.Field.DADDR), ast.Jump("KUBE-NODEPORTS")
        if not self._bases or self._table.partial:
            yield _assumed(f"{text}; the jump is assumed to be there, as kube-proxy writes it", local, jump)
        else:
            text += ": a line is missing, or no address of the node is one for node ports (nodePortAddresses)"
            yield ast.Rule((ast.RuleGap(text), local, jump))


def _assumed(text: str, *expressions: ast.Expression) -> ast.Rule:
    return ast.Rule((ast.Assumed(text), *expressions))
