"""The simulated world of one run, and the properties that must hold in it.

1. Once the inputs are quiet, the kernel has the rules of the newest objects within `QUIET_SECONDS`.
2. The proxy never removes the rules of a Service that was not deleted. Rules that another program removed are back
   within `REPAIR_SECONDS`, plus the time of the reads and writes.
   Repairs are bounded even if another program changes the rules all the time, and the log names that conflict.
3. `/healthz` does not answer 200 while rules have been missing for longer than `UNHEALTHY_SECONDS`; it answers 200 at
   the end.
4. What the process keeps is bounded by what exists.
5. Files that are written slowly, or that cannot be read, remove nothing; a deletion takes effect within
   `DELETION_SECONDS`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Coroutine
from random import Random
from typing import Any

import msgspec
from immutables import Map

from narthex.lab.api.reads import PRESENT
from narthex.lab.api.store import ObjectStore
from narthex.model import EndpointSlice, IPFamily, NamespacedName, Snapshot, Store, Synced, Upsert
from narthex.model.decode.slice import SERVICE_LABEL
from narthex.proxy.backends import BACKENDS
from narthex.proxy.backends.ipvs.rules import IpvsRules
from narthex.proxy.backends.userspace.rules import UserspaceRules
from narthex.proxy.kernel.dataplanes import DATAPLANES
from narthex.proxy.plan.ir import Plan
from narthex.proxy.plan.planner import NodeConfig, plan_once
from narthex.testing.build import CONFIG, endpoint, endpoint_slice, node, service
from narthex.testing.simulation.files import DELETION_SECONDS, SimulatedFiles
from narthex.testing.simulation.foreign import foreign_change, silent_change
from narthex.testing.simulation.kernel import KernelFaults, SimulatedKernel
from narthex.testing.simulation.process import SimulatedProcess
from narthex.testing.simulation.properties import EXCUSES, SAMPLE_SECONDS, RuleProperties, Violation, cluster_ip
from narthex.testing.simulation.server import LOST_STORE_VERSION, SimulatedServer
from narthex.testing.simulation.time import VirtualLoop

QUIET_SECONDS = 700.0
"""A watch that hangs on a connection without bookmarks is only noticed when it should have ended."""
RELIST_SECONDS = 1300.0
"""The same if the server was restored from a backup and gave versions a second meaning, which only a new list shows."""
_IDLE_SECONDS = 10.0
_OTHER_CIDRS = ("10.128.0.0/12", "fd65::/48")
STEADY = 3
CHANGING = 6


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
        backend = BACKENDS[random.choice(("nftables", "nftables", "iptables", "iptables", "ipvs", "userspace"))]
        self.plane = DATAPLANES[backend.name]
        self.families: tuple[IPFamily, ...] = random.choice(
            ((IPFamily.IPV4,), (IPFamily.IPV4,), (IPFamily.IPV4, IPFamily.IPV6))
        )
        features = msgspec.structs.replace(PRESENT, streaming=random.random() < 0.7)
        self.server = SimulatedServer(loop, Random(random.random()), features)
        self.files = SimulatedFiles(loop, Random(random.random())) if random.random() < 0.25 else None
        self.inputs = self.files or self.server
        self._deleted: set[str] = set()
        if self.files is not None:
            self.files.settled = self._file_settled
        self.kernel = SimulatedKernel(backend, loop, Random(random.random()))
        self.kernel.interfere = self._interfere
        # One thread runs everything here: a slow kernel would also slow down those who write files.
        slowest = 4 if self.files is None else 2
        self.kernel.faults.read_seconds = random.choice((0.001, 0.02, 0.3, 1.2)[:slowest])
        self.kernel.faults.write_seconds = random.choice((0.001, 0.001, 0.05)[:slowest])
        # Not from `random`: the runs of known seeds stay the same.
        self.kernel.faults.notify_seconds = Random(f"notifications of {seed}").choice((0.0, 0.001, 0.05))
        self.server.faults.latency = random.choice((0.0, 0.01, 0.2))
        self.process: SimulatedProcess | None = None
        self.competitor: SimulatedProcess | None = None
        """A second proxy on the node, with another configuration."""
        self._restarting: asyncio.Task[None] | None = None
        self.backup: ObjectStore | None = None
        self.reused_versions = False
        self._lost: ObjectStore | None = None
        self._alarm = asyncio.Event()
        """Set when something has happened that the checks look at."""
        self.properties = RuleProperties(self, self._alarm.set)
        self.kernel.observe = self.properties.observe
        self._competing: asyncio.Task[None] | None = None
        self._programs: list[asyncio.Task[None]] = []
        self._restore: list[Callable[[], None]] = []

    # ---- the run ---------------------------------------------------------------------------------------------------

    async def run(self, schedule: Callable[[Simulation], Awaitable[None]]) -> SimulationResult:
        """Run a schedule, heal everything, and check the end."""
        violation = ""
        inputs = "files" if self.files is not None else "an API server"
        self.note(
            f"mode {self.plane.mode}, {' and '.join(each.label for each in self.families)}, objects from {inputs}"
        )
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
            for task in filter(None, (*self._programs, self._competing, self._restarting)):
                task.cancel()
            for process in filter(None, (self.process, self.competitor)):
                self.steps += process.turns
                await process.kill()
            if self.files is not None:
                self.files.close()
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
        if self.files is not None:
            text = text.replace(str(self.files.path), "manifests")
        self.log.append(f"{self.loop.time():10.3f} {text}")

    def _start(self) -> None:
        self.note("the process starts")
        self.properties.named_from = len(self.log)
        self.process = self._proxy(CONFIG, self.kernel.faults)

    def _proxy(self, node: NodeConfig, faults: KernelFaults) -> SimulatedProcess:
        source = self.inputs.source(node.node_name, Random(self.random.random()))
        from_files = self.files is not None
        return SimulatedProcess(source, self.kernel, self.families, node, faults=faults, from_files=from_files)

    def compete(self, seconds: float) -> None:
        """Start a second proxy with another cluster CIDR for some time."""
        # Two proxies that know different objects, since one of them started without any, cannot agree.
        if self.competitor is not None or self.lost or self.plane.relays_connections:
            return
        faults = KernelFaults()
        faults.read_seconds, faults.write_seconds = self.kernel.faults.read_seconds, self.kernel.faults.write_seconds
        self.note(f"  a second proxy runs for {seconds:.1f} s")
        self.competitor = self._proxy(msgspec.structs.replace(CONFIG, cluster_cidrs=_OTHER_CIDRS), faults)
        self._competing = self.loop.create_task(self._end_competitor(seconds))

    async def _end_competitor(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self.competitor is not None:
            ended, self.competitor = self.competitor, None
            self.steps += ended.turns
            await ended.kill()
            self.note("  the second proxy ends")

    def kill(self, after: float) -> None:
        """Kill the process, and start another one after some seconds."""
        self._restarting = self.loop.create_task(self._restart(after))

    async def _restart(self, after: float) -> None:
        self.properties.excused_at = self.loop.time()
        ended, self.process = self.process, None
        if ended is None:
            return
        self.steps += ended.turns
        await ended.kill()
        self._end_relays()
        await asyncio.sleep(after)
        # A process that starts has read no earlier state of a file: it takes half a file for all of it.
        while self.files is not None and self.files.busy:
            await asyncio.sleep(0.1)
        self.properties.excused_at = self.loop.time()
        self._start()

    def _end_relays(self) -> None:
        """Close the ports of a relay, which ends with its process."""
        for family, rules in tuple(self.kernel.rules.items()):
            if isinstance(rules, UserspaceRules):
                closed = msgspec.structs.replace(rules, listeners=Map())
                self.kernel.commit(family, closed, is_notified=False)

    def run_along(self, program: Coroutine[Any, Any, None]) -> None:
        """Run another program of the node until everything heals."""
        self._programs.append(self.loop.create_task(program))

    async def _heal(self) -> None:
        """End all faults."""
        self.note("everything heals")
        self.recover()
        for restore in self._restore:
            restore()
        self._restore.clear()
        for program in self._programs:
            program.cancel()
        await asyncio.gather(*self._programs, return_exceptions=True)
        if self.competitor is not None:
            await self._end_competitor(0.0)
        if self._restarting is not None:
            await self._restarting
        if self.process is not None and not self.process.running:
            await self._restart(0.5)

    def for_a_while(self, holder: object, field: str, value: Any, seconds: float) -> None:
        """Set a fault, and end it after some time or when everything heals."""
        healthy = type(getattr(holder, field))()
        setattr(holder, field, value)
        self.note(f"  {field} = {value} for {seconds:.1f} s")

        def restore() -> None:
            """End the fault, unless it was ended or replaced by another one before."""
            if getattr(holder, field) == value:
                setattr(holder, field, healthy)
                if field in EXCUSES:
                    self.properties.excused_at = self.loop.time()

        self._restore.append(restore)
        self.loop.call_later(seconds, restore)

    # ---- objects ---------------------------------------------------------------------------------------------------

    def _create_objects(self) -> None:
        self.inputs.put(node())
        for name in range(STEADY):
            self.put_service(f"steady{name}", 10 + name)
            self.properties.served[f"steady{name}"] = False
        for name in range(CHANGING):
            self.put_service(f"changing{name}", 100 + name)

    def put_service(self, name: str, number: int) -> None:
        """Create or change a Service and its slices."""
        draw = self.random
        self._deleted.discard(name)
        ips = [cluster_ip(number, family) for family in self.families]
        if draw.random() < 0.3:
            self.inputs.put(service(f"shop/{name}", *ips, node_port=30000 + number, type="NodePort"))
        else:
            self.inputs.put(service(f"shop/{name}", *ips))
        self.put_slices(name)

    def put_slices(self, name: str) -> None:
        """Create or change the slices of a Service, with at least one endpoint each."""
        for family in self.families:
            self.inputs.put(self._slice(name, family))

    def _slice(self, name: str, family: IPFamily) -> EndpointSlice:
        prefix = "10.64.2." if family is IPFamily.IPV4 else "fd64:0:0:2::"
        ends = [endpoint(f"{prefix}{self.random.randint(1, 250):{'d' if family is IPFamily.IPV4 else 'x'}}")]
        labels = ((SERVICE_LABEL, name),)
        return endpoint_slice(f"shop/{name}", *ends, suffix=family.nft, labels=labels)

    def delete_service(self, name: str) -> None:
        """Delete a Service and its slices."""
        self._deleted.add(name)
        for family in self.families:
            self.inputs.delete(self._slice(name, family))
        self.inputs.delete(service(f"shop/{name}", "10.110.0.1"))

    def lose(self) -> None:
        """Replace the store by an empty one, as an API server with a lost etcd has."""
        if self._lost is None and self.competitor is None and self.process is not None and self.process.health.ready:
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
        for obj in self.inputs.objects():
            store.apply(Upsert(obj))
        return store.apply(Synced())

    # ---- properties ------------------------------------------------------------------------------------------------

    async def _watch_health(self) -> None:
        """Check, in short intervals, what must hold at all times."""
        while True:
            await self._sample()
            if self.properties.violations:
                raise Violation(self.properties.violations[0])
            process = self.process
            if process is None:
                continue
            if not process.running:
                if (error := process.failure()) is not None:
                    raise Violation(f"the process ended with {type(error).__name__}: {error}")
                self.note("the process was killed between two writes")
                await self._restart(self.random.choice((0.1, 1.0, 5.0)))
                continue
            self.properties.check(process)
            if process.waiting > 1000 or len(process.problems) > 100:
                raise Violation(f"{process.waiting} events and {len(process.problems)} problems are waiting")

    def _file_settled(self, file: str) -> None:
        """Check later that what was deleted from a file is gone, unless the file changes again."""
        assert self.files is not None
        version = self.files.versions[file]
        for name in self._deleted:
            if self.files.name_of(name) == file:
                # One thread runs everything here, so the files are read only when the proxy does not read the kernel.
                waiting = 10 * len(self.families) * self.kernel.faults.read_seconds
                self.loop.call_later(DELETION_SECONDS + waiting, self._check_deleted, name, file, version)

    def _check_deleted(self, name: str, file: str, version: int) -> None:
        assert self.files is not None
        if name not in self._deleted or self.files.versions[file] != version or self.process is None:
            return
        if NamespacedName("shop", name) in self.process.proxy.snapshot.services:
            self.properties.violations.append(
                f"{name} was deleted from {file} {DELETION_SECONDS:g} s ago and is still known"
            )
            self._alarm.set()

    async def _sample(self) -> None:
        """Wait for the next check: soon while rules are missing, and otherwise when something happens."""
        loop = asyncio.get_running_loop()
        if self.properties.missing_since or self.properties.is_excused:
            await asyncio.sleep(SAMPLE_SECONDS)
            return
        timer = loop.call_later(_IDLE_SECONDS, self._alarm.set)
        await self._alarm.wait()
        timer.cancel()
        self._alarm.clear()

    def _check_end(self) -> None:
        if self.properties.violations:
            raise Violation(self.properties.violations[0])
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

    def change_silently(self, family: IPFamily) -> None:
        """Change what the kernel does not notify anybody about."""
        rules = self.kernel.rules.get(family)
        if isinstance(rules, IpvsRules):
            self.properties.changing_silently = True
            self.kernel.commit(family, silent_change(rules, self.random), is_notified=False)
            self.properties.changing_silently = False

    def _interfere(self, family: IPFamily) -> None:
        self.note("  another program changes our rules between two of our transactions")
        self.properties.excused_at = self.loop.time()
        rules = self.kernel.rules.get(family)
        self.kernel.commit(family, foreign_change(rules, self.random))


def _difference(have: Plan, want: Plan) -> str:
    names = {*have.services, *want.services}
    return ", ".join(sorted(str(name) for name in names if have.services.get(name) != want.services.get(name)))
