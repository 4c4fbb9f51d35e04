"""What may refuse a change set before it is written: a verifier of what the changes lead to.

`narthex.trace.proof.incremental` has the one that proves it for all packets. The proxy only knows this interface.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import msgspec

from narthex.model import ServicePortName
from narthex.proxy.plan.ir import Plan

R = TypeVar("R", contravariant=True)
C = TypeVar("C", contravariant=True)


class ChangeVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a verifier says of a change set."""

    refusal: str = ""
    """Why the changes must not be written: the packets that the rules would treat otherwise than the plan; empty: they are right."""
    culprits: frozenset[ServicePortName] = frozenset()
    """With a refusal: the changed Service ports that these packets are for. Empty if it does not follow from single ones."""
    undecided: frozenset[ServicePortName] = frozenset()
    """All Service ports of the plan about which nothing can be said, such as those with consistent hashing."""
    whole: bool = False
    """All packets were looked at, and not only those that the changes touch."""
    classes: int = 0
    """Classes of packets that were compared."""


class ChangeVerifier(Protocol[R, C]):
    """Verifies the change sets of one IP family, one after the other."""

    def verify(self, have: R | None, changes: C, want: R, plan: Plan) -> ChangeVerdict:
        """Return whether the rules that the changes lead to do what the plan means.

        `have` are the rules in force, None if there are none; `want` are those that the backend takes for the result.
        """
        ...

    def restores(self, rules: R, changes: C) -> bool:
        """Return True if changes only write parts of the rules in force again, which were verified."""
        ...

    def written(self) -> None:
        """Note that the changes that were verified last are in force."""
        ...


class RefusedChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Changes that were not written, because the rules would not do what the objects mean."""

    reason: str
    """The packets that the rules would treat otherwise."""
    services: frozenset[ServicePortName]
    """The Service ports that keep their earlier rules."""
    everything: bool = False
    """No change could be written, so that other Service ports keep their earlier rules, too."""
