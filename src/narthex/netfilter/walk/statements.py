"""Statements: what each does to a branch, and where it sends it."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, ClassVar

from narthex.model.net import address_key, family_of
from narthex.model.packet import Disposition
from narthex.netfilter.ast import (
    Accept,
    CopyMark,
    Dnat,
    DnatMap,
    DnatRange,
    DropPacket,
    Expression,
    Goto,
    IgnoredStatement,
    InlineVerdictMap,
    Jump,
    MarkOr,
    MarkXor,
    Masquerade,
    NoTrack,
    RandomGoto,
    RandomMap,
    RecentSet,
    Redirect,
    RedirectRange,
    RejectPacket,
    Return,
    SetMark,
    Snat,
    Table,
    UpdateSet,
    Verdict,
    VerdictMap,
)
from narthex.netfilter.describe import describe, describe_element
from narthex.netfilter.walk.lookup import RulesetIndex
from narthex.netfilter.walk.matches import Matcher, ValueNotKnown
from narthex.netfilter.walk.state import ACCEPT, RETURN, Branch, BranchEnd, Continuation, HookPoint

NameOf = Callable[[str], str]
"""Says what an address is ("pod shop/web-1"), or nothing ("")."""

LEAVES_BEHIND = frozenset((MarkOr, MarkXor, SetMark, CopyMark, NoTrack, IgnoredStatement, UpdateSet, RecentSet))
"""Statements that leave something behind and go on with the next one."""

_U32 = 0xFFFFFFFF
_DESTINATION_HOOKS = ("prerouting", "output")
_SOURCE_HOOKS = ("postrouting", "input")
_MAX_CHOICES = 4096


class Decision:
    """One way out of a statement: a verdict to be carried out (`what`), or a `way`."""

    __slots__ = ("branch", "told", "way", "what", "why")

    def __init__(
        self, branch: Branch, what: Verdict | None = None, way: Continuation = None, told: str = "", why: str = ""
    ) -> None:
        self.branch, self.what, self.way, self.told, self.why = branch, what, way, told, why


class Actor:
    """Carries out statements for one packet."""

    TELLS_ITSELF: ClassVar[frozenset[type]] = frozenset((VerdictMap, DnatMap, RandomGoto, RandomMap, InlineVerdictMap))
    """Statements of which the element or arm that was met makes a better step than the rule."""

    def __init__(self, matcher: Matcher, index: RulesetIndex, name_of: NameOf) -> None:
        self._matcher = matcher
        self._index = index
        self.name_of = name_of
        self._acts: dict[type, Callable[[Any, Branch, HookPoint, Table, str], Iterator[Decision]]] = {
            VerdictMap: self._verdict_map,
            DnatMap: self._dnat_map,
            RandomGoto: self._spread,
            RandomMap: self._draw,
            InlineVerdictMap: self._switch,
            Dnat: self._dnat,
            DnatRange: self._dnat_range,
            Redirect: self._redirect,
            RedirectRange: self._redirect_range,
            Snat: self._snat,
            Masquerade: self._masquerade,
        }

    def verdict(self, verdict: Verdict, branch: Branch) -> list[tuple[Continuation, Branch]]:
        """A verdict that calls no chain."""
        if isinstance(verdict, Return):
            return [(RETURN, branch)]
        if isinstance(verdict, Accept):
            return [(ACCEPT, branch)]
        if isinstance(verdict, DropPacket):
            return [(BranchEnd(Disposition.DROPPED), branch)]
        return [(BranchEnd(Disposition.REJECTED), branch)]

    def leave_behind(self, e: Expression, branch: Branch, point: HookPoint) -> str:
        """Carry out a statement of LEAVES_BEHIND; returns why that cannot be followed, or nothing."""
        if isinstance(e, MarkOr):
            branch.mark = (branch.mark | e.bits) & _U32
        elif isinstance(e, MarkXor):
            branch.mark = (branch.mark ^ e.bits) & _U32
        elif isinstance(e, CopyMark) and not branch.tracked:
            pass
        elif isinstance(e, SetMark):
            if e.connection:
                branch.connection_mark = (branch.connection_mark & ~e.mask ^ e.value) & _U32
            else:
                branch.mark = (branch.mark & ~e.mask ^ e.value) & _U32
        elif isinstance(e, CopyMark):
            if e.to_connection:
                branch.connection_mark = (branch.connection_mark & ~e.to_mask ^ branch.mark & e.from_mask) & _U32
            else:
                branch.mark = (branch.mark & ~e.to_mask ^ branch.connection_mark & e.from_mask) & _U32
        elif isinstance(e, NoTrack):
            branch.tracked = False
        elif isinstance(e, RecentSet):
            branch.remembers = (*branch.remembers, (e.name, (self._matcher.packet.source,)))
        elif isinstance(e, UpdateSet):
            try:
                key = self._matcher.key(e.key, branch, point)
            except ValueNotKnown as error:
                return str(error)
            if key is not None:
                branch.remembers = (*branch.remembers, (e.set, key))
        return ""

    def act(self, e: Expression, branch: Branch, point: HookPoint, table: Table, where: str) -> Iterator[Decision]:
        """Carry out a statement that decides where the packet goes."""
        if isinstance(e, (Jump, Goto, Return, Accept, DropPacket, RejectPacket)):
            yield Decision(branch, e)
            return
        act = self._acts.get(type(e))
        if act is None:
            yield Decision(branch, way=unsupported(f"not understood: {describe(e) or type(e).__name__}"))
            return
        yield from act(e, branch, point, table, where)

    # ---- maps and draws --------------------------------------------------------------------------------------------

    def _verdict_map(
        self, e: VerdictMap, branch: Branch, point: HookPoint, table: Table, where: str
    ) -> Iterator[Decision]:
        for out, element, data in self._look_up(e, branch, point, table, where):
            if isinstance(data, Decision):
                yield data
            elif isinstance(data, (Jump, Goto, Return, Accept, DropPacket, RejectPacket)):
                yield Decision(out, data, told=element)
            else:
                yield Decision(out, way=unsupported(f"the map {e.map} holds no verdict"), told=element)

    def _dnat_map(self, e: DnatMap, branch: Branch, point: HookPoint, table: Table, where: str) -> Iterator[Decision]:
        for out, element, data in self._look_up(e, branch, point, table, where):
            if isinstance(data, Decision):
                yield data
            elif not isinstance(data, tuple):
                yield Decision(out, way=unsupported(f"the map {e.map} holds no address and port"))
            else:
                way = self._rewrite(point, out, *data)
                yield Decision(out, way=way, told=f"dnat to {element}", why=self.name_of(data[0]))

    def _look_up(
        self, e: VerdictMap | DnatMap, branch: Branch, point: HookPoint, table: Table, where: str
    ) -> Iterator[tuple[Branch, str, object]]:
        """The elements that the key may fall on, each with a branch of its own; a Decision for the ways without."""
        elements = self._index.elements(table, e.map)
        told = describe(e)
        if elements is None or elements.set.unsupported:
            note = f"the map {e.map} of table {table.name} is not there"
            if elements is not None:
                note = f"the map {e.map} of table {table.name} is not understood: {elements.set.unsupported}"
            yield branch, "", Decision(branch, way=unsupported(note), told=told)
            return
        try:
            draws = list(self._matcher.draws(e.key, branch, point))
        except ValueNotKnown as error:
            yield branch, "", Decision(branch, way=unsupported(f"{where}: {error}"), told=told)
            return
        left = Fraction(1)
        for share, key in draws:
            element = elements.find(key)
            if element is None:
                continue
            data = elements.data(element)
            # `take` splits what is left of the branch, so a share of the whole has to be scaled up.
            yield branch.take(share / left), describe_element(e.map, element, data), data
            left -= share
        if left:
            yield branch, "", Decision(branch)

    def _spread(
        self, e: RandomGoto, branch: Branch, _place: HookPoint, _table: Table, _where: str
    ) -> Iterator[Decision]:
        count = len(e.chains)
        for number, name in enumerate(e.chains):
            out = branch.take(Fraction(1, count - number))
            yield Decision(out, Goto(name), told=f"draw {number} of {count}: goto {name}")

    def _draw(self, e: RandomMap, branch: Branch, point: HookPoint, _table: Table, _where: str) -> Iterator[Decision]:
        left = e.mod
        for first, last, what in e.arms:
            count = last - first + 1
            out = branch.take(Fraction(count, left))
            left -= count
            drawn = str(first) if first == last else f"{first}-{last}"
            told = f"draw {drawn} of {e.mod}: {describe(what)}"
            if isinstance(what, Dnat):
                way = self._rewrite(point, out, what.address or out.daddr, what.port)
                yield Decision(out, way=way, told=told, why=self.name_of(what.address))
            else:
                yield Decision(out, what, told=told)
        if left:
            yield Decision(branch)

    def _switch(
        self, e: InlineVerdictMap, branch: Branch, point: HookPoint, table: Table, where: str
    ) -> Iterator[Decision]:
        for matches, verdict in e.arms:
            answer = self._matcher.all_of(matches, branch, point, table)
            if answer is False:
                continue
            told = ", ".join((*map(describe, matches), describe(verdict)))
            if answer is True:
                yield Decision(branch, verdict, told=told)
                return
            note = f"{where}: {answer}"
            if not branch.doubt:
                yield Decision(branch.copy(), way=unsupported(note), told=told)
                branch.doubt = note
            yield Decision(branch.copy(), verdict, told=told)
        yield Decision(branch)

    # ---- rewriting -------------------------------------------------------------------------------------------------

    def _dnat(self, e: Dnat, branch: Branch, point: HookPoint, _table: Table, _where: str) -> Iterator[Decision]:
        yield Decision(branch, way=self._rewrite(point, branch, e.address, e.port))

    def _dnat_range(
        self, e: DnatRange, branch: Branch, point: HookPoint, _table: Table, _where: str
    ) -> Iterator[Decision]:
        addresses = [branch.daddr]
        if e.first:
            count = address_key(e.last)[1] - address_key(e.first)[1] + 1
            addresses = list(_addresses(e.first, count)) if 0 < count <= _MAX_CHOICES else []
        yield from self._chosen(addresses, e.first_port, e.last_port, branch, point)

    def _chosen(
        self, addresses: list[str], first: int | None, last: int | None, branch: Branch, point: HookPoint
    ) -> Iterator[Decision]:
        """Each address and port that the kernel may choose, equally likely over many connections; a port that is in the
        range already is kept (nf_nat_l4proto_unique_tuple)."""
        ports: list[int | None] = [None]
        if first is not None and last is not None and not first <= branch.dport <= last:
            ports = list(range(first, last + 1))
        count = len(addresses) * len(ports)
        if not 0 < count <= _MAX_CHOICES:
            yield Decision(branch, way=unsupported("the kernel chooses among too many addresses and ports"))
            return
        for address in addresses:
            for port in ports:
                out = branch.take(Fraction(1, count))
                count -= 1
                yield Decision(out, way=self._rewrite(point, out, address, port))

    def _redirect(
        self, e: Redirect, branch: Branch, point: HookPoint, _table: Table, _where: str
    ) -> Iterator[Decision]:
        own = self._matcher.own_address(point.hook)
        yield Decision(branch, way=self._rewrite(point, branch, own, e.port))

    def _redirect_range(
        self, e: RedirectRange, branch: Branch, point: HookPoint, _table: Table, _where: str
    ) -> Iterator[Decision]:
        yield from self._chosen([self._matcher.own_address(point.hook)], e.first, e.last, branch, point)

    def _snat(self, e: Snat, branch: Branch, point: HookPoint, _table: Table, _where: str) -> Iterator[Decision]:
        if point.hook not in _SOURCE_HOOKS:
            yield Decision(branch, way=unsupported(f"source rewritten in {point.hook}"))
            return
        branch.masquerade = True
        branch.saddr = e.first if e.first == e.last else ""
        yield Decision(branch, way=ACCEPT)

    def _masquerade(
        self, _e: Masquerade, branch: Branch, point: HookPoint, _table: Table, _where: str
    ) -> Iterator[Decision]:
        if point.hook != "postrouting":
            yield Decision(branch, way=unsupported(f"masquerade in {point.hook}"))
            return
        branch.masquerade = True
        yield Decision(branch, way=ACCEPT)

    def _rewrite(self, point: HookPoint, branch: Branch, address: str, port: int | None) -> Continuation:
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
    """The end of a branch of which nobody can say how it goes on."""
    return BranchEnd(Disposition.UNSUPPORTED, note)
