"""One life of the simulated proxy process: the real source, loop, planner, and backend over a simulated kernel."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from narthex.kube.messages import WATCH_TIMES
from narthex.model import Event, IPFamily
from narthex.proxy.kernel.dataplanes import dataplane
from narthex.proxy.plan.planner import NodeConfig, Planner
from narthex.proxy.program.dataplane import AnnouncedTarget
from narthex.proxy.program.health import ProxyHealth
from narthex.proxy.program.loop import Proxy
from narthex.proxy.program.schedule import SyncPeriods
from narthex.proxy.program.sync import FamilySync, SyncResult
from narthex.testing.simulation.kernel import (
    KernelFaults,
    ProcessCrash,
    SimulatedKernel,
    SimulatedMonitor,
    SimulatedTarget,
)
from narthex.testing.simulation.time import VirtualClock


class SimulatedSource(Protocol):
    """What one process reads its objects from."""

    @property
    def problems(self) -> Sequence[Any]:
        """Return the present problems of objects."""
        ...

    def batches(self) -> AsyncIterator[Sequence[Event]]:
        """Yield events as the real source does."""
        ...


class SimulatedProcess:
    """The proxy, from its start to its end. A process that ended cannot be started again."""

    def __init__(
        self,
        source: SimulatedSource,
        kernel: SimulatedKernel,
        families: Sequence[IPFamily],
        node: NodeConfig,
        *,
        faults: KernelFaults,
        from_files: bool = False,
    ) -> None:
        """Build the process and start it. `faults` are those of its own reads and writes."""
        loop = kernel.loop
        self.clock = VirtualClock(loop)
        self.problems: Sequence[Any] = ()
        self.turns = 0
        self.blind = True
        """It does not know all objects yet that stay, for example because the server has lost them."""
        self.repairs: deque[tuple[float, float, bool]] = deque(maxlen=100)
        """Syncs that found and repaired changes by others: end, duration, and whether rules were missing in a contest."""
        self._inbox: deque[Event] = deque()
        self._source = source
        self._monitor = SimulatedMonitor(kernel, self)
        plane = dataplane(kernel.backend.name)
        self.syncs = [
            FamilySync(
                family,
                Planner(node, family),
                kernel.backend,
                AnnouncedTarget(SimulatedTarget(kernel, family, self, faults), self._monitor, plane.transactions),
                self.clock,
                doubt=0.0 if from_files else WATCH_TIMES.doubt,
            )
            for family in families
        ]
        periods = SyncPeriods(watched=plane.notifies)
        self.health = ProxyHealth(families, periods.sync, self.clock, node_expected=not from_files)
        self.proxy = Proxy(
            self,
            self.syncs,
            self.clock,
            periods,
            node_name=node.node_name,
            foreign=self._monitor,
            health=self.health,
            after_sync=self._note,
        )
        self._task = loop.create_task(self._run())

    @property
    def waiting(self) -> int:
        """Events that the loop has not taken yet."""
        return len(self._inbox)

    @property
    def running(self) -> bool:
        """True until the process was killed."""
        return not self._task.done()

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        events = list(self._inbox)
        self._inbox.clear()
        return events

    async def kill(self) -> None:
        """End the process wherever it is."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def failure(self) -> BaseException | None:
        """Return the exception that ended the process, if it was none of the simulation's."""
        if not self._task.done() or self._task.cancelled():
            return None
        return self._task.exception()

    def _note(self, done: SyncResult) -> None:
        if done.drift:
            self.repairs.append((self.clock.now(), done.total, done.lost))

    async def _run(self) -> None:
        feeding = asyncio.get_running_loop().create_task(self._feed())
        try:
            with self.proxy.listening():
                while True:
                    self.turns += 1
                    wait = self.proxy.turn()
                    await self.clock.wait(wait)
                    if feeding.done():
                        feeding.result()
        except ProcessCrash:
            pass
        finally:
            feeding.cancel()
            self._monitor.close()
            await asyncio.gather(feeding, return_exceptions=True)

    async def _feed(self) -> None:
        async for events in self._source.batches():
            self._inbox.extend(events)
            self.problems = self._source.problems
            self.clock.wake()
