"""Masquerading and forwarding of pods' packets, as typed rules: flannel's chains in iptables, a table of ours in nftables.

A pod that speaks to the outside gets the node's address, and so does a node that speaks to a pod elsewhere, whose answer
would not find back otherwise. Between pods, and from outside to this node's own pods, addresses stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from narthex.model.net import IPFamily
from narthex.netfilter.ast import (
    Accept,
    Chain,
    Compare,
    Expression,
    Field,
    Hook,
    Jump,
    MarkIs,
    Masquerade,
    Return,
    Rule,
    Ruleset,
    Table,
)
from narthex.netfilter.xtables.print import chain_lines, rule_text

POSTROUTING, FORWARD = "FLANNEL-POSTRTG", "FLANNEL-FWD"
MARK = 0x4000
"""What kube-proxy marks and masquerades itself."""
TABLES = {IPFamily.IPV4: "flannel-ipv4", IPFamily.IPV6: "flannel-ipv6"}
"""flannel's own names: what it left there is replaced, and nothing is masqueraded twice."""
_MULTICAST = {IPFamily.IPV4: "224.0.0.0/4", IPFamily.IPV6: "ff00::/8"}
_MASQUERADED, _FORWARDED = "flanneld masq", "flanneld forward"
_BASES = {POSTROUTING: ("nat", "POSTROUTING", _MASQUERADED), FORWARD: ("filter", "FORWARD", _FORWARDED)}


def _masquerading(cluster: str, own: str, family: IPFamily) -> tuple[Rule, ...]:
    """`cluster`: where all pods are; `own`: where this node's are."""

    def rule(*expressions: Expression) -> Rule:
        return Rule(expressions, _MASQUERADED)

    def source(cidr: str, negate: bool = False) -> Compare:
        return Compare(Field.SADDR, (cidr,), negate)

    def destination(cidr: str, negate: bool = False) -> Compare:
        return Compare(Field.DADDR, (cidr,), negate)

    return (
        rule(MarkIs(MARK, MARK), Return()),
        rule(source(own), destination(cluster), Return()),
        rule(source(cluster), destination(own), Return()),
        rule(source(cluster, negate=True), destination(own), Return()),
        rule(source(cluster), destination(_MULTICAST[family], negate=True), Masquerade()),
        rule(source(cluster, negate=True), destination(cluster), Masquerade()),
    )


def _forwarding(cluster: str) -> tuple[Rule, ...]:
    sides = (Field.SADDR, Field.DADDR)
    return tuple(Rule((Compare(side, (cluster,)), Accept()), _FORWARDED) for side in sides)


class MasqueradeRules:
    """Which rules are wanted in one family. Without a subnet none are."""

    def __init__(self, family: IPFamily, cluster: str, own: str, *, masquerade: bool, forward: bool) -> None:
        self.family = family
        self.masquerading = _masquerading(cluster, own, family) if own and masquerade else ()
        self.forwarding = _forwarding(cluster) if own and forward else ()

    def chains(self) -> Mapping[str, tuple[Rule, ...]]:
        """iptables: the rules of our two chains; none: the chain is not wanted."""
        return {POSTROUTING: self.masquerading, FORWARD: self.forwarding}

    def table(self) -> Table | None:
        """nftables: the whole table; None: it is not wanted."""
        chains = {}
        if self.masquerading:
            hook = Hook(type="nat", hook="postrouting", priority=100)
            chains["postrtg"] = Chain(name="postrtg", rules=self.masquerading, hook=hook)
        if self.forwarding:
            hook = Hook(type="filter", hook="forward", priority=0)
            chains["forward"] = Chain(name="forward", rules=self.forwarding, hook=hook)
        return Table(family=self.family, name=TABLES[self.family], chains=chains) if chains else None


def iptables_changes(wish: MasqueradeRules, have: Ruleset) -> str:
    """Input for `iptables-restore --noflush` that makes what is there into what is wanted; empty when it is. `have`: the
    tables nat and filter as they are listed."""
    tables = {table.name: table for table in have.tables}
    scripts = []
    for chain, rules in wish.chains().items():
        table, base, comment = _BASES[chain]
        there = tables[table].chains if table in tables else {}
        lines = list(_chain_changes(chain, rules, base, Rule((Jump(chain),), comment), there, wish.family))
        if lines:
            scripts += [f"*{table}", *lines, "COMMIT"]
    return "".join(line + "\n" for line in scripts)


def _chain_changes(
    chain: str, rules: tuple[Rule, ...], base: str, jump: Rule, there: Mapping[str, Chain], family: IPFamily
) -> Iterable[str]:
    jumps = [rule for rule in (there[base].rules if base in there else ()) if Jump(chain) in rule.expressions]
    if not rules:
        if chain in there or jumps:
            yield f":{chain} - [0:0]"
            yield from (f"-D {base}{rule_text(one, family)}" for one in jumps)
            yield f"-X {chain}"
        return
    if chain not in there or there[chain].rules != rules:
        # To declare a chain is to empty it.
        yield f":{chain} - [0:0]"
        yield from chain_lines(chain, rules, family)
    if jumps != [jump]:
        yield from (f"-D {base}{rule_text(one, family)}" for one in jumps)
        yield f"-A {base}{rule_text(jump, family)}"
