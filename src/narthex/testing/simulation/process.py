"""One life of the simulated proxy process: the real source, loop, planner, and backend over a simulated kernel."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from random import Random
from typing import Any

from narthex.kube.access import Access
from narthex.kube.resources import of_a_proxy
from narthex.kube.source import KubeSource
from narthex.model.net import IPFamily
from narthex.model.store import Event
from narthex.proxy.kernel.dataplanes import dataplane
from narthex.proxy.plan.planner import NodeConfig, Planner
from narthex.proxy.program.dataplane import AnnouncedTarget
from narthex.proxy.program.health import ProxyHealth
from narthex.proxy.program.loop import Proxy
from narthex.proxy.program.schedule import SyncPeriods
from narthex.proxy.program.sync import FamilySync
from narthex.testing.simulation.kernel import ProcessCrash, SimulatedKernel, SimulatedMonitor, SimulatedTarget
from narthex.testing.simulation.server import SimulatedServer
from narthex.testing.simulation.time import VirtualClock


class SimulatedProcess:
    """The proxy, from its start to its end. A process that ended cannot be started again."""

    def __init__(
        self,
        server: SimulatedServer,
        kernel: SimulatedKernel,
        families: Sequence[IPFamily],
        node: NodeConfig,
        random: Random,
    ) -> None:
        """Build the process; nothing runs yet."""
        loop = kernel.loop
        self.clock = VirtualClock(loop)
        self.problems: Sequence[Any] = ()
        self.turns = 0
        self._server = server
        self._inbox: deque[Event] = deque()
        self._source = KubeSource(Access(), of_a_proxy(node.node_name), random_number=random.random)
        self._monitor = SimulatedMonitor(kernel)
        plane = dataplane(kernel.backend.name)
        self.syncs = [
            FamilySync(
                family,
                Planner(node, family),
                kernel.backend,
                AnnouncedTarget(SimulatedTarget(kernel, family), self._monitor, plane.transactions),
                self.clock,
            )
            for family in families
        ]
        periods = SyncPeriods(watched=True)
        self.health = ProxyHealth(families, periods.sync, self.clock, node_expected=True)
        self.proxy = Proxy(
            self, self.syncs, self.clock, periods, node_name=node.node_name, foreign=self._monitor, health=self.health
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
        async for events in self._source.follow(self._server, asyncio.Event()):
            self._inbox.extend(events)
            self.problems = self._source.problems
            self.clock.wake()
