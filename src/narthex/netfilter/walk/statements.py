"""Execution of statements: the effect on a branch, and the verdict."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, ClassVar

from narthex.model import Disposition, address_key, family_of
from narthex.netfilter import ast
from narthex.netfilter.describe import describe, describe_element
from narthex.netfilter.walk.lookup import RulesetIndex
from narthex.netfilter.walk.matches import Matcher, ValueNotKnown
from narthex.netfilter.walk.state import ACCEPT, RETURN, Branch, BranchEnd, Continuation, HookPoint
from narthex.netfilter.walk.structure import CHECK_MAPS

NameOf = Callable[[str], str]
"""Returns a name for an address ("pod shop/web-1"), or ""."""

SIDE_EFFECTS = frozenset(
    (
        ast.MarkOr,
        ast.MarkXor,
        ast.SetMark,
        ast.CopyMark,
        ast.NoTrack,
        ast.IgnoredStatement,
        ast.UpdateSet,
        ast.RecentSet,
    )
)
"""Statements that only change the state of the branch and continue with the next one."""

_U32 = 0xFFFFFFFF
_DESTINATION_HOOKS = ("prerouting", "output")
_SOURCE_HOOKS = ("postrouting", "input")
_MAX_CHOICES = 4096


class StatementResult:
    """One result of a statement: a verdict to apply, or a continuation."""

    __slots__ = ("branch", "continuation", "description", "verdict", "why")

    def __init__(
        self,
        branch: Branch,
        verdict: ast.Verdict | None = None,
        continuation: Continuation = None,
        description: str = "",
        why: str = "",
    ) -> None:
        self.branch, self.verdict, self.continuation, self.description, self.why = (
            branch,
            verdict,
            continuation,
            description,
            why,
        )


class StatementExecutor:
    """Executes statements for one packet."""

    DESCRIBED_BY_RESULT: ClassVar[frozenset[type]] = frozenset(
        (ast.VerdictMap, ast.DnatMap, ast.RandomGoto, ast.RandomMap, ast.InlineVerdictMap)
    )
    """Statements whose matching element or arm describes a step better than the rule does."""

    def __init__(self, matcher: Matcher, index: RulesetIndex, name_of: NameOf) -> None:
        self._matcher = matcher
        self._index = index
        self.name_of = name_of
        self._executors: dict[type, Callable[[Any, Branch, HookPoint, ast.Table, str], Iterator[StatementResult]]] = {
            ast.VerdictMap: self._verdict_map,
            ast.DnatMap: self._dnat_map,
            ast.RandomGoto: self._spread,
            ast.RandomMap: self._draw,
            ast.InlineVerdictMap: self._switch,
            ast.DnatRange: self._dnat_range,
            ast.Redirect: self._redirect,
            ast.RedirectRange: self._redirect_range,
            ast.Snat: self._snat,
            ast.Masquerade: self._masquerade,
        }

    def verdict(self, verdict: ast.Verdict, branch: Branch) -> list[tuple[Continuation, Branch]]:
        """Apply a verdict that calls no chain."""
        if isinstance(verdict, ast.Return):
            return [(RETURN, branch)]
        if isinstance(verdict, ast.Accept):
            return [(ACCEPT, branch)]
        if isinstance(verdict, ast.DropPacket):
            return [(BranchEnd(Disposition.DROPPED), branch)]
        return [(BranchEnd(Disposition.REJECTED), branch)]

    def apply_side_effect(self, e: ast.Expression, branch: Branch, point: HookPoint) -> str:
        """Execute a statement of SIDE_EFFECTS. Return the reason if its effect is unknown, else ""."""
        if isinstance(e, ast.MarkOr):
            branch.mark = (branch.mark | e.bits) & _U32
        elif isinstance(e, ast.MarkXor):
            branch.mark = (branch.mark ^ e.bits) & _U32
        elif isinstance(e, ast.CopyMark) and not branch.tracked:
            pass
        elif isinstance(e, ast.SetMark):
            if e.connection:
                branch.connection_mark = (branch.connection_mark & ~e.mask ^ e.value) & _U32
            else:
                branch.mark = (branch.mark & ~e.mask ^ e.value) & _U32
        elif isinstance(e, ast.CopyMark):
            if e.to_connection:
                branch.connection_mark = (branch.connection_mark & ~e.to_mask ^ branch.mark & e.from_mask) & _U32
            else:
                branch.mark = (branch.mark & ~e.to_mask ^ branch.connection_mark & e.from_mask) & _U32
        elif isinstance(e, ast.NoTrack):
            branch.tracked = False
        elif isinstance(e, ast.RecentSet):
            branch.remembers = (*branch.remembers, (e.name, (self._matcher.packet.source,)))
        elif isinstance(e, ast.UpdateSet):
            try:
                key = self._matcher.key(e.key, branch, point)
            except ValueNotKnown as error:
                return str(error)
            if key is not None:
                branch.remembers = (*branch.remembers, (e.set, key))
        return ""

    def act(
        self, e: ast.Expression, branch: Branch, point: HookPoint, table: ast.Table, where: str
    ) -> Iterator[StatementResult]:
        """Execute a statement that determines the path of the packet."""
        if isinstance(e, (ast.Jump, ast.Goto, ast.Return, ast.Accept, ast.DropPacket, ast.RejectPacket)):
            yield StatementResult(branch, e)
            return
        act = self._executors.get(type(e))
        if act is None:
            yield StatementResult(
                branch, continuation=unsupported(f"not understood: {describe(e) or type(e).__name__}")
            )
            return
        yield from act(e, branch, point, table, where)

    # ---- maps and random numbers --------------------------------------------------------------------------------------------

    def _verdict_map(
        self, e: ast.VerdictMap, branch: Branch, point: HookPoint, table: ast.Table, where: str
    ) -> Iterator[StatementResult]:
        for out, element, data, comment in self._look_up(e, branch, point, table, where):
            if isinstance(data, StatementResult):
                yield data
            elif isinstance(data, (ast.Jump, ast.Goto, ast.Return, ast.Accept, ast.DropPacket, ast.RejectPacket)):
                yield StatementResult(out, data, description=element, why=comment)
            else:
                yield StatementResult(
                    out, continuation=unsupported(f"the map {e.map} has no verdict"), description=element
                )

    def _dnat_map(
        self, e: ast.DnatMap, branch: Branch, point: HookPoint, table: ast.Table, where: str
    ) -> Iterator[StatementResult]:
        for out, element, data, _ in self._look_up(e, branch, point, table, where):
            if isinstance(data, StatementResult):
                yield data
            elif not isinstance(data, tuple):
                yield StatementResult(out, continuation=unsupported(f"the map {e.map} has no address and port"))
            else:
                continuation = self.rewrite(point, out, *data)
                yield StatementResult(
                    out, continuation=continuation, description=f"dnat to {element}", why=self.name_of(data[0])
                )

    def _look_up(
        self, e: ast.VerdictMap | ast.DnatMap, branch: Branch, point: HookPoint, table: ast.Table, where: str
    ) -> Iterator[tuple[Branch, str, object, str]]:
        """Yield the elements that the key may select: branch, text, data, and comment. In other cases, data is a StatementResult."""
        elements = self._index.elements(table, e.map)
        description = describe(e)
        if elements is None and self._index.copied and e.map in CHECK_MAPS:
            text = f"the map {e.map} of table {table.name} is not in the input"
            branch.unsure = branch.unsure or text
            branch.suppose(f"{text}; it is assumed to have no element for the packet")
            yield branch, "", StatementResult(branch), ""
            return
        if elements is None or elements.set.unsupported:
            note = f"the map {e.map} of table {table.name} is not in the input"
            if elements is not None:
                note = f"the map {e.map} of table {table.name} is not understood: {elements.set.unsupported}"
            yield branch, "", StatementResult(branch, continuation=unsupported(note), description=description), ""
            return
        try:
            draws = list(self._matcher.draws(e.key, branch, point))
        except ValueNotKnown as error:
            yield (
                branch,
                "",
                StatementResult(branch, continuation=unsupported(f"{where}: {error}"), description=description),
                "",
            )
            return
        left = Fraction(1)
        for share, key in draws:
            element = elements.find(key)
            if element is None:
                continue
            data = elements.data(element)
            # `take` splits the remainder of the branch, so a share of the whole has to be scaled.
            text, comment = describe_element(e.map, element, data), elements.set.comments.get(element, "")
            yield branch.take(share / left), text, data, comment
            left -= share
        if left:
            yield branch, "", StatementResult(branch), ""

    def _spread(
        self, e: ast.RandomGoto, branch: Branch, _place: HookPoint, _table: ast.Table, _where: str
    ) -> Iterator[StatementResult]:
        count = len(e.chains)
        for number, name in enumerate(e.chains):
            out = branch.take(Fraction(1, count - number))
            yield StatementResult(out, ast.Goto(name), description=f"draw {number} of {count}: goto {name}")

    def _draw(
        self, e: ast.RandomMap, branch: Branch, point: HookPoint, _table: ast.Table, _where: str
    ) -> Iterator[StatementResult]:
        left, arms = e.mod, e.arms
        number = self._matcher.hashed(e.by, branch, point) if e.by else None
        if e.by and number is not None:
            number -= e.by.offset
            left, arms = 1, tuple((number, number, what) for low, high, what in arms if low <= number <= high)
        for first, last, what in arms:
            count = last - first + 1
            out = branch.take(Fraction(count, left))
            left -= count
            drawn = str(first) if first == last else f"{first}-{last}"
            description = f"{'hash' if e.by else 'draw'} {drawn} of {e.mod}: {describe(what)}"
            if isinstance(what, ast.Dnat):
                continuation = self.rewrite(point, out, what.address or out.daddr, what.port)
                yield StatementResult(
                    out, continuation=continuation, description=description, why=self.name_of(what.address)
                )
            else:
                yield StatementResult(out, what, description=description)
        if left:
            yield StatementResult(branch)

    def _switch(
        self, e: ast.InlineVerdictMap, branch: Branch, point: HookPoint, table: ast.Table, where: str
    ) -> Iterator[StatementResult]:
        for matches, verdict in e.arms:
            answer = self._matcher.all_of(matches, branch, point, table)
            if answer is False:
                continue
            description = ", ".join((*map(describe, matches), describe(verdict)))
            if answer is True:
                yield StatementResult(branch, verdict, description=description)
                return
            note = f"{where}: {answer}"
            if not branch.doubt:
                yield StatementResult(branch.copy(), continuation=unsupported(note), description=description)
                branch.doubt = note
            yield StatementResult(branch.copy(), verdict, description=description)
        yield StatementResult(branch)

    # ---- NAT -------------------------------------------------------------------------------------------------------

    def _dnat_range(
        self, e: ast.DnatRange, branch: Branch, point: HookPoint, _table: ast.Table, _where: str
    ) -> Iterator[StatementResult]:
        addresses = [branch.daddr]
        if e.first:
            count = address_key(e.last)[1] - address_key(e.first)[1] + 1
            addresses = list(_addresses(e.first, count)) if 0 < count <= _MAX_CHOICES else []
        yield from self._chosen(addresses, e.first_port, e.last_port, branch, point)

    def _chosen(
        self, addresses: list[str], first: int | None, last: int | None, branch: Branch, point: HookPoint
    ) -> Iterator[StatementResult]:
        """Yield a result for each address and port that the kernel may choose, all equally likely over many connections.

        A port in the range is kept (nf_nat_l4proto_unique_tuple).
        """
        ports: list[int | None] = [None]
        if first is not None and last is not None and not first <= branch.dport <= last:
            ports = list(range(first, last + 1))
        count = len(addresses) * len(ports)
        if not 0 < count <= _MAX_CHOICES:
            yield StatementResult(
                branch, continuation=unsupported("the kernel chooses among too many addresses and ports")
            )
            return
        for address in addresses:
            for port in ports:
                out = branch.take(Fraction(1, count))
                count -= 1
                yield StatementResult(out, continuation=self.rewrite(point, out, address, port))

    def _redirect(
        self, e: ast.Redirect, branch: Branch, point: HookPoint, _table: ast.Table, _where: str
    ) -> Iterator[StatementResult]:
        own = self._matcher.own_address(point.hook)
        yield StatementResult(branch, continuation=self.rewrite(point, branch, own, e.port))

    def _redirect_range(
        self, e: ast.RedirectRange, branch: Branch, point: HookPoint, _table: ast.Table, _where: str
    ) -> Iterator[StatementResult]:
        yield from self._chosen([self._matcher.own_address(point.hook)], e.first, e.last, branch, point)

    def _snat(
        self, e: ast.Snat, branch: Branch, point: HookPoint, _table: ast.Table, _where: str
    ) -> Iterator[StatementResult]:
        if point.hook not in _SOURCE_HOOKS:
            yield StatementResult(branch, continuation=unsupported(f"source rewritten in {point.hook}"))
            return
        branch.masquerade = True
        branch.saddr = e.first if e.first == e.last else ""
        yield StatementResult(branch, continuation=ACCEPT)

    def _masquerade(
        self, _e: ast.Masquerade, branch: Branch, point: HookPoint, _table: ast.Table, _where: str
    ) -> Iterator[StatementResult]:
        if point.hook != "postrouting":
            yield StatementResult(branch, continuation=unsupported(f"masquerade in {point.hook}"))
            return
        branch.masquerade = True
        yield StatementResult(branch, continuation=ACCEPT)

    def rewrite(self, point: HookPoint, branch: Branch, address: str, port: int | None) -> Continuation:
        """Rewrite the destination of a branch. Return how it continues."""
        if point.hook not in _DESTINATION_HOOKS:
            return unsupported(f"destination rewritten in {point.hook}")
        if family_of(address) is not self._matcher.family:
            return unsupported(f"destination rewritten to {address}, which is of the other family")
        port = branch.dport if port is None else port
        branch.rewritten = branch.rewritten or (branch.daddr, branch.dport) != (address, port)
        branch.daddr, branch.dport = address, port
        branch.dnat = True
        return ACCEPT


def _addresses(first: str, count: int) -> Iterator[str]:
    start = ipaddress.ip_address(first)
    return (str(start + number) for number in range(count))


def unsupported(note: str) -> BranchEnd:
    """Return the end of a branch whose path cannot be determined."""
    return BranchEnd(Disposition.UNSUPPORTED, note)
