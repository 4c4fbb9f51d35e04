"""One process for all that a node needs: parts side by side, none of which another's failure can end.

Each part works in a thread of its own. One that ends, by an error or without being told to, is made anew and started
again after a rest that grows; the others go on meanwhile.
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
"""Seconds that a part has to end in when it is told to."""
_LOOK = 1.0
"""Seconds between two looks whether a signal has come."""


class NodePart(Protocol):
    """One job of a node, for one run. What it opens and starts it also closes and ends before `run` is over, since the
    next one may come in its place."""

    @property
    def healthy(self) -> bool:
        """Whether it does its work now. Asked from other threads, while it runs."""
        ...

    def run(self) -> None:
        """Work until `stop`. To return sooner is a failure, as any exception is."""
        ...

    def stop(self) -> None:
        """Let `run` return soon, also when it has not begun. Safe from any thread, and at any time."""
        ...


@runtime_checkable
class MeasuredPart(Protocol):
    """A part that has numbers of its own."""

    def collect(self) -> Iterable[Metric]:
        """Those of this run. Asked from other threads, while it runs."""
        ...


PartFactory = Callable[[], NodePart]
"""Makes a part for one run. What it raises is the part's failure."""


class PartSupervisor:
    """Keeps one part going. `keep` blocks; everything else may be called from any thread."""

    def __init__(self, name: str, make: PartFactory, clock: Clock | None = None) -> None:
        self.name = name
        self._make = make
        self._clock = clock or SystemClock()
        self._part: NodePart | None = None
        self._stopping = False
        self._renewed = False
        """The present run has been told to end for the next one."""
        self._failures = 0
        self._error = ""

    def keep(self) -> None:
        """Run the part, again and again, until `stop`."""
        in_a_row = 0
        while not self._stopping:
            # Whoever asks for a new one from here on has it made by what is so now.
            self._renewed = False
            begun = self._clock.now()
            error = self._run_once()
            if self._stopping:
                return
            if self._renewed:
                LOGGER.info("part %s begins anew, for other settings", self.name)
                continue
            if self._clock.now() - begun >= STEADY:
                in_a_row = 0
            self._failures += 1
            in_a_row += 1
            rest = RESTART_BACKOFF.delay(in_a_row)
            self._error = error
            LOGGER.error(
                "part %s ended: %s; it is started again in %g s, the other parts go on", self.name, error, rest
            )
            self._sleep(rest)

    def _sleep(self, seconds: float) -> None:
        end = self._clock.now() + seconds
        # A wake may have been meant for a run that was over already.
        while not self._stopping and not self._renewed and (left := end - self._clock.now()) > 0:
            self._clock.sleep(left)

    def renew(self) -> None:
        """End the present run, or the rest after it, and make the part anew. That is no failure."""
        self._renewed = True
        self._end_run()

    def stop(self) -> None:
        """End `keep`, and the part with it."""
        self._stopping = True
        self._end_run()

    def _end_run(self) -> None:
        self._clock.wake()
        part = self._part
        if part is not None:
            part.stop()

    def report(self) -> PartReport:
        """How it is now."""
        part = self._part
        healthy = part is not None and part.healthy
        error = "" if healthy else self._error
        return PartReport(running=part is not None, healthy=healthy, failures=self._failures, error=error)

    def collect(self) -> Iterable[Metric]:
        """The part's own numbers; none while it does not run."""
        part = self._part
        return part.collect() if isinstance(part, MeasuredPart) else ()

    def _run_once(self) -> str:
        """One run; why it ended."""
        try:
            self._part = part = self._make()
            # Whoever stops between these lines has seen the part, or is seen here.
            if not self._stopping and not self._renewed:
                part.run()
        except BaseException as error:
            # Also a SystemExit, which would end this thread and no more.
            LOGGER.debug("where part %s ended", self.name, exc_info=error)
            return f"{type(error).__name__}: {error}"
        finally:
            self._part = None
        return "it returned without being told to"


class NodeSupervisor:
    """All parts of a node. `run` blocks; `stop` is safe in a signal handler."""

    def __init__(
        self,
        parts: Iterable[tuple[str, PartFactory]],
        *,
        clock: Callable[[], Clock] = SystemClock,
        patience: float = PATIENCE,
    ) -> None:
        """`parts`: name and how to make it, in the order in which they start; they end the other way round. `clock`
        makes a clock, since each waiter needs one of its own."""
        self._keepers = {name: PartSupervisor(name, make, clock()) for name, make in parts}
        self._clock = clock()
        self._patience = patience
        self._stopping = False

    def run(self) -> None:
        """Start all parts, and end them all when `stop` is called."""
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
                LOGGER.error("part %s does not end within %g s; it ends with the process", keeper.name, self._patience)

    def stop(self) -> None:
        """End `run`."""
        self._stopping = True
        self._clock.wake()

    def renew(self, name: str) -> None:
        """Make a part anew; the others go on."""
        self._keepers[name].renew()

    def report(self) -> dict[str, PartReport]:
        """How each part is now, in order."""
        return {name: keeper.report() for name, keeper in self._keepers.items()}

    def collect(self) -> Sequence[Metric]:
        """The same for prometheus-client, and what the parts count themselves."""
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
