"""Protocols of a mode: the Backend renders a plan as rules, the Target carries changes of rules to a kernel.

`R` is the backend's type of rules: immutable, comparable, printable. `C` is its type of changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

from narthex.model.objects import ServicePortName
from narthex.model.packet import Host, Memory, Packet, Trace
from narthex.proxy.plan.ir import Deviation, Plan
from narthex.proxy.plan.traits import Trait

R = TypeVar("R")
C = TypeVar("C")


class Backend(Protocol[R, C]):
    """Renders plans as rules. Pure; one per mode; knows no endpoint's state."""

    name: str
    """The `mode` of KubeProxyConfiguration: `nftables`, `iptables`, and so on."""
    deviations: frozenset[Deviation]
    traits: Mapping[Trait, str]
    """An answer to each question that no single packet answers."""

    def advance(self, previous: R | None, plan: Plan) -> tuple[R, C]:
        """Return the rules for a plan, and the changes that lead from the previous rules to them.

        Both are computed together, so a plan that differs in one Service costs what that Service costs. `previous` lets
        unchanged parts be taken over and slots stay where they are; it never changes what the rules mean. Without it
        the state of the kernel is unknown or empty, and the changes replace everything.

        The law is `patch(previous, changes) == rules`.
        """
        ...

    def render(self, plan: Plan) -> R:
        """Return the rules for a plan, from scratch."""
        return self.advance(None, plan)[0]

    def diff(self, have: R | None, want: R) -> C:
        """Return the changes between any two rules, such as rules that were read from a kernel. Compares everything."""
        ...

    def patch(self, have: R, changes: C) -> R:
        """Return the rules after the changes: `patch(a, diff(a, b)) == b`."""
        ...

    def walk(self, rules: R, packet: Packet, host: Host, memory: Memory | None = None, now: float = 0.0) -> Trace:
        """Return the path of a packet through the rules, given what earlier packets left in the memory."""
        ...

    def text(self, rules: R) -> str:
        """Return the rules in the format that their kernel tool reads."""
        ...

    def unserved(self, rules: R) -> Mapping[ServicePortName, str]:
        """Return the Service ports that the rules refuse although they have endpoints, with the reason."""
        del rules
        return {}


class Target(Protocol[R, C]):  # type: ignore[misc]  # R and C are exactly the backend's own, neither wider
    """Carries changes to one kernel: one network namespace, one backend, one IP family."""

    def read(self) -> R | None:
        """Return our rules in the kernel; None when there are none. Raises ApplyError."""
        ...

    def apply(self, changes: C) -> None:
        """Make the changes, all or nothing per kernel transaction.

        Raises ApplyError with the message of the tool and, if known, the object; the state of the kernel is then
        unknown.
        """
        ...

    def clean(self) -> None:
        """Remove everything that is ours."""
        ...

    def unchanged(self) -> bool:
        """Return True if nothing that `read` would see has changed since this Target last read or applied.

        False: something may have changed, or it cannot be known.
        """
        return False

    def tend(self) -> float | None:
        """Do the work that is due between syncs. Returns the seconds until the next call, or None."""
        return None

    def close(self) -> None:
        """Release sockets and end processes of this Target; the rules stay."""
        return
