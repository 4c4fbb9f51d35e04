"""Evaluation of rules and chains for sets of packets: all parts that rules treat differently, with exact probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

from narthex.model import Disposition, family_of
from narthex.netfilter import ast
from narthex.netfilter.describe import describe
from narthex.netfilter.sets.branch import Continuation, PacketEnd, SetBranch, WalkPoint
from narthex.netfilter.sets.matches import SetMatcher, list_name
from narthex.netfilter.sets.probabilities import read_probability, share
from narthex.netfilter.sets.space import DADDR, DPORT, LINK, SADDR, NotInterpreted, PacketSpace
from narthex.netfilter.sets.tracked import conditions
from narthex.netfilter.sets.values import ValueSet, span, union, values
from narthex.netfilter.walk.lookup import RulesetIndex
from narthex.netfilter.walk.state import KernelObjects

SetResults = list[tuple[Continuation | PacketEnd, SetBranch]]

_NEXT, _RETURN, _ACCEPT = Continuation.NEXT, Continuation.RETURN, Continuation.ACCEPT
_NFT_JUMPS, _LEGACY_JUMPS = 16, 100
_U32 = 0xFFFFFFFF
_KEYED = 16
"""Number of rules for one address each from which a chain is split by its addresses at once."""
_SILENT = (ast.Counter, ast.IgnoredStatement)
_DROPPED, _REJECTED = PacketEnd(Disposition.DROPPED), PacketEnd(Disposition.REJECTED)
_DESTINATION_HOOKS = ("prerouting", "output")
THIS_NODE = "this node"
"""The destination of redirected packets on a node with several addresses."""


class _ChainRules:
    """The rules of a chain, and which of them packets for one address or port can meet."""

    def __init__(self, chain: ast.Chain, space: PacketSpace) -> None:
        self.rules = tuple(chain.rules)
        self._by_address: dict[int, list[int]] = {}
        self._by_port: dict[int, list[int]] = {}
        self._unkeyed: list[int] = []
        for number, rule in enumerate(self.rules):
            address, port = _keys(rule, space)
            if address is not None:
                self._by_address.setdefault(address, []).append(number)
            elif port is not None:
                self._by_port.setdefault(port, []).append(number)
            else:
                self._unkeyed.append(number)
        self._addresses = union(values(each) for each in self._by_address)
        self._ports = union(values(each) for each in self._by_port)
        self._all = range(len(self.rules))
        self._keyed = len(self._by_address) + len(self._by_port) >= _KEYED

    def split(self, branch: SetBranch) -> Iterable[tuple[Sequence[int], SetBranch]]:
        """Split a branch into parts, each with the numbers of the rules that it can meet, in order."""
        if not self._keyed:
            yield self._all, branch
            return
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
        self._rules: dict[tuple[int, str], _ChainRules] = {}
        self._addresses: dict[str, ValueSet] = {}
        self._known: dict[tuple[object, ...], tuple[Fraction, SetResults]] = {}
        self._linked: dict[tuple[int, str], bool] = {}
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
        self, point: WalkPoint, table: ast.Table, chain: ast.Chain, branch: SetBranch, path: tuple[str, ...], depth: int
    ) -> SetResults:
        limit = _LEGACY_JUMPS if table.legacy else _NFT_JUMPS
        if chain.name in path or depth > limit:
            why = "calls itself" if chain.name in path else f"is called through more than {limit} jumps"
            return [(_undecided(f"{point.hook} {table.name} {chain.name}: the chain {why}"), branch)]
        known = self._rules_of(table, chain)
        at = _Position(point, table, chain.name, (*path, chain.name), depth)
        results: SetResults = []
        rules = known.rules
        for numbers, part in known.split(branch):
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
        latter, unless a rule asks for links.
        """
        box = branch.box
        if branch.daddr is not None or box[DADDR].size != 1 or self._asks_links(at.table, chain):
            return self._chain(at.point, at.table, chain, branch, at.path, depth)
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
            made_now = self._chain(at.point, at.table, chain, branch, at.path, depth)
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

    def _asks_links(self, table: ast.Table, chain: ast.Chain) -> bool:
        """Return True if what a chain does may depend on links, or on the hook."""
        key = id(table), chain.name
        known = self._linked.get(key)
        if known is None:
            self._linked[key] = False  # for a chain that calls itself
            known = self._linked[key] = any(
                self._asks_link(each, table) for rule in self._rules_of(table, chain).rules for each in rule.expressions
            )
        return known

    def _asks_link(self, e: ast.Expression, table: ast.Table) -> bool:
        if isinstance(e, (ast.UndecidableMatch, ast.Redirect, ast.RedirectRange, ast.AnyOf, ast.InlineVerdictMap)):
            return True
        if getattr(e, "field", None) in _LINKS or not _LINKS.isdisjoint(getattr(e, "key", ())):
            return True
        return any(self._asks_links(table, table.chains[name]) for name in called(e, table) if name in table.chains)

    def _rules_of(self, table: ast.Table, chain: ast.Chain) -> _ChainRules:
        known = self._rules.get((id(table), chain.name))
        if known is None:
            known = self._rules[id(table), chain.name] = _ChainRules(chain, self._space)
        return known

    def _met(self, at: _Position, rule: ast.Rule, branches: list[SetBranch], results: SetResults) -> list[SetBranch]:
        """Apply a rule to branches: add what leaves the chain to the results, and return what goes on to the next rule."""
        ongoing: list[SetBranch] = []
        for branch in branches:
            for how, out in self._rule(at, rule, branch):
                if how is _NEXT:
                    ongoing.append(out)
                else:
                    # A return from here continues in the calling chain.
                    results.append((_NEXT if how is _RETURN else how, out))
        return ongoing

    def _rule(self, at: _Position, rule: ast.Rule, branch: SetBranch) -> SetResults:
        results: SetResults = []
        present: list[tuple[str, SetBranch]] = [("", branch)]
        expressions = rule.expressions
        for position, expression in enumerate(expressions):
            kind = type(expression)
            answer = self._answers.get(kind)
            if answer is not None:
                matched: list[tuple[str, SetBranch]] = []
                for doubt, part in present:
                    for found, smaller in answer(expression, part, at.point, at.table):
                        if found is False:
                            results.append((_NEXT, smaller))
                        else:
                            matched.append((doubt if found is True else doubt or str(found), smaller))
                if not matched:
                    return results
                present = matched
            elif kind is ast.RandomMatch or kind is ast.EveryNth:
                probability = self._probability(expression)
                if probability != 1:
                    rest = share(probability.denominator - probability.numerator, probability.denominator)
                    results += [(_NEXT, part.taking(rest)) for _, part in present]
                    present = [(doubt, part.taking(probability)) for doubt, part in present] if probability else []
                if not present:
                    return results
            elif kind in (ast.Counter, ast.IgnoredStatement):
                continue
            else:
                return results + self._from(at, expressions[position:], present)
        return results + [(_NEXT, part) for _, part in present]

    def _from(
        self, at: _Position, rest: tuple[ast.Expression, ...], present: list[tuple[str, SetBranch]]
    ) -> SetResults:
        """Execute the statements of a rule for the packets that match it, or that may match it."""
        results: SetResults = []
        silent = all(isinstance(each, _SILENT) for each in rest)
        for doubt, part in present:
            if doubt and not silent:
                results.append((_undecided(f"{at.where}: {doubt}"), part))
                continue
            ongoing = [part]
            for position, each in enumerate(rest):
                if type(each) in self._answers or isinstance(each, (ast.RandomMatch, ast.EveryNth)):
                    # nft allows matches behind statements: those before them have acted, and the others ask.
                    results += [found for one in ongoing for found in self._rule(at, ast.Rule(rest[position:]), one)]
                    ongoing = []
                    break
                done: SetResults = []
                for one in ongoing:
                    try:
                        done += self._execute(at, each, one)
                    except NotInterpreted as error:
                        done.append((_undecided(f"{at.where}: {error}"), one))
                ongoing = [out for how, out in done if how is _NEXT]
                results += [(how, out) for how, out in done if how is not _NEXT]
                if isinstance(each, _PATH) or not ongoing:
                    break
            results += [(_NEXT, out) for out in ongoing]
        return results

    def _probability(self, match: ast.Expression) -> Fraction:
        if isinstance(match, ast.EveryNth):
            return share(1, max(match.every, 1))
        assert isinstance(match, ast.RandomMatch)
        probability, rounding = read_probability(match.probability)
        self.rounding = max(self.rounding, abs(rounding))
        return probability

    # ---- statements ------------------------------------------------------------------------------------------------------------

    def _execute(self, at: _Position, e: ast.Expression, branch: SetBranch) -> SetResults:
        if isinstance(e, _VERDICTS):
            return self._verdict(at, e, branch)
        if isinstance(e, _MARKS):
            return [(_NEXT, _marked(e, branch))]
        if isinstance(e, ast.Dnat):
            return self._rewrite(at, branch, e.address, e.port)
        if isinstance(e, ast.VerdictMap):
            return self._verdict_map(at, e, branch)
        if isinstance(e, ast.DnatMap):
            return self._dnat_map(at, e, branch)
        if isinstance(e, (ast.RandomGoto, ast.RandomMap)):
            return self._random(at, e, branch)
        if isinstance(e, ast.InlineVerdictMap):
            return self._arms(at, e, branch)
        if isinstance(e, (ast.UpdateSet, ast.RecentSet)):
            made = branch.copy()
            name = list_name(e.set, e.key) if isinstance(e, ast.UpdateSet) else e.name
            made.remembers = tuple(dict.fromkeys((*branch.remembers, name)))
            return [(_NEXT, made)]
        if isinstance(e, (ast.Masquerade, ast.Snat)):
            return self._source(at, e, branch)
        if isinstance(e, ast.NoTrack):
            made = branch.copy()
            made.tracked = False
            return [(_NEXT, made)]
        if isinstance(e, _SILENT):
            return [(_NEXT, branch)]
        if isinstance(e, ast.Redirect):
            return self._redirect(at, branch, e.port)
        raise NotInterpreted(f"not interpreted: {describe(e) or type(e).__name__}")

    def _verdict(self, at: _Position, verdict: ast.Verdict, branch: SetBranch) -> SetResults:
        if isinstance(verdict, (ast.Jump, ast.Goto)):
            chain = at.table.chains.get(verdict.chain)
            if chain is None:
                why = f"chain {verdict.chain} of table {at.table.name} is not in the input"
                return [(_undecided(f"{at.where}: {why}"), branch)]
            jump = isinstance(verdict, ast.Jump)
            results = self._called(at, chain, branch, at.depth + jump)
            return results if jump else [(_RETURN if how is _NEXT else how, out) for how, out in results]
        if isinstance(verdict, ast.Return):
            return [(_RETURN, branch)]
        if isinstance(verdict, ast.Accept):
            return [(_ACCEPT, branch)]
        return [(_DROPPED if isinstance(verdict, ast.DropPacket) else _REJECTED, branch)]

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

    def _redirect(self, at: _Position, branch: SetBranch, port: int | None) -> SetResults:
        """Rewrite the destination to the node itself: to loopback if it sent the packet, else to an address of the link of arrival."""
        space = self._space
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

    __slots__ = ("chain", "depth", "path", "point", "table")

    def __init__(self, point: WalkPoint, table: ast.Table, chain: str, path: tuple[str, ...], depth: int) -> None:
        self.point, self.table, self.chain, self.path, self.depth = point, table, chain, path, depth

    @property
    def where(self) -> str:
        """The hook, the table, and the chain, for notes."""
        return f"{self.point.hook} {self.table.name} {self.chain}"


_LINKS = frozenset((ast.Field.IIFNAME, ast.Field.OIFNAME))
_VERDICTS = (ast.Jump, ast.Goto, ast.Return, ast.Accept, ast.DropPacket, ast.RejectPacket)
_MARKS = (ast.MarkOr, ast.MarkXor, ast.SetMark, ast.CopyMark)
_PATH = (*_VERDICTS, ast.Dnat, ast.VerdictMap, ast.DnatMap, ast.RandomGoto, ast.RandomMap, ast.InlineVerdictMap,
         ast.Masquerade, ast.Snat)  # fmt: skip
"""Statements that determine the path, after which nothing of a rule runs."""


def called(e: ast.Expression, table: ast.Table) -> Iterator[str]:
    """Yield the chains that a statement may lead to."""
    if isinstance(e, (ast.Jump, ast.Goto)):
        yield e.chain
    elif isinstance(e, ast.RandomGoto):
        yield from e.chains
    elif isinstance(e, ast.RandomMap):
        yield from (what.chain for _, _, what in e.arms if isinstance(what, (ast.Jump, ast.Goto)))
    elif isinstance(e, ast.InlineVerdictMap):
        yield from (what.chain for _, what in e.arms if isinstance(what, (ast.Jump, ast.Goto)))
    elif isinstance(e, ast.VerdictMap):
        held = table.sets.get(e.map)
        yield from (
            data.chain for data in (held.elements.values() if held else ()) if isinstance(data, (ast.Jump, ast.Goto))
        )


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
