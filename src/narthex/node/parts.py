"""Supervision of the parts of a node, so that the failure of one part does not end another.

Each part runs in a thread of its own. A part that ends without being stopped is created anew and restarted after a
backoff.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from narthex.linux.clock import Clock, SystemClock
from narthex.model.backoff import Backoff
from narthex.runtime.logs import LOGGER
from narthex.runtime.status import PartReport

if TYPE_CHECKING:
    from prometheus_client.core import Metric

RESTART_BACKOFF = Backoff(1.0, 60.0)
"""Between the failure of a part and its next start."""
STEADY = 120.0
"""A run of so many seconds resets the backoff."""
PATIENCE = 10.0
"""Seconds that a part may take to stop."""
_LOOK = 1.0
"""Period at which the main thread checks for signals."""


class NodePart(Protocol):
    """One run of one task of a node.

    `run` releases all its resources before it returns, since the next run needs them.
    """

    @property
    def healthy(self) -> bool:
        """Return True if the part does its work. Called from other threads while it runs."""
        ...

    def run(self) -> None:
        """Work until `stop`. To return earlier or to raise is a failure."""
        ...

    def stop(self) -> None:
        """Let `run` return soon, also if it has not begun. Safe from any thread, at any time."""
        ...


@runtime_checkable
class MeasuredPart(Protocol):
    """A part with metrics of its own."""

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of this run. Called from other threads while it runs."""
        ...


PartFactory = Callable[[], NodePart]
"""Creates a part for one run. An exception counts as a failure of the part."""


class PartSupervisor:
    """Keeps one part running. `keep` blocks; everything else may be called from any thread."""

    def __init__(self, name: str, make: PartFactory, clock: Clock | None = None) -> None:
        self.name = name
        self._make = make
        self._clock = clock or SystemClock()
        self._part: NodePart | None = None
        self._stopping = False
        self._renewed = False
        """The present run was stopped so that a new one begins."""
        self._failures = 0
        self._error = ""

    def keep(self) -> None:
        """Run the part again and again until `stop`."""
        in_a_row = 0
        while not self._stopping:
            # A request for a new run from here on uses the current settings.
            self._renewed = False
            begun = self._clock.now()
            error = self._run_once()
            if self._stopping:
                return
            if self._renewed:
                LOGGER.info("part %s restarts with the new settings", self.name)
                continue
            if self._clock.now() - begun >= STEADY:
                in_a_row = 0
            self._failures += 1
            in_a_row += 1
            rest = RESTART_BACKOFF.delay(in_a_row)
            self._error = error
            LOGGER.error("part %s ended: %s; restarting in %g s, other parts continue", self.name, error, rest)
            self._sleep(rest)

    def _sleep(self, seconds: float) -> None:
        end = self._clock.now() + seconds
        # A wake may have been meant for a run that was over already.
        while not self._stopping and not self._renewed and (left := end - self._clock.now()) > 0:
            self._clock.sleep(left)

    def renew(self) -> None:
        """End the present run or backoff and create the part anew. This does not count as a failure."""
        self._renewed = True
        self._end_run()

    def stop(self) -> None:
        """End `keep` and the part."""
        self._stopping = True
        self._end_run()

    def _end_run(self) -> None:
        self._clock.wake()
        part = self._part
        if part is not None:
            part.stop()

    def report(self) -> PartReport:
        """Return the present state of the part."""
        part = self._part
        healthy = part is not None and part.healthy
        error = "" if healthy else self._error
        return PartReport(running=part is not None, healthy=healthy, failures=self._failures, error=error)

    def collect(self) -> Iterable[Metric]:
        """Return the part's own metrics; none while it does not run."""
        part = self._part
        return part.collect() if isinstance(part, MeasuredPart) else ()

    def _run_once(self) -> str:
        """Run the part once and return why it ended."""
        try:
            self._part = part = self._make()
            # A `stop` between these lines either saw the part, or is seen here.
            if not self._stopping and not self._renewed:
                part.run()
        except BaseException as error:
            # Also a SystemExit, which would end this thread and no more.
            LOGGER.debug("where part %s ended", self.name, exc_info=error)
            return f"{type(error).__name__}: {error}"
        finally:
            self._part = None
        return "it returned without being stopped"


class NodeSupervisor:
    """Runs all parts of a node. `run` blocks; `stop` is safe in a signal handler."""

    def __init__(
        self,
        parts: Iterable[tuple[str, PartFactory]],
        *,
        clock: Callable[[], Clock] = SystemClock,
        patience: float = PATIENCE,
    ) -> None:
        """Prepare the parts, given by name and factory in start order; they stop in reverse order.

        `clock` creates a clock for each thread that waits.
        """
        self._keepers = {name: PartSupervisor(name, make, clock()) for name, make in parts}
        self._clock = clock()
        self._patience = patience
        self._stopping = False

    def run(self) -> None:
        """Start all parts, and stop them after `stop` was called."""
        threads = [
            (keeper, threading.Thread(target=keeper.keep, name=keeper.name, daemon=True))
            for keeper in self._keepers.values()
        ]
        for _, thread in threads:
            thread.start()
        while not self._stopping:
            # The kernel may give a signal to another thread, which does not end this one's sleep.
            self._clock.sleep(_LOOK)
        for keeper, thread in reversed(threads):
            keeper.stop()
            thread.join(self._patience)
            if thread.is_alive():
                LOGGER.error("part %s did not stop within %g s; it ends with the process", keeper.name, self._patience)

    def stop(self) -> None:
        """End `run`."""
        self._stopping = True
        self._clock.wake()

    def renew(self, name: str) -> None:
        """Create one part anew while the others continue."""
        self._keepers[name].renew()

    def report(self) -> dict[str, PartReport]:
        """Return the state of each part, in start order."""
        return {name: keeper.report() for name, keeper in self._keepers.items()}

    def collect(self) -> Sequence[Metric]:
        """Return metrics about the parts and those of the parts."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        running = GaugeMetricFamily("narthex_part_running", "1: the part runs.", labels=["part"])
        healthy = GaugeMetricFamily("narthex_part_healthy", "1: the part does its work.", labels=["part"])
        failures = CounterMetricFamily("narthex_part_failures", "Times the part ended untold.", labels=["part"])
        for name, report in self.report().items():
            running.add_metric([name], float(report.running))
            healthy.add_metric([name], float(report.healthy))
            failures.add_metric([name], report.failures)
        own = (metric for keeper in self._keepers.values() for metric in keeper.collect())
        return running, healthy, failures, *own
