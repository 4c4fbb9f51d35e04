"""Masquerading and forwarding rules for Pod traffic as typed rules: flannel's chains in iptables, or a table in nftables.

Traffic of Pods to external addresses gets the node's address, as does traffic of a node to Pods elsewhere, whose replies
would otherwise not return. Between Pods, and from outside to this node's Pods, addresses stay unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from narthex.model import IPFamily
from narthex.netfilter.ast import (
    Accept,
    Chain,
    Compare,
    Expression,
    Field,
    Hook,
    Jump,
    MarkIs,
    MarkXor,
    Masquerade,
    Return,
    Rule,
    Ruleset,
    Snat,
    Table,
)
from narthex.netfilter.xtables.print import chain_lines, rule_text

POSTROUTING, FORWARD = "FLANNEL-POSTRTG", "FLANNEL-FWD"
MARK = 0x4000
"""Mark of packets that kube-proxy masquerades itself."""
TABLES = {IPFamily.IPV4: "flannel-ipv4", IPFamily.IPV6: "flannel-ipv6"}
"""flannel's own names: its leftover tables are replaced, and nothing is masqueraded twice."""
PEERS = "narthex-overlay"
"""Name of the table that rewrites what is masqueraded on its way to Pods of other nodes."""
_BEFORE_OTHERS = 99
"""Priority of a chain in front of those that masquerade; the first rule that rewrites a source is the only one."""
_MULTICAST = {IPFamily.IPV4: "224.0.0.0/4", IPFamily.IPV6: "ff00::/8"}
_MASQUERADED, _FORWARDED = "flanneld masq", "flanneld forward"
_BASES = {POSTROUTING: ("nat", "POSTROUTING", _MASQUERADED), FORWARD: ("filter", "FORWARD", _FORWARDED)}


def _masquerading(cluster: str, own: str, family: IPFamily) -> tuple[Rule, ...]:
    """Return the rules; `cluster` is the Pod network of the cluster, `own` that of this node."""
    from_cluster, from_elsewhere = (Compare(Field.SADDR, (cluster,), negate) for negate in (False, True))
    to_cluster, to_own = (Compare(Field.DADDR, (cidr,)) for cidr in (cluster, own))
    to_unicast = Compare(Field.DADDR, (_MULTICAST[family],), negate=True)
    rules: tuple[tuple[Expression, ...], ...] = (
        (MarkIs(MARK, MARK), Return()),
        (Compare(Field.SADDR, (own,)), to_cluster, Return()),
        (from_cluster, to_own, Return()),
        (from_elsewhere, to_own, Return()),
        (from_cluster, to_unicast, Masquerade()),
        (from_elsewhere, to_cluster, Masquerade()),
    )
    return tuple(Rule(expressions, _MASQUERADED) for expressions in rules)


def _to_peers(
    cluster: str, own: str, family: IPFamily, sources: Mapping[str, str], *, masquerade: bool
) -> Table | None:
    """Return the table that gives to what is masqueraded the address of the outgoing link, and remembers no link.

    The kernel ends a masqueraded connection when its packets leave by another link, as they do after a change of the backend
    (net/netfilter/nf_nat_core.c, `nf_nat_oif_changed`). It does not end one whose source was rewritten to a certain address.
    `sources` are the addresses that a masquerading rule would choose, by link. Other links are left to such rules.
    """
    to_peers = (Compare(Field.DADDR, (cluster,)), Compare(Field.DADDR, (own,), negate=True))
    rules = []
    for link, address in sources.items():
        leaves, rewrite = Compare(Field.OIFNAME, (link,)), Snat(address, address, fully_random=True)
        rules.append(Rule((leaves, *to_peers, MarkIs(MARK, MARK), MarkXor(MARK), rewrite)))
        if masquerade:
            rules.append(Rule((leaves, *to_peers, Compare(Field.SADDR, (cluster,), negate=True), rewrite)))
    hook = Hook(type="nat", hook="postrouting", priority=_BEFORE_OTHERS)
    chain = Chain(name="to-peers", rules=tuple(rules), hook=hook)
    return Table(family=family, name=PEERS, chains={"to-peers": chain}) if rules else None


def _forwarding(cluster: str) -> tuple[Rule, ...]:
    sides = (Field.SADDR, Field.DADDR)
    return tuple(Rule((Compare(side, (cluster,)), Accept()), _FORWARDED) for side in sides)


class MasqueradeRules:
    """The desired rules of one family; none without a subnet."""

    def __init__(
        self,
        family: IPFamily,
        cluster: str,
        own: str,
        *,
        masquerade: bool,
        forward: bool,
        sources: Mapping[str, str] | None = None,
    ) -> None:
        """Derive the rules. `sources` are this node's addresses by the links to its peers."""
        self.family = family
        self.to_peers = _to_peers(cluster, own, family, sources or {}, masquerade=masquerade) if own else None
        self.masquerading = _masquerading(cluster, own, family) if own and masquerade else ()
        self.forwarding = _forwarding(cluster) if own and forward else ()

    def chains(self) -> Mapping[str, tuple[Rule, ...]]:
        """Return the rules of our two iptables chains; a chain without rules must not exist."""
        return {POSTROUTING: self.masquerading, FORWARD: self.forwarding}

    def table(self) -> Table | None:
        """Return the nftables table; None if it must not exist."""
        chains = {}
        if self.masquerading:
            hook = Hook(type="nat", hook="postrouting", priority=100)
            chains["postrtg"] = Chain(name="postrtg", rules=self.masquerading, hook=hook)
        if self.forwarding:
            hook = Hook(type="filter", hook="forward", priority=0)
            chains["forward"] = Chain(name="forward", rules=self.forwarding, hook=hook)
        return Table(family=self.family, name=TABLES[self.family], chains=chains) if chains else None


def iptables_changes(rules: MasqueradeRules, have: Ruleset) -> str:
    """Return the input for `iptables-restore --noflush` that establishes the rules; empty if nothing differs.

    `have` has the current tables nat and filter.
    """
    tables = {table.name: table for table in have.tables}
    scripts = []
    for chain, chain_rules in rules.chains().items():
        table, base, comment = _BASES[chain]
        there = tables[table].chains if table in tables else {}
        lines = list(_chain_changes(chain, chain_rules, base, Rule((Jump(chain),), comment), there, rules.family))
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
        # Declaring a chain flushes it.
        yield f":{chain} - [0:0]"
        yield from chain_lines(chain, rules, family)
    if jumps != [jump]:
        yield from (f"-D {base}{rule_text(one, family)}" for one in jumps)
        yield f"-A {base}{rule_text(jump, family)}"
