"""A packet's way through rules, as the kernel takes it: hooks, base chains by priority, jumps, address rewriting.

The packet is the first of a NEW connection. Wherever the kernel would draw a random number, all draws are followed,
each with its exact probability. What the walk cannot know ends that branch as UNSUPPORTED; it never guesses.

The kernel facts are those of Linux 5.13 and later: nf_nat_core.c (a hook's nat chains end with the first rewriting),
nf_tables_core.c (jump, goto, return), ip_vs_core.c (IPVS stands in input and output), and the loopback path (a packet from
this host to itself passes output and postrouting, then prerouting and input without nat).
"""

from __future__ import annotations

import msgspec

from narthex.model.net import family_of
from narthex.model.packet import Disposition, Host, Memory, Outcome, Packet, Trace, WalkNearMiss
from narthex.netfilter.ast import Ruleset
from narthex.netfilter.walk.chains import ChainWalk
from narthex.netfilter.walk.ipvs import AFTER_INPUT, AFTER_OUTPUT, BEFORE_INPUT, BEFORE_OUTPUT, Balancer
from narthex.netfilter.walk.lookup import ALL_PRIORITIES, PriorityRange, index_ruleset
from narthex.netfilter.walk.matches import Matcher
from narthex.netfilter.walk.state import Branch, BranchEnd, HookPoint, KernelObjects, merge
from narthex.netfilter.walk.statements import Actor, NameOf

__all__ = ["Branch", "BranchEnd", "HookPoint", "HookWalk", "NameOf", "walk"]

Ended = list[tuple[Branch, BranchEnd]]

_DESTINATION_HOOKS = ("prerouting", "output")


def walk(
    ruleset: Ruleset,
    packet: Packet,
    host: Host,
    memory: Memory | None = None,
    now: float = 0.0,
    name_of: NameOf | None = None,
    objects: KernelObjects = KernelObjects(),  # noqa: B008  # frozen
) -> Trace:
    """Follow a packet through all tables of its family. `now` is in seconds, on the clock of `memory`."""
    return _Walk(HookWalk(ruleset, packet, host, memory, now, name_of, objects)).trace()


class HookWalk:
    """One packet and the rules of one network namespace, hook by hook. Who routes between the hooks is the caller."""

    def __init__(
        self,
        ruleset: Ruleset,
        packet: Packet,
        host: Host,
        memory: Memory | None = None,
        now: float = 0.0,
        name_of: NameOf | None = None,
        objects: KernelObjects = KernelObjects(),  # noqa: B008  # frozen
        state: str = "new",
    ) -> None:
        """`state` is the connection's, in conntrack's words."""
        self.packet = packet
        self._index = index_ruleset(ruleset, family_of(packet.destination))
        name_of = name_of or (lambda _address: "")
        self._matcher = Matcher(packet, host, self._index, memory, now, objects, state)
        self._chains = ChainWalk(self._matcher, Actor(self._matcher, self._index, name_of), self._index)
        self._balancer = Balancer(objects, self._matcher, name_of)

    def start(self) -> Branch:
        """The packet before all rules."""
        return Branch(self.packet.destination, self.packet.port)

    def local(self, address: str) -> bool:
        """Whether an address is one of the host's own, loopback included."""
        return self._matcher.local(address)

    def hook(
        self, point: HookPoint, branches: list[Branch], *, nat: bool = True, span: PriorityRange = ALL_PRIORITIES
    ) -> tuple[list[Branch], Ended]:
        """Walk all base chains of a hook in the kernel's order, or those with priorities in the span: which branches
        are let through, and how the others end. `nat` False: the connection is known already, as on the way in again
        over loopback."""
        ended: Ended = []
        for table, chain in self._index.base_chains(point.hook, span):
            if not branches:
                break
            assert chain.hook is not None
            passed: list[Branch] = []
            for branch in branches:
                if chain.hook.type == "nat" and not (nat and _may_be_rewritten(point, branch)):
                    passed.append(branch)
                    continue
                for way, out in self._chains.base(point, table, chain, branch):
                    if isinstance(way, BranchEnd):
                        ended.append((out, way))
                    else:
                        passed.append(out)
            branches = merge(passed)
        return branches, ended

    def balance(self, hook: str, branches: list[Branch]) -> tuple[list[Branch], list[Branch], Ended]:
        """What IPVS does in input or output: who goes on here, who is sent to another machine, and whose way ends."""
        return self._balancer.balance(hook, branches)

    @property
    def near(self) -> tuple[WalkNearMiss, ...]:
        """The rules that nearly matched so far, the telling ones first."""
        return self._chains.near


def _may_be_rewritten(point: HookPoint, branch: Branch) -> bool:
    """Only what is tracked, and each address once."""
    return branch.tracked and not (branch.dnat if point.hook in _DESTINATION_HOOKS else branch.masquerade)


class _Walk:
    """All hooks, where nothing is known of routes."""

    def __init__(self, hooks: HookWalk) -> None:
        self._hooks = hooks
        self._outcomes: dict[tuple[object, ...], Outcome] = {}
        self._may: dict[str, dict[tuple[Disposition, tuple[str, int] | None, bool], None]] = {}

    def trace(self) -> Trace:
        """All ends that the packet can come to."""
        packet = self._hooks.packet
        start = [self._hooks.start()]
        for branch in self._sent(start) if packet.from_host else self._received(start):
            delivered = branch.dnat or branch.served is not None
            self._finish(branch, BranchEnd(Disposition.DELIVERED if delivered else Disposition.NOT_OURS))
        outcomes = tuple(
            msgspec.structs.replace(outcome, may=tuple(self._may[outcome.note]))
            if outcome.disposition is Disposition.UNSUPPORTED and outcome.note in self._may
            else outcome
            for outcome in self._outcomes.values()
        )
        return Trace(packet=packet, outcomes=outcomes, near=self._hooks.near)

    def _received(self, branches: list[Branch]) -> list[Branch]:
        """In from a link: prerouting, then input or forward and postrouting. What IPVS takes out of input and sends to
        another machine goes on through output."""
        iif = self._hooks.packet.iif
        here, away = self._routed(self._hook(HookPoint("prerouting", iif=iif), branches))
        here = self._hook(HookPoint("input", iif=iif), here, span=BEFORE_INPUT)
        here, sent = self._balance("input", here)
        here = self._hook(HookPoint("input", iif=iif), here, span=AFTER_INPUT)
        away = self._hook(HookPoint("forward", iif=iif, oif=None), away)
        away += self._hook(HookPoint("output", oif=None), sent, nat=False)
        # Since Linux 5.7 (commit 28f8bfd1ac94) rules of postrouting see where a forwarded packet came in.
        return here + self._hook(HookPoint("postrouting", iif=iif, oif=None), away)

    def _sent(self, branches: list[Branch]) -> list[Branch]:
        """Made on this host: output and postrouting, and once more in over loopback when it is for this host. What IPVS
        sends to another machine begins output again, without nat."""
        oif = "lo" if self._hooks.local(self._hooks.packet.destination) else None
        branches = self._hook(HookPoint("output", oif=oif), branches, span=BEFORE_OUTPUT)
        branches, sent = self._balance("output", branches)
        here, away = self._routed(self._hook(HookPoint("output", oif=oif), branches, span=AFTER_OUTPUT))
        away += self._hook(HookPoint("output", oif=None), sent, nat=False)
        away = self._hook(HookPoint("postrouting", oif=None), away)
        here = self._hook(HookPoint("postrouting", oif="lo"), here)
        here = self._hook(HookPoint("prerouting", iif="lo"), here, nat=False)
        return away + self._hook(HookPoint("input", iif="lo"), here, nat=False)

    def _routed(self, branches: list[Branch]) -> tuple[list[Branch], list[Branch]]:
        local = self._hooks.local
        return [one for one in branches if local(one.daddr)], [one for one in branches if not local(one.daddr)]

    def _hook(
        self, point: HookPoint, branches: list[Branch], *, nat: bool = True, span: PriorityRange = ALL_PRIORITIES
    ) -> list[Branch]:
        passed, ended = self._hooks.hook(point, branches, nat=nat, span=span)
        for branch, end in ended:
            self._finish(branch, end)
        return passed

    def _balance(self, hook: str, branches: list[Branch]) -> tuple[list[Branch], list[Branch]]:
        stay, away, ended = self._hooks.balance(hook, branches)
        for branch, end in ended:
            self._finish(branch, end)
        return stay, away

    def _finish(self, branch: Branch, end: BranchEnd) -> None:
        delivered = end.disposition is Disposition.DELIVERED
        endpoint = (branch.daddr, branch.dport) if delivered else None
        if branch.doubt:
            may = self._may.setdefault(branch.doubt, {})
            may[end.disposition, endpoint, delivered and branch.masquerade] = None
            return
        outcome = Outcome(
            disposition=end.disposition,
            probability=branch.probability,
            endpoint=endpoint,
            masquerade=delivered and branch.masquerade,
            source=branch.saddr if delivered else "",
            note=end.note,
            supposing=branch.supposing,
            remembers=branch.remembers,
            steps=branch.steps(),
        )
        key = (
            outcome.disposition,
            outcome.endpoint,
            outcome.masquerade,
            outcome.source,
            outcome.note,
            outcome.supposing,
            outcome.remembers,
        )
        same = self._outcomes.get(key)
        if same is not None:
            teller = same if same.probability >= outcome.probability else outcome
            outcome = msgspec.structs.replace(teller, probability=same.probability + outcome.probability)
        self._outcomes[key] = outcome
