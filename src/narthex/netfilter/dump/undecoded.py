"""Rules of kube-proxy that the printing tool could not decode.

An older iptables or nft prints rules of a newer one without the parts that it does not know: an endpoint chain without DNAT,
a `RETURN` for all packets in KUBE-POSTROUTING, a rule for a Service without its port. kube-proxy, in every version since
1.12, never writes such a rule. It gets an `Undecoded`, so that no conclusion is drawn from it. (Rules that are missing as a
whole are the business of `netfilter.walk.assumed_rules`.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec

from narthex.netfilter import ast
from narthex.netfilter.lazy import LazyMapping
from narthex.netfilter.xtables.values import TABLES, builtin_chains

Rules = Sequence[ast.Rule]

_NOT_DECODED = (
    f"the tool that printed the rules {ast.NOT_DECODED} {{}} of this rule of chain {{}}, which kube-proxy always writes"
)
_INTERFACE = "iptables -L without -v does not show the interface that this rule of chain {} matches"
_SERVICE = re.compile(r"KUBE-(?:SVC|SVL|EXT|XLB|FW)-")
_STATEMENTS = (
    ast.Jump,
    ast.Goto,
    ast.Return,
    ast.Accept,
    ast.DropPacket,
    ast.RejectPacket,
    ast.MarkOr,
    ast.MarkXor,
    ast.SetMark,
    ast.CopyMark,
    ast.Masquerade,
    ast.Snat,
    ast.Dnat,
    ast.DnatRange,
    ast.DnatMap,
    ast.Redirect,
    ast.RedirectRange,
    ast.VerdictMap,
    ast.InlineVerdictMap,
    ast.RandomGoto,
    ast.RandomMap,
    ast.UpdateSet,
    ast.NoTrack,
    ast.IgnoredStatement,
)
_TARGETS = frozenset(_STATEMENTS)
_OPAQUE = (ast.Unknown, ast.Undecoded, ast.RuleGap)


def refined(table: ast.Table, *, by_nft: bool = False) -> ast.Table:
    """Return a table of iptables whose rules are compared with what kube-proxy writes when their chain is accessed.

    Args:
        table: A table of a dump.
        by_nft: nft printed the table. nft prints nothing for some targets of iptables.
    """
    if table.name not in TABLES or (by_nft and set(builtin_chains(table.name)).isdisjoint(table.chains)):
        return table

    def refine(chain: ast.Chain) -> ast.Chain:
        """Return the chain with its undecoded rules replaced, or the same object if nothing changed."""
        rules = _of_chain(table.name, chain, by_nft=by_nft)
        return chain if rules == chain.rules else msgspec.structs.replace(chain, rules=tuple(rules))

    if isinstance(table.chains, LazyMapping):
        table.chains.refine(refine)
        return table
    chains = {name: refine(chain) for name, chain in table.chains.items()}
    return msgspec.structs.replace(table, chains=chains)


def _of_chain(table: str, chain: ast.Chain, *, by_nft: bool) -> Rules:
    rules: Rules = chain.rules
    ours = chain.name.startswith("KUBE-")
    if by_nft or ours:
        rules = _with_targets(chain.name, rules)
    if not ours:
        return rules
    kind = _kind(chain.name)
    check = _CHECKS.get((table, kind)) or _CHECKS.get(("", kind))
    return check(chain.name, rules) if check is not None else rules


def _kind(chain: str) -> str:
    name = chain.removeprefix("KUBE-")
    first = name.partition("-")[0]
    return first if first in ("SEP", "SVC", "SVL", "EXT", "XLB", "FW") and first != name else name


# ---- rules ---------------------------------------------------------------------------------------------------------


def _has(rule: ast.Rule, *kinds: type) -> bool:
    # Loops, here and below, take half of the time of generators, and a large dump has 200,000 rules.
    for each in rule.expressions:  # noqa: SIM110
        if isinstance(each, kinds):
            return True
    return False


def _compares(rule: ast.Rule, *fields: ast.Field) -> bool:
    for each in rule.expressions:  # noqa: SIM110
        if isinstance(each, (ast.Compare, ast.PortRange)) and each.field in fields:
            return True
    return False


def _opaque(rule: ast.Rule) -> bool:
    """Return True if something in the rule is unknown anyway."""
    return _has(rule, *_OPAQUE)


def _with_targets(chain: str, rules: Rules) -> Rules:
    """Return the rules, with an `Undecoded` in each that has no target; the same object if all have one."""
    for rule in rules:
        if not _has_target(rule):
            return tuple(each if _has_target(each) else _with_undecoded_target(each, chain) for each in rules)
    return rules


def _has_target(rule: ast.Rule) -> bool:
    return bool(rule.expressions) and type(rule.expressions[-1]) in _TARGETS


def _with_undecoded_target(rule: ast.Rule, chain: str) -> ast.Rule:
    remark = chain.startswith("KUBE-FW-") and not set(map(type, rule.expressions)) - {ast.Counter, ast.OmittedMatch}
    if remark or _has(rule, *_STATEMENTS, *_OPAQUE):
        # A rule of KUBE-FW has only a comment, which says what the filter table does.
        return rule
    what = ast.Undecoded(_NOT_DECODED.format("the target", chain).removesuffix(", which kube-proxy always writes"))
    return msgspec.structs.replace(rule, expressions=(*rule.expressions, what))


def _undecoded(rule: ast.Rule, text: str) -> ast.Rule:
    """Return the rule with an `Undecoded` before its target."""
    *matches, target = rule.expressions
    return msgspec.structs.replace(rule, expressions=(*matches, ast.Undecoded(text), target))


def _without_match(rule: ast.Rule, what: str, chain: str) -> ast.Rule:
    return _undecoded(rule, _NOT_DECODED.format(what, chain))


def _each(rules: Rules, wrong: Callable[[ast.Rule], str], chain: str) -> Rules:
    """Return the rules, with an `Undecoded` in each for which `wrong` names a missing match."""
    return tuple(
        _without_match(rule, what, chain) if not _opaque(rule) and (what := wrong(rule)) else rule for rule in rules
    )


# ---- chains of iptables ----------------------------------------------------------------------------------------------


def _spread(chain: str, rules: Rules) -> Rules:
    """Find rules for endpoints without a probability, except for the last one."""
    found = list(rules)
    ways: list[int] = []
    for number, rule in enumerate(rules):
        target = rule.target
        if target == "KUBE-MARK-MASQ":
            found[number] = _cluster_ip_mark(chain, rule)
        elif target.startswith("KUBE-SEP-") and not _has(rule, ast.RecentCheck, *_OPAQUE):
            ways.append(number)
    for number in ways[:-1]:
        if not _has(rules[number], ast.RandomMatch, ast.EveryNth):
            found[number] = _without_match(rules[number], "the probability", chain)
    return tuple(found)


def _cluster_ip_mark(chain: str, rule: ast.Rule) -> ast.Rule:
    if _opaque(rule):
        return rule
    if _compares(rule, ast.Field.DADDR) and not _compares(rule, ast.Field.DPORT):
        return _without_match(rule, "the port", chain)
    return _interface_shown(chain, rule)


def _interface_shown(chain: str, rule: ast.Rule) -> ast.Rule:
    """Return the rule with an `Undecoded` if it must match senders and shows no match of them in a listing."""
    senders = _compares(rule, ast.Field.SADDR, ast.Field.IIFNAME) or _has(rule, ast.IsLocal)
    if senders or not _has(rule, ast.OmittedMatch):
        return rule
    return _undecoded(rule, _INTERFACE.format(chain))


_SENDERS = ("pod traffic", "pods trying", "LOCAL traffic", "from cluster")
"""Words in the comments of rules that match some senders only."""


def _external(chain: str, rules: Rules) -> Rules:
    found: list[ast.Rule] = []
    for rule in rules:
        made = rule
        if any(words in rule.comment for words in _SENDERS) and not _opaque(rule):
            made = _interface_shown(chain, rule)
            if made is rule and not _compares(rule, ast.Field.SADDR, ast.Field.IIFNAME) and not _has(rule, ast.IsLocal):
                made = _without_match(rule, "the match of senders", chain)
        found.append(made)
    return tuple(found)


def _services(chain: str, rules: Rules) -> Rules:
    def wrong(rule: ast.Rule) -> str:
        """Return which match a rule of the services chain lacks, or an empty text."""
        service = _SERVICE.match(rule.target) is not None
        final = _has(rule, ast.RejectPacket, ast.DropPacket)
        marks = rule.target == "KUBE-MARK-MASQ" and _compares(rule, ast.Field.DADDR)
        if not (service or final or marks) or _has(rule, ast.MatchSet, ast.AnyOf):
            return ""
        if not _compares(rule, ast.Field.DADDR) and not _has(rule, ast.IsLocal):
            return "the address"
        return "" if _compares(rule, ast.Field.DPORT) else "the port"

    return _each(rules, wrong, chain)


def _node_ports(chain: str, rules: Rules) -> Rules:
    def wrong(rule: ast.Rule) -> str:
        """Return "the port" if a rule for a node port compares none, else an empty text."""
        ports = _SERVICE.match(rule.target) or rule.target == "KUBE-MARK-MASQ" or _has(rule, ast.Accept)
        return "the port" if ports and not _compares(rule, ast.Field.DPORT) and not _has(rule, ast.AnyOf) else ""

    return _each(rules, wrong, chain)


_MARKS = (ast.MarkIs, ast.MatchSet, ast.CtStatus)


def _postrouting(chain: str, rules: Rules) -> Rules:
    returns = any(_has(rule, ast.Return) for rule in rules)

    def wrong(rule: ast.Rule) -> str:
        """Return what a deciding rule of the postrouting chain lacks, or an empty text."""
        decides = _has(rule, ast.Return) or (not returns and _has(rule, ast.Masquerade))
        plain = not _has(rule, *_MARKS) and not _compares(rule, *ast.Field)
        return "the match of the mark" if decides and plain else ""

    return _each(rules, wrong, chain)


def _forward(chain: str, rules: Rules) -> Rules:
    def wrong(rule: ast.Rule) -> str:
        """Return "a match" if a final rule of the forward chain matches every packet, else an empty text."""
        final = _has(rule, ast.Accept, ast.DropPacket)
        plain = not _has(rule, *_MARKS, ast.CtState) and not _compares(rule, *ast.Field)
        return "a match" if final and plain else ""

    return _each(rules, wrong, chain)


def _firewall(chain: str, rules: Rules) -> Rules:
    def wrong(rule: ast.Rule) -> str:
        """Return what a dropping rule of the firewall chain lacks, or an empty text."""
        if not _has(rule, ast.DropPacket):
            return ""
        if _has(rule, ast.CtStatus) and not _has(rule, ast.CtState):
            # nft prints `! --ctstate RELATED,ESTABLISHED,DNAT` as `ct status dnat`.
            return "the connection states"
        return "" if _has(rule, ast.MarkIs, ast.CtState) or _compares(rule, *ast.Field) else "a match"

    return _each(rules, wrong, chain)


_CHECKS: dict[tuple[str, str], Callable[[str, Rules], Rules]] = {
    ("nat", "SVC"): _spread,
    ("nat", "SVL"): _spread,
    ("nat", "EXT"): _external,
    ("nat", "XLB"): _external,
    ("nat", "SERVICES"): _services,
    ("filter", "SERVICES"): _services,
    ("filter", "EXTERNAL-SERVICES"): _services,
    ("filter", "PROXY-FIREWALL"): _services,
    ("", "NODEPORTS"): _node_ports,
    ("nat", "POSTROUTING"): _postrouting,
    ("filter", "FORWARD"): _forward,
    ("filter", "FIREWALL"): _firewall,
}
