"""The symbolic walk: what rules do with all packets at once.

It takes the way of `narthex.netfilter.walk.walk` through hooks and base chains, with boxes of packets in place of one packet. The result
is a function from packets to distributions over ends, as weighted boxes. It is exact: every packet of a box has the end of the box.

A hook is walked once for each state that packets arrive in (marks, NAT), with all headers at once, and its parts are then looked up for
the boxes that arrive. The effort is linear in the number of boxes, not in boxes times rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from narthex.model import Disposition, Host, IPFamily
from narthex.netfilter import ast
from narthex.netfilter.sets.branch import PacketEnd, SetBranch, WalkPoint
from narthex.netfilter.sets.asked import Asked
from narthex.netfilter.sets.chains import SetChains
from narthex.netfilter.sets.diagram import WeightedBox
from narthex.netfilter.sets.index import BoxIndex
from narthex.netfilter.sets.ipvs import SetIpvs
from narthex.netfilter.sets.space import DADDR, HERE, LINK, Box, LinkNames, PacketSpace
from narthex.netfilter.sets.values import ValueSet, union
from narthex.netfilter.walk.lookup import BaseChain, RulesetIndex, index_ruleset
from narthex.netfilter.walk.state import (
    AFTER_INPUT,
    AFTER_OUTPUT,
    ALL_PRIORITIES,
    BEFORE_INPUT,
    BEFORE_OUTPUT,
    KernelObjects,
    PriorityRange,
)

Passed = tuple[PacketEnd | None, SetBranch]
"""A branch that a hook lets pass (None), or that ends there."""

_DESTINATION_HOOKS = ("prerouting", "output")
_ORDER = tuple(range(6))
_FORWARDED = (WalkPoint("forward", oif=None), WalkPoint("postrouting", oif=None))
_POSTROUTING = WalkPoint("postrouting", iif="", oif=None)
_OVER_LOOPBACK = (
    WalkPoint("postrouting", iif="", oif="lo"),
    WalkPoint("prerouting", iif="lo"),
    WalkPoint("input", iif="lo"),
)
_OUTPUT_OF_IPVS = WalkPoint("output", iif="", oif=None)


def space_of(
    ruleset: ast.Ruleset,
    family: IPFamily,
    host: Host,
    links: Sequence[str] = (),
    objects: KernelObjects = KernelObjects(),  # noqa: B008  # frozen
) -> PacketSpace:
    """Return the space of packets that rules of a family see; `links` are further names that matter."""
    names = LinkNames(set(links))
    for table in ruleset.tables:
        if table.family in (None, family):
            names.read(table)
    return PacketSpace(family, host, names.names, objects.bound)


class SetWalk:
    """Walks all packets of a family through rules."""

    def __init__(
        self,
        ruleset: ast.Ruleset,
        space: PacketSpace,
        objects: KernelObjects = KernelObjects(),  # noqa: B008  # frozen
    ) -> None:
        self._space = space
        self._index = index_ruleset(ruleset, space.family)
        self._chains = SetChains(space, self._index, objects)
        self._ipvs = SetIpvs(space, objects)
        self._hooks: dict[tuple[str, PriorityRange, int], _HookRules] = {}
        self._summaries: dict[tuple[object, ...], _HookSummary] = {}

    @property
    def chains(self) -> SetChains:
        """The evaluation of chains, which knows how far printed probabilities were rounded."""
        return self._chains

    def forget(self) -> None:
        """Drop what is known of single destinations: other packets can't use it."""
        self._chains.forget()
        for summary in self._summaries.values():
            summary.forget()

    def ends(self, box: Box | None = None) -> Iterator[WeightedBox]:
        """Yield the ends of all packets of a box, or of all that the node can meet.

        They come as boxes whose probabilities add up to 1 for each packet.
        """
        box = self._space.possible if box is None else box
        for links, follow in ((box[LINK] - HERE, self._received), (box[LINK] & HERE, self._sent)):
            if links:
                for end, branch in follow(SetBranch((*box[:LINK], links, *box[LINK + 1 :]))):
                    yield WeightedBox(branch.box, end or _end(branch), branch.probability, branch.choices)

    def _received(self, branch: SetBranch) -> Iterator[Passed]:
        for end, passed in self._hook(WalkPoint("prerouting"), branch, first=True):
            if end is not None:
                yield end, passed
                continue
            for local, part in self._routed(passed):
                if local:
                    yield from self._arrived(part)
                else:
                    yield from self._through(_FORWARDED, part)

    def _arrived(self, branch: SetBranch) -> Iterator[Passed]:
        """Walk packets for this host through input. Those that IPVS sends to another host continue in output."""
        point = WalkPoint("input")
        if not self._ipvs.serves:
            yield from self._hook(point, branch)
            return
        for end, passed in self._balanced(point, branch, BEFORE_INPUT):
            if end is not None:
                yield end, passed
            elif self._is_away(passed):
                yield from self._through((_OUTPUT_OF_IPVS, WalkPoint("postrouting", oif=None)), passed)
            else:
                yield from self._hook(point, passed, span=AFTER_INPUT)

    def _sent(self, branch: SetBranch) -> Iterator[Passed]:
        for here, whole in self._routed(branch):
            point = WalkPoint("output", iif="", oif="lo" if here else None)
            for end, passed in self._put_out(point, whole):
                if end is not None:
                    yield end, passed
                elif self._is_away(passed):
                    yield from self._through((_OUTPUT_OF_IPVS, _POSTROUTING), passed)
                else:
                    for local, part in self._routed(passed):
                        if local:
                            yield from self._through(_OVER_LOOPBACK, part)
                        else:
                            yield from self._hook(_POSTROUTING, part)

    def _put_out(self, point: WalkPoint, branch: SetBranch) -> Iterator[Passed]:
        """Walk packets of this host through output. Those that IPVS sends to another host have passed its first part."""
        if not self._ipvs.serves:
            yield from self._hook(point, branch, first=True)
            return
        for end, passed in self._balanced(point, branch, BEFORE_OUTPUT, first=True):
            if end is not None or self._is_away(passed):
                yield end, passed
            else:
                yield from self._hook(point, passed, span=AFTER_OUTPUT)

    def _balanced(
        self, point: WalkPoint, branch: SetBranch, span: PriorityRange, *, first: bool = False
    ) -> Iterator[Passed]:
        """Walk the part of a hook before IPVS, and IPVS."""
        for end, passed in self._hook(point, branch, first=first, span=span):
            if end is not None:
                yield end, passed
            else:
                yield from self._ipvs.balance(point.hook, passed)

    def _is_away(self, branch: SetBranch) -> bool:
        """Return True for packets that IPVS has sent to another host."""
        return branch.served and not branch.header[DADDR] & self._space.local

    def _through(self, points: Sequence[WalkPoint], branch: SetBranch) -> Iterator[Passed]:
        """Walk hooks one after the other. Nat chains see no packet again, over loopback or after IPVS."""
        nat = points[0].iif != "lo" and points[0] is not _OUTPUT_OF_IPVS
        for end, passed in self._hook(points[0], branch, nat=nat):
            if end is not None or len(points) == 1:
                yield end, passed
            else:
                yield from self._through(points[1:], passed)

    def _routed(self, branch: SetBranch) -> list[tuple[bool, SetBranch]]:
        """Split a branch into packets for this host and for others."""
        have, own = branch.header[DADDR], self._space.local
        here = have & own
        if not here.size or here.size == have.size:
            return [(bool(here.size), branch)]
        return [(True, branch.within(DADDR, here)), (False, branch.within(DADDR, have - own))]

    # ---- one hook ------------------------------------------------------------------------------------------------------------

    def _hook(
        self,
        point: WalkPoint,
        branch: SetBranch,
        *,
        nat: bool = True,
        first: bool = False,
        span: PriorityRange = ALL_PRIORITIES,
        start: int = 0,
    ) -> Iterator[Passed]:
        """Walk the base chains of a hook from number `start` on.

        At the `first` hook, all packets arrive together, so that there is nothing to look up. But nat chains split them, and the
        chains behind them are looked up: that takes a quarter less time for rules like kube-proxy's, which filter what they rewrite.
        """
        rules = self._hooks.get((point.hook, span, start))
        if rules is None:
            rules = self._hooks[point.hook, span, start] = _HookRules(self._index, self._chains, point.hook, span, start)
        if not rules.chains:
            yield None, branch
            return
        if first and rules.until_nat < len(rules.chains):
            for end, passed in self._walked(rules.chains[: rules.until_nat], point, branch, nat):
                if end is not None:
                    yield end, passed
                else:
                    yield from self._hook(point, passed, nat=nat, span=span, start=rules.until_nat)
            return
        changed = branch.rewritten or branch.served
        if first or rules.asked & Asked.LISTS or branch.is_vague or (changed and rules.asked & Asked.ORIGINAL):
            yield from self._walked(rules.chains, point, branch, nat)
            return
        key = point, nat, span, start, branch.state
        known = self._summaries.get(key)
        if known is None:
            known = self._summaries[key] = self._summary(rules.chains, point, branch, nat)
        if known.passes:
            yield None, branch
            return
        for header, passed in known.parts(branch.header):
            part = branch if header is branch.header else branch.with_header(header)
            for end, later in passed:
                yield end, part.resume(later) if later.daddr is None else self._redirected(part, later)

    @staticmethod
    def _redirected(part: SetBranch, later: SetBranch) -> SetBranch:
        """Return a part that a hook sent elsewhere."""
        out = part.resume(later)
        out.daddr, out.to = later.daddr, later.to
        out.dport = later.dport if later.dport is not None else part.dport
        out.choices, out.remembers = part.choices | later.choices, (*part.remembers, *later.remembers)
        return out

    def _summary(self, chains: Sequence[BaseChain], point: WalkPoint, branch: SetBranch, nat: bool) -> _HookSummary:
        whole = branch.fresh(self._space.whole)
        return _HookSummary(whole, list(self._walked(chains, point, whole, nat)))

    def _walked(self, chains: Sequence[BaseChain], point: WalkPoint, branch: SetBranch, nat: bool) -> Iterator[Passed]:
        present = [branch]
        for table, chain in chains:
            assert chain.hook is not None
            is_nat = chain.hook.type == "nat"
            passed: list[SetBranch] = []
            for one in present:
                if is_nat and not (nat and _may_be_rewritten(point, one)):
                    passed.append(one)
                    continue
                for how, out in self._chains.base(point, table, chain, one):
                    if isinstance(how, PacketEnd):
                        yield how, out
                    else:
                        passed.append(out)
            present = passed
        for one in present:
            yield None, one


def _may_be_rewritten(point: WalkPoint, branch: SetBranch) -> bool:
    return branch.tracked and not (branch.dnat if point.hook in _DESTINATION_HOOKS else branch.masquerade)


def _end(branch: SetBranch) -> PacketEnd:
    """Return the end of packets that all hooks let pass."""
    if not (branch.dnat or branch.served):
        return PacketEnd(Disposition.NOT_OURS)
    return PacketEnd(Disposition.DELIVERED, branch.to, branch.masquerade, branch.remembers)


class _HookSummary:
    """What a hook does with all headers of packets in one state."""

    def __init__(self, whole: SetBranch, results: list[Passed]) -> None:
        self._index: BoxIndex[Passed] | None = None
        self._results = tuple(results)
        if any(out.box != whole.box for _, out in results):
            self._index = BoxIndex(_joined(results), _ORDER, whole.box)
            self._results = ()
        end, out = results[0]
        self.passes = len(results) == 1 and end is None and out.state == whole.state
        """All packets pass unchanged."""

    def forget(self) -> None:
        """Drop what is known of headers that were looked up."""
        if self._index is not None:
            self._index.forget()

    def parts(self, header: Box) -> Sequence[tuple[Box, tuple[Passed, ...]]]:
        """Split a header into parts, each with its results."""
        return ((header, self._results),) if self._index is None else self._index.split(header)


def _joined(results: list[Passed]) -> list[tuple[Box, Passed]]:
    """Return results with their boxes, those that differ in the destination alone as one."""
    alike: dict[tuple[object, ...], tuple[Passed, list[ValueSet]]] = {}
    for end, out in results:
        sent = None if out.daddr is None else (out.daddr, out.dport, out.to)
        key = (end, out.state, out.probability, out.choices, out.remembers, sent, out.box[1:])
        alike.setdefault(key, ((end, out), []))[1].append(out.box[DADDR])
    return [((union(parts), *passed[1].box[1:]), passed) for passed, parts in alike.values()]


class _HookRules:
    """The base chains of a hook from number `start` on, and what the rules that they lead to ask for."""

    def __init__(self, index: RulesetIndex, chains: SetChains, hook: str, priorities: PriorityRange, start: int) -> None:
        self.chains = [pair for rank in index.ranks(hook, priorities) for pair in rank][start:]
        nat = [number for number, (_, chain) in enumerate(self.chains, start=1) if chain.hook and chain.hook.type == "nat"]
        self.until_nat = nat[-1] if nat else len(self.chains)
        """The number of chains up to the last nat chain, or of all."""
        self.asked = 0
        for table, chain in self.chains:
            self.asked |= chains.asked.of(table, chain)
        """`Asked` bits of all rules that packets can meet."""
