"""What a mode is: the Backend renders a plan as rules, the Target carries changes of rules to a kernel.

`R` is the backend's type of rules: immutable, comparable, printable. `C` is its type of changes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Protocol, TypeVar

import msgspec

from narthex.model import Host, Memory, Packet, ServicePortName, Trace
from narthex.model import Protocol as IpProtocol
from narthex.netfilter.ast import TouchedPart
from narthex.netfilter.edit import TableEdit
from narthex.proxy.plan.ir import Deviation, Plan, ServicePlan

R = TypeVar("R")
C = TypeVar("C")


class ApplyError(RuntimeError):
    """The kernel or its tool refused a change."""


class Trait(enum.Enum):
    """A difference between modes that no single packet shows: a question, with the text `words`.

    Each backend answers all of them (`narthex.proxy.backends.traits`).
    """

    words: str
    concerns: Callable[[ServicePlan], bool]
    """Returns True if the answer is relevant to a Service port."""

    def __new__(cls, value: str, words: str, concerns: Callable[[ServicePlan], bool]) -> Trait:
        """Create a member with its question and the test of relevance."""
        member = object.__new__(cls)
        member._value_ = value
        member.words = words
        member.concerns = concerns
        return member

    CHOICE = "choice", "which endpoint a new connection gets", lambda service: _has_choice(service)
    RETRY = "retry", "an endpoint that does not answer", lambda service: _has_choice(service) and _tcp(service)
    AFFINITY = "affinity", "where session affinity is remembered", lambda service: service.affinity_seconds is not None
    CONNECTIONS = "connections", "what open connections hang on", lambda service: _has_endpoints(service)
    RESTART = "restart", "what a restart of the proxy breaks", lambda service: _has_endpoints(service)
    LEAVING = "leaving", "an endpoint that leaves", lambda service: _has_endpoints(service)
    IDLE = "idle", "how long an idle connection is remembered", lambda service: _has_endpoints(service)
    INVALID = (
        "invalid",
        "packets that connection tracking calls invalid",
        lambda service: _has_endpoints(service) and _tcp(service),
    )
    FIREWALL = "firewall", "next to other software's firewall rules", lambda _: True
    VISIBLE = "visible", "what the node itself shows of Services", lambda _: True
    NEEDS = "needs", "what the node needs", lambda _: True


def _has_endpoints(service: ServicePlan) -> bool:
    return bool(service.pools)


def _has_choice(service: ServicePlan) -> bool:
    return any(len(pool.endpoints) > 1 for pool in service.pools.values())


def _tcp(service: ServicePlan) -> bool:
    return service.name.protocol is IpProtocol.TCP


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

    def edits(self, changes: C) -> tuple[TableEdit, ...] | None:
        """Return changes as those of tables; None for a mode that works by more than rules."""
        del changes
        return None

    def walk(self, rules: R, packet: Packet, host: Host, memory: Memory | None = None, now: float = 0.0) -> Trace:
        """Return the path of a packet through the rules, given what earlier packets left in the memory."""
        ...

    def text(self, rules: R) -> str:
        """Return the rules in the format that their kernel tool reads."""
        ...

    def served(self, rules: R) -> int:
        """Return about how many Service ports these rules serve, also without a proxy; 0 if none works without it."""
        del rules
        return 0

    def contents(self, rules: R) -> object:
        """Return the rules as structures, mappings, sets, and tuples, which `lacks` compares."""
        return rules

    def unserved(self, rules: R) -> Mapping[ServicePortName, str]:
        """Return the Service ports that the rules refuse although they have endpoints, with the reason."""
        del rules
        return {}


def lacks(have: object, want: object) -> bool:
    """Return True if a structure has fewer items than another one: keys that are missing, or shorter lists."""
    match have, want:
        case (Mapping(), Mapping()):
            return any(key not in have or lacks(have[key], value) for key, value in want.items())
        case (Set(), Set()):
            return not want <= have
        case (Sequence(), Sequence()) if not isinstance(want, str):
            return len(have) < len(want)
        case (msgspec.Struct(), msgspec.Struct()):
            return any(lacks(getattr(have, name), getattr(want, name)) for name in want.__struct_fields__)
    return False


class Target(Protocol[R, C]):
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

    def lacking(self, rules: R, touched: Set[TouchedPart]) -> Set[TouchedPart]:
        """Return those of the touched parts that have fewer rules than `rules`, found without reading everything.

        Nothing is known of the others: they may have other rules in the place of ours.
        """
        del rules, touched
        return frozenset()

    def damage(self, rules: R, touched: Set[TouchedPart] | None) -> C | None:
        """Return the changes that restore `rules`, found without reading everything; None if everything must be read.

        `rules` are what this Target last wrote or read. `touched` has what other programs changed since; None:
        it may be anything. Raises ApplyError.
        """
        del rules, touched
        return None

    def tend(self) -> float | None:
        """Do the work that is due between syncs. Returns the seconds until the next call, or None."""
        return None

    def close(self) -> None:
        """Release sockets and end processes of this Target; the rules stay."""
        return
