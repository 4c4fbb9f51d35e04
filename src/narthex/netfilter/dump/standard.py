"""What kube-proxy writes in each of its chains, in every version since 1.12, and where a dump shows less.

kube-proxy never writes an endpoint chain without DNAT, a rule for a Service without its port, or a spread whose
probabilities do not add up. A dump with such a chain was printed by a tool that could not decode the rules of a newer one,
or lines are missing. The rule gets an `Undecoded`, or the chain a `RuleGap`, so that no conclusion is drawn from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from narthex.netfilter import ast
from narthex.netfilter.lazy import LazyMapping
from narthex.netfilter.xtables.values import TABLES, builtin_chains

Rules = list[ast.Rule]
Node = TypeVar("Node")

_NOT_DECODED = (
    "the tool that printed the rules could not decode {} of this rule of chain {}, which kube-proxy always writes"
)
_LINES_MISSING = "rules of chain {} are missing: kube-proxy always writes {}"
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
_OPAQUE = (ast.Unknown, ast.Undecoded, ast.RuleGap)
_PROBABILITY_ERROR = 5.1e-6
"""kube-proxy before 1.19 rounded probabilities to five decimals."""


def refined(table: ast.Table, *, by_nft: bool = False) -> ast.Table:
    """Return a table whose chains are compared with what kube-proxy writes when they are accessed.

    Args:
        table: A table of a dump.
        by_nft: nft printed the table. nft prints nothing for some targets of iptables.
    """
    xtables = table.name in TABLES and not (by_nft and set(builtin_chains(table.name)).isdisjoint(table.chains))
    if not xtables and not (by_nft and table.name == "kube-proxy"):
        return table

    def refine(chain: ast.Chain) -> ast.Chain:
        rules = list(chain.rules)
        if xtables:
            rules = _of_xtables(table.name, chain, rules, by_nft=by_nft)
        else:
            rules = _of_nftables(chain.name, rules)
        return chain if rules == list(chain.rules) else msgspec.structs.replace(chain, rules=tuple(rules))

    if isinstance(table.chains, LazyMapping):
        table.chains.refine(refine)
        return table
    chains = {name: refine(chain) for name, chain in table.chains.items()}
    return msgspec.structs.replace(table, chains=chains)


def _of_xtables(table: str, chain: ast.Chain, rules: Rules, *, by_nft: bool) -> Rules:
    ours = chain.name.startswith("KUBE-")
    if by_nft or ours:
        rules = [_with_target(rule, chain.name) for rule in rules]
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


def _find(rule: ast.Rule, kind: type[Node]) -> Node | None:
    return next((each for each in rule.expressions if type(each) is kind), None)


def _has(rule: ast.Rule, *kinds: type) -> bool:
    return any(isinstance(each, kinds) for each in rule.expressions)


def _compares(rule: ast.Rule, *fields: ast.Field) -> bool:
    return any(isinstance(each, (ast.Compare, ast.PortRange)) and each.field in fields for each in rule.expressions)


def _opaque(rule: ast.Rule) -> bool:
    """Return True if something in the rule is not known anyway."""
    return _has(rule, *_OPAQUE)


def _jump(rule: ast.Rule) -> str:
    last = rule.expressions[-1] if rule.expressions else None
    return last.chain if isinstance(last, (ast.Jump, ast.Goto)) else ""


def _with_target(rule: ast.Rule, chain: str) -> ast.Rule:
    """Return the rule with an `Undecoded` if it has no target."""
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
    return [
        _without_match(rule, what, chain) if not _opaque(rule) and (what := wrong(rule)) else rule for rule in rules
    ]


def _gap(chain: str, what: str, *matches: ast.Expression) -> ast.Rule:
    return ast.Rule((*matches, ast.RuleGap(_LINES_MISSING.format(chain, what))))


def _gapped(rules: Iterable[ast.Rule]) -> bool:
    return any(_opaque(rule) for rule in rules)


# ---- chains of iptables ----------------------------------------------------------------------------------------------


def _endpoint(chain: str, rules: Rules) -> Rules:
    nat = [rule for rule in rules if _has(rule, ast.Dnat, ast.DnatRange)]
    if not nat:
        return rules if _gapped(rules) else [*rules, _gap(chain, "a rule with DNAT")]
    if not any(_compares(rule, ast.Field.SADDR) for rule in rules) and not _gapped(rules):
        target = _find(nat[-1], ast.Dnat)
        source = (ast.Compare(ast.Field.SADDR, (target.address,)),) if target is not None else ()
        return [_gap(chain, "a rule for packets of the endpoint itself", *source), *rules]
    return rules


def _spread(chain: str, rules: Rules) -> Rules:
    """Compare the probabilities of a Service's chain with those of an equal spread."""
    masked = [_cluster_ip_mark(chain, rule) for rule in rules]
    ways = [
        (number, _find(rule, ast.RandomMatch))
        for number, rule in enumerate(rules)
        if _jump(rule).startswith("KUBE-SEP-") and not _has(rule, ast.RecentCheck, *_OPAQUE)
    ]
    if not ways:
        onward = any(_jump(rule).startswith("KUBE-") and "MARK" not in _jump(rule) for rule in rules)
        return masked if onward or _gapped(rules) else [*masked, _gap(chain, "a rule for each endpoint")]
    if any(match is None for _, match in ways[:-1]):
        plain = {number for number, match in ways[:-1] if match is None}
        return [
            _without_match(rule, "the probability", chain) if number in plain else rule
            for number, rule in enumerate(masked)
        ]
    if ways[-1][1] is not None:
        return masked if _gapped(rules) else [*masked, _gap(chain, "a last rule without probability")]
    for left, (_, match) in zip(range(len(ways), 1, -1), ways, strict=False):
        assert match is not None
        probability = float(match.probability)
        # Without one of its rules, every probability before it is too small. What is too large was written so.
        if probability < 1 / left - _PROBABILITY_ERROR and not _gapped(rules):
            first = ways[0][0]
            return [*masked[:first], _gap(chain, "as many rules as the probabilities say"), *masked[first:]]
    return masked


def _cluster_ip_mark(chain: str, rule: ast.Rule) -> ast.Rule:
    if _jump(rule) != "KUBE-MARK-MASQ" or _opaque(rule):
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
    if not rules:
        return [_gap(chain, "a rule for each kind of sender")]
    found: Rules = []
    for rule in rules:
        made = rule
        if any(words in rule.comment for words in _SENDERS) and not _opaque(rule):
            made = _interface_shown(chain, rule)
            if made is rule and not _compares(rule, ast.Field.SADDR, ast.Field.IIFNAME) and not _has(rule, ast.IsLocal):
                made = _without_match(rule, "the match of senders", chain)
        found.append(made)
    return found


def _services(chain: str, rules: Rules) -> Rules:
    def wrong(rule: ast.Rule) -> str:
        service = _SERVICE.match(_jump(rule)) is not None
        final = _has(rule, ast.RejectPacket, ast.DropPacket)
        marks = _jump(rule) == "KUBE-MARK-MASQ" and _compares(rule, ast.Field.DADDR)
        if not (service or final or marks) or _has(rule, ast.MatchSet, ast.AnyOf):
            return ""
        if not _compares(rule, ast.Field.DADDR) and not _has(rule, ast.IsLocal):
            return "the address"
        return "" if _compares(rule, ast.Field.DPORT) else "the port"

    return _each(rules, wrong, chain)


def _node_ports(chain: str, rules: Rules) -> Rules:
    def wrong(rule: ast.Rule) -> str:
        ports = _SERVICE.match(_jump(rule)) or _jump(rule) == "KUBE-MARK-MASQ" or _has(rule, ast.Accept)
        return "the port" if ports and not _compares(rule, ast.Field.DPORT) and not _has(rule, ast.AnyOf) else ""

    return _each(rules, wrong, chain)


_MARKS = (ast.MarkIs, ast.MatchSet, ast.CtStatus)


def _postrouting(chain: str, rules: Rules) -> Rules:
    returns = any(_has(rule, ast.Return) for rule in rules)

    def wrong(rule: ast.Rule) -> str:
        decides = _has(rule, ast.Return) or (not returns and _has(rule, ast.Masquerade))
        plain = not _has(rule, *_MARKS) and not _compares(rule, *ast.Field)
        return "the match of the mark" if decides and plain else ""

    found = _each(rules, wrong, chain)
    if not any(_has(rule, ast.Masquerade, ast.Snat) for rule in found) and not _gapped(found):
        return [*found, _gap(chain, "a rule that masquerades")]
    return found


def _mark(chain: str, rules: Rules) -> Rules:
    marks = any(_has(rule, ast.MarkOr, ast.SetMark, ast.MarkXor) for rule in rules)
    return rules if marks or _gapped(rules) else [*rules, _gap(chain, "a rule that sets the mark")]


def _forward(chain: str, rules: Rules) -> Rules:
    def wrong(rule: ast.Rule) -> str:
        final = _has(rule, ast.Accept, ast.DropPacket)
        plain = not _has(rule, *_MARKS, ast.CtState) and not _compares(rule, *ast.Field)
        return "a match" if final and plain else ""

    return _each(rules, wrong, chain)


def _firewall(chain: str, rules: Rules) -> Rules:
    def wrong(rule: ast.Rule) -> str:
        if not _has(rule, ast.DropPacket):
            return ""
        if _has(rule, ast.CtStatus) and not _has(rule, ast.CtState):
            # nft prints `! --ctstate RELATED,ESTABLISHED,DNAT` as `ct status dnat`.
            return "the connection states"
        return "" if _has(rule, ast.MarkIs, ast.CtState) or _compares(rule, *ast.Field) else "a match"

    return _each(rules, wrong, chain)


_CHECKS: dict[tuple[str, str], Callable[[str, Rules], Rules]] = {
    ("nat", "SEP"): _endpoint,
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
    ("nat", "MARK-MASQ"): _mark,
    ("nat", "MARK-DROP"): _mark,
    ("filter", "FORWARD"): _forward,
    ("filter", "FIREWALL"): _firewall,
}


# ---- chains of nftables ----------------------------------------------------------------------------------------------


def _of_nftables(chain: str, rules: Rules) -> Rules:
    if _gapped(rules):
        return rules
    if chain.startswith("endpoint-"):
        return _endpoint(chain, rules)
    if chain == "mark-for-masquerade":
        return _mark(chain, rules)
    if chain == "masquerading":
        return _postrouting(chain, rules)
    if chain.startswith(("service-", "external-", "firewall-")) and not chain.endswith("-check"):
        onward = (ast.RandomGoto, ast.RandomMap, ast.Goto, ast.VerdictMap, ast.InlineVerdictMap, ast.DropPacket)
        spread = next((each for rule in rules for each in rule.expressions if type(each) is ast.RandomMap), None)
        covered = sum(last - first + 1 for first, last, _ in spread.arms) if spread is not None else 0
        if not any(_has(rule, *onward) for rule in rules) or (spread is not None and covered < spread.mod):
            return [*rules, _gap(chain, "a rule that leads to every endpoint")]
    if chain in ("services", "nat-prerouting", "nat-output", "nat-postrouting") and not rules:
        return [_gap(chain, "a rule that leads to the Services")]
    return rules
