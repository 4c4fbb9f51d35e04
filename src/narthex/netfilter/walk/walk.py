"""The path of a packet through rules as in the kernel: hooks, base chains by priority, jumps, and NAT.

The packet is the first of a NEW connection. Where the kernel draws a random number, the walk follows every outcome with its
exact probability. A branch that depends on unknown information ends as UNSUPPORTED; the walk never guesses.

The kernel's behavior is that of Linux 5.13 and later: nf_nat_core.c (the first NAT statement ends the nat chains of a hook),
nf_tables_core.c (jump, goto, return), ip_vs_core.c (IPVS runs in input and output), and the loopback path (a packet from this
host to itself passes output and postrouting, then prerouting and input without nat).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import msgspec

from narthex.model import Disposition, Host, Memory, Outcome, Packet, Trace, WalkNearMiss, family_of, join_port
from narthex.netfilter.ast import Ruleset
from narthex.netfilter.walk.chains import ChainWalk
from narthex.netfilter.walk.ipvs import IpvsStage
from narthex.netfilter.walk.lookup import BaseChain, index_ruleset
from narthex.netfilter.walk.losses import absent_parts
from narthex.netfilter.walk.matches import Matcher
from narthex.netfilter.walk.state import (
    AFTER_INPUT,
    AFTER_OUTPUT,
    ALL_PRIORITIES,
    BEFORE_INPUT,
    BEFORE_OUTPUT,
    Branch,
    BranchEnd,
    HookPoint,
    KernelObjects,
    PriorityRange,
    merge,
)
from narthex.netfilter.walk.statements import NameOf, StatementExecutor
from narthex.netfilter.walk.structure import CLUSTER_IPS_CHECK, EXTERNAL_SERVICES, is_proxy_chain

__all__ = ["Branch", "BranchEnd", "HookPoint", "HookWalk", "NameOf", "walk"]

Ended = list[tuple[Branch, BranchEnd]]

_DESTINATION_HOOKS = ("prerouting", "output")
_DROPPED_UNSENT = (
    f"table filter drops the packet in chain {EXTERNAL_SERVICES} because no endpoint is local, and no rule of table nat is for its "
    "Service: lines of the input are missing"
)
_REFUSING_HOOKS = ("input", "forward", "output")
"""Hooks in which kube-proxy refuses what no chain of a Service has taken."""
_MOST_ORDERS = 4
"""Other orders of chains of one priority to try: more than two tables at one priority are rare."""


def walk(
    ruleset: Ruleset,
    packet: Packet,
    host: Host,
    memory: Memory | None = None,
    now: float = 0.0,
    name_of: NameOf | None = None,
    objects: KernelObjects = KernelObjects(),  # noqa: B008  # frozen
) -> Trace:
    """Walk a packet through all tables of its family. `now` is in seconds on the clock of `memory`."""
    return _Walk(HookWalk(ruleset, packet, host, memory, now, name_of, objects)).trace()


class HookWalk:
    """Walks one packet through the rules of one network namespace, hook by hook. The caller routes between the hooks.

    `state` is the conntrack state of the connection. Unless `explained`, it records neither steps nor near misses: the results are
    the same, in half the time.
    """

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
        *,
        explained: bool = True,
    ) -> None:
        self.packet = packet
        self._index = index_ruleset(ruleset, family_of(packet.destination))
        name_of = name_of or (lambda _address: "")
        self._matcher = Matcher(packet, host, self._index, memory, now, objects, state)
        self._chains = ChainWalk(
            self._matcher, StatementExecutor(self._matcher, self._index, name_of), self._index, explained
        )
        self._ipvs = IpvsStage(objects, self._matcher, name_of)
        self._is_new = state == "new"
        self._absent = (
            absent_parts(ruleset, self._matcher.family, self._index.lost, bool(objects.servers))
            if self._is_new
            else ("", "")
        )

    def start(self) -> Branch:
        """Return the packet before all rules."""
        return Branch(self.packet.destination, self.packet.port)

    def local(self, address: str) -> bool:
        """Return True for a local address of the host, including loopback."""
        return self._matcher.local(address)

    def hook(
        self, point: HookPoint, branches: list[Branch], *, nat: bool = True, span: PriorityRange = ALL_PRIORITIES
    ) -> tuple[list[Branch], Ended]:
        """Walk the base chains of a hook with priorities in `span`, in the kernel's order.

        Args:
            point: The hook.
            branches: The branches that arrive at the hook.
            nat: False skips the nat chains, for a packet of a known connection, such as one that arrives over loopback.
            span: The range of priorities.

        Returns:
            The branches that pass, and those that end.
        """
        ended: Ended = []
        for rank in self._index.ranks(point.hook, span):
            if not branches:
                break
            branches, out = self._rank(point, rank, branches, nat)
            ended += out
        for branch in branches:
            if branch.stranded and not branch.dnat and point.hook in _REFUSING_HOOKS:
                branch.unsure = branch.unsure or branch.stranded
        for branch in (*branches, *(branch for branch, _ in ended)):
            self._consider_absent(point, branch, nat)
        return branches, ended

    def _rank(
        self, point: HookPoint, rank: Sequence[BaseChain], branches: list[Branch], nat: bool
    ) -> tuple[list[Branch], Ended]:
        """Walk base chains of the same priority. Record at the results if they depend on an order that dumps do not show."""
        others = [pair for pair in rank if pair[0] is not rank[0][0]][:_MOST_ORDERS]
        if not others:
            return self._in_order(point, rank, branches, nat)
        states = {branch.state for branch in branches}
        passed, ended = self._in_order(point, rank, [branch.copy() for branch in branches], nat)
        if ended or any(branch.state not in states for branch in passed):
            found = _shares(passed, ended)
            for first in others:
                order = (first, *(pair for pair in rank if pair is not first))
                other = _shares(*self._in_order(point, order, [branch.copy() for branch in branches], nat))
                if other != found:
                    text = _assumed_order(rank[0], first)
                    for branch, end in (*((branch, None) for branch in passed), *ended):
                        key = _result(branch, end)
                        if found[key] != other.get(key):
                            branch.suppose(text)
                    break
        return passed, ended

    def _in_order(
        self, point: HookPoint, chains: Sequence[BaseChain], branches: list[Branch], nat: bool
    ) -> tuple[list[Branch], Ended]:
        ended: Ended = []
        for table, chain in chains:
            assert chain.hook is not None
            passed: list[Branch] = []
            for branch in branches:
                if chain.hook.type == "nat" and not (nat and _may_be_rewritten(point, branch)):
                    passed.append(branch)
                    continue
                for continuation, out in self._chains.base(point, table, chain, branch):
                    if isinstance(continuation, BranchEnd):
                        ended.append((out, continuation))
                    else:
                        passed.append(out)
            branches = merge(passed)
        return branches, ended

    def _consider_absent(self, point: HookPoint, branch: Branch, nat: bool) -> None:
        """Record at a branch that the input lacks rules that could act on the packet at this hook."""
        rewriting, refusing = self._absent
        absent = rewriting if nat and point.hook in _DESTINATION_HOOKS else ""
        absent = absent or (refusing if point.hook != "prerouting" else "")
        if not absent:
            return
        if branch.sent:
            branch.suppose(f"{absent}; it is assumed to let the packet pass")
        else:
            branch.unsure = branch.unsure or absent

    def balance(self, hook: str, branches: list[Branch]) -> tuple[list[Branch], list[Branch], Ended]:
        """Apply IPVS in input or output. Return the branches that stay here, those to other hosts, and those that end."""
        return self._ipvs.balance(hook, branches)

    def is_unsure(self, branch: Branch, disposition: Disposition) -> bool:
        """Return True for an end that rules which the input lacks could prevent.

        A rule of the input that refuses the packet shows the end, unless other rules of its table may be missing. That no rule
        rewrites the packet shows its end only if no line is missing: where nothing shows that one is, the end assumes it.
        """
        last = branch.last_step()
        if (
            self._index.copied
            and disposition is Disposition.DROPPED
            and last is not None
            and last.chain == EXTERNAL_SERVICES
            and not (branch.stranded or self._absent[0])
        ):
            branch.unsure = branch.unsure or _DROPPED_UNSENT
        if branch.stranded and last is not None and last.chain == CLUSTER_IPS_CHECK:
            branch.unsure = branch.unsure or branch.stranded
        if branch.sent or disposition is Disposition.UNSUPPORTED:
            return False
        refused = disposition in (Disposition.DROPPED, Disposition.REJECTED)
        if not branch.unsure:
            # What a Service's chain has not sent on is refused because of what no rule of that chain matches.
            if self._is_new and (branch.stranded or not refused) and self._may_lack(branch):
                to = join_port(branch.daddr, branch.dport) if branch.dport else branch.daddr
                branch.suppose(f"no rule for {to} is missing from the input")
            return False
        if last is not None and (last.chain == CLUSTER_IPS_CHECK or branch.unsure == _DROPPED_UNSENT):
            return True
        if refused and last is not None and (not self._absent[1] or is_proxy_chain(last.table, last.chain)):
            branch.suppose(f"{branch.unsure}; it is assumed not to act on the packet")
            return False
        return True

    def _may_lack(self, branch: Branch) -> bool:
        """Return True if the input may lack a rule for the destination of a branch, though nothing shows it."""
        return self._index.may_lack(branch.daddr, branch.dport, own=self.local(branch.daddr))

    @property
    def asked_links(self) -> frozenset[str]:
        """The names that rules compared with an output link that is unknown."""
        return frozenset(self._matcher.asked_links)

    @property
    def asked_addresses(self) -> frozenset[str]:
        """The destinations of which rules asked whether the host has them, and of which that is unknown."""
        return frozenset(self._matcher.asked_addresses)

    @property
    def near(self) -> tuple[WalkNearMiss, ...]:
        """The rules of which exactly one match failed so far, the most relevant first."""
        return self._chains.near


_Result = tuple[object, ...]


def _result(branch: Branch, end: BranchEnd | None) -> _Result:
    return end.disposition if end is not None else None, branch.state


def _shares(passed: list[Branch], ended: Ended) -> dict[_Result, Fraction]:
    """Return the probability of each result; branches in doubt have none."""
    shares: dict[_Result, Fraction] = {}
    for branch, end in (*((branch, None) for branch in passed), *ended):
        key = _result(branch, end)
        shares[key] = shares.get(key, Fraction(0)) + (0 if branch.doubt else branch.probability)
    return shares


def _assumed_order(one: BaseChain, other: BaseChain) -> str:
    assert one[1].hook is not None
    return (
        f"{_words(one)} is assumed to run before {_words(other)}: both have priority {one[1].hook.priority}, "
        "and the input does not show which was registered last"
    )


def _words(pair: BaseChain) -> str:
    table, chain = pair
    return f"chain {chain.name} of table {table.name}" + (" (iptables-legacy)" if table.legacy else "")


def _may_be_rewritten(point: HookPoint, branch: Branch) -> bool:
    """Return True for a tracked packet whose address at this hook has not been translated yet."""
    return branch.tracked and not (branch.dnat if point.hook in _DESTINATION_HOOKS else branch.masquerade)


class _Walk:
    """Walks a packet through all hooks without knowledge of routes."""

    def __init__(self, hooks: HookWalk) -> None:
        self._hooks = hooks
        self._outcomes: dict[tuple[object, ...], Outcome] = {}
        self._may: dict[str, dict[tuple[Disposition, tuple[str, int] | None, bool], None]] = {}

    def trace(self) -> Trace:
        """Return all outcomes of the packet."""
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
        """Walk a received packet: prerouting, then input, or forward and postrouting.

        A packet that IPVS forwards from input to another host continues in output.
        """
        iif = self._hooks.packet.iif
        here, away = self._routed(self._hook(HookPoint("prerouting", iif=iif), branches))
        here = self._hook(HookPoint("input", iif=iif), here, span=BEFORE_INPUT)
        here, sent = self._balance("input", here)
        here = self._hook(HookPoint("input", iif=iif), here, span=AFTER_INPUT)
        away = self._hook(HookPoint("forward", iif=iif, oif=None), away)
        away += self._hook(HookPoint("output", oif=None), sent, nat=False)
        # Since Linux 5.7 (commit 28f8bfd1ac94) postrouting rules see the input interface of a forwarded packet.
        return here + self._hook(HookPoint("postrouting", iif=iif, oif=None), away)

    def _sent(self, branches: list[Branch]) -> list[Branch]:
        """Walk a local packet: output and postrouting, then prerouting and input if it is for this host.

        A packet that IPVS forwards to another host enters output again, without nat.
        """
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
        if not branch.doubt and self._hooks.is_unsure(branch, end.disposition):
            self._may.setdefault(branch.unsure, {})[end.disposition, None, False] = None
            end = BranchEnd(Disposition.UNSUPPORTED, branch.unsure)
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
            likelier = same if same.probability >= outcome.probability else outcome
            outcome = msgspec.structs.replace(likelier, probability=same.probability + outcome.probability)
        self._outcomes[key] = outcome
