"""The properties of the rules in the kernel, checked at each change of them and in short intervals."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from narthex.model import Disposition, IPFamily, NamespacedName, join_port
from narthex.proxy.kernel.dataplanes import Dataplane
from narthex.proxy.program.schedule import CONTEST_REPAIRS, CONTEST_SECONDS, LONGEST_DEFERRAL, SyncPeriods
from narthex.testing.build import HOST, packet
from narthex.testing.simulation.kernel import SimulatedKernel
from narthex.testing.simulation.process import SimulatedProcess
from narthex.testing.simulation.time import VirtualLoop

REPAIR_SECONDS = 1.5
UNNOTICED_SECONDS = 5.0
"""Added to the period of read-backs for changes that the kernel does not report: turns for other things come first."""
UNHEALTHY_SECONDS = 1.0
AFTER_FAULT_SECONDS = 35.0
"""Added to `REPAIR_SECONDS` when a write failed or the process was down meanwhile: the longest backoff."""
CONTEST_NAMED_REPAIRS = 3 * CONTEST_REPAIRS
"""So many repairs of a family within twice `CONTEST_SECONDS` must not be: the proxy backs off before."""
_SHARE_SECONDS, _LARGEST_SHARE, _LARGEST_SHARE_LOST = 120.0, 0.35, 0.55
"""Repairs take at most this share of such a time, with those of missing rules the second one."""
_CONTEST_LOG = "again and again, so they are repaired less often"
EXCUSES = frozenset(("refuse", "unreadable", "crash", "meanwhile"))
"""Faults of the kernel that excuse a late repair."""
SAMPLE_SECONDS = 0.25
_CLIENT = "10.64.1.200"


class Violation(Exception):
    """A property does not hold; the message says which one, when, and for which object."""


class SimulatedWorld(Protocol):
    """What the properties refer to."""

    loop: VirtualLoop
    kernel: SimulatedKernel
    plane: type[Dataplane]
    families: tuple[IPFamily, ...]
    process: SimulatedProcess | None
    competitor: SimulatedProcess | None
    log: list[str]


class RuleProperties:
    """What holds of the rules of steady Services, of repairs, and of `/healthz`."""

    def __init__(self, world: SimulatedWorld, note_event: Callable[[], None]) -> None:
        """Watch the rules of a world; `note_event` is called when the checks should look soon."""
        self._world = world
        self.note_event = note_event
        self.served: dict[str, bool] = {}
        """Steady Services: whether the kernel has rules for them."""
        self._walked: deque[tuple[Any, tuple[bool, ...]]] = deque(maxlen=12)
        """The last different rules of the first family, and which steady Services they serve."""
        self.missing_since: dict[str, float] = {}
        self._wrong_seconds = 0.0
        """For how long `/healthz` has answered 200 although rules are missing."""
        self._wrong_since = math.inf
        """Since when rules had been missing when the last sample was taken."""
        self.excused_at = -1e9
        """When a fault was last active that excuses a late repair."""
        self.violations: list[str] = []
        self._blind_at = -math.inf
        """When the process was last seen to know too little of the cluster."""
        self._silent = False
        """Rules are missing of which the kernel does not notify anybody."""
        self.changing_silently = False
        self.named_from = 0
        """Line of the log at which the process started."""

    def check(self, process: SimulatedProcess) -> None:
        """Check what must hold at all times. Raises Violation."""
        if self.is_excused:
            self.excused_at = self._world.loop.time()
        for name in tuple(self.missing_since):
            self._check_repair(name)
        # What was answered while the process did not yield is not known, so only samples count.
        since = min(self.missing_since.values(), default=math.inf)
        is_known = since < math.inf and not self._silent and not self._is_blind(process)
        is_wrong = is_known and process.health.healthz()[0] == 200
        same = is_wrong and since == self._wrong_since
        self._wrong_seconds = self._wrong_seconds + SAMPLE_SECONDS if same else 0.0
        self._wrong_since = since
        if self._wrong_seconds > UNHEALTHY_SECONDS + SAMPLE_SECONDS:
            raise Violation(f"/healthz answers 200, and {', '.join(self.missing_since)} has no rules")
        self._check_contest(process)

    def observe(self, family: IPFamily, writer: object) -> None:
        """Check the steady Services after a change of the kernel's rules."""
        if family is not self._world.families[0]:
            return
        rules, now = self._world.kernel.rules.get(family), self._world.loop.time()
        self.note_event()
        process = self._world.process
        excused = process is None or writer is not process or self._knows_little(process)
        for name, is_served in zip(self.served, self._served_by(rules), strict=True):
            if self.served[name] and not is_served and not excused:
                self.violations.append(f"the proxy removed the rules of {name}")
            if self.served[name] and not is_served:
                self.missing_since[name] = now
                self._silent |= self.changing_silently
            elif is_served and name in self.missing_since:
                self._check_repair(name)
                del self.missing_since[name]
                self._silent &= bool(self.missing_since)
            self.served[name] = is_served

    def _knows_little(self, process: SimulatedProcess) -> bool:
        """Return True for a process whose first list was empty and that has learned of some Services only since then.

        It also knows nothing of what a second proxy writes once other programs have removed the rules that it kept. Its
        first changes after that are changes to the rules that it wrote before.
        """
        services, competes = process.proxy.snapshot.services, self._world.competitor is not None
        if self._is_blind(process):
            return bool(services) or competes
        return competes and self._world.loop.time() <= self._blind_at + REPAIR_SECONDS

    def _is_blind(self, process: SimulatedProcess) -> bool:
        """Return True for a process whose first list was empty, until it knows all that stays."""
        snapshot, names = process.proxy.snapshot, [NamespacedName("shop", name) for name in self.served]
        if process.blind:
            self._blind_at = self._world.loop.time()
        if process.blind and all(name in snapshot.services and name in snapshot.slices for name in names):
            process.blind = False
        return process.blind

    def _served_by(self, rules: Any) -> tuple[bool, ...]:
        """Return which of the steady Services work by these rules."""
        if rules is None:
            return (False,) * len(self.served)
        # Flushes and repairs return to the same rules again and again, and a walk costs far more than a comparison.
        for known, answer in self._walked:
            if known == rules:
                return answer
        answer = tuple(self._is_served(rules, index) for index in range(len(self.served)))
        self._walked.append((rules, answer))
        return answer

    def _is_served(self, rules: Any, index: int) -> bool:
        where = cluster_ip(10 + index, self._world.families[0])
        client = _CLIENT if self._world.families[0] is IPFamily.IPV4 else "fd64:0:0:1::200"
        trace = self._world.kernel.backend.walk(rules, packet(client, join_port(where, 80)), HOST)
        return any(outcome.disposition is Disposition.DELIVERED for outcome in trace.outcomes)

    def _check_repair(self, name: str) -> None:
        now, faults = self._world.loop.time(), self._world.kernel.faults
        limit = REPAIR_SECONDS + len(self._world.families) * (2 * faults.read_seconds + 8 * faults.write_seconds)
        since = self.missing_since[name]
        if self._silent or not self._world.plane.notifies:
            limit += SyncPeriods().sync + UNNOTICED_SECONDS
        if self._world.process is not None and self._world.process.proxy.contested:
            limit += LONGEST_DEFERRAL + len(self._world.families) * 4 * (
                2 * faults.read_seconds + 8 * faults.write_seconds
            )
        if self.excused_at >= since:
            since, limit = self.excused_at, limit + AFTER_FAULT_SECONDS
        if now - since > limit and not self.is_excused:
            self.violations.append(f"{name} was without rules for {now - since:.1f} s (limit {limit:.1f} s)")

    @property
    def is_excused(self) -> bool:
        """Return True while a fault is active that may delay a repair."""
        process = self._world.process
        if process is None or not process.health.ready or self._is_blind(process):
            # A process that does not know any objects yet cannot repair their rules.
            return True
        return any(getattr(self._world.kernel.faults, name) for name in EXCUSES)

    def _check_contest(self, process: SimulatedProcess) -> None:
        """Check that repairs back off, and that the log says why."""
        now = self._world.loop.time()
        for limit, kinds in ((_LARGEST_SHARE, (False,)), (_LARGEST_SHARE_LOST, (False, True))):
            took = sum(seconds for at, seconds, lost in process.repairs if at > now - _SHARE_SECONDS and lost in kinds)
            if took > limit * _SHARE_SECONDS:
                raise Violation(f"repairs took most of the last {_SHARE_SECONDS:g} s: the proxy does not settle")
        latest = [lost for at, _, lost in process.repairs if at > now - 2 * CONTEST_SECONDS]
        repairs = len(latest) / len(self._world.families)
        if latest.count(False) > CONTEST_NAMED_REPAIRS * len(self._world.families):
            raise Violation(f"{repairs:g} repairs within {2 * CONTEST_SECONDS:g} s: the proxy does not settle")
        if repairs > 2 * CONTEST_REPAIRS and not any(
            _CONTEST_LOG in line for line in self._world.log[self.named_from :]
        ):
            raise Violation(f"{repairs:g} repairs within {2 * CONTEST_SECONDS:g} s, and no line names the conflict")


def cluster_ip(number: int, family: IPFamily) -> str:
    """Return the cluster IP of a Service by its number."""
    return f"10.110.0.{number}" if family is IPFamily.IPV4 else f"fd6e::{number:x}"
