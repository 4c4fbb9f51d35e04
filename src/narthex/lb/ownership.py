"""Which addresses this announcer answers for, while views differ and nodes come and go: make before break.

`lb/announce.py` says whose turn it is. Whoever has to give an address up answers on until the next one says that it
has it, so that no question goes unanswered; two that both think it theirs settle it within a moment by the order that
both compute. Whoever answers is never silent about it: beats carry it (`lb/heartbeat.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from narthex.lb.announce import AddressElection, rank

HANDOVER_SECONDS = 3.0
"""Who may not answer any more waits so long for the next one."""
CONFLICT_SECONDS = 1.0
"""Two that both answer, and neither of which gives way by its own view, settle it after this."""


class PeerClaims(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer that is alive tells."""

    held: frozenset[str] = frozenset()
    yielding: frozenset[str] = frozenset()
    leaving: bool = False
    standing_back: bool = False


class OwnedAddress(msgspec.Struct, kw_only=True):
    """An address that is answered for."""

    since: float
    yielding: bool = False
    """It is given up as soon as another has it."""
    until: float = math.inf
    """It is given up then in any case."""
    rivals: dict[str, float] = {}
    """Peers that answer too without giving way, and since when."""
    told: set[str] = set()
    """Those of them that were told of."""


class OwnershipChanges(msgspec.Struct, frozen=True, kw_only=True):
    """What a look at the present has changed."""

    gained: tuple[str, ...] = ()
    lost: tuple[tuple[str, str], ...] = ()
    """Address, and why."""
    duplicates: tuple[tuple[str, str], ...] = ()
    """Address, and the peer that answers for it too, and has not given way for CONFLICT_SECONDS; each told once."""
    settled: tuple[str, ...] = ()
    """A rival has given way: everybody should hear once more who has it."""

    def __bool__(self) -> bool:
        return bool(self.gained or self.lost or self.duplicates or self.settled)


class AddressOwnership:
    """The addresses of one announcer. Owned by one thread."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.held: dict[str, OwnedAddress] = {}
        self._conflicts: dict[str, float] = {}
        """Since when a better rival holds what should be ours."""

    @property
    def yielding(self) -> frozenset[str]:
        """What is given up as soon as another has it."""
        return frozenset(address for address, each in self.held.items() if each.yielding)

    def next_due(self) -> float:
        """When `update` has to be called, though nothing else happens."""
        ends = [each.until for each in self.held.values()]
        settles = [at + CONFLICT_SECONDS for each in self.held.values() for at in each.rivals.values()]
        return min([*ends, *settles], default=math.inf)

    def update(
        self,
        decisions: Mapping[str, AddressElection],
        rivals: Mapping[str, PeerClaims],
        now: float,
        *,
        standing_back: bool = False,
    ) -> OwnershipChanges:
        """Come as near to the decisions as can be. `rivals` are the peers that are alive; `standing_back` is what this node
        tells them of itself."""
        gained, lost, duplicates, settled = [], [], [], []
        for address, each in list(self.held.items()):
            before = dict(each.rivals)
            why = self._give_up(address, each, decisions.get(address), rivals, now, standing_back)
            if why:
                del self.held[address]
                lost.append((address, why))
                continue
            settled += [address] if before and not each.rivals and not each.yielding else []
            lasting = {name for name, at in each.rivals.items() if now - at >= CONFLICT_SECONDS}
            duplicates += [(address, name) for name in sorted(lasting - each.told)]
            each.told = (each.told | lasting) & each.rivals.keys()
        for address, decision in decisions.items():
            if address in self.held or decision.holder != self.node:
                continue
            better = self._better(decision, rivals, standing_back)
            if better:
                # It may not know yet that it should give way; and if it never does, it is better than two.
                begun = self._conflicts.setdefault(address, now)
                if now - begun >= CONFLICT_SECONDS:
                    continue
            else:
                self._conflicts.pop(address, None)
            self.held[address] = OwnedAddress(since=now)
            gained.append(address)
        for address in self._conflicts.keys() - decisions.keys():
            del self._conflicts[address]
        return OwnershipChanges(
            gained=tuple(gained), lost=tuple(lost), duplicates=tuple(duplicates), settled=tuple(settled)
        )

    def drop_all(self) -> tuple[str, ...]:
        """Answer for nothing from now on."""
        before = tuple(self.held)
        self.held.clear()
        return before

    def _give_up(
        self,
        address: str,
        each: OwnedAddress,
        decision: AddressElection | None,
        rivals: Mapping[str, PeerClaims],
        now: float,
        standing_back: bool,
    ) -> str:
        """Why an address is not answered for any more; empty when it still is."""
        if decision is None:
            return "no Service has it any more"
        holders = {name for name, rival in rivals.items() if address in rival.held}
        if decision.holder != self.node:
            return self._hand_over(each, decision, holders, now)
        each.yielding, each.until = False, math.inf
        steady = {name for name in holders if address not in rivals[name].yielding and not rivals[name].leaving}
        each.rivals = {name: each.rivals.get(name, now) for name in sorted(steady)}
        better = self._better(decision, rivals, standing_back)
        for name in sorted(better & each.rivals.keys()):
            if now - each.rivals[name] >= CONFLICT_SECONDS:
                self._conflicts[address] = each.rivals[name]
                return f"{name} has it too, and comes first"
        if not better:
            self._conflicts.pop(address, None)
        return ""

    def _hand_over(self, each: OwnedAddress, decision: AddressElection, holders: set[str], now: float) -> str:
        each.rivals = {}
        verdict = decision.verdict(self.node)
        why = verdict.text if verdict else "this node is not known any more"
        if not decision.holder:
            return why
        if decision.holder in holders:
            return f"{decision.holder} has it now"
        # Who is only not the best answers until the best does; who may not, for a while.
        patient = verdict is not None and verdict.eligible
        each.until = math.inf if patient else min(each.until, now + HANDOVER_SECONDS)
        each.yielding = True
        if now >= each.until:
            return f"{why}; {decision.holder} has not taken it within {HANDOVER_SECONDS:g} s"
        return ""

    def _better(self, decision: AddressElection, rivals: Mapping[str, PeerClaims], standing_back: bool) -> set[str]:
        """Peers that hold an address, do not give way, and come before this node by what both of them know."""
        own = (standing_back, rank(self.node, decision.first))
        return {
            name
            for name, rival in rivals.items()
            if decision.address in rival.held - rival.yielding
            and not rival.leaving
            and (rival.standing_back, rank(name, decision.first)) < own
        }
