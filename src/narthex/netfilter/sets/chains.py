"""Evaluation of rules and chains for sets of packets: all parts that rules treat differently, with exact probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any

from narthex.model import Disposition, family_of
from narthex.netfilter import ast
from narthex.netfilter.describe import describe
from narthex.netfilter.sets.asked import LINKS, AskedByChains
from narthex.netfilter.sets.branch import Continuation, PacketEnd, SetBranch, WalkPoint
from narthex.netfilter.sets.conditions import conditions
from narthex.netfilter.sets.matches import SetMatcher, list_name
from narthex.netfilter.sets.probabilities import read_probability, share
from narthex.netfilter.sets.space import DADDR, DPORT, LINK, SADDR, NotInterpreted, PacketSpace
from narthex.netfilter.sets.values import ValueSet, span, values
from narthex.netfilter.walk.lookup import RulesetIndex
from narthex.netfilter.walk.state import KernelObjects

SetResults = list[tuple[Continuation | PacketEnd, SetBranch]]

_NEXT, _RETURN, _ACCEPT = Continuation.NEXT, Continuation.RETURN, Continuation.ACCEPT
_NFT_JUMPS, _LEGACY_JUMPS = 16, 100
_U32 = 0xFFFFFFFF
_KEYED = 16
"""Number of rules for one address each from which a chain is split by its addresses at once."""
_SILENT = frozenset((ast.Counter, ast.IgnoredStatement))
_RANDOM = frozenset((ast.RandomMatch, ast.EveryNth))
_DROPPED, _REJECTED = PacketEnd(Disposition.DROPPED), PacketEnd(Disposition.REJECTED)
_DESTINATION_HOOKS = ("prerouting", "output")
THIS_NODE = "this node"
"""The destination of redirected packets on a node with several addresses."""


class _ChainRules:
    """The rules of a chain, and which of them packets for one address or port can meet."""

    def __init__(self, chain: ast.Chain, space: PacketSpace) -> None:
        self.rules = tuple(chain.rules)
        self._all = range(len(self.rules))
        self._by_address: dict[int, list[int]] = {}
        self._by_port: dict[int, list[int]] = {}
        self._unkeyed: list[int] = []
        self._keyed = False
        if len(self.rules) >= _KEYED:
            self._sort(space)

    def _sort(self, space: PacketSpace) -> None:
        for number, rule in enumerate(self.rules):
            address, port = _keys(rule, space)
            if address is not None:
                self._by_address.setdefault(address, []).append(number)
            elif port is not None:
                self._by_port.setdefault(port, []).append(number)
            else:
                self._unkeyed.append(number)
        self._addresses = values(*self._by_address)
        self._ports = values(*self._by_port)
        self._keyed = len(self._by_address) + len(self._by_port) >= _KEYED

    def split(self, branch: SetBranch) -> Iterable[tuple[Sequence[int], SetBranch]]:
        """Split a branch into parts, each with the numbers of the rules that it can meet, in order."""
        return self._split(branch) if self._keyed else ((self._all, branch),)

    def _split(self, branch: SetBranch) -> Iterator[tuple[Sequence[int], SetBranch]]:
        for by_address, part in self._parts(branch, DADDR, self._addresses, self._by_address):
            for by_port, smaller in self._parts(part, DPORT, self._ports, self._by_port):
                yield sorted((*self._unkeyed, *by_address, *by_port)), smaller

    @staticmethod
    def _parts(
        branch: SetBranch, field: int, keys: ValueSet, numbers: dict[int, list[int]]
    ) -> Iterable[tuple[Sequence[int], SetBranch]]:
        have = branch.header[field]
        if field == DADDR and branch.is_vague:
            yield [each for address, held in numbers.items() if address in have for each in held], branch
            return
        if have.size == 1:
            yield numbers.get(have.first, ()), branch
            return
        inside = have & keys
        for first, last in inside.spans:
            for value in range(first, last + 1):
                yield numbers[value], branch.within(field, ValueSet(((value, value),)))
        rest = have - keys if inside else have
        if rest:
            yield (), branch.within(field, rest) if inside else branch


def _keys(rule: ast.Rule, space: PacketSpace) -> tuple[int | None, int | None]:
    """Return the single destination address and port without which a rule does nothing to a packet."""
    address = port = None
    for each in conditions(rule):
        if isinstance(each, ast.Compare) and not each.negate and len(each.values) == 1:
            value = each.values[0]
            if each.field is ast.Field.DADDR:
                try:
                    address = space.network(str(value)).single
                except NotInterpreted:
                    continue
            elif each.field is ast.Field.DPORT and isinstance(value, int):
                port = value
    return address, port


class SetChains:
    """Evaluates chains for sets of packets of one family."""

    def __init__(self, space: PacketSpace, index: RulesetIndex, objects: KernelObjects) -> None:
        self._space = space
        self._matcher = SetMatcher(space, index, objects)
        self._answers = self._matcher.answers
        self._statements: dict[type, Callable[[_Position, Any, SetBranch], SetResults]] = {
            **dict.fromkeys((ast.Jump, ast.Goto), self._call),
            **dict.fromkeys(_FINAL, self._verdict),
            **dict.fromkeys((ast.MarkOr, ast.MarkXor, ast.SetMark, ast.CopyMark), self._mark),
            **dict.fromkeys((ast.RandomGoto, ast.RandomMap), self._random),
            **dict.fromkeys((ast.UpdateSet, ast.RecentSet), self._remember),
            **dict.fromkeys((ast.Masquerade, ast.Snat), self._source),
            **dict.fromkeys(_SILENT, _unchanged),
            ast.Dnat: self._dnat,
            ast.VerdictMap: self._verdict_map,
            ast.DnatMap: self._dnat_map,
            ast.InlineVerdictMap: self._arms,
            ast.NoTrack: self._untracked,
            ast.Redirect: self._redirect,
        }
        """By type of statement. Found by type, they take a tenth less time than a row of `isinstance`."""
        self._rules: dict[tuple[int, str], _ChainRules] = {}
        self._addresses: dict[str, ValueSet] = {}
        self._known: dict[tuple[object, ...], tuple[Fraction, SetResults]] = {}
        self.asked = AskedByChains(lambda table, chain: self._rules_of(table, chain).rules)
        """What chains ask for."""
        self.rounding = Fraction(0)
        """The largest difference between a probability that the kernel applies and the 1/n that it stands for."""

    def forget(self) -> None:
        """Drop the results of chains, which are those of single destinations."""
        self._known.clear()
        self._matcher.forget()

    def base(self, point: WalkPoint, table: ast.Table, chain: ast.Chain, branch: SetBranch) -> SetResults:
        """Return the results of a base chain. A result that is no `PacketEnd` passes it."""
        assert chain.hook is not None
        results = self._chain(point, table, chain, branch, (), 0)
        if chain.hook.policy != "drop":
            return results
        return [(_DROPPED if how in (_NEXT, _RETURN) else how, out) for how, out in results]

    def _chain(
        self,
        point: WalkPoint,
        table: ast.Table,
        chain: ast.Chain,
        branch: SetBranch,
        path: tuple[str, ...],
        depth: int,
        *,
        known: bool = False,
    ) -> SetResults:
        """Return the results of a chain. `known`: a chain that leads to it remembers its own."""
        limit = _LEGACY_JUMPS if table.legacy else _NFT_JUMPS
        if chain.name in path or depth > limit:
            why = "calls itself" if chain.name in path else f"is called through more than {limit} jumps"
            return [(_undecided(f"{point.hook} {table.name} {chain.name}: the chain {why}"), branch)]
        held = self._rules_of(table, chain)
        at = _Position(point, table, chain.name, (*path, chain.name), depth, known=known)
        results: SetResults = []
        rules = held.rules
        for numbers, part in held.split(branch):
            present = [part]
            for number in numbers:
                present = self._met(at, rules[number], present, results)
                if not present:
                    break
            results += [(_NEXT, out) for out in present]
        return results

    def _called(self, at: _Position, chain: ast.Chain, branch: SetBranch, depth: int) -> SetResults:
        """Return the results of a chain that a rule calls.

        Packets that arrive and packets of this node meet the same chains of Services. What is known for the former holds for the
        latter, unless a rule asks for links: that saves a fifth of the time. The outermost chain that packets for one destination meet
        is remembered, and not those that it calls, which packets for one destination seldom meet twice.
        """
        box = branch.box
        if at.known or branch.daddr is not None or box[DADDR].size != 1 or self.asked.of(at.table, chain) & LINKS:
            return self._chain(at.point, at.table, chain, branch, at.path, depth, known=at.known)
        destination = at.point.hook in _DESTINATION_HOOKS or at.point.hook
        key = (
            id(at.table),
            chain.name,
            destination,
            depth,
            box[:LINK],
            box[SADDR],
            branch.state,
            branch.choices,
            branch.remembers,
        )
        known = self._known.get(key)
        if known is None:
            made_now = self._chain(at.point, at.table, chain, branch, at.path, depth, known=True)
            self._known[key] = branch.probability, made_now
            return made_now
        before, results = known
        scale = branch.probability / before if before is not branch.probability else None
        link = box[LINK]
        found: SetResults = []
        for how, out in results:
            made = out.copy()
            made.box = (*out.box[:LINK], link, out.box[SADDR])
            if scale is not None:
                made.probability = out.probability * scale
            found.append((how, made))
        return found

    def _rules_of(self, table: ast.Table, chain: ast.Chain) -> _ChainRules:
        known = self._rules.get((id(table), chain.name))
        if known is None:
            known = self._rules[id(table), chain.name] = _ChainRules(chain, self._space)
        return known

    def _met(self, at: _Position, rule: ast.Rule, branches: list[SetBranch], results: SetResults) -> list[SetBranch]:
        """Apply a rule to branches: add what leaves the chain to the results, and return what goes on to the next rule."""
        ongoing: list[SetBranch] = []
        for branch in branches:
            self._rule(at, rule.expressions, branch, ongoing, results)
        return ongoing

    def _rule(
        self,
        at: _Position,
        expressions: tuple[ast.Expression, ...],
        branch: SetBranch,
        ongoing: list[SetBranch],
        left: SetResults,
    ) -> None:
        """Apply a rule to a branch: add what goes on to the next rule to `ongoing`, and what leaves the chain to `left`."""
        present: list[tuple[str, SetBranch]] = [("", branch)]
        for position, expression in enumerate(expressions):
            kind = type(expression)
            answer = self._answers.get(kind)
            if answer is not None:
                matched: list[tuple[str, SetBranch]] = []
                for doubt, part in present:
                    for found, smaller in answer(expression, part, at.point, at.table):
                        if found is False:
                            ongoing.append(smaller)
                        else:
                            matched.append((doubt if found is True else doubt or str(found), smaller))
                if not matched:
                    return
                present = matched
            elif kind in _RANDOM:
                probability = self._probability(expression)
                if probability != 1:
                    rest = share(probability.denominator - probability.numerator, probability.denominator)
                    ongoing += [part.taking(rest) for _, part in present]
                    present = [(doubt, part.taking(probability)) for doubt, part in present] if probability else []
                if not present:
                    return
            elif kind not in _SILENT:
                for doubt, part in present:
                    self._from(at, expressions[position:], doubt, part, ongoing, left)
                return
        ongoing += [part for _, part in present]

    def _from(
        self,
        at: _Position,
        rest: tuple[ast.Expression, ...],
        doubt: str,
        branch: SetBranch,
        ongoing: list[SetBranch],
        left: SetResults,
    ) -> None:
        """Execute the statements of a rule for packets that match it, or with a doubt whether they do."""
        if doubt and not all(type(each) in _SILENT for each in rest):
            left.append((_undecided(f"{at.where}: {doubt}"), branch))
            return
        present = [branch]
        for position, each in enumerate(rest):
            kind = type(each)
            if kind in self._answers or kind in _RANDOM:
                # nft allows matches behind statements: those before them have acted, and the others ask.
                for one in present:
                    self._rule(at, rest[position:], one, ongoing, left)
                return
            execute = self._statements.get(kind, _not_interpreted)
            acted: list[SetBranch] = []
            for one in present:
                try:
                    results = execute(at, each, one)
                except NotInterpreted as error:
                    left.append((_undecided(f"{at.where}: {error}"), one))
                    continue
                for how, out in results:
                    if how is _NEXT:
                        acted.append(out)
                    else:
                        # A return from here continues in the calling chain.
                        left.append((_NEXT if how is _RETURN else how, out))
            present = acted
            if kind in _PATH or not present:
                break
        ongoing += present

    def _probability(self, match: ast.Expression) -> Fraction:
        if isinstance(match, ast.EveryNth):
            return share(1, max(match.every, 1))
        assert isinstance(match, ast.RandomMatch)
        probability, rounding = read_probability(match.probability)
        self.rounding = max(self.rounding, abs(rounding))
        return probability

    # ---- statements ------------------------------------------------------------------------------------------------------------

    def _mark(self, _at: _Position, e: ast.Expression, branch: SetBranch) -> SetResults:
        return [(_NEXT, _marked(e, branch))]

    def _dnat(self, at: _Position, e: ast.Dnat, branch: SetBranch) -> SetResults:
        return self._rewrite(at, branch, e.address, e.port)

    def _remember(self, _at: _Position, e: ast.UpdateSet | ast.RecentSet, branch: SetBranch) -> SetResults:
        made = branch.copy()
        name = list_name(e.set, e.key) if isinstance(e, ast.UpdateSet) else e.name
        made.remembers = tuple(dict.fromkeys((*branch.remembers, name)))
        return [(_NEXT, made)]

    def _untracked(self, _at: _Position, _e: ast.NoTrack, branch: SetBranch) -> SetResults:
        made = branch.copy()
        made.tracked = False
        return [(_NEXT, made)]

    def _call(self, at: _Position, e: ast.Jump | ast.Goto, branch: SetBranch) -> SetResults:
        chain = at.table.chains.get(e.chain)
        if chain is None:
            why = f"chain {e.chain} of table {at.table.name} is not in the input"
            return [(_undecided(f"{at.where}: {why}"), branch)]
        if type(e) is ast.Jump:
            return self._called(at, chain, branch, at.depth + 1)
        results = self._called(at, chain, branch, at.depth)
        return [(_RETURN if how is _NEXT else how, out) for how, out in results]

    def _verdict(self, at: _Position, verdict: ast.Verdict, branch: SetBranch) -> SetResults:
        if isinstance(verdict, (ast.Jump, ast.Goto)):
            return self._call(at, verdict, branch)
        return [(_FINAL[type(verdict)], branch)]

    def _verdict_map(self, at: _Position, e: ast.VerdictMap, branch: SetBranch) -> SetResults:
        results: SetResults = []
        for slots, data, part in self._matcher.look_up(e.key, e.map, branch, at.point, at.table):
            out = _drawn(e.key, slots, part)
            if not data:
                results.append((_NEXT, out))
            elif isinstance(data[0], _VERDICTS):
                results += self._verdict(at, data[0], out)
            else:
                raise NotInterpreted(f"the map {e.map} has no verdict")
        return results

    def _dnat_map(self, at: _Position, e: ast.DnatMap, branch: SetBranch) -> SetResults:
        results: SetResults = []
        for slots, data, part in self._matcher.look_up(e.key, e.map, branch, at.point, at.table):
            out = _drawn(e.key, slots, part)
            if not data:
                results.append((_NEXT, out))
            elif isinstance(data[0], tuple):
                results += self._rewrite(at, out, *data[0])
            else:
                raise NotInterpreted(f"the map {e.map} has no address and port")
        return results

    def _random(self, at: _Position, e: ast.RandomGoto | ast.RandomMap, branch: SetBranch) -> SetResults:
        if isinstance(e, ast.RandomGoto):
            mod = len(e.chains)
            arms = [(number, number, ast.Goto(name)) for number, name in enumerate(e.chains)]
            return [
                result
                for first, last, goto in arms
                for result in self._verdict(at, goto, branch.taking(share(last - first + 1, mod)))
            ]
        if e.by is not None:
            raise NotInterpreted("a hash of the packet selects the endpoint, which splits no set of packets")
        results: SetResults = []
        left = e.mod
        for first, last, what in e.arms:
            out = branch.taking(share(last - first + 1, e.mod))
            left -= last - first + 1
            if isinstance(what, ast.Dnat):
                results += self._rewrite(at, out, what.address, what.port)
            else:
                results += self._verdict(at, what, out)
        return results + ([(_NEXT, branch.taking(share(left, e.mod)))] if left else [])

    def _arms(self, at: _Position, e: ast.InlineVerdictMap, branch: SetBranch) -> SetResults:
        results: SetResults = []
        present = [branch]
        for matches, verdict in e.arms:
            left: list[SetBranch] = []
            for one in present:
                for answer, part in self._matcher.all_of(matches, one, at.point, at.table):
                    if answer is True:
                        results += self._verdict(at, verdict, part)
                    elif answer is False:
                        left.append(part)
                    else:
                        results.append((_undecided(f"{at.where}: {answer}"), part))
            present = left
        return results + [(_NEXT, part) for part in present]

    def _source(self, at: _Position, e: ast.Masquerade | ast.Snat, branch: SetBranch) -> SetResults:
        hooks = ("postrouting",) if isinstance(e, ast.Masquerade) else ("postrouting", "input")
        if at.point.hook not in hooks:
            raise NotInterpreted(f"the source is rewritten in {at.point.hook}")
        made = branch.copy()
        made.masquerade = True
        if isinstance(e, ast.Snat) and e.first == e.last:
            made.saddr = self._space.network(e.first)
        return [(_ACCEPT, made)]

    def _redirect(self, at: _Position, e: ast.Redirect, branch: SetBranch) -> SetResults:
        """Rewrite the destination to the node itself: to loopback if it sent the packet, else to an address of the link of arrival."""
        space, port = self._space, e.port
        if at.point.hook == "output":
            return self._rewrite(at, branch, "127.0.0.1" if "." in space.family.loopback else "::1", port)
        if not space.node:
            raise NotInterpreted("the packet is redirected, and the node has no address of this family")
        if space.node.single is not None:
            return self._rewrite(at, branch, space.address_text(space.node.single), port)
        if at.point.hook not in _DESTINATION_HOOKS:
            raise NotInterpreted(f"the destination is rewritten in {at.point.hook}")
        ports = span(port, port) if port is not None else None
        header = branch.header
        if header[DADDR] & space.node and (ports is None or header[DPORT] & ports):
            raise NotInterpreted("whether the redirection changes the destination depends on the link of arrival")
        return [(_ACCEPT, _sent(branch, space.node, ports, (THIS_NODE, port or 0), rewritten=True))]

    def _rewrite(self, at: _Position, branch: SetBranch, address: str, port: int | None) -> SetResults:
        """Rewrite the destination. Packets that have it already are kept apart: conntrack sees no rewriting in them."""
        if at.point.hook not in _DESTINATION_HOOKS:
            raise NotInterpreted(f"the destination is rewritten in {at.point.hook}")
        if not address or family_of(address) is not self._space.family:
            raise NotInterpreted(f"the destination is rewritten to {address or 'a port alone'}")
        target = self._addresses.get(address)
        if target is None:
            target = self._addresses[address] = self._space.network(address)
        ports = span(port, port) if port is not None else None
        header = branch.header
        same = header[DADDR] & target
        if same.size:
            same_port = header[DPORT] & ports if ports is not None else header[DPORT]
            if same_port.size:
                return self._partly(branch, target, ports, (address, port or 0), same_port)
        return [(_ACCEPT, _sent(branch, target, ports, (address, port or 0), rewritten=True))]

    @staticmethod
    def _partly(
        branch: SetBranch, target: ValueSet, ports: ValueSet | None, to: tuple[str, int], same_port: ValueSet
    ) -> SetResults:
        """Return the results of a rewriting that leaves some packets as they are."""
        header = branch.header
        found: SetResults = []
        others = header[DADDR] - target
        if others.size:
            away = branch.with_header((others, *header[1:]))
            found.append((_ACCEPT, _sent(away, target, ports, to, rewritten=True)))
        here = branch.with_header((target, *header[1:]))
        other_ports = header[DPORT] - same_port
        if other_ports.size:
            moved = here.with_header((target, header[1], other_ports, *header[3:]))
            found.append((_ACCEPT, _sent(moved, target, ports, to, rewritten=True)))
        kept = here.with_header((target, header[1], same_port, *header[3:]))
        return [*found, (_ACCEPT, _sent(kept, target, ports, to, rewritten=False))]


class _Position:
    """The chain that is evaluated, and how it was called."""

    __slots__ = ("chain", "depth", "known", "path", "point", "table")

    def __init__(
        self, point: WalkPoint, table: ast.Table, chain: str, path: tuple[str, ...], depth: int, *, known: bool
    ) -> None:
        self.point, self.table, self.chain, self.path, self.depth = point, table, chain, path, depth
        self.known = known

    @property
    def where(self) -> str:
        """The hook, the table, and the chain, for notes."""
        return f"{self.point.hook} {self.table.name} {self.chain}"


_VERDICTS = (ast.Jump, ast.Goto, ast.Return, ast.Accept, ast.DropPacket, ast.RejectPacket)
_FINAL: dict[type, Continuation | PacketEnd] = {
    ast.Return: _RETURN,
    ast.Accept: _ACCEPT,
    ast.DropPacket: _DROPPED,
    ast.RejectPacket: _REJECTED,
}
_PATH = frozenset((*_VERDICTS, ast.Dnat, ast.VerdictMap, ast.DnatMap, ast.RandomGoto, ast.RandomMap, ast.InlineVerdictMap,
                   ast.Masquerade, ast.Snat))  # fmt: skip
"""Statements that determine the path, after which nothing of a rule runs."""


def _unchanged(_at: _Position, _e: ast.Expression, branch: SetBranch) -> SetResults:
    return [(_NEXT, branch)]


def _not_interpreted(_at: _Position, e: ast.Expression, _branch: SetBranch) -> SetResults:
    raise NotInterpreted(f"not interpreted: {describe(e) or type(e).__name__}")


def _marked(e: ast.Expression, branch: SetBranch) -> SetBranch:
    made = branch.copy()
    if isinstance(e, ast.MarkOr):
        made.mark = (branch.mark | e.bits) & _U32
    elif isinstance(e, ast.MarkXor):
        made.mark = (branch.mark ^ e.bits) & _U32
    elif isinstance(e, ast.SetMark) and e.connection:
        made.connection_mark = (branch.connection_mark & ~e.mask ^ e.value) & _U32
    elif isinstance(e, ast.SetMark):
        made.mark = (branch.mark & ~e.mask ^ e.value) & _U32
    elif isinstance(e, ast.CopyMark) and branch.tracked:
        if e.to_connection:
            made.connection_mark = (branch.connection_mark & ~e.to_mask ^ branch.mark & e.from_mask) & _U32
        else:
            made.mark = (branch.mark & ~e.to_mask ^ branch.connection_mark & e.from_mask) & _U32
    return made


def _sent(
    branch: SetBranch, target: ValueSet, ports: ValueSet | None, to: tuple[str, int], *, rewritten: bool
) -> SetBranch:
    made = branch.sent(target, ports, to)
    made.dnat, made.rewritten = True, rewritten
    return made


def _drawn(key: ast.Key, slots: ValueSet | None, branch: SetBranch) -> SetBranch:
    """Return the branch with the probability that one of the slots is drawn."""
    if slots is None:
        return branch
    mod = next((part.mod for part in key if isinstance(part, ast.Slot)), 1)
    return branch.taking(share(slots.size, mod))


def _undecided(note: str) -> PacketEnd:
    return PacketEnd(Disposition.UNSUPPORTED, note=note)
