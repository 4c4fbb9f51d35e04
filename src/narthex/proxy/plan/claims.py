"""Who has which address and port when several Service ports claim it."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from narthex.model.names import ServicePortName
from narthex.proxy.plan.ir import FrontendConflict, FrontendKind, Match, ServicePlan

_RANK = {
    FrontendKind.CLUSTER_IP: 0,
    FrontendKind.LOAD_BALANCER: 1,
    FrontendKind.EXTERNAL_IP: 2,
    FrontendKind.NODE_PORT: 3,
}
"""Who wins an address and port that two Services claim: what the control plane allocated beats what a Service's author
wrote down, so that `externalIPs` cannot take over another Service's ClusterIP (CVE-2020-8554)."""
_KIND_OF_RANK = {rank: kind for kind, rank in _RANK.items()}


_Claim = tuple[int, tuple[str, str, str, str], ServicePlan]
"""Rank and name, by which the smallest wins, and whose it is."""


class Claims:
    """What all Service ports claim, whatever the order in which they came.

    Nearly every match is claimed once; then no more is kept of it than the plan that claims it.
    """

    def __init__(self) -> None:
        self._single: dict[Match, ServicePlan] = {}
        self._contested: dict[Match, list[_Claim]] = {}
        """In order; two or more."""
        self._doubtful: set[ServicePortName] = set()

    def claim(self, wish: ServicePlan) -> None:
        """A Service port claims all that it wishes to have; what it claimed before was released."""
        for frontend in wish.frontends:
            match = frontend.address, frontend.protocol, frontend.port
            if match in self._contested:
                claims = self._contested[match] = sorted((*self._contested[match], _claim(match, wish)), key=_order)
            elif (held := self._single.setdefault(match, wish)) is not wish:
                del self._single[match]
                claims = self._contested[match] = sorted((_claim(match, held), _claim(match, wish)), key=_order)
            else:
                continue
            self._doubtful.update(holder.name for _, _, holder in claims)

    def release(self, wish: ServicePlan) -> None:
        """What `claim` was called with is claimed no more."""
        for frontend in wish.frontends:
            match = frontend.address, frontend.protocol, frontend.port
            claims = self._contested.get(match)
            if claims is None:
                del self._single[match]
                continue
            self._doubtful.update(holder.name for _, _, holder in claims)
            left = [claim for claim in claims if claim[2] is not wish]
            if len(left) > 1:
                self._contested[match] = left
            else:
                del self._contested[match]
                self._single[match] = left[0][2]

    def has(self, wish: ServicePlan, match: Match) -> bool:
        """Whether nobody has a better claim to what the Service port claims."""
        claims = self._contested.get(match)
        return claims is None or claims[0][2] is wish

    def take_doubtful(self) -> AbstractSet[ServicePortName]:
        """Service ports that may have won or lost something since this was asked last."""
        doubtful, self._doubtful = self._doubtful, set()
        return doubtful

    def conflicts(self) -> tuple[FrontendConflict, ...]:
        """All that several claim, in order."""
        found = [
            FrontendConflict(match=match, kind=_KIND_OF_RANK[rank], winner=claims[0][2].name, loser=loser.name)
            for match, claims in self._contested.items()
            for rank, _, loser in claims[1:]
        ]
        return tuple(sorted(found, key=lambda c: (c.match[0] or "", c.match[1].value, c.match[2], c.loser.sort_key)))


def _claim(match: Match, wish: ServicePlan) -> _Claim:
    kind = next(each.kind for each in wish.frontends if each.match == match)
    return _RANK[kind], wish.name.sort_key, wish


def _order(claim: _Claim) -> tuple[int, tuple[str, str, str, str]]:
    return claim[0], claim[1]
