"""One packet in the hooks of one node: base chains by priority, jumps, address rewriting, draws.

What lies between two hooks (routing, IPVS) is the caller's: `walk` for a node of which only the rules are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction

import msgspec

from narthex.model.net import family_of
from narthex.model.packet import Disposition, Host, Memory, Packet
from narthex.netfilter.ast import (
    Accept,
    Chain,
    Chance,
    Counter,
    Dnat,
    DnatMap,
    DropPacket,
    Expression,
    Goto,
    Jump,
    MarkOr,
    MarkXor,
    Masquerade,
    RecentSet,
    Redirect,
    RejectPacket,
    Remember,
    Return,
    Rule,
    Ruleset,
    Spread,
    Table,
    VerdictMap,
)
from narthex.netfilter.brief import brief, brief_element
from narthex.netfilter.ipvs import Beside
from narthex.netfilter.walk_index import EVERY, Span, indexed
from narthex.netfilter.walk_ipvs import Balancer, Finish
from narthex.netfilter.walk_match import Matcher, NotKnown
from narthex.netfilter.walk_state import Branch, End, Met, Place, merge

NameOf = Callable[[str], str]
"""Says what an address is ("pod shop/web-1"), or nothing ("")."""

_MAX_DEPTH = 64
_MAX_RULES = 5_000_000
_U32 = 0xFFFFFFFF
_DESTINATION_HOOKS = ("prerouting", "output")


class _At(msgspec.Struct, frozen=True):
    """Where in the rules a branch is."""

    place: Place
    table: Table
    chain: Chain
    path: tuple[str, ...]
    """Chains from the base chain to this one."""

    @property
    def where(self) -> str:
        """For a step."""
        return f"{self.place.hook} {self.table.name} {self.chain.name}"

    def met(self, rule: Rule, branch: Branch) -> Met:
        """For a step: the rule, and the branch as it came to it."""
        return Met(self.place, self.table, self.chain, rule, branch)


_NEXT = None
_ACCEPT = "accept"
_RETURN = "return"
Way = None | str | End
"""None: go on with the next rule; "return": leave the chain; "accept": leave the base chain; or the end."""

_Ways = list[tuple[Way, Branch]]


class HookWalk:
    """One packet in the hooks of one node, hook by hook: for callers that decide themselves what comes between them, as
    routing. `finish` is told of each branch that ends."""

    def __init__(
        self,
        ruleset: Ruleset,
        packet: Packet,
        host: Host,
        finish: Finish,
        memory: Memory | None = None,
        now: float = 0.0,
        name_of: NameOf | None = None,
        beside: Beside = Beside(),  # noqa: B008  # frozen
        state: str = "new",
    ) -> None:
        """`state` is the connection's, in conntrack's words."""
        self._packet = packet
        self._index = indexed(ruleset, family_of(packet.destination))
        self._matcher = Matcher(packet, host, self._index, memory, now, beside, state)
        self._name_of = name_of or (lambda _address: "")
        self._balancer = Balancer(beside, self._matcher, self._name_of, finish)
        self._finish = finish
        self._rules_left = _MAX_RULES

    @property
    def matcher(self) -> Matcher:
        """What answers for the packet's matches."""
        return self._matcher

    @property
    def balancer(self) -> Balancer:
        """IPVS."""
        return self._balancer

    def base_chains(self, hook: str, span: Span = EVERY) -> Iterator[tuple[Table, Chain]]:
        """The base chains of a hook in the kernel's order."""
        return self._index.base_chains(hook, span)

    def hook(self, place: Place, branches: list[Branch], nat: bool = True, span: Span = EVERY) -> list[Branch]:
        """Walk all base chains of a hook, or those with priorities in the span; what comes back is let through."""
        for table, chain in self._index.base_chains(place.hook, span):
            if not branches:
                break
            assert chain.hook is not None
            if chain.hook.type != "nat":
                branches = self.base_chain(place, table, chain, branches)
            elif nat:
                rewritten = [branch for branch in branches if _is_rewritten(place, branch)]
                rest = [branch for branch in branches if not _is_rewritten(place, branch)]
                branches = rewritten + self.base_chain(place, table, chain, rest)
        return branches

    def base_chain(self, place: Place, table: Table, chain: Chain, branches: list[Branch]) -> list[Branch]:
        """Walk one base chain; what comes back is let through."""
        assert chain.hook is not None
        passed: list[Branch] = []
        for branch in branches:
            for way, out in self._chain(place, table, chain, branch, ()):
                if isinstance(way, End):
                    self._finish(out, way)
                elif way != _ACCEPT and chain.hook.policy == "drop":
                    at = _At(place, table, chain, ())
                    out.note(at.where, "policy drop", met=Met(place, table, chain, None, out))
                    self._finish(out, End(Disposition.DROPPED))
                else:
                    passed.append(out)
        return merge(passed)

    # ---- chains and rules ------------------------------------------------------------------------------------------

    def _chain(self, place: Place, table: Table, chain: Chain, branch: Branch, path: tuple[str, ...]) -> _Ways:
        """All ways out of a chain. "Return" and the chain's end both come back as None."""
        if chain.name in path or len(path) > _MAX_DEPTH:
            return [(_unsupported(f"the chains of table {table.name} call each other without end"), branch)]
        at = _At(place, table, chain, (*path, chain.name))
        left: _Ways = []
        present = [branch]
        for rule in chain.rules:
            self._rules_left -= 1
            if self._rules_left < 0:
                return left + [(_unsupported("too many rules on the way"), out) for out in present]
            ongoing: list[Branch] = []
            for here in present:
                for way, out in self._rule(at, rule, here):
                    if way is _NEXT:
                        ongoing.append(out)
                    else:
                        left.append((_NEXT if way == _RETURN else way, out))
            present = merge(ongoing)
            if not present:
                return left
        return left + [(_NEXT, out) for out in present]

    def _rule(self, at: _At, rule: Rule, branch: Branch) -> _Ways:
        """All ways out of one rule."""
        ways: _Ways = []
        doubt = ""
        noted = False
        for expression in rule.expressions:
            if self._matcher.is_match(expression):
                answer = self._matcher.answer(expression, branch, at.place, at.table)
                if answer is False:
                    return [*ways, (_NEXT, branch)]
                if isinstance(answer, str):
                    doubt = doubt or answer
                continue
            if isinstance(expression, Counter):
                continue
            if isinstance(expression, Chance):
                hit = branch.take(_probability(expression))
                if branch.probability:
                    ways.append((_NEXT, branch))
                if not hit.probability:
                    return ways
                branch = hit
                continue
            if doubt:
                break
            if not noted and not isinstance(expression, (VerdictMap, DnatMap, Spread)):
                told = self._matcher.told(rule, branch, at.place, at.table)
                branch.note(at.where, told, rule.comment or self._why(rule), at.met(rule, branch))
                noted = True
            if isinstance(expression, (MarkOr, MarkXor, Remember, RecentSet)):
                doubt = self._set_aside(expression, branch, at.place)
                continue
            return ways + self._act(at, rule, expression, branch)
        if doubt:
            told = self._matcher.told(rule, branch, at.place, at.table)
            branch.note(at.where, told, rule.comment, at.met(rule, branch))
            return [*ways, (_unsupported(f"{at.where}: {doubt}"), branch)]
        return [*ways, (_NEXT, branch)]

    def _set_aside(self, e: MarkOr | MarkXor | Remember | RecentSet, branch: Branch, place: Place) -> str:
        """Statements that leave something behind and go on; returns why that cannot be followed, or nothing."""
        if isinstance(e, MarkOr):
            branch.mark = (branch.mark | e.bits) & _U32
        elif isinstance(e, MarkXor):
            branch.mark = (branch.mark ^ e.bits) & _U32
        elif isinstance(e, RecentSet):
            branch.remembers = (*branch.remembers, (e.name, (self._packet.source,)))
        else:
            try:
                key = self._matcher.key(e.key, branch, place)
            except NotKnown as error:
                return str(error)
            if key is not None:
                branch.remembers = (*branch.remembers, (e.set, key))
        return ""

    def _act(self, at: _At, rule: Rule, expression: Expression, branch: Branch) -> _Ways:
        """Statements that decide where the packet goes."""
        if isinstance(expression, VerdictMap):
            return self._verdict_map(at, rule, expression, branch)
        if isinstance(expression, DnatMap):
            return self._dnat_map(at, rule, expression, branch)
        if isinstance(expression, Spread):
            return self._spread(at, rule, expression, branch)
        if isinstance(expression, Dnat):
            return [(_rewrite(at.place, branch, expression.address, expression.port), branch)]
        if isinstance(expression, Redirect):
            to = self._matcher.own_address(at.place.hook)
            return [(_rewrite(at.place, branch, to, expression.port), branch)]
        if isinstance(expression, Masquerade):
            if at.place.hook != "postrouting":
                return [(_unsupported(f"masquerade in {at.place.hook}"), branch)]
            branch.masquerade = True
            return [(_ACCEPT, branch)]
        return self._verdict(at, expression, branch)

    def _verdict(self, at: _At, verdict: object, branch: Branch) -> _Ways:
        if isinstance(verdict, (Jump, Goto)):
            target = at.table.chains.get(verdict.chain)
            if target is None:
                return [(_unsupported(f"the chain {verdict.chain} of table {at.table.name} is not there"), branch)]
            ways = self._chain(at.place, at.table, target, branch, at.path)
            if isinstance(verdict, Goto):
                return [(_RETURN if way is _NEXT else way, out) for way, out in ways]
            return ways
        if isinstance(verdict, Return):
            return [(_RETURN, branch)]
        if isinstance(verdict, Accept):
            return [(_ACCEPT, branch)]
        if isinstance(verdict, DropPacket):
            return [(End(Disposition.DROPPED), branch)]
        if isinstance(verdict, RejectPacket):
            return [(End(Disposition.REJECTED), branch)]
        return [(_unsupported(f"not understood: {verdict}"), branch)]

    def _verdict_map(self, at: _At, rule: Rule, e: VerdictMap, branch: Branch) -> _Ways:
        drawn, ways = self._look_up(at, rule, e, branch)
        for out, element, data in drawn:
            out.note(at.where, element, rule.comment, at.met(rule, out))
            ways += self._verdict(at, data, out)
        return ways

    def _dnat_map(self, at: _At, rule: Rule, e: DnatMap, branch: Branch) -> _Ways:
        drawn, ways = self._look_up(at, rule, e, branch)
        for out, element, data in drawn:
            if not isinstance(data, tuple):
                ways.append((_unsupported(f"the map {e.map} holds no address and port"), out))
                continue
            out.note(at.where, f"dnat to {element}", rule.comment or self._name_of(data[0]), at.met(rule, out))
            ways.append((_rewrite(at.place, out, *data), out))
        return ways

    def _look_up(
        self, at: _At, rule: Rule, e: VerdictMap | DnatMap, branch: Branch
    ) -> tuple[list[tuple[Branch, str, object]], _Ways]:
        """The elements that the key may fall on, each with a branch of its own; and the ways that go on without."""
        elements = self._index.elements(at.table, e.map)
        if elements is None:
            branch.note(at.where, brief(e), met=at.met(rule, branch))
            return [], [(_unsupported(f"the map {e.map} of table {at.table.name} is not there"), branch)]
        try:
            draws = list(self._matcher.draws(e.key, branch, at.place))
        except NotKnown as error:
            branch.note(at.where, brief(e), met=at.met(rule, branch))
            return [], [(_unsupported(f"{at.where}: {error}"), branch)]
        drawn: list[tuple[Branch, str, object]] = []
        left = Fraction(1)
        for share, key in draws:
            element = elements.find(key)
            if element is None:
                continue
            data = elements.data(element)
            # `take` splits what is left of the branch, so a share of the whole has to be scaled up.
            drawn.append((branch.take(share / left), brief_element(e.map, element, data), data))
            left -= share
        return drawn, [(_NEXT, branch)] if left else []

    def _spread(self, at: _At, rule: Rule, e: Spread, branch: Branch) -> _Ways:
        ways: _Ways = []
        count = len(e.chains)
        for number, name in enumerate(e.chains):
            out = branch.take(Fraction(1, count - number))
            out.note(at.where, f"draw {number} of {count}: goto {name}", rule.comment, at.met(rule, out))
            ways += self._verdict(at, Goto(name), out)
        return ways

    def _why(self, rule: Rule) -> str:
        addresses = (e.address for e in rule.expressions if isinstance(e, Dnat))
        return next(filter(None, map(self._name_of, addresses)), "")


def _rewrite(place: Place, branch: Branch, address: str, port: int | None) -> Way:
    if place.hook not in _DESTINATION_HOOKS:
        return _unsupported(f"destination rewritten in {place.hook}")
    branch.daddr = address
    branch.dport = branch.dport if port is None else port
    branch.dnat = True
    return _ACCEPT


def _is_rewritten(place: Place, branch: Branch) -> bool:
    return branch.dnat if place.hook in _DESTINATION_HOOKS else branch.masquerade


def _probability(chance: Chance) -> Fraction:
    return min(max(Fraction(chance.probability), Fraction(0)), Fraction(1))


def _unsupported(note: str) -> End:
    return End(Disposition.UNSUPPORTED, note)
