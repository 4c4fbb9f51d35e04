"""The symbolic walk: what rules do with all packets at once.

It takes the way of `narthex.netfilter.walk.walk` through hooks and base chains, with boxes of packets in place of one packet. The result
is a function from packets to distributions over ends, as weighted boxes. It is exact: every packet of a box has the end of the box.

A hook is walked once for each state that packets arrive in (marks, NAT), with all headers at once, and its parts are then looked up for
the boxes that arrive. The effort is linear in the number of boxes, not in boxes times rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from narthex.model import Disposition, Host, IPFamily
from narthex.netfilter import ast
from narthex.netfilter.sets.asked import LISTS, TRACKED
from narthex.netfilter.sets.branch import ONE, PacketEnd, SetBranch, WalkPoint
from narthex.netfilter.sets.chains import SetChains
from narthex.netfilter.sets.diagram import WeightedBox
from narthex.netfilter.sets.index import BoxIndex
from narthex.netfilter.sets.ipvs import SetIpvs
from narthex.netfilter.sets.space import DADDR, HERE, LINK, Box, LinkNames, PacketSpace
from narthex.netfilter.sets.values import ValueSet, disjoint_union
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
Ended = list[tuple[PacketEnd, SetBranch]]
"""Branches with their ends."""

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
        self._summaries: dict[tuple[object, ...], dict[tuple[object, ...], _HookSummary]] = {}
        """By hook, then by state."""

    @property
    def chains(self) -> SetChains:
        """The evaluation of chains, which knows how far printed probabilities were rounded."""
        return self._chains

    def forget(self) -> None:
        """Drop what is known of single destinations: other packets can't use it."""
        self._chains.forget()
        for summaries in self._summaries.values():
            for summary in summaries.values():
                summary.forget()

    def ends(self, box: Box | None = None) -> Iterator[WeightedBox]:
        """Yield the ends of all packets of a box, or of all that the node can meet.

        They come as boxes whose probabilities add up to 1 for each packet.
        """
        box = self._space.possible if box is None else box
        for links, follow in ((box[LINK] - HERE, self._received), (box[LINK] & HERE, self._sent)):
            if links:
                ended: Ended = []
                passed = follow(SetBranch((*box[:LINK], links, *box[LINK + 1 :])), ended)
                for end, branch in ended:
                    yield WeightedBox(branch.box, end, branch.probability, branch.choices)
                for branch in passed:
                    yield WeightedBox(branch.box, _end(branch), branch.probability, branch.choices)

    def _received(self, branch: SetBranch, ended: Ended) -> list[SetBranch]:
        here, away = self._routed(self._first_hook(WalkPoint("prerouting"), branch, ended))
        return [*self._arrived(here, ended), *self._through(_FORWARDED, away, ended)]

    def _arrived(self, branches: list[SetBranch], ended: Ended) -> list[SetBranch]:
        """Walk packets for this host through input. Those that IPVS sends to another host continue in output."""
        point = WalkPoint("input")
        if not self._ipvs.serves:
            return self._hook(point, branches, ended)
        balanced = self._balanced("input", self._hook(point, branches, ended, span=BEFORE_INPUT), ended)
        away = [each for each in balanced if self._is_away(each)]
        here = [each for each in balanced if not self._is_away(each)]
        return [
            *self._through((_OUTPUT_OF_IPVS, WalkPoint("postrouting", oif=None)), away, ended),
            *self._hook(point, here, ended, span=AFTER_INPUT),
        ]

    def _sent(self, branch: SetBranch, ended: Ended) -> list[SetBranch]:
        found: list[SetBranch] = []
        for oif, whole in zip(("lo", None), self._routed([branch]), strict=True):
            for one in whole:
                passed, away = self._put_out(WalkPoint("output", iif="", oif=oif), one, ended)
                found += self._through((_OUTPUT_OF_IPVS, _POSTROUTING), away, ended)
                here, others = self._routed(passed)
                found += self._through(_OVER_LOOPBACK, here, ended)
                found += self._hook(_POSTROUTING, others, ended)
        return found

    def _put_out(self, point: WalkPoint, branch: SetBranch, ended: Ended) -> tuple[list[SetBranch], list[SetBranch]]:
        """Walk packets of this host through output. Return those that pass, and those that IPVS sends to another host before."""
        if not self._ipvs.serves:
            return self._first_hook(point, branch, ended), []
        balanced = self._balanced("output", self._first_hook(point, branch, ended, span=BEFORE_OUTPUT), ended)
        away = [each for each in balanced if self._is_away(each)]
        here = [each for each in balanced if not self._is_away(each)]
        return self._hook(point, here, ended, span=AFTER_OUTPUT), away

    def _balanced(self, hook: str, branches: list[SetBranch], ended: Ended) -> list[SetBranch]:
        """Return what IPVS lets pass, to a real server or as it was."""
        passed: list[SetBranch] = []
        for branch in branches:
            _sorted(self._ipvs.balance(hook, branch), passed, ended)
        return passed

    def _is_away(self, branch: SetBranch) -> bool:
        """Return True for packets that IPVS has sent to another host."""
        return branch.served and not branch.header[DADDR] & self._space.local

    def _through(self, points: Sequence[WalkPoint], branches: list[SetBranch], ended: Ended) -> list[SetBranch]:
        """Walk hooks one after the other. Nat chains see no packet again, over loopback or after IPVS."""
        for point in points:
            nat = point.iif != "lo" and point is not _OUTPUT_OF_IPVS
            branches = self._hook(point, branches, ended, nat=nat)
        return branches

    def _routed(self, branches: list[SetBranch]) -> tuple[list[SetBranch], list[SetBranch]]:
        """Split branches into packets for this host and for others."""
        own = self._space.local
        local: list[SetBranch] = []
        others: list[SetBranch] = []
        for branch in branches:
            have = branch.box[DADDR] if branch.daddr is None else branch.daddr
            here = have & own
            if not here.size:
                others.append(branch)
            elif here.size == have.size:
                local.append(branch)
            else:
                local.append(branch.within(DADDR, here))
                others.append(branch.within(DADDR, have - own))
        return local, others

    # ---- one hook ------------------------------------------------------------------------------------------------------------

    def _rules(self, hook: str, span: PriorityRange, start: int = 0) -> _HookRules:
        rules = self._hooks.get((hook, span, start))
        if rules is None:
            rules = self._hooks[hook, span, start] = _HookRules(self._index, self._chains, hook, span, start)
        return rules

    def _first_hook(
        self, point: WalkPoint, branch: SetBranch, ended: Ended, span: PriorityRange = ALL_PRIORITIES
    ) -> list[SetBranch]:
        """Walk the first hook, where all packets arrive together, so that there is nothing to look up.

        But nat chains split them, and the chains behind these are looked up: that saves up to a seventh of the time for rules
        like those of kube-proxy's mode iptables, which filter what they rewrite.
        """
        rules = self._rules(point.hook, span)
        passed = self._walked(rules.chains[: rules.until_nat], point, branch, True, ended)
        return self._hook(point, passed, ended, span=span, start=rules.until_nat)

    def _hook(
        self,
        point: WalkPoint,
        branches: list[SetBranch],
        ended: Ended,
        *,
        nat: bool = True,
        span: PriorityRange = ALL_PRIORITIES,
        start: int = 0,
    ) -> list[SetBranch]:
        """Walk the base chains of a hook from number `start` on. Return the branches that pass, and add the others to `ended`."""
        rules = self._rules(point.hook, span, start)
        if not rules.chains:
            return branches
        passed: list[SetBranch] = []
        summaries = self._summaries.setdefault((point, nat, span, start), {})
        for branch in branches:
            changed = branch.rewritten or branch.served
            if rules.lists or branch.is_vague or (changed and rules.tracked):
                passed += self._walked(rules.chains, point, branch, nat, ended)
                continue
            state = branch.state
            known = summaries.get(state)
            if known is None:
                known = summaries[state] = self._summary(rules.chains, point, branch, nat)
            if known.passes:
                passed.append(branch)
                continue
            header = branch.header
            for narrowed, results in known.parts(header):
                part = branch if narrowed is header else branch.with_header(narrowed)
                for end, later in results:
                    out = part if later.state == state and later.probability is ONE else part.resume(later)
                    if later.daddr is not None:
                        out = self._redirected(part, later)
                    if end is None:
                        passed.append(out)
                    else:
                        ended.append((end, out))
        return passed

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
        ended: Ended = []
        passed = self._walked(chains, point, whole, nat, ended)
        return _HookSummary(whole, [*ended, *((None, out) for out in passed)])

    def _walked(
        self, chains: Sequence[BaseChain], point: WalkPoint, branch: SetBranch, nat: bool, ended: Ended
    ) -> list[SetBranch]:
        present = [branch]
        for table, chain in chains:
            assert chain.hook is not None
            is_nat = chain.hook.type == "nat"
            passed: list[SetBranch] = []
            for one in present:
                if is_nat and not (nat and _may_be_rewritten(point, one)):
                    passed.append(one)
                else:
                    results = self._chains.base(point, table, chain, one)
                    _sorted(((how if isinstance(how, PacketEnd) else None, out) for how, out in results), passed, ended)
            present = passed
        return present


def _sorted(results: Iterable[Passed], passed: list[SetBranch], ended: Ended) -> None:
    for end, out in results:
        if end is None:
            passed.append(out)
        else:
            ended.append((end, out))


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
    """Return results with their boxes, those that differ in the destination alone as one.

    Equal packets with equal results, of which each has a share of the probability, stay apart.
    """
    alike: dict[tuple[object, ...], tuple[Passed, list[ValueSet]]] = {}
    for end, out in results:
        sent = None if out.daddr is None else (out.daddr, out.dport, out.to)
        key = (end, out.state, out.probability, out.choices, out.remembers, sent, out.box[1:])
        alike.setdefault(key, ((end, out), []))[1].append(out.box[DADDR])
    joined: list[tuple[Box, Passed]] = []
    for passed, parts in alike.values():
        whole = disjoint_union(parts)
        joined += [((part, *passed[1].box[1:]), passed) for part in (parts if whole is None else (whole,))]
    return joined


class _HookRules:
    """The base chains of a hook from number `start` on, and what the rules that they lead to ask for."""

    def __init__(
        self, index: RulesetIndex, chains: SetChains, hook: str, priorities: PriorityRange, start: int
    ) -> None:
        self.chains = [pair for rank in index.ranks(hook, priorities) for pair in rank][start:]
        nat = [
            number for number, (_, chain) in enumerate(self.chains, start=1) if chain.hook and chain.hook.type == "nat"
        ]
        self.until_nat = nat[-1] if nat else len(self.chains)
        """The number of chains up to the last nat chain, or of all."""
        asked = 0
        for table, chain in self.chains:
            asked |= chains.asked.of(table, chain)
        self.lists = bool(asked & LISTS)
        """Rules read or write affinity lists."""
        self.tracked = bool(asked & TRACKED)
        """Rules compare what conntrack knows of the packet as it was sent."""
