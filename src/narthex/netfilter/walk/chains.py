"""Evaluation of rules and chains: all results, each with its exact probability.

The effect of a chain on a branch depends only on the state of the branch. Each chain is therefore walked once per state,
however often it is called. A rule that depends on unknown information ends its branch as UNSUPPORTED. From there, two
branches in doubt continue, one as if the rule matched and one as if not, to find where the packet may end.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

from narthex.model import WalkNearMiss
from narthex.netfilter import ast
from narthex.netfilter.describe import describe, describe_rule
from narthex.netfilter.walk.lookup import RulesetIndex
from narthex.netfilter.walk.matches import Matcher
from narthex.netfilter.walk.state import (
    RETURN,
    Branch,
    ChainResults,
    Continuation,
    HookPoint,
    graft,
    merge,
    merge_results,
)
from narthex.netfilter.walk.statements import SIDE_EFFECTS, StatementExecutor, unsupported
from narthex.netfilter.walk.structure import is_dispatch, is_proxy_chain, is_service_chain

_NFT_JUMPS = 16
"""NFT_JUMP_STACK_SIZE of nf_tables, for iptables-nft too."""
_LEGACY_JUMPS = 100
"""xt_jumpstack grows with the table. No table written by a person is deeper than this."""
_MAX_RULES = 5_000_000
_MAX_NEAR, _MAX_NEAR_ADDRESSES = 200, 20
_SILENT = (ast.Counter, ast.IgnoredStatement)


class ChainPosition:
    """The chain that is evaluated, its caller chains, and the hook."""

    __slots__ = ("chain", "depth", "path", "point", "table")

    def __init__(self, point: HookPoint, table: ast.Table, chain: ast.Chain, path: tuple[str, ...], depth: int) -> None:
        self.point, self.table, self.chain, self.path, self.depth = point, table, chain, path, depth

    @property
    def where(self) -> str:
        """The hook, the table, and the chain, for the texts of steps."""
        return f"{self.point.hook} {self.table.name} {self.chain.name}"


class ChainWalk:
    """Evaluates chains for one packet."""

    def __init__(
        self, matcher: Matcher, executor: StatementExecutor, index: RulesetIndex, explained: bool = True
    ) -> None:
        self._explained = explained
        self._matcher = matcher
        self._index = index
        self._executor = executor
        self._answers = matcher.answers
        self._known: dict[tuple[object, ...], ChainResults] = {}
        self._rules_left = _MAX_RULES
        self._near: dict[tuple[str, str, str, int], WalkNearMiss] = {}
        self._near_addresses: dict[tuple[str, str, str, int], WalkNearMiss] = {}

    @property
    def near(self) -> tuple[WalkNearMiss, ...]:
        """The rules of which exactly one match failed so far. Those that failed at the destination come last."""
        return (*self._near.values(), *self._near_addresses.values())

    def base(self, point: HookPoint, table: ast.Table, chain: ast.Chain, branch: Branch) -> ChainResults:
        """Return the results of a base chain. A result that is not a `BranchEnd` passes this chain."""
        assert chain.hook is not None
        results: ChainResults = []
        for continuation, out in self._chain(point, table, chain, branch, (), 0):
            if (continuation is None or continuation == RETURN) and chain.hook.policy == "drop":
                where = ChainPosition(point, table, chain, (), 0).where
                out.note(where, "policy drop", rule=(table.name, chain.name, None))
                results += self._executor.verdict(ast.DropPacket(), out)
            else:
                results.append((continuation, out))
        return results

    def _chain(
        self, point: HookPoint, table: ast.Table, chain: ast.Chain, branch: Branch, path: tuple[str, ...], depth: int
    ) -> ChainResults:
        """Return the results of a chain. RETURN and the end of the chain are both None."""
        if chain.name in path:
            loop = " -> ".join((*path[path.index(chain.name) :], chain.name))
            return [(unsupported(f"the chains of table {table.name} call each other in a loop: {loop}"), branch)]
        limit = _LEGACY_JUMPS if table.legacy else _NFT_JUMPS
        if depth > limit:
            note = (
                f"table {table.name}: {chain.name} is called through more than {limit} jumps, the limit of the kernel"
            )
            return [(unsupported(note), branch)]
        key = point, id(table), chain.name, depth, branch.state
        known = self._known.get(key)
        if known is None:
            at = ChainPosition(point, table, chain, (*path, chain.name), depth)
            known = self._rules(at, branch.fresh())
            if self._index.copied and is_service_chain(chain.name):
                self._strand(at, known)
            known = self._known[key] = merge_results(known)
        return graft(branch, known)

    @staticmethod
    def _strand(at: ChainPosition, results: ChainResults) -> None:
        """Mark the packets that the chain of a Service sends nowhere."""
        for continuation, out in results:
            if continuation is None and not out.dnat:
                out.stranded = (
                    f"chain {at.chain.name} of table {at.table.name} sends the packet nowhere, and nothing in the input refuses "
                    "it, as kube-proxy does: lines of the input are missing"
                )

    def _rules(self, at: ChainPosition, branch: Branch) -> ChainResults:
        left: ChainResults = []
        present = [branch]
        rules = at.chain.rules
        for number in self._index.numbers(at.chain, branch.daddr, branch.dport):
            rule = rules[number]
            self._rules_left -= 1
            if self._rules_left < 0:
                return left + [(unsupported("too many rules on the path"), out) for out in present]
            if len(present) == 1:
                results = self._rule(at, number, rule, present[0])
                if len(results) == 1 and results[0][0] is None:
                    present[0] = results[0][1]
                    continue
            else:
                results = [result for here in present for result in self._rule(at, number, rule, here)]
            ongoing: list[Branch] = []
            for continuation, out in results:
                if continuation is None:
                    ongoing.append(out)
                else:
                    left.append((None if continuation == RETURN else continuation, out))
            present = merge(ongoing)
            if not present:
                return left
        return left + [(None, out) for out in present]

    # ---- rules -----------------------------------------------------------------------------------------------------

    def _rule(self, at: ChainPosition, number: int, rule: ast.Rule, branch: Branch, start: int = 0) -> ChainResults:
        """Return the results of a rule, starting at one of its expressions."""
        results: ChainResults = []
        doubt = omission = ""
        noted = start > 0 or not self._explained
        expressions = rule.expressions
        for position in range(start, len(expressions)):
            expression = expressions[position]
            kind = type(expression)
            answerer = self._answers.get(kind)
            if answerer is not None:
                answer = answerer(expression, branch, at.point, at.table)
                if answer is False:
                    if not doubt and self._explained:
                        self._missed(at, number, rule, position, branch)
                    return [*results, (None, branch)]
                if answer is not True:
                    doubt = doubt or answer
                continue
            if kind is ast.Counter:
                continue
            if isinstance(expression, (ast.OmittedMatch, ast.Assumed)):
                doubt, omission = _left_out(rule, expression, doubt, omission)
                continue
            if kind is ast.RandomMatch or kind is ast.EveryNth:
                hit = branch.take(_probability(expression))
                if branch.probability:
                    results.append((None, branch))
                if not hit.probability:
                    return results
                branch = hit
                continue
            if doubt:
                return results + self._in_doubt(at, number, rule, branch, position, doubt)
            if omission:
                branch.suppose(omission)
                omission = ""
            if not noted and kind not in StatementExecutor.DESCRIBED_BY_RESULT:
                self._note(at, number, rule, branch, self._matcher.describe_match(rule, branch, at.point, at.table))
                noted = True
            if kind in SIDE_EFFECTS:
                doubt = self._executor.apply_side_effect(expression, branch, at.point)
            else:
                return results + self._act(at, number, rule, position, branch)
        if doubt:
            return results + self._in_doubt(at, number, rule, branch, len(expressions), doubt)
        if omission and isinstance(expressions[-1], ast.Assumed):
            branch.suppose(omission)
        return [*results, (None, branch)]

    def _in_doubt(
        self, at: ChainPosition, number: int, rule: ast.Rule, branch: Branch, position: int, doubt: str
    ) -> ChainResults:
        """Return the results of a rule whose matches before `position` cannot be determined."""
        rest = rule.expressions[position:]
        if rest and all(isinstance(each, _SILENT) for each in rest):
            return [(None, branch)]
        note = f"{at.where}: {doubt}"
        if self._explained:
            self._note(at, number, rule, branch, self._matcher.describe_match(rule, branch, at.point, at.table))
        results: ChainResults = []
        if not branch.doubt:
            results.append((unsupported(note), branch.copy()))
            branch.doubt = note
        if rest:
            results += self._rule(at, number, rule, branch.copy(), position)
        return [*results, (None, branch)]

    def _note(
        self, at: ChainPosition, number: int, rule: ast.Rule, branch: Branch, description: str, why: str = ""
    ) -> None:
        why = rule.comment or why or self._why(rule)
        branch.note(at.where, description, why, (at.table.name, at.chain.name, self._number(at, number)))

    def _number(self, at: ChainPosition, number: int) -> int | None:
        """Return the number of a rule in its text, or None for a rule that completes the text."""
        number -= self._index.shift(at.table, at.chain.name)
        return number if number >= 0 else None

    def _act(self, at: ChainPosition, number: int, rule: ast.Rule, position: int, branch: Branch) -> ChainResults:
        """Execute a statement that determines the path of the packet."""
        statement = rule.expressions[position]
        if isinstance(statement, (ast.Jump, ast.Goto)):
            return self._call(at, statement, branch)
        if isinstance(statement, ast.Dnat):
            return [(self._executor.rewrite(at.point, branch, statement.address, statement.port), branch)]
        results: ChainResults = []
        for result in self._executor.act(statement, branch, at.point, at.table, at.where):
            out = result.branch
            if result.description and self._explained:
                self._note(at, number, rule, out, result.description, result.why)
            what = result.verdict
            if isinstance(what, (ast.Jump, ast.Goto)):
                results += self._call(at, what, out)
            elif what is not None:
                results += self._executor.verdict(what, out)
            else:
                results.append((result.continuation, out))
        return results

    def _call(self, at: ChainPosition, verdict: ast.Jump | ast.Goto, branch: Branch) -> ChainResults:
        target = at.table.chains.get(verdict.chain)
        if target is None:
            return [self._without(at, verdict, branch)]
        if isinstance(verdict, ast.Jump):
            return self._chain(at.point, at.table, target, branch, at.path, at.depth + 1)
        results = self._chain(at.point, at.table, target, branch, at.path, at.depth)
        return [(RETURN if continuation is None else continuation, out) for continuation, out in results]

    def _without(self, at: ChainPosition, verdict: ast.Jump | ast.Goto, branch: Branch) -> tuple[Continuation, Branch]:
        """Return the result of calling a chain that the rules lack."""
        words = f"chain {verdict.chain} of table {at.table.name} is not in the input"
        if not self._index.copied or (at.table.name != "filter" and is_dispatch(verdict.chain)):
            return unsupported(words), branch
        if is_proxy_chain(at.table.name, verdict.chain):
            branch.unsure = branch.unsure or words
        branch.suppose(f"{words}; it is assumed to return")
        return (None if isinstance(verdict, ast.Jump) else RETURN), branch

    def _why(self, rule: ast.Rule) -> str:
        addresses = (each.address for each in rule.expressions if isinstance(each, ast.Dnat))
        return next(filter(None, map(self._executor.name_of, addresses)), "")

    # ---- near misses -----------------------------------------------------------------------------------------------

    def _missed(self, at: ChainPosition, number: int, rule: ast.Rule, position: int, branch: Branch) -> None:
        """Record the rule as a near miss if the match at `position` is the only one that failed."""
        failed = rule.expressions[position]
        elsewhere = type(failed) is ast.Compare and failed.field is ast.Field.DADDR
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
        rule_number = self._number(at, number)
        if not matches or rule_number is None:
            return
        key = at.point.hook, at.table.name, at.chain.name, rule_number
        if key in kept:
            return
        kept[key] = WalkNearMiss(
            where=at.where,
            what=describe_rule(rule),
            missing=describe(failed),
            why=rule.comment,
            table=at.table.name,
            chain=at.chain.name,
            rule=rule_number,
        )


def _left_out(rule: ast.Rule, match: ast.OmittedMatch | ast.Assumed, doubt: str, omission: str) -> tuple[str, str]:
    """Return the doubt and the omission of a rule after a match that the input leaves out."""
    if isinstance(match, ast.OmittedMatch) and _is_bare(rule):
        return doubt or match.text, omission
    return doubt, match.text


def _is_bare(rule: ast.Rule) -> bool:
    """Return True for a rule with a verdict and without any visible match. Most often it has one for an interface."""
    rest = [each for each in rule.expressions if not isinstance(each, (ast.Counter, ast.OmittedMatch))]
    return len(rest) == 1 and isinstance(rest[0], (ast.Accept, ast.DropPacket, ast.RejectPacket))


def _probability(match: ast.Expression) -> Fraction:
    if isinstance(match, ast.EveryNth):
        return Fraction(1, max(match.every, 1))
    assert isinstance(match, ast.RandomMatch)
    return _fraction(match.probability)


@lru_cache(maxsize=1024)
def _fraction(probability: str) -> Fraction:
    """Return a probability as a number between 0 and 1. A dump has as many different ones as the largest Service has endpoints."""
    return min(max(Fraction(probability), Fraction(0)), Fraction(1))
