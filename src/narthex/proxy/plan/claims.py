"""Decides which Service port gets an address and port that several claim."""

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
"""Precedence of claims. What the control plane allocated takes precedence over what the author of a Service wrote, so
that `externalIPs` cannot take over the ClusterIP of another Service (CVE-2020-8554).
"""
_KIND_OF_RANK = {rank: kind for kind, rank in _RANK.items()}


_Claim = tuple[int, tuple[str, str, str, str], ServicePlan]
"""Rank and name, by which the smallest wins, and the plan that claims."""


class Claims:
    """The claims of all Service ports, independent of the order of arrival.

    Nearly every match is claimed once; for these only the claiming plan is stored.
    """

    def __init__(self) -> None:
        self._single: dict[Match, ServicePlan] = {}
        self._contested: dict[Match, list[_Claim]] = {}
        """In order; two or more."""
        self._doubtful: set[ServicePortName] = set()

    def claim(self, service: ServicePlan) -> None:
        """Register all frontends of a Service port, whose earlier claims were released."""
        for frontend in service.frontends:
            match = frontend.address, frontend.protocol, frontend.port
            if match in self._contested:
                claims = self._contested[match] = sorted((*self._contested[match], _claim(match, service)), key=_order)
            elif (held := self._single.setdefault(match, service)) is not service:
                del self._single[match]
                claims = self._contested[match] = sorted((_claim(match, held), _claim(match, service)), key=_order)
            else:
                continue
            self._doubtful.update(holder.name for _, _, holder in claims)

    def release(self, service: ServicePlan) -> None:
        """Remove the claims that `claim` registered."""
        for frontend in service.frontends:
            match = frontend.address, frontend.protocol, frontend.port
            claims = self._contested.get(match)
            if claims is None:
                del self._single[match]
                continue
            self._doubtful.update(holder.name for _, _, holder in claims)
            left = [claim for claim in claims if claim[2] is not service]
            if len(left) > 1:
                self._contested[match] = left
            else:
                del self._contested[match]
                self._single[match] = left[0][2]

    def has(self, service: ServicePlan, match: Match) -> bool:
        """Return True if no other Service port has a better claim to the match."""
        claims = self._contested.get(match)
        return claims is None or claims[0][2] is service

    def take_doubtful(self) -> AbstractSet[ServicePortName]:
        """Return the Service ports that may have won or lost something since the last call."""
        doubtful, self._doubtful = self._doubtful, set()
        return doubtful

    def conflicts(self) -> tuple[FrontendConflict, ...]:
        """Return all matches that several Service ports claim, in order."""
        found = [
            FrontendConflict(match=match, kind=_KIND_OF_RANK[rank], winner=claims[0][2].name, loser=loser.name)
            for match, claims in self._contested.items()
            for rank, _, loser in claims[1:]
        ]
        return tuple(sorted(found, key=lambda c: (c.match[0] or "", c.match[1].value, c.match[2], c.loser.sort_key)))


def _claim(match: Match, service: ServicePlan) -> _Claim:
    kind = next(each.kind for each in service.frontends if each.match == match)
    return _RANK[kind], service.name.sort_key, service


def _order(claim: _Claim) -> tuple[int, tuple[str, str, str, str]]:
    return claim[0], claim[1]
