"""Fakes for code with effects: a kernel in memory, an inbox of events, and a clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from narthex.model import (
    AnyObject,
    Delete,
    Disposition,
    Event,
    Host,
    Memory,
    Packet,
    Synced,
    Trace,
    Upsert,
    join_port,
    single,
)
from narthex.proxy.backends.base import ApplyError, Backend, Target, Trait
from narthex.proxy.plan.ir import Deviation, Forward, Plan

R = TypeVar("R")
C = TypeVar("C")


class FakeClock:
    """A fake clock that advances only on `sleep()`. Actions that `at` registered run when the clock reaches them."""

    def __init__(self, now: float = 1000.0, wall: float = 1_700_000_000.0) -> None:
        self._now = now
        self._wall = wall - now
        self._woken = False
        self._agenda: list[tuple[float, Callable[[], object]]] = []

    def now(self) -> float:
        """Return the monotonic time in seconds."""
        return self._now

    def wall(self) -> float:
        """Return the time of day in seconds since the epoch."""
        return self._now + self._wall

    def jump(self, seconds: float) -> None:
        """Move the time of day, as a user does who corrects the clock of a machine."""
        self._wall += seconds

    def wake(self) -> None:
        """End the current or next `sleep` at once."""
        self._woken = True

    def at(self, delay: float, action: Callable[[], object]) -> None:
        """Run an action when the clock has advanced by `delay` seconds."""
        self._agenda.append((self._now + delay, action))
        self._agenda.sort(key=lambda item: item[0])

    def advance(self, seconds: float) -> None:
        """Let time pass without running actions, as a slow operation does."""
        self._now += seconds

    def sleep(self, seconds: float) -> bool:
        """Advance the clock, and return True if `wake` ended the sleep."""
        end = self._now + max(0.0, seconds)
        while not self._woken and self._agenda and self._agenda[0][0] <= end:
            when, action = self._agenda.pop(0)
            self._now = max(self._now, when)
            action()
        if not self._woken:
            self._now = max(self._now, end)
        woken, self._woken = self._woken, False
        return woken


class FakeTarget(Target[R, C], Generic[R, C]):
    """A kernel in memory: `apply` does what the backend's `patch` computes.

    Tests may change these attributes at any time: `rules` (the content of the kernel; assign to it to simulate a foreign change),
    `failures` and `unreadable` (messages; each `apply` or `read` consumes one and fails with it), and `applied` (all changes so
    far).
    """

    def __init__(self, backend: Backend[R, C], empty: R, rules: R | None = None) -> None:
        self._backend = backend
        self._empty = empty
        self.rules = rules
        self.failures: list[str] = []
        self.unreadable: list[str] = []
        self.applied: list[C] = []
        self.reads = 0

    def read(self) -> R | None:
        """Return the rules in the kernel."""
        self.reads += 1
        if self.unreadable:
            raise ApplyError(self.unreadable.pop(0))
        return self.rules

    def apply(self, changes: C) -> None:
        """Apply changes, or raise ApplyError with the next message of `failures`."""
        if self.failures:
            raise ApplyError(self.failures.pop(0))
        self.rules = self._backend.patch(self._empty if self.rules is None else self.rules, changes)
        self.applied.append(changes)

    def clean(self) -> None:
        """Remove all rules."""
        self.rules = None


class FakeRules(msgspec.Struct, frozen=True):
    """The rules of `FakeBackend`: one line of text for each frontend."""

    lines: tuple[tuple[str, str], ...] = ()


class FakeChanges(msgspec.Struct, frozen=True):
    """The changes of `FakeBackend`."""

    reset: bool = False
    """Forget everything first."""
    put: tuple[tuple[str, str], ...] = ()
    remove: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reset or self.put or self.remove)


class FakeBackend(Backend[FakeRules, FakeChanges]):
    """The smallest backend that fulfils the protocol."""

    name = "fake"
    deviations: frozenset[Deviation] = frozenset()
    traits: Mapping[Trait, str] = {}

    def advance(self, previous: FakeRules | None, plan: Plan) -> tuple[FakeRules, FakeChanges]:
        """Return the rules for a plan and the changes."""
        rules = self.render(plan)
        return rules, self.diff(previous, rules)

    def render(self, plan: Plan) -> FakeRules:
        """Return the rules for a plan."""
        lines = []
        for service in plan.services.values():
            for front in service.frontends:
                where = join_port(front.address or "node", front.port)
                ends = ""
                if isinstance(front.other, Forward):
                    pool = service.pool(front.other.scope)
                    ends = ",".join(join_port(end.address, end.port) for end in pool.endpoints)
                lines.append((f"{where}/{front.protocol.value}", f"{service.name} -> {ends or front.other}"))
        return FakeRules(tuple(sorted(lines)))

    def diff(self, have: FakeRules | None, want: FakeRules) -> FakeChanges:
        """Return the difference between rules."""
        if have is None:
            return FakeChanges(reset=True, put=want.lines)
        old, new = dict(have.lines), dict(want.lines)
        return FakeChanges(
            put=tuple(item for item in want.lines if old.get(item[0]) != item[1]),
            remove=tuple(key for key in old if key not in new),
        )

    def patch(self, have: FakeRules, changes: FakeChanges) -> FakeRules:
        """Return the rules after the changes."""
        lines = {} if changes.reset else dict(have.lines)
        for key in changes.remove:
            del lines[key]
        lines.update(changes.put)
        return FakeRules(tuple(sorted(lines.items())))

    def walk(
        self,
        rules: FakeRules,
        packet: Packet,
        host: Host,  # noqa: ARG002
        memory: Memory | None = None,  # noqa: ARG002
        now: float = 0.0,  # noqa: ARG002
    ) -> Trace:
        """Return a trace that knows no packets."""
        where = f"{join_port(packet.destination, packet.port)}/{packet.protocol.value}"
        known = where in dict(rules.lines)
        return single(packet, Disposition.UNSUPPORTED if known else Disposition.NOT_OURS, note="a fake has no packets")

    def text(self, rules: FakeRules) -> str:
        """Return one line for each frontend."""
        return "".join(f"{where} {what}\n" for where, what in rules.lines)


class FakeInbox:
    """An inbox with the events that a test puts into it, and one Synced event."""

    def __init__(self, *objects: AnyObject) -> None:
        self._waiting: list[Event] = [*map(Upsert, objects), Synced()]
        self.problems: tuple[Any, ...] = ()

    def put(self, *objects: AnyObject) -> None:
        """Add or change objects."""
        self._waiting += map(Upsert, objects)

    def remove(self, *objects: AnyObject) -> None:
        """Remove objects."""
        self._waiting += [Delete(type(gone).__name__, gone.key) for gone in objects]

    def take(self) -> list[Event]:
        """Return and forget the waiting events."""
        events, self._waiting = self._waiting, []
        return events
