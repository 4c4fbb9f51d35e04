"""A packet's way through rules, as the kernel takes it: hooks, base chains by priority, jumps, address rewriting.

The packet is the first of a NEW connection. Wherever the kernel would draw a random number, all draws are followed,
each with its exact probability. What the walk cannot know ends that branch as UNSUPPORTED; it never guesses.

The kernel facts are those of Linux 5.13 and later: nf_nat_core.c (a hook's nat chains end with the first rewriting),
nf_tables_core.c (jump, goto, return), ip_vs_core.c (IPVS stands in input and output), and the loopback path (a packet from this host to itself passes output and
postrouting, then prerouting and input without nat).
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import msgspec

from narthex.model.net import family_of
from narthex.model.packet import Disposition, Host, Memory, Outcome, Packet, Trace
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
from narthex.netfilter.walk_ipvs import AFTER_INPUT, AFTER_OUTPUT, BEFORE_INPUT, BEFORE_OUTPUT, Balancer
from narthex.netfilter.walk_match import Matcher, NotKnown
from narthex.netfilter.walk_state import Branch, End, Place, merge

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


_NEXT = None
_ACCEPT = "accept"
_RETURN = "return"
Way = None | str | End
"""None: go on with the next rule; "return": leave the chain; "accept": leave the base chain; or the end."""

_Ways = list[tuple[Way, Branch]]


def walk(
    ruleset: Ruleset,
    packet: Packet,
    host: Host,
    memory: Memory | None = None,
    now: float = 0.0,
    name_of: NameOf | None = None,
    beside: Beside = Beside(),  # noqa: B008  # frozen
) -> Trace:
    """Follow a packet through all tables of its family. `now` is in seconds, on the clock of `memory`."""
    return _Walk(ruleset, packet, host, memory, now, name_of, beside).trace()


class _Walk:
    def __init__(
        self,
        ruleset: Ruleset,
        packet: Packet,
        host: Host,
        memory: Memory | None,
        now: float,
        name_of: NameOf | None,
        beside: Beside,
    ) -> None:
        self._packet = packet
        self._index = indexed(ruleset, family_of(packet.destination))
        self._matcher = Matcher(packet, host, self._index, memory, now, beside)
        self._name_of = name_of or (lambda _address: "")
        self._balancer = Balancer(beside, self._matcher, self._name_of, self._finish)
        self._outcomes: dict[tuple[object, ...], Outcome] = {}
        self._rules_left = _MAX_RULES

    def trace(self) -> Trace:
        """All ends that the packet can come to."""
        packet = self._packet
        start = [Branch(packet.destination, packet.port)]
        for branch in self._sent(start) if packet.from_host else self._received(start):
            delivered = branch.dnat or branch.served is not None
            self._finish(branch, End(Disposition.DELIVERED if delivered else Disposition.NOT_OURS))
        return Trace(packet=packet, outcomes=tuple(self._outcomes.values()))

    # ---- hooks -----------------------------------------------------------------------------------------------------

    def _received(self, branches: list[Branch]) -> list[Branch]:
        """In from a link: prerouting, then input or forward and postrouting. What IPVS takes out of input and sends to
        another machine goes on through output."""
        iif = self._packet.iif
        here, away = self._routed(self._hook(Place("prerouting", iif=iif), branches))
        here = self._hook(Place("input", iif=iif), here, span=BEFORE_INPUT)
        here, sent = self._balancer.balance("input", here)
        here = self._hook(Place("input", iif=iif), here, span=AFTER_INPUT)
        away = self._hook(Place("forward", iif=iif, oif=None), away)
        away += self._hook(Place("output", oif=None), sent, nat=False)
        return here + self._hook(Place("postrouting", oif=None), away)

    def _sent(self, branches: list[Branch]) -> list[Branch]:
        """Made on this host: output and postrouting, and once more in over loopback when it is for this host. What IPVS
        sends to another machine begins output again, without nat."""
        oif = "lo" if self._matcher.local(self._packet.destination) else None
        branches = self._hook(Place("output", oif=oif), branches, span=BEFORE_OUTPUT)
        branches, sent = self._balancer.balance("output", branches)
        here, away = self._routed(self._hook(Place("output", oif=oif), branches, span=AFTER_OUTPUT))
        away += self._hook(Place("output", oif=None), sent, nat=False)
        away = self._hook(Place("postrouting", oif=None), away)
        here = self._hook(Place("postrouting", oif="lo"), here)
        here = self._hook(Place("prerouting", iif="lo"), here, nat=False)
        return away + self._hook(Place("input", iif="lo"), here, nat=False)

    def _routed(self, branches: list[Branch]) -> tuple[list[Branch], list[Branch]]:
        here = [branch for branch in branches if self._matcher.local(branch.daddr)]
        return here, [branch for branch in branches if not self._matcher.local(branch.daddr)]

    def _hook(self, place: Place, branches: list[Branch], nat: bool = True, span: Span = EVERY) -> list[Branch]:
        """Walk all base chains of a hook, or those with priorities in the span; what comes back is let through."""
        for table, chain in self._index.base_chains(place.hook, span):
            if not branches:
                break
            assert chain.hook is not None
            if chain.hook.type != "nat":
                branches = self._base_chain(place, table, chain, branches)
            elif nat:
                rewritten = [branch for branch in branches if _is_rewritten(place, branch)]
                rest = [branch for branch in branches if not _is_rewritten(place, branch)]
                branches = rewritten + self._base_chain(place, table, chain, rest)
        return branches

    def _base_chain(self, place: Place, table: Table, chain: Chain, branches: list[Branch]) -> list[Branch]:
        assert chain.hook is not None
        passed: list[Branch] = []
        for branch in branches:
            for way, out in self._chain(place, table, chain, branch, ()):
                if isinstance(way, End):
                    self._finish(out, way)
                elif way != _ACCEPT and chain.hook.policy == "drop":
                    out.note(_At(place, table, chain, ()).where, "policy drop")
                    self._finish(out, End(Disposition.DROPPED))
                else:
                    passed.append(out)
        return merge(passed)

    def _finish(self, branch: Branch, end: End) -> None:
        delivered = end.disposition is Disposition.DELIVERED
        outcome = Outcome(
            disposition=end.disposition,
            probability=branch.probability,
            endpoint=(branch.daddr, branch.dport) if delivered else None,
            masquerade=delivered and branch.masquerade,
            note=end.note,
            remembers=branch.remembers,
            steps=branch.steps(),
        )
        key = outcome.disposition, outcome.endpoint, outcome.masquerade, outcome.note, outcome.remembers
        same = self._outcomes.get(key)
        if same is not None:
            teller = same if same.probability >= outcome.probability else outcome
            outcome = msgspec.structs.replace(teller, probability=same.probability + outcome.probability)
        self._outcomes[key] = outcome

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
                branch.note(at.where, told, rule.comment or self._why(rule))
                noted = True
            if isinstance(expression, (MarkOr, MarkXor, Remember, RecentSet)):
                doubt = self._set_aside(expression, branch, at.place)
                continue
            return ways + self._act(at, rule, expression, branch)
        if doubt:
            branch.note(at.where, self._matcher.told(rule, branch, at.place, at.table), rule.comment)
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
        drawn, ways = self._look_up(at, e, branch)
        for out, element, data in drawn:
            out.note(at.where, element, rule.comment)
            ways += self._verdict(at, data, out)
        return ways

    def _dnat_map(self, at: _At, rule: Rule, e: DnatMap, branch: Branch) -> _Ways:
        drawn, ways = self._look_up(at, e, branch)
        for out, element, data in drawn:
            if not isinstance(data, tuple):
                ways.append((_unsupported(f"the map {e.map} holds no address and port"), out))
                continue
            out.note(at.where, f"dnat to {element}", rule.comment or self._name_of(data[0]))
            ways.append((_rewrite(at.place, out, *data), out))
        return ways

    def _look_up(
        self, at: _At, e: VerdictMap | DnatMap, branch: Branch
    ) -> tuple[list[tuple[Branch, str, object]], _Ways]:
        """The elements that the key may fall on, each with a branch of its own; and the ways that go on without."""
        elements = self._index.elements(at.table, e.map)
        if elements is None:
            branch.note(at.where, brief(e))
            return [], [(_unsupported(f"the map {e.map} of table {at.table.name} is not there"), branch)]
        try:
            draws = list(self._matcher.draws(e.key, branch, at.place))
        except NotKnown as error:
            branch.note(at.where, brief(e))
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
            out.note(at.where, f"draw {number} of {count}: goto {name}", rule.comment)
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
