"""Chains and rules: all ways out of them, each with its exact probability.

What a chain does to a branch depends on the branch's state alone, so each chain is walked once for each state, however
often it is called. A rule that asks for something that cannot be known ends its branch as UNSUPPORTED; from there two
branches in doubt go on, one as if the rule matched and one as if not, so that it can be said where the packet may end.
"""

from __future__ import annotations

from fractions import Fraction

from narthex.model.packet import WalkNearMiss
from narthex.netfilter.ast import (
    Accept,
    Chain,
    Compare,
    Counter,
    Dnat,
    DropPacket,
    EveryNth,
    Expression,
    Field,
    Goto,
    IgnoredStatement,
    Jump,
    OmittedMatch,
    RandomMatch,
    RejectPacket,
    Rule,
    Table,
)
from narthex.netfilter.describe import describe, describe_rule
from narthex.netfilter.walk.lookup import RulesetIndex
from narthex.netfilter.walk.matches import Matcher
from narthex.netfilter.walk.state import RETURN, Branch, Continuation, HookPoint, graft, merge, merge_results
from narthex.netfilter.walk.statements import LEAVES_BEHIND, Actor, unsupported

ChainResults = list[tuple[Continuation, Branch]]

_NFT_JUMPS = 16
"""NFT_JUMP_STACK_SIZE of nf_tables, for iptables-nft too."""
_LEGACY_JUMPS = 100
"""xt_jumpstack is as large as a table asks for; no table of a person's is deeper than this."""
_MAX_RULES = 5_000_000
_MAX_NEAR, _MAX_NEAR_ADDRESSES = 200, 20
_SILENT = (Counter, IgnoredStatement)


class At:
    """Where in the rules a branch is."""

    __slots__ = ("chain", "depth", "path", "point", "table", "where")

    def __init__(self, point: HookPoint, table: Table, chain: Chain, path: tuple[str, ...], depth: int) -> None:
        self.point, self.table, self.chain, self.path, self.depth = point, table, chain, path, depth
        self.where = f"{point.hook} {table.name} {chain.name}"


class ChainWalk:
    """Walks chains for one packet."""

    def __init__(self, matcher: Matcher, actor: Actor, index: RulesetIndex) -> None:
        self._matcher = matcher
        self._index = index
        self._actor = actor
        self._answers = matcher.answers
        self._known: dict[tuple[object, ...], ChainResults] = {}
        self._rules_left = _MAX_RULES
        self._near: dict[tuple[str, str, str, int], WalkNearMiss] = {}
        self._near_addresses: dict[tuple[str, str, str, int], WalkNearMiss] = {}

    @property
    def near(self) -> tuple[WalkNearMiss, ...]:
        """The rules that nearly matched so far; those for another destination come last."""
        return (*self._near.values(), *self._near_addresses.values())

    def base(self, point: HookPoint, table: Table, chain: Chain, branch: Branch) -> ChainResults:
        """All ways out of a base chain. Whatever is no end is let through, as far as this chain goes."""
        assert chain.hook is not None
        ways: ChainResults = []
        for way, out in self._chain(point, table, chain, branch, (), 0):
            if (way is None or way == RETURN) and chain.hook.policy == "drop":
                out.note(At(point, table, chain, (), 0).where, "policy drop")
                ways += self._actor.verdict(DropPacket(), out)
            else:
                ways.append((way, out))
        return ways

    def _chain(
        self, point: HookPoint, table: Table, chain: Chain, branch: Branch, path: tuple[str, ...], depth: int
    ) -> ChainResults:
        """All ways out of a chain. "Return" and the chain's end both come back as None."""
        if chain.name in path:
            loop = " -> ".join((*path[path.index(chain.name) :], chain.name))
            return [(unsupported(f"the chains of table {table.name} call each other without end: {loop}"), branch)]
        limit = _LEGACY_JUMPS if table.legacy else _NFT_JUMPS
        if depth > limit:
            note = f"table {table.name}: {chain.name} is called through more than {limit} jumps, which no kernel allows"
            return [(unsupported(note), branch)]
        key = point, id(table), chain.name, depth, branch.state
        known = self._known.get(key)
        if known is None:
            at = At(point, table, chain, (*path, chain.name), depth)
            known = self._known[key] = merge_results(self._rules(at, branch.fresh()))
        return graft(branch, known)

    def _rules(self, at: At, branch: Branch) -> ChainResults:
        left: ChainResults = []
        present = [branch]
        rules = at.chain.rules
        for number in self._index.numbers(at.chain, branch.daddr, branch.dport):
            rule = rules[number]
            self._rules_left -= 1
            if self._rules_left < 0:
                return left + [(unsupported("too many rules on the way"), out) for out in present]
            if len(present) == 1:
                ways = self._rule(at, number, rule, present[0])
                if len(ways) == 1 and ways[0][0] is None:
                    present[0] = ways[0][1]
                    continue
            else:
                ways = [way for here in present for way in self._rule(at, number, rule, here)]
            ongoing: list[Branch] = []
            for way, out in ways:
                if way is None:
                    ongoing.append(out)
                else:
                    left.append((None if way == RETURN else way, out))
            present = merge(ongoing)
            if not present:
                return left
        return left + [(None, out) for out in present]

    # ---- one rule --------------------------------------------------------------------------------------------------

    def _rule(self, at: At, number: int, rule: Rule, branch: Branch, start: int = 0) -> ChainResults:
        """All ways out of one rule, from one of its expressions on."""
        ways: ChainResults = []
        doubt = ""
        supposing = ""
        noted = start > 0
        expressions = rule.expressions
        for position in range(start, len(expressions)):
            expression = expressions[position]
            kind = type(expression)
            answerer = self._answers.get(kind)
            if answerer is not None:
                answer = answerer(expression, branch, at.point, at.table)
                if answer is False:
                    if not doubt:
                        self._missed(at, number, rule, position, branch)
                    return [*ways, (None, branch)]
                if answer is not True:
                    doubt = doubt or answer
                continue
            if kind is Counter:
                continue
            if kind is OmittedMatch:
                assert isinstance(expression, OmittedMatch)
                if _is_bare(rule):
                    doubt = doubt or expression.text
                else:
                    supposing = expression.text
                continue
            if kind is RandomMatch or kind is EveryNth:
                hit = branch.take(_probability(expression))
                if branch.probability:
                    ways.append((None, branch))
                if not hit.probability:
                    return ways
                branch = hit
                continue
            if doubt:
                return ways + self._in_doubt(at, number, rule, branch, position, doubt)
            if supposing:
                branch.suppose(supposing)
                supposing = ""
            if not noted and kind not in Actor.TELLS_ITSELF:
                told = self._matcher.told(rule, branch, at.point, at.table)
                self._note(at, number, rule, branch, told)
                noted = True
            if kind in LEAVES_BEHIND:
                doubt = self._actor.leave_behind(expression, branch, at.point)
                continue
            return ways + self._act(at, number, rule, position, branch)
        if doubt:
            return ways + self._in_doubt(at, number, rule, branch, len(expressions), doubt)
        return [*ways, (None, branch)]

    def _in_doubt(self, at: At, number: int, rule: Rule, branch: Branch, position: int, doubt: str) -> ChainResults:
        """A rule of which nobody can say whether it matches, read as far as `position`."""
        rest = rule.expressions[position:]
        if rest and all(isinstance(each, _SILENT) for each in rest):
            return [(None, branch)]
        note = f"{at.where}: {doubt}"
        self._note(at, number, rule, branch, self._matcher.told(rule, branch, at.point, at.table))
        ways: ChainResults = []
        if not branch.doubt:
            ways.append((unsupported(note), branch.copy()))
            branch.doubt = note
        if rest:
            ways += self._rule(at, number, rule, branch.copy(), position)
        return [*ways, (None, branch)]

    def _note(self, at: At, number: int, rule: Rule, branch: Branch, told: str, why: str = "") -> None:
        why = rule.comment or why or self._why(rule)
        branch.note(at.where, told, why, (at.table.name, at.chain.name, number))

    def _act(self, at: At, number: int, rule: Rule, position: int, branch: Branch) -> ChainResults:
        """A statement that decides where the packet goes."""
        ways: ChainResults = []
        for decision in self._actor.act(rule.expressions[position], branch, at.point, at.table, at.where):
            out = decision.branch
            if decision.told:
                self._note(at, number, rule, out, decision.told, decision.why)
            what = decision.what
            if isinstance(what, (Jump, Goto)):
                ways += self._call(at, what, out)
            elif what is not None:
                ways += self._actor.verdict(what, out)
            else:
                ways.append((decision.way, out))
        return ways

    def _call(self, at: At, verdict: Jump | Goto, branch: Branch) -> ChainResults:
        target = at.table.chains.get(verdict.chain)
        if target is None:
            return [(unsupported(f"the chain {verdict.chain} of table {at.table.name} is not there"), branch)]
        if isinstance(verdict, Jump):
            return self._chain(at.point, at.table, target, branch, at.path, at.depth + 1)
        ways = self._chain(at.point, at.table, target, branch, at.path, at.depth)
        return [(RETURN if way is None else way, out) for way, out in ways]

    def _why(self, rule: Rule) -> str:
        addresses = (each.address for each in rule.expressions if isinstance(each, Dnat))
        return next(filter(None, map(self._actor.name_of, addresses)), "")

    # ---- near misses -----------------------------------------------------------------------------------------------

    def _missed(self, at: At, number: int, rule: Rule, position: int, branch: Branch) -> None:
        """Keep the rule if the match at `position` is the only one that failed."""
        failed = rule.expressions[position]
        elsewhere = type(failed) is Compare and failed.field is Field.DADDR
        kept, limit = (self._near_addresses, _MAX_NEAR_ADDRESSES) if elsewhere else (self._near, _MAX_NEAR)
        if len(kept) >= limit or branch.doubt:
            return
        matches = 0
        for other in rule.expressions:
            answerer = self._answers.get(type(other))
            if answerer is None or other is failed:
                continue
            matches += 1
            if answerer(other, branch, at.point, at.table) is False:
                return
        key = at.point.hook, at.table.name, at.chain.name, number
        if not matches or key in kept:
            return
        kept[key] = WalkNearMiss(
            where=at.where,
            what=describe_rule(rule),
            missing=describe(failed),
            why=rule.comment,
            table=at.table.name,
            chain=at.chain.name,
            rule=number,
        )


def _is_bare(rule: Rule) -> bool:
    """Whether a rule that settles a packet's fate shows no match at all: most often one for an interface."""
    rest = [each for each in rule.expressions if not isinstance(each, (Counter, OmittedMatch))]
    return len(rest) == 1 and isinstance(rest[0], (Accept, DropPacket, RejectPacket))


def _probability(chance: Expression) -> Fraction:
    if isinstance(chance, EveryNth):
        return Fraction(1, max(chance.every, 1))
    assert isinstance(chance, RandomMatch)
    return min(max(Fraction(chance.probability), Fraction(0)), Fraction(1))
