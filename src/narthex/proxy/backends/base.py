"""What a backend is: pure rendering of a plan into rules of some kind, and the Target that carries them to a kernel.

`R` is the backend's own kind of rules: frozen, comparable, printable. `C` is its kind of changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar, runtime_checkable

from narthex.model.packet import Host, Memory, Packet, Trace
from narthex.proxy.plan.ir import Deviation, Plan
from narthex.proxy.plan.traits import Trait

R = TypeVar("R")
C = TypeVar("C")


class Backend(Protocol[R, C]):
    """Pure. One per dataplane; never an endpoint."""

    name: str
    """The `mode` of KubeProxyConfiguration: `nftables`, `iptables`, …"""
    deviations: frozenset[Deviation]
    traits: Mapping[Trait, str]
    """An answer to each question that no single packet answers."""

    def advance(self, previous: R | None, plan: Plan) -> tuple[R, C]:
        """Return the rules for a plan, and the changes that lead from the previous rules to them.

        Both are computed together, so a plan that differs in one Service costs what that Service costs. `previous` lets
        unchanged parts be taken over and slots stay where they are; it never changes what the rules mean. Without it the
        state of the kernel is unknown or empty, and the changes replace everything.

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
        """A packet's way through the rules, given what earlier packets left behind."""
        ...

    def text(self, rules: R) -> str:
        """The rules as their kernel tool reads them."""
        ...


class Target(Protocol[R, C]):  # type: ignore[misc]  # R and C are exactly the backend's own, neither wider
    """Effects: one kernel (one network namespace), one backend, one IP family."""

    def read(self) -> R | None:
        """The rules that are ours in the kernel now; None when there are none."""
        ...

    def apply(self, changes: C) -> None:
        """Make the changes, all or nothing per kernel transaction. Raises `ApplyError` with the tool's own words and,
        where it can be known, the object; the kernel's state then counts as unknown."""
        ...

    def clean(self) -> None:
        """Remove everything that is ours."""
        ...


@runtime_checkable
class Witness(Protocol):
    """A Target whose kernel tells cheaply whether anybody has written."""

    def unchanged(self) -> bool:
        """True: nobody has changed anything that `read` would see since this Target last read or applied. False: it
        may be, or it cannot be known."""
        ...
