"""The changes that may be written: all of them, or those without the Service ports whose rules would be wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

import msgspec

from narthex.model import NamespacedName, ServicePortName
from narthex.proxy.backends.base import Backend
from narthex.proxy.plan.ir import Lineage, Plan
from narthex.proxy.verification import ChangeVerdict, ChangeVerifier, RefusedChanges

R = TypeVar("R")
C = TypeVar("C")

_MOST_TRIES = 8
"""Number of times that more Service ports are held back because the rules for them are wrong, too."""
_MOST_SUSPECTS = 16
"""Number of changed Services up to which each is held back alone to find the one whose change does harm to others."""


class VerifiedChanges(NamedTuple, Generic[R, C]):
    """A plan with the rules and changes that implement it, all of which were verified."""

    plan: Plan
    rules: R
    changes: C
    verdict: ChangeVerdict
    refused: RefusedChanges | None = None


_Part = tuple[frozenset[ServicePortName], VerifiedChanges[R, C]]
"""Service ports that are held back, and what passes without them."""


class ChangeFilter(Generic[R, C]):
    """Chooses the changes that pass a verifier."""

    def __init__(self, backend: Backend[R, C], verifier: ChangeVerifier[R, C]) -> None:
        self._backend = backend
        self._verifier = verifier

    def choose(self, have: R | None, before: Plan | None, plan: Plan) -> VerifiedChanges[R, C] | RefusedChanges:
        """Return changes that lead to a plan, or to the part of it that passes; if none does, why.

        `before` is the plan in force. A Service port that is held back stays as it is there. Without a plan in force it is left out,
        unless the kernel has rules: then they may serve it, in an unknown way.
        """
        found = self._tried(have, plan)
        if not found.verdict.refusal:
            return found
        changed = _changed(before, plan)
        refused = RefusedChanges(reason=found.verdict.refusal, services=found.verdict.culprits or changed)
        if before is not None or have is None:
            part = self._without_culprits(have, before, plan, found.verdict) or self._without_one(have, before, plan)
            if part is not None:
                held, passed = part
                return passed._replace(refused=msgspec.structs.replace(refused, services=held))
        refused = msgspec.structs.replace(refused, everything=True)
        if before is not None:
            # Others may have damaged the rules of the plan in force.
            tried = self._tried(have, before)
            if not tried.verdict.refusal:
                return tried._replace(refused=refused)
        return refused

    def _tried(self, have: R | None, plan: Plan) -> VerifiedChanges[R, C]:
        want, changes = self._backend.advance(have, plan)
        return VerifiedChanges(plan, want, changes, self._verifier.verify(have, changes, want, plan))

    def _without_culprits(
        self, have: R | None, before: Plan | None, plan: Plan, verdict: ChangeVerdict
    ) -> _Part[R, C] | None:
        """Hold back the Service ports for which the rules would be wrong. Return them with what passes, None if nothing does."""
        changed, held = _changed(before, plan), frozenset[ServicePortName]()
        for _ in range(_MOST_TRIES):
            more = _with_rivals(held | (verdict.culprits & changed), before, plan, changed)
            if more == held:
                return None
            held = more
            tried = self._tried(have, _without(plan, before, held))
            if not tried.verdict.refusal:
                return held, tried
            verdict = tried.verdict
        return None

    def _without_one(self, have: R | None, before: Plan | None, plan: Plan) -> _Part[R, C] | None:
        """Hold back each changed Service alone, since its change may do harm to others. Return the same."""
        changed = _changed(before, plan)
        services: dict[NamespacedName, set[ServicePortName]] = {}
        for name in changed:
            services.setdefault(name.service, set()).add(name)
        if before is None or not 1 < len(services) <= _MOST_SUSPECTS:
            return None
        for _, names in sorted(services.items()):
            held = _with_rivals(frozenset(names), before, plan, changed)
            tried = self._tried(have, _without(plan, before, held))
            if not tried.verdict.refusal:
                return held, tried
        return None


def _changed(before: Plan | None, plan: Plan) -> frozenset[ServicePortName]:
    if before is None:
        return frozenset(plan.services)
    names = {*before.services, *plan.services}
    return frozenset(name for name in names if before.services.get(name) is not plan.services.get(name))


def _with_rivals(
    held: frozenset[ServicePortName], before: Plan | None, plan: Plan, changed: Iterable[ServicePortName]
) -> frozenset[ServicePortName]:
    """Return Service ports to hold back, with those that have got an address and port from one of them."""
    if before is None:
        return held
    names = set(held)
    while True:
        matches = {frontend.match for name in names if (was := before.services.get(name)) for frontend in was.frontends}
        rivals = {
            name
            for name in changed
            if name not in names
            and (service := plan.services.get(name)) is not None
            and any(frontend.match in matches for frontend in service.frontends)
        }
        if not rivals:
            return frozenset(names)
        names |= rivals


def _without(plan: Plan, before: Plan | None, held: frozenset[ServicePortName]) -> Plan:
    """Return a plan in which some Service ports are as they were before, or not there."""
    services = {name: service for name, service in plan.services.items() if name not in held}
    if before is not None:
        services.update((name, before.services[name]) for name in held if name in before.services)
    return msgspec.structs.replace(plan, services=services, lineage=Lineage())
