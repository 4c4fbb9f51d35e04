"""The simulated world of one run, and the properties that must hold in it.

1. Once the inputs are quiet, the kernel has the rules of the newest objects within `QUIET_SECONDS`.
2. The proxy never removes the rules of a Service that was not deleted. Rules that another program removed are back
   within `REPAIR_SECONDS`, plus the time of the reads and writes.
3. `/healthz` does not answer 200 while rules have been missing for longer than `UNHEALTHY_SECONDS`; it answers 200 at
   the end.
4. What the process keeps is bounded by what exists.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import msgspec

from narthex.lab.api.reads import PRESENT
from narthex.lab.api.store import ObjectStore
from narthex.model.decode.objects import decode
from narthex.model.decode.slice import SERVICE_LABEL
from narthex.model.net import IPFamily
from narthex.model.objects import AnyObject, EndpointSlice
from narthex.model.packet import Disposition
from narthex.model.store import Snapshot, Store, Synced, Upsert
from narthex.proxy.backends import BACKENDS
from narthex.proxy.plan.ir import Plan
from narthex.proxy.plan.planner import plan_once
from narthex.proxy.program.schedule import CONTEST_BACKOFF
from narthex.testing.build import CONFIG, HOST, endpoint, endpoint_slice, node, packet, service
from narthex.testing.simulation.foreign import foreign_change
from narthex.testing.simulation.kernel import SimulatedKernel
from narthex.testing.simulation.process import SimulatedProcess
from narthex.testing.simulation.server import LOST_STORE_VERSION, SimulatedServer
from narthex.testing.simulation.time import VirtualLoop

QUIET_SECONDS = 700.0
"""A watch that hangs on a connection without bookmarks is only noticed when it should have ended."""
RELIST_SECONDS = 1300.0
"""The same if the server was restored from a backup and gave versions a second meaning, which only a new list shows."""
REPAIR_SECONDS = 1.5
UNHEALTHY_SECONDS = 1.0
AFTER_FAULT_SECONDS = 35.0
"""Added to `REPAIR_SECONDS` when a write failed or the process was down meanwhile: the longest backoff."""
_EXCUSES = frozenset(("refuse", "unreadable", "crash", "meanwhile"))
"""Faults of the kernel that excuse a late repair."""
_SAMPLE_SECONDS = 0.25
_IDLE_SECONDS = 10.0
_CLIENT = "10.64.1.200"
STEADY = 3
CHANGING = 6


class Violation(Exception):
    """A property does not hold; the message says which one, when, and for which object."""


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one run."""

    seed: int
    steps: int
    """Actions of the schedule, turns of the proxy, and transactions."""
    violation: str = ""
    """Empty: all properties held."""
    digest: str
    """Digest of the log: equal for equal runs."""
    log: tuple[str, ...]


class Simulation:
    """The state of one run."""

    def __init__(self, seed: int, loop: VirtualLoop) -> None:
        """Draw the circumstances of the run."""
        self.seed = seed
        self.loop = loop
        self.random = random = Random(seed)
        self.log: list[str] = []
        self.steps = 0
        backend = BACKENDS[random.choice(("nftables", "nftables", "iptables"))]
        self.families = random.choice(((IPFamily.IPV4,), (IPFamily.IPV4,), (IPFamily.IPV4, IPFamily.IPV6)))
        features = msgspec.structs.replace(PRESENT, streaming=random.random() < 0.7)
        self.server = SimulatedServer(loop, Random(random.random()), features)
        self.kernel = SimulatedKernel(backend, loop, Random(random.random()))
        self.kernel.observe = self._observe
        self.kernel.interfere = self._interfere
        self.kernel.faults.read_seconds = random.choice((0.001, 0.02, 0.3, 1.2))
        self.kernel.faults.write_seconds = random.choice((0.001, 0.001, 0.05))
        self.server.faults.latency = random.choice((0.0, 0.01, 0.2))
        self.process: SimulatedProcess | None = None
        self._restarting: asyncio.Task[None] | None = None
        self.backup: ObjectStore | None = None
        self.reused_versions = False
        self._lost: ObjectStore | None = None
        self._served: dict[str, bool] = {}
        """Steady Services: whether the kernel has rules for them."""
        self._missing_since: dict[str, float] = {}
        self._wrong_seconds = 0.0
        """For how long `/healthz` has answered 200 although rules are missing."""
        self._excused_at = -1e9
        """When a fault was last active that excuses a late repair."""
        self._violations: list[str] = []
        self._alarm = asyncio.Event()
        """Set when something has happened that the checks look at."""
        self._restore: list[Callable[[], None]] = []

    # ---- the run ---------------------------------------------------------------------------------------------------

    async def run(self, schedule: Callable[[Simulation], Awaitable[None]]) -> SimulationResult:
        """Run a schedule, heal everything, and check the end."""
        violation = ""
        try:
            self._create_objects()
            self._start()
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._watch_health())
                await schedule(self)
                await self._heal()
                await asyncio.sleep(RELIST_SECONDS if self.reused_versions else QUIET_SECONDS)
                self._check_end()
                watching.cancel()
        except* Violation as group_error:
            violation = str(group_error.exceptions[0])
            self.note(violation)
        finally:
            if self.process is not None:
                self.steps += self.process.turns
                await self.process.kill()
        self.steps += self.kernel.transactions
        text = "\n".join(self.log)
        return SimulationResult(
            seed=self.seed,
            steps=self.steps,
            violation=violation,
            digest=hashlib.sha256(text.encode()).hexdigest()[:16],
            log=tuple(self.log),
        )

    def note(self, text: str) -> None:
        """Add a line to the log."""
        self.log.append(f"{self.loop.time():10.3f} {text}")

    def _start(self) -> None:
        self.note("the process starts")
        self.process = SimulatedProcess(self.server, self.kernel, self.families, CONFIG, Random(self.random.random()))

    def kill(self, after: float) -> None:
        """Kill the process, and start another one after some seconds."""
        self._restarting = self.loop.create_task(self._restart(after))

    async def _restart(self, after: float) -> None:
        self._excused_at = self.loop.time()
        ended, self.process = self.process, None
        if ended is None:
            return
        self.steps += ended.turns
        await ended.kill()
        await asyncio.sleep(after)
        # A process that starts now would have nothing to hold the empty list against.
        while self.lost:
            await asyncio.sleep(1.0)
        self._excused_at = self.loop.time()
        self._start()

    async def _heal(self) -> None:
        """End all faults."""
        self.note("everything heals")
        self.recover()
        for restore in self._restore:
            restore()
        self._restore.clear()
        if self._restarting is not None:
            await self._restarting
        if self.process is not None and not self.process.running:
            await self._restart(0.5)

    def for_a_while(self, holder: object, field: str, value: Any, seconds: float) -> None:
        """Set a fault, and end it after some time or when everything heals."""
        healthy = vars(type(holder)())[field]
        setattr(holder, field, value)
        self.note(f"  {field} = {value} for {seconds:.1f} s")

        def restore() -> None:
            if getattr(holder, field) == value:
                setattr(holder, field, healthy)
                if field in _EXCUSES:
                    self._excused_at = self.loop.time()

        self._restore.append(restore)
        self.loop.call_later(seconds, restore)

    # ---- objects ---------------------------------------------------------------------------------------------------

    def _create_objects(self) -> None:
        self.server.put(node())
        for name in range(STEADY):
            self.put_service(f"steady{name}", 10 + name)
            self._served[f"steady{name}"] = False
        for name in range(CHANGING):
            self.put_service(f"changing{name}", 100 + name)

    def put_service(self, name: str, number: int) -> None:
        """Create or change a Service and its slices."""
        draw = self.random
        ips = [_cluster_ip(number, family) for family in self.families]
        if draw.random() < 0.3:
            self.server.put(service(f"shop/{name}", *ips, node_port=30000 + number, type="NodePort"))
        else:
            self.server.put(service(f"shop/{name}", *ips))
        self.put_slices(name)

    def put_slices(self, name: str) -> None:
        """Create or change the slices of a Service, with at least one endpoint each."""
        for family in self.families:
            self.server.put(self._slice(name, family))

    def _slice(self, name: str, family: IPFamily) -> EndpointSlice:
        prefix = "10.64.2." if family is IPFamily.IPV4 else "fd64:0:0:2::"
        ends = [endpoint(f"{prefix}{self.random.randint(1, 250):{'d' if family is IPFamily.IPV4 else 'x'}}")]
        labels = ((SERVICE_LABEL, name),)
        return endpoint_slice(f"shop/{name}", *ends, suffix=family.nft, labels=labels)

    def delete_service(self, name: str) -> None:
        """Delete a Service and its slices."""
        for family in self.families:
            self.server.delete(self._slice(name, family))
        self.server.delete(service(f"shop/{name}", "10.110.0.1"))

    def lose(self) -> None:
        """Replace the store by an empty one, as an API server with a lost etcd has."""
        if self._lost is None and self.process is not None and self.process.health.ready:
            self._lost = self.server.store
            self.server.store = ObjectStore(LOST_STORE_VERSION)

    def recover(self) -> None:
        """Bring the lost store back."""
        if self._lost is not None:
            self.server.store, self._lost = self._lost, None
            self.note("the store is back")

    @property
    def lost(self) -> bool:
        """True while the server has the wrong store."""
        return self._lost is not None

    def _truth(self) -> Snapshot:
        store = Store()
        for kind in self.server.store.kinds():
            for _, stored in self.server.store.entries(kind):
                decoded = decode(stored.raw)
                assert decoded.object is not None
                obj: AnyObject = decoded.object
                store.apply(Upsert(obj))
        return store.apply(Synced())

    # ---- properties ------------------------------------------------------------------------------------------------

    def _observe(self, family: IPFamily, by_proxy: bool) -> None:
        """Check the steady Services after a change of the kernel's rules."""
        if family is not self.families[0]:
            return
        rules, now = self.kernel.rules.get(family), self.loop.time()
        self._alarm.set()
        for index, name in enumerate(self._served):
            is_served = rules is not None and self._is_served(rules, index)
            if by_proxy and self._served[name] and not is_served:
                self._violations.append(f"the proxy removed the rules of {name}")
            if self._served[name] and not is_served:
                self._missing_since[name] = now
            elif is_served and name in self._missing_since:
                self._check_repair(name)
                del self._missing_since[name]
            self._served[name] = is_served

    def _is_served(self, rules: Any, index: int) -> bool:
        where = _cluster_ip(10 + index, self.families[0])
        trace = self.kernel.backend.walk(rules, packet(_client(self.families[0]), _with_port(where)), HOST)
        return any(outcome.disposition is Disposition.DELIVERED for outcome in trace.outcomes)

    def _check_repair(self, name: str) -> None:
        now, faults = self.loop.time(), self.kernel.faults
        limit = REPAIR_SECONDS + len(self.families) * (2 * faults.read_seconds + 8 * faults.write_seconds)
        since = self._missing_since[name]
        if self.process is not None and self.process.proxy.contested:
            limit += CONTEST_BACKOFF.longest
        if self._excused_at >= since:
            since, limit = self._excused_at, limit + AFTER_FAULT_SECONDS
        if now - since > limit and not self._is_excused():
            self._violations.append(f"{name} was without rules for {now - since:.1f} s (limit {limit:.1f} s)")

    def _is_excused(self) -> bool:
        """Return True while a fault is active that may delay a repair."""
        if self.process is None or not self.process.health.ready:
            # A process that does not know any objects yet cannot repair their rules.
            return True
        return any(getattr(self.kernel.faults, name) for name in _EXCUSES)

    async def _watch_health(self) -> None:
        """Check, in short intervals, what must hold at all times."""
        while True:
            await self._sample()
            if self._violations:
                raise Violation(self._violations[0])
            process = self.process
            if process is None:
                continue
            if not process.running:
                if (error := process.failure()) is not None:
                    raise Violation(f"the process ended with {type(error).__name__}: {error}")
                self.note("the process was killed between two writes")
                await self._restart(self.random.choice((0.1, 1.0, 5.0)))
                continue
            if self._is_excused():
                self._excused_at = self.loop.time()
            for name in tuple(self._missing_since):
                self._check_repair(name)
            # What was answered while the process did not yield is not known, so only samples count.
            is_wrong = bool(self._missing_since) and process.health.healthz()[0] == 200
            self._wrong_seconds = self._wrong_seconds + _SAMPLE_SECONDS if is_wrong else 0.0
            if self._wrong_seconds > UNHEALTHY_SECONDS + _SAMPLE_SECONDS:
                raise Violation(f"/healthz answers 200, and {', '.join(self._missing_since)} has no rules")
            if process.waiting > 1000 or len(process.problems) > 100:
                raise Violation(f"{process.waiting} events and {len(process.problems)} problems are waiting")

    async def _sample(self) -> None:
        """Wait for the next check: soon while rules are missing, and otherwise when something happens."""
        loop = asyncio.get_running_loop()
        if self._missing_since or self._is_excused():
            await asyncio.sleep(_SAMPLE_SECONDS)
            return
        timer = loop.call_later(_IDLE_SECONDS, self._alarm.set)
        await self._alarm.wait()
        timer.cancel()
        self._alarm.clear()

    def _check_end(self) -> None:
        if self._violations:
            raise Violation(self._violations[0])
        assert self.process is not None
        if not self.process.running:
            raise Violation("the process does not run at the end")
        snapshot = self._truth()
        for sync in self.process.syncs:
            desired = plan_once(self.process.proxy.snapshot, CONFIG, sync.family)
            newest = plan_once(snapshot, CONFIG, sync.family)
            if desired.services != newest.services:
                raise Violation(f"{sync.family.label}: the proxy misses {_difference(desired, newest)}")
            if sync.plan is None or sync.plan.services != newest.services:
                raise Violation(f"{sync.family.label}: the plan in force is not that of the newest objects")
            if self.kernel.rules.get(sync.family) != sync.rules:
                raise Violation(f"{sync.family.label}: the kernel does not have the rules of the plan")
        if (code := self.process.health.healthz()[0]) != 200:
            raise Violation(f"/healthz answers {code} although everything is well")

    def _interfere(self, family: IPFamily) -> None:
        self.note("  another program changes our rules between two of our transactions")
        self._excused_at = self.loop.time()
        rules = self.kernel.rules.get(family)
        self.kernel.commit(family, foreign_change(rules, self.random), by_proxy=False)


def _cluster_ip(number: int, family: IPFamily) -> str:
    return f"10.110.0.{number}" if family is IPFamily.IPV4 else f"fd6e::{number:x}"


def _client(family: IPFamily) -> str:
    return _CLIENT if family is IPFamily.IPV4 else "fd64:0:0:1::200"


def _with_port(address: str) -> str:
    return f"[{address}]:80" if ":" in address else f"{address}:80"


def _difference(have: Plan, want: Plan) -> str:
    names = {*have.services, *want.services}
    return ", ".join(sorted(str(name) for name in names if have.services.get(name) != want.services.get(name)))
