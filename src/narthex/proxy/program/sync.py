"""One IP family from snapshot to kernel: plan, advance, apply, and what is known of the kernel meanwhile."""

from __future__ import annotations

import enum
import gc
import math
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import msgspec

from narthex.linux.clock import Clock
from narthex.model import IPFamily, NamespacedName, ServicePortName, Snapshot
from narthex.netfilter.ast import TouchedPart
from narthex.proxy.backends.base import Backend, Target, lacks
from narthex.proxy.plan.ir import Plan
from narthex.proxy.plan.planner import Planner
from narthex.proxy.program.verified import ChangeFilter
from narthex.proxy.verification import ChangeVerifier, RefusedChanges
from narthex.runtime.process import without_collections

R = TypeVar("R")
C = TypeVar("C")

PHASES = ("read", "plan", "render", "apply")
VERIFY = "verify"
"""The phase in which rules are rendered and verified, in the place of `render`."""

SOME_SERVICES = 3
"""Fewer Services in the kernel than this may well have been deleted while no proxy ran."""
API_SERVER = NamespacedName("default", "kubernetes")
"""The Service whose endpoints are the API servers. They make it anew as soon as they have lost it."""

Changed = frozenset[NamespacedName] | None
"""Services that may differ since the last call; None: any may."""


class Look(enum.Enum):
    """What a sync checks in the kernel before it writes."""

    NOTHING = enum.auto()
    """The kernel counts as known."""
    MISSING_PARTS = enum.auto()
    """Whether the touched parts lack rules. Other parts and other differences wait."""
    MISSING = enum.auto()
    """Whether rules are missing. Other differences wait."""
    ALL = enum.auto()
    """What others changed."""


class SyncResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a successful sync."""

    family: IPFamily
    plan: Plan
    first: bool
    drift: bool = False
    """Others had changed our rules since they were last written or read."""
    changed: frozenset[ServicePortName] = frozenset()
    """Service ports whose plan differs from that of the last successful sync."""
    seconds: dict[str, float]
    """Duration by phase of PHASES, without phases that were not needed."""
    changes: Any = None
    """The changes written to the kernel, of the backend's type; None if there were none."""
    lost: bool = False
    """The drift was that rules were missing; looked at only when repairs of other drift had to wait."""
    deferred: bool = False
    """Others had changed our rules, all Services kept theirs, and the repair waits."""
    parts_only: bool = False
    """Only the touched parts were checked, and only for rules that are missing."""
    inconclusive: bool = False
    """With `parts_only`: some parts lacked nothing, so that they may hold other rules in the place of ours."""
    refused: RefusedChanges | None = None
    """Changes that a verifier refused. `plan` is what is in force."""
    undecided: frozenset[ServicePortName] = frozenset()
    """Service ports about which the verifier says nothing."""
    doubted_until: float | None = None
    """Nothing was written: the kernel has Services, and the plan has none. It takes effect at this time of the clock."""

    @property
    def wrote(self) -> bool:
        """Return False if the kernel was up to date already."""
        return self.changes is not None

    @property
    def total(self) -> float:
        """Return the duration of all phases in seconds."""
        return sum(self.seconds.values())


class FamilySync(Generic[R, C]):
    """The level-triggered sync of one family: each call brings the kernel to the snapshot, whatever happened before.

    It assumes that the kernel holds what was last written or read, until a write fails or a read-back is requested.
    """

    def __init__(
        self,
        family: IPFamily,
        planner: Planner,
        backend: Backend[R, C],
        target: Target[R, C],
        clock: Clock,
        *,
        doubt: float = 0.0,
        verifier: ChangeVerifier[R, C] | None = None,
    ) -> None:
        """Prepare a sync; nothing is read or written. A `verifier` may refuse changes, which are then not written.

        `doubt` is for how many seconds the rules of an earlier process stay in force if the first plan has no Services.
        A process that starts has no objects to compare its first list with; the kernel is its memory.
        """
        self.family = family
        self.backend = backend
        self._planner = planner
        self._target = target
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self.before_write: Callable[[Plan], object] = lambda _: None
        """Receives each plan that takes effect, before the rules are computed and written; it must not raise."""
        self.plan: Plan | None = None
        """The plan of the last successful sync."""
        self.rules: R | None = None
        """The rules that the kernel is assumed to hold."""
        self._kernel_known = False
        self._planner_known = False
        """False: the planner may have missed a change, so it looks at everything."""
        self._deferred = self._lost = False
        """Others changed our rules, and the repair waits; others only removed rules."""
        self._parts_only = self._inconclusive = False
        """As in the result of the present sync."""
        self.verifier = verifier
        self._filter = ChangeFilter(backend, verifier) if verifier is not None else None
        self._doubt = doubt
        self._doubted_until = math.inf

    @property
    def unserved(self) -> Mapping[ServicePortName, str]:
        """Service ports that the rules in force refuse although they have endpoints, with the reason."""
        return self.backend.unserved(self.rules) if self.rules is not None else {}

    def tend(self) -> float | None:
        """Let the target do its work between syncs, once something was synced.

        Returns the seconds until the next call, or None if there is no such work.
        """
        return self._target.tend() if self.plan is not None else None

    def use(self, planner: Planner) -> None:
        """Replace the planner at the next sync."""
        self._planner = planner
        self._planner_known = False

    def sync(
        self,
        snapshot: Snapshot,
        changed: Changed,
        *,
        look: Look = Look.NOTHING,
        touched: Set[TouchedPart] | None = None,
    ) -> SyncResult:
        """Bring the kernel to the snapshot. `look` says what is checked first, to be repaired.

        `touched` has what others may have changed; None: anything.

        Raises what the target raises (ApplyError above all); the kernel then counts as unknown and is read before
        anything is written again.
        """
        self._seconds = {}
        self._lost = self._parts_only = self._inconclusive = False
        try:
            return self._sync(snapshot, changed, look, touched)
        except BaseException:
            self._kernel_known = False
            raise

    def _sync(self, snapshot: Snapshot, changed: Changed, look: Look, touched: Set[TouchedPart] | None) -> SyncResult:
        unsure, drift, repair = not self._kernel_known, False, None
        if unsure:
            self._look()
        elif look is not Look.NOTHING and (self._deferred or not self._is_unchanged()):
            repair = self._repair(touched) if look is Look.ALL else self._restore(touched or frozenset())
            self._parts_only = look is Look.MISSING_PARTS or (look is Look.MISSING and repair is not None)
            drift = bool(repair) if repair is not None or self._parts_only else self._look(look is Look.MISSING)
            unsure = drift and repair is None
        plan = self._plan(snapshot, changed)
        last = self.plan
        if plan is last and not unsure:
            return self._done(plan, last, changes=repair or None, drift=drift)
        have = self.rules
        if last is None and have is not None and self._is_doubtful(plan, have):
            # Others may change the rules until something is written.
            self._kernel_known = False
            return self._done(plan, plan, doubted_until=self._doubted_until)
        if self._filter is not None:
            return self._verified(self._filter, plan, drift, repair)
        self.before_write(plan)
        with self._timed("render"):
            want, changes = self.backend.advance(have, plan)
        self._write(plan, want, changes)
        return self._done(plan, last, changes=changes or repair or None, drift=drift)

    def _write(self, plan: Plan, want: R, changes: C) -> None:
        if changes:
            with self._timed("apply"):
                self._target.apply(changes)
        self.rules, self.plan = want, plan

    def _verified(self, passing: ChangeFilter[R, C], plan: Plan, drift: bool, repair: C | None) -> SyncResult:
        """Write what passes the verifier."""
        last = self.plan
        with self._timed(VERIFY), without_collections():
            found = passing.choose(self.rules, last, plan)
        if not isinstance(found, RefusedChanges) and found.verdict.whole:
            gc.collect()  # what a proof of all packets leaves is large
        if isinstance(found, RefusedChanges):
            done = self._done(last or plan, last, changes=repair or None, drift=drift)
            return msgspec.structs.replace(done, refused=found)
        self.before_write(found.plan)
        self._write(found.plan, found.rules, found.changes)
        if self.verifier is not None:
            self.verifier.written()
        done = self._done(found.plan, last, changes=found.changes or repair or None, drift=drift)
        return msgspec.structs.replace(done, refused=found.refused, undecided=found.verdict.undecided)

    def _is_doubtful(self, plan: Plan, found: R) -> bool:
        """Return True while a first plan is doubted, because it would remove every Service that an earlier process served.

        A Service without endpoints does not end the doubt: when a server regains its data, Services may be listed before
        their endpoints.
        """
        served = (each for name, each in plan.services.items() if name.service != API_SERVER)
        if not self._doubt or any(each.endpoint_count for each in served):
            return False
        # Once in doubt, it stays: other programs may damage the rules meanwhile.
        if self._doubted_until == math.inf and self.backend.served(found) < SOME_SERVICES:
            return False
        now = self._clock.now()
        self._doubted_until = min(self._doubted_until, now + self._doubt)
        return now < self._doubted_until

    def _is_unchanged(self) -> bool:
        with self._timed("read"):
            return self._target.unchanged()

    def _repair(self, touched: Set[TouchedPart] | None) -> C | None:
        """Repair damage that the target finds without reading everything. Return the changes, or None if it cannot."""
        if self.rules is None or self._deferred:
            return None
        return self._mend(self.rules, touched)

    def _restore(self, touched: Set[TouchedPart]) -> C | None:
        """Repair those of the touched parts that lack rules. Return the changes; None if the target finds none."""
        self._inconclusive = True
        if self.rules is None or not touched:
            return None
        with self._timed("read"):
            lacking = self._target.lacking(self.rules, touched)
        repair = self._mend(self.rules, lacking) if lacking else None
        self._lost, self._inconclusive = bool(repair), not repair or lacking != touched
        return repair or None

    def _mend(self, rules: R, touched: Set[TouchedPart] | None) -> C | None:
        with self._timed("read"):
            repair = self._target.damage(rules, touched)
        if repair and self.verifier is not None and not self.verifier.restores(rules, repair):
            return None
        if repair:
            with self._timed("apply"):
                self._target.apply(repair)
        return repair

    def _look(self, losses_only: bool = False) -> bool:
        """Read the kernel; return True if it differs from what was last written, and is to be repaired now."""
        with self._timed("read"):
            found = self._target.read()
        self._kernel_known = True
        differs = found != self.rules
        self._lost = differs and losses_only and self._is_loss(found)
        self._deferred = differs and losses_only and not self._lost
        if not differs or self._deferred:
            # The equal rules that were rendered are kept: later stages skip what is identical to them.
            return False
        self.rules = found
        return True

    def _is_loss(self, found: R | None) -> bool:
        """Return True if some of our rules are missing, and not merely others in their place."""
        return found is None or (
            self.rules is not None and lacks(self.backend.contents(found), self.backend.contents(self.rules))
        )

    def _plan(self, snapshot: Snapshot, changed: Changed) -> Plan:
        hint = changed if self._planner_known else None
        self._planner_known = False
        with self._timed("plan"):
            plan = self._planner.plan(snapshot, hint)
        self._planner_known = True
        return plan

    def _done(
        self,
        plan: Plan,
        last: Plan | None,
        *,
        changes: C | None = None,
        drift: bool = False,
        doubted_until: float | None = None,
    ) -> SyncResult:
        return SyncResult(
            family=self.family,
            plan=plan,
            first=last is None,
            drift=drift and changes is not None,
            changed=_changed(last, plan),
            seconds=dict(self._seconds),
            changes=changes,
            lost=self._lost,
            deferred=self._deferred,
            parts_only=self._parts_only,
            inconclusive=self._parts_only and self._inconclusive,
            doubted_until=doubted_until,
        )

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = self._clock.now()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + self._clock.now() - start


def _changed(old: Plan | None, new: Plan) -> frozenset[ServicePortName]:
    """Return the Service ports that differ between two plans, by lineage where that reaches."""
    if old is new:
        return frozenset()
    if old is None:
        return frozenset(new.services)
    if new.lineage.parent == old.lineage.number:
        return new.lineage.changed
    names = {*old.services, *new.services}
    return frozenset(name for name in names if old.services.get(name) is not new.services.get(name))
