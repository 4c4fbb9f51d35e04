"""Socket load balancing while the proxy runs: brings the BPF maps to each plan, in addition to the rules of the mode.

Nothing here can fail a sync. Whatever the kernel refuses, the rules serve the connections; the reason is logged and shown.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narthex.model import ConntrackFlow, IPFamily
from narthex.proxy.backends.base import ApplyError
from narthex.proxy.backends.counters import ConnectionCount
from narthex.proxy.backends.sockets.rows import CountedPort, SocketRows
from narthex.proxy.kernel.connected_sockets import ConnectedSockets
from narthex.proxy.kernel.sockets import PINS, SocketsUnavailableError, SocketTarget, cgroup_path, remove_pins
from narthex.proxy.plan.ir import Plan
from narthex.proxy.plan.stale import StaleReason
from narthex.proxy.program.ejection import PassiveEjection
from narthex.runtime.logs import LOGGER
from narthex.runtime.metrics import gauge

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from narthex.proxy.kernel.dataplanes import CounterReader


class SocketAccelerator:
    """The programs and maps of one cgroup. `follow` is called by the loop, the rest by any thread."""

    def __init__(self, cgroup: str, pins: Path = PINS) -> None:
        """Prepare for the network namespace of the calling thread; nothing is opened.

        Args:
            cgroup: Path of the cgroup whose sockets are balanced; empty: the root of the hierarchy.
            pins: Directory below which objects are pinned.
        """
        self._cgroup = cgroup
        self._pins = pins
        self._target: SocketTarget | None = None
        self._rows: dict[IPFamily, SocketRows] = {}
        self._plans: dict[IPFamily, Plan] = {}
        self._counted: dict[IPFamily, tuple[Plan, Mapping[int, CountedPort]]] = {}
        self.reason = "no Services are known yet"
        """Why sockets are not balanced; empty if they are."""
        self._given_up = False
        self.ejection: PassiveEjection | None = None
        """Removes endpoints that connections fail to reach from the plans that sockets follow; None: none are."""
        self._planned: dict[IPFamily, Plan] = {}
        """The plans that were to be followed last, with all endpoints."""
        self._connected: ConnectedSockets | None = None

    def follow(self, plan: Plan) -> None:
        """Bring the maps to a plan, and attach the programs at first. Errors are logged, never raised."""
        self._planned[plan.family] = plan
        if self.ejection is not None:
            plan = self.ejection.reduced(plan)
        if self._given_up or self._plans.get(plan.family) is plan:
            return
        try:
            self._bring(plan)
        except SocketsUnavailableError as error:
            self._given_up, self.reason = True, str(error)
            LOGGER.warning("socket load balancing stays off: %s; the rules serve all connections", error)
            self._withdraw()
        except ApplyError as error:
            if self.reason != str(error):
                LOGGER.warning("socket load balancing is behind: %s; it is tried again at the next sync", error)
            self.reason = str(error)
        else:
            self._plans[plan.family] = plan
            if self.reason:
                LOGGER.info("socket load balancing is on")
            self.reason = ""
            if self.ejection is not None and self._target is not None:
                self.ejection.start(self._target)

    def tend(self, now: float) -> float:
        """Eject endpoints that connections failed to reach, and let others return. Return the seconds until the next call."""
        if self.ejection is None or self.reason:
            return math.inf
        delay = self.ejection.take_in(now)
        for plan in list(self._planned.values()):
            self.follow(plan)
        return delay

    def _bring(self, plan: Plan) -> None:
        if self._target is None:
            target = SocketTarget(cgroup_path(self._cgroup), self._pins)
            target.open()
            self._target = target
        target, family = self._target, plan.family
        # Until everything is written, the content of the maps counts as unknown.
        rows = self._rows.pop(family, None)
        self._plans.pop(family, None)
        if rows is None:
            fits = target.ensure(family, *_sizes(plan))
            rows = SocketRows(family, target.read(family) if fits else None)
        changes = rows.advance(plan)
        if not target.ensure(family, rows.service_count, rows.frontend_count, rows.slot_count):
            rows = SocketRows(family)
            changes = rows.advance(plan)
        if rows.counts_open:
            target.count_open(family)
        if changes:
            target.apply(family, changes)
        self._rows[family] = rows
        if not target.active:
            target.activate()

    def _withdraw(self) -> None:
        """Remove what an earlier process has attached: its maps would grow old."""
        try:
            for family in IPFamily:
                remove_pins(family, self._pins)
        except OSError as error:
            LOGGER.error("pins below %s could not be removed: %s; remove them by hand", self._pins, error)

    def close_stale(
        self,
        family: IPFamily,
        endpoints: Collection[tuple[str, int]] | None,
        reason: Callable[[ConntrackFlow], StaleReason | None],
    ) -> Counter[StaleReason]:
        """Close UDP sockets that were sent to an endpoint that is gone, as `ConnectedSockets.close_stale` does."""
        target = self._target
        if target is None or not target.active:
            return Counter()
        if self._connected is None:
            self._connected = ConnectedSockets(target.cgroup, target.origins)
        return self._connected.close_stale(family, endpoints, reason)

    @property
    def possible(self) -> bool:
        """False once it is known that this machine cannot balance sockets."""
        return not self._given_up

    def counters(self, plan: Plan) -> Iterable[ConnectionCount]:
        """Return the connections that sockets sent to the endpoints of a plan in force. Raises ApplyError."""
        rows, target = self._rows.get(plan.family), self._target
        if rows is None or target is None:
            return ()
        known = self._counted.get(plan.family)
        if known is None or known[0] is not plan:
            known = self._counted[plan.family] = plan, rows.counted()
        return target.read_counters(plan.family, known[1])

    def counting(self, reader: CounterReader) -> CounterReader:
        """Return a reader of the counters of rules and sockets."""

        def read(plan: Plan, endpoints: bool) -> Iterable[ConnectionCount]:
            """Read both."""
            return [*reader(plan, endpoints), *self.counters(plan)]

        return read

    @property
    def status(self) -> dict[str, Any]:
        """The state, as the status port shows it."""
        target = self._target
        return {
            "active": not self.reason,
            "reason": self.reason,
            "cgroup": str(target.cgroup) if target is not None else self._cgroup,
            "writes": target.writes if target is not None else 0,
            "families": {
                family.label: {"frontends": rows.frontend_count, "endpoints": rows.slot_count}
                for family, rows in list(self._rows.items())
            },
            **({"ejection": self.ejection.status} if self.ejection is not None else {}),
        }

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics for prometheus-client."""
        text = "1 if sockets are sent to endpoints when they connect; the reason is given if not."
        yield gauge("narthex_socket_load_balancing", text, {self.reason: int(not self.reason)}, "reason")
        if self.ejection is not None:
            yield from self.ejection.collect()

    def close(self) -> None:
        """Close the maps. The programs that balance stay in force."""
        if self.ejection is not None:
            self.ejection.close()
        if self._target is not None:
            self._target.close()


def _sizes(plan: Plan) -> tuple[int, int, int]:
    """Return how many numbers, frontends, and slots a plan can need."""
    services = plan.services.values()
    return (
        len(services) + 1,
        sum([len(service.frontends) for service in services]),
        sum([len(pool.endpoints) for service in services for pool in (service.cluster, service.local) if pool]),
    )
