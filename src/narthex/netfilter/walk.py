"""A packet's way through rules, as the kernel takes it: hooks, base chains by priority, jumps, address rewriting.

The packet is the first of a NEW connection. Wherever the kernel would draw a random number, all draws are followed,
each with its exact probability. What the walk cannot know ends that branch as UNSUPPORTED; it never guesses.

The kernel facts are those of Linux 5.13 and later: nf_nat_core.c (a hook's nat chains end with the first rewriting),
nf_tables_core.c (jump, goto, return), ip_vs_core.c (IPVS stands in input and output), and the loopback path (a packet from this host to itself passes output and
postrouting, then prerouting and input without nat).
"""

from __future__ import annotations

import msgspec

from narthex.model.packet import Disposition, Host, Memory, Outcome, Packet, Trace
from narthex.netfilter.ast import Ruleset
from narthex.netfilter.ipvs import Beside
from narthex.netfilter.walk_ipvs import AFTER_INPUT, AFTER_OUTPUT, BEFORE_INPUT, BEFORE_OUTPUT
from narthex.netfilter.walk_rules import HookWalk, NameOf
from narthex.netfilter.walk_state import Branch, End, Place


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
    """All hooks of a node whose routes are not known: what is no address of its own goes out."""

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
        self._hooks = HookWalk(ruleset, packet, host, self._finish, memory, now, name_of, beside)
        self._local = self._hooks.matcher.local
        self._balance = self._hooks.balancer.balance
        self._hook = self._hooks.hook
        self._outcomes: dict[tuple[object, ...], Outcome] = {}

    def trace(self) -> Trace:
        """All ends that the packet can come to."""
        packet = self._packet
        start = [Branch(packet.destination, packet.port)]
        for branch in self._sent(start) if packet.from_host else self._received(start):
            delivered = branch.dnat or branch.served is not None
            self._finish(branch, End(Disposition.DELIVERED if delivered else Disposition.NOT_OURS))
        return Trace(packet=packet, outcomes=tuple(self._outcomes.values()))

    def _received(self, branches: list[Branch]) -> list[Branch]:
        """In from a link: prerouting, then input or forward and postrouting. What IPVS takes out of input and sends to
        another machine goes on through output."""
        iif = self._packet.iif
        here, away = self._routed(self._hook(Place("prerouting", iif=iif), branches))
        here = self._hook(Place("input", iif=iif), here, span=BEFORE_INPUT)
        here, sent = self._balance("input", here)
        here = self._hook(Place("input", iif=iif), here, span=AFTER_INPUT)
        away = self._hook(Place("forward", iif=iif, oif=None), away)
        away += self._hook(Place("output", oif=None), sent, nat=False)
        return here + self._hook(Place("postrouting", oif=None), away)

    def _sent(self, branches: list[Branch]) -> list[Branch]:
        """Made on this host: output and postrouting, and once more in over loopback when it is for this host. What IPVS
        sends to another machine begins output again, without nat."""
        oif = "lo" if self._local(self._packet.destination) else None
        branches = self._hook(Place("output", oif=oif), branches, span=BEFORE_OUTPUT)
        branches, sent = self._balance("output", branches)
        here, away = self._routed(self._hook(Place("output", oif=oif), branches, span=AFTER_OUTPUT))
        away += self._hook(Place("output", oif=None), sent, nat=False)
        away = self._hook(Place("postrouting", oif=None), away)
        here = self._hook(Place("postrouting", oif="lo"), here)
        here = self._hook(Place("prerouting", iif="lo"), here, nat=False)
        return away + self._hook(Place("input", iif="lo"), here, nat=False)

    def _routed(self, branches: list[Branch]) -> tuple[list[Branch], list[Branch]]:
        here = [branch for branch in branches if self._local(branch.daddr)]
        return here, [branch for branch in branches if not self._local(branch.daddr)]

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
