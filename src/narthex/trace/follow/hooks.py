"""One packet in the hooks of one node, with the result as steps of a path."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import msgspec

from narthex.model import Disposition, Host, Packet, Protocol, family_of
from narthex.model import WalkNearMiss as Missed
from narthex.model import WalkStep as Met
from narthex.netfilter.ast import Ruleset
from narthex.netfilter.walk.state import ALL_PRIORITIES, KernelObjects, PriorityRange
from narthex.netfilter.walk.walk import Branch, BranchEnd, HookPoint, HookWalk
from narthex.trace.follow.unknown_facts import AskedFacts
from narthex.trace.follow.views import NodeView
from narthex.trace.model import FATES, Fate, Header, NearMiss, PathEnd, PathStep, PossibleEnd, rule_step

Steps = tuple[PathStep, ...]

_REASONS = {
    Disposition.DROPPED: "a rule drops it silently",
    Disposition.REJECTED: "a rule rejects it, and the sender receives an error",
}


Near = dict[tuple[str, str], list[NearMiss]]

_MOST_NEAR = 10


class PartialPath:
    """One alternative so far: the state of the packet, and its steps."""

    __slots__ = ("branch", "steps")

    def __init__(self, branch: Branch, steps: Steps) -> None:
        """Combine a walk's branch with the steps before it."""
        self.branch = branch
        self.steps = steps

    def then(self, *steps: PathStep) -> PartialPath:
        """Return this alternative with more steps."""
        return PartialPath(self.branch, (*self.steps, *steps))

    def part(self, share: Fraction) -> PartialPath:
        """Split off a share of the probability; the rest remains here."""
        return PartialPath(self.branch.take(share), self.steps)


class NodeHooks:
    """The rules of one node for one packet."""

    def __init__(self, view: NodeView, header: Header, host: Host, name_of: Callable[[str], str], state: str) -> None:
        """Prepare the walk; `host` is the node, `state` that of connection tracking: `new` or `established`."""
        self._view = view
        self._header = header
        held = view.rules.get(family_of(header.destination)) if view.rules is not None else None
        self._held = held
        self.known = held is not None
        self.unread = held.unread if held is not None else ()
        self.gaps = held.gaps if held is not None else ()
        self._seen: set[tuple[str, str, str, int]] = set()
        self._walk = HookWalk(
            held.assumed if held is not None else Ruleset(),
            Packet(
                source=header.source,
                destination=header.destination,
                port=header.port,
                protocol=Protocol(header.protocol.upper()),
                source_port=header.source_port or 0,
                iif=header.iif,
                from_host=not header.iif,
            ),
            host,
            name_of=name_of,
            objects=held.objects if held is not None else KernelObjects(),
            state=state,
        )

    @property
    def asked(self) -> AskedFacts:
        """The facts that rules asked for and the view lacks."""
        return AskedFacts(links=self._walk.asked_links, addresses=self._walk.asked_addresses)

    def start(self, steps: Steps) -> PartialPath:
        """Return the packet before all rules."""
        branch = self._walk.start()
        branch.mark = self._header.mark
        return PartialPath(branch, steps)

    def local(self, address: str) -> bool:
        """Return True if the rules treat the address as one of the node's own."""
        return self._walk.local(address)

    def header(self, path: PartialPath, iif: str = "", oif: str = "") -> Header:
        """Return the packet's current header."""
        branch = path.branch
        return msgspec.structs.replace(
            self._header,
            source=branch.saddr or ("" if branch.masquerade else self._header.source),
            destination=branch.daddr,
            port=branch.dport,
            mark=branch.mark,
            masqueraded=branch.masquerade or self._header.masqueraded,
            iif=iif,
            oif=oif,
        )

    def hook(
        self, place: HookPoint, paths: list[PartialPath], *, nat: bool = True, span: PriorityRange = ALL_PRIORITIES
    ) -> tuple[list[PartialPath], list[tuple[PartialPath, PathEnd]]]:
        """Run all base chains of a hook; return the alternatives that pass, and those that end."""
        passed: list[PartialPath] = []
        ended: list[tuple[PartialPath, PathEnd]] = []
        for path in paths:
            before = self._begin(path, place)
            on, off = self._walk.hook(place, [path.branch], nat=nat, span=span)
            near = self._near()
            passed += [self._extended(path, branch, before, place, near) for branch in on]
            ended += [self._end(path, branch, end, before, place, near) for branch, end in off]
        return _without_repetition(passed), ended

    def balance(
        self, place: HookPoint, paths: list[PartialPath]
    ) -> tuple[list[PartialPath], list[PartialPath], list[tuple[PartialPath, PathEnd]]]:
        """Run IPVS; return the alternatives that stay on the node, those for a real server, and those that end."""
        stay: list[PartialPath] = []
        away: list[PartialPath] = []
        ended: list[tuple[PartialPath, PathEnd]] = []
        for path in paths:
            before = self._begin(path, place)
            here, there, off = self._walk.balance(place.hook, [path.branch])
            stay += [self._extended(path, branch, before, place) for branch in here]
            away += [self._extended(path, branch, before, place) for branch in there]
            ended += [self._end(path, branch, end, before, place) for branch, end in off]
        return stay, away, ended

    def _begin(self, path: PartialPath, place: HookPoint) -> Header:
        path.branch.trail = None
        path.branch.step_probability = Fraction(1)
        return self.header(path, place.iif, place.oif or "")

    def _near(self) -> Near:
        """Return the near misses since the last call, by table and chain."""
        found: Near = {}
        for each in self._walk.near:
            key = each.where, each.table, each.chain, each.rule
            if key not in self._seen:
                self._seen.add(key)
                found.setdefault((each.table, each.chain), []).append(self._miss(each))
        return found

    def _miss(self, each: Missed) -> NearMiss:
        place, text = self._place(each.table, each.chain, each.rule, each.what)
        return NearMiss(table=each.table, chain=each.chain, rule=text or each.what, place=place, missing=each.missing)

    def _place(self, table: str, chain: str, rule: int | None, what: str) -> tuple[str, str]:
        if self._held is None or rule is None:
            return "", ""
        return self._held.place(table, chain, rule, what)

    def _end(
        self,
        path: PartialPath,
        branch: Branch,
        end: BranchEnd,
        before: Header,
        place: HookPoint,
        near: Near | None = None,
    ) -> tuple[PartialPath, PathEnd]:
        extended = self._extended(path, branch, before, place, near)
        unsure = self.unsure_end(branch, end.disposition)
        if unsure is not None:
            return extended, unsure
        last = extended.steps[-1] if extended.steps else None
        why = f" ({last.why})" if last is not None and last.why else ""
        reason = end.note or _REASONS.get(end.disposition, "") + why
        return extended, PathEnd(fate=FATES[end.disposition], node=self._view.node, reason=reason)

    def unsure_end(self, branch: Branch, disposition: Disposition) -> PathEnd | None:
        """Return the end of a packet on which a rule that the input lacks may act; `disposition` is its end otherwise."""
        if not self._walk.is_unsure(branch, disposition):
            return None
        may = (PossibleEnd(when="no rule that is missing acts on it", fate=FATES[disposition]),)
        return PathEnd(fate=Fate.UNKNOWN, node=self._view.node, reason=branch.unsure, may=may)

    def _extended(
        self, path: PartialPath, branch: Branch, before: Header, place: HookPoint, near: Near | None = None
    ) -> PartialPath:
        made = PartialPath(branch, path.steps)
        after = self.header(made, place.iif, place.oif or "")
        steps = [self._step(met, before) for met in branch.steps()]
        for number, step in enumerate(steps):
            last = all(later.chain != step.chain for later in steps[number + 1 :])
            if near and last and (step.table, step.chain) in near:
                steps[number] = msgspec.structs.replace(step, near=tuple(near[step.table, step.chain][:_MOST_NEAR]))
        if steps and _changes(before, after):
            steps[-1] = msgspec.structs.replace(steps[-1], after=after)
        assumed = [each for each in branch.supposing if all(each not in step.unknown for step in path.steps)]
        if assumed and steps:
            steps[-1] = msgspec.structs.replace(steps[-1], unknown="; ".join(assumed))
        return made.then(*steps)

    def _step(self, met: Met, before: Header) -> PathStep:
        place, rule = self._place(met.table, met.chain, met.rule, met.what)
        view = self._view
        return rule_step(met, view.node, before, namespace=view.namespace, rule=rule, place=place)


def _without_repetition(paths: list[PartialPath]) -> list[PartialPath]:
    """Leave out alternatives in doubt in the same state as another: they continue in the same way, and have no probability."""
    seen: set[tuple[object, ...]] = set()
    kept: list[PartialPath] = []
    for path in paths:
        if path.branch.doubt and path.branch.state in seen:
            continue
        seen.add(path.branch.state)
        kept.append(path)
    return kept


def _changes(before: Header, after: Header) -> bool:
    names = ("source", "destination", "port", "mark", "masqueraded")
    return any(getattr(before, name) != getattr(after, name) for name in names)
