"""Which addresses this announcer answers for while views differ and nodes change: make before break.

`lb/election.py` elects the node. A node that loses an address answers until the elected one announces it in its
heartbeats, so no request goes unanswered. Two nodes that both consider themselves elected resolve it quickly by the order
that both compute. A node publishes every address that it answers for (`lb/heartbeat.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from narthex.lb.election import AddressElection, rank

HANDOVER_SECONDS = 3.0
"""How long a node that is no longer eligible waits for its successor."""
CONFLICT_SECONDS = 1.0
"""Two nodes that both answer, neither yielding by its own view, resolve the conflict after this."""


class PeerClaims(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses that a live peer publishes."""

    held: frozenset[str] = frozenset()
    yielding: frozenset[str] = frozenset()
    leaving: bool = False
    standing_back: bool = False


class OwnedAddress(msgspec.Struct, kw_only=True):
    """An address that this node answers for."""

    since: float
    yielding: bool = False
    """Released as soon as another node has it."""
    until: float = math.inf
    """When it is released in any case."""
    rivals: dict[str, float] = {}
    """Peers that also answer without yielding, and since when."""
    reported: set[str] = set()


class OwnershipChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of one update."""

    gained: tuple[str, ...] = ()
    lost: tuple[tuple[str, str], ...] = ()
    duplicates: tuple[tuple[str, str], ...] = ()
    """Address and peer, for peers that also answer and have not yielded for CONFLICT_SECONDS; each reported once."""
    settled: tuple[str, ...] = ()
    """Addresses whose rival has yielded; they must be announced again."""

    def __bool__(self) -> bool:
        return bool(self.gained or self.lost or self.duplicates or self.settled)


class AddressOwnership:
    """The addresses that one announcer answers for. Owned by one thread."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.held: dict[str, OwnedAddress] = {}
        self._conflicts: dict[str, float] = {}
        """By address: since when a preferred rival holds it although we are elected."""

    @property
    def yielding(self) -> frozenset[str]:
        """Addresses that are released as soon as another node has them."""
        return frozenset(address for address, each in self.held.items() if each.yielding)

    def next_due(self) -> float:
        """Return when `update` must be called even if nothing else happens."""
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
        """Approach the elected state as far as the peers allow.

        `rivals` are the claims of all live peers; `standing_back` is what this node publishes about itself.
        """
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
            duplicates += [(address, name) for name in sorted(lasting - each.reported)]
            each.reported = (each.reported | lasting) & each.rivals.keys()
        for address, decision in decisions.items():
            if address in self.held or decision.holder != self.node:
                continue
            better = self._better(decision, rivals, standing_back)
            if better:
                # The peer may not know yet that it must yield; if it never does, one node is better than two.
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
        """Release all addresses; return them."""
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
        """Return why an address is released; empty if it is kept."""
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
        # An eligible node answers until the elected one does; others wait only for a while.
        patient = verdict is not None and verdict.eligible
        each.until = math.inf if patient else min(each.until, now + HANDOVER_SECONDS)
        each.yielding = True
        if now >= each.until:
            return f"{why}; {decision.holder} has not taken it within {HANDOVER_SECONDS:g} s"
        return ""

    def _better(self, decision: AddressElection, rivals: Mapping[str, PeerClaims], standing_back: bool) -> set[str]:
        """Return the peers that hold an address, do not yield, and precede this node in the order known to both."""
        own = (standing_back, rank(self.node, decision.first))
        return {
            name
            for name, rival in rivals.items()
            if decision.address in rival.held - rival.yielding
            and not rival.leaving
            and (rival.standing_back, rank(name, decision.first)) < own
        }
