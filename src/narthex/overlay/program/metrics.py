"""What the overlay has done and found, counted; for metrics, health and the log."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from narthex.overlay.kernel.checksums import ChecksumVerdict
from narthex.runtime.logs import LOGGER

if TYPE_CHECKING:
    from prometheus_client.core import Metric

KINDS = ("device", "address", "neighbour", "fdb", "route", "rules")


class OverlayMetrics:
    """Written by one thread, read by any."""

    def __init__(self) -> None:
        self.peers = 0
        """Reachable peer nodes."""
        self.problems: tuple[str, ...] = ()
        self.failure = ""
        """Why the last reconciliation failed; empty if it succeeded."""
        self.ready = False
        """True once a reconciliation has succeeded."""
        self.broken = False
        """True if the kernel rejected a change at the last reconciliation. Waiting for other components does not count."""
        self.last_look = 0.0
        """Monotonic time of the last reconciliation."""
        self.last_sync = 0.0
        """Unix time of the last successful reconciliation."""
        self.syncs = 0
        self.healed: Counter[str] = Counter()
        self.checksums: dict[str, ChecksumVerdict] = {}
        """Last result of the checksum self-test, by device."""
        self.repaired = 0
        self._lock = threading.Lock()

    def say(self, failure: str, problems: tuple[str, ...]) -> None:
        """Put down what is wrong now, and log what is new of it."""
        with self._lock:
            before = {self.failure, *self.problems}
            self.failure, self.problems = failure, problems
        for text in (failure, *problems):
            if text and text not in before:
                LOGGER.error("overlay: %s", text)
        if before - {""} and not failure and not problems:
            LOGGER.info("overlay: all that was wrong is well again")

    def state(self) -> dict[str, object]:
        """For `/readyz` and `-o json`."""
        return {
            "ready": self.ready and not self.failure,
            "failure": self.failure,
            "problems": list(self.problems),
            "peers": self.peers,
            "healed": dict(self.healed),
            "checksums": {device: found.value for device, found in list(self.checksums.items())},
        }

    def collect(self) -> Iterable[Metric]:
        """For prometheus-client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        yield GaugeMetricFamily(
            "narthex_overlay_nodes", "Other nodes that pods' packets find their way to.", self.peers
        )
        yield GaugeMetricFamily(
            "narthex_overlay_problems",
            "What is wrong at present, this node's or others'.",
            len(self.problems) + bool(self.failure),
        )
        yield GaugeMetricFamily(
            "narthex_overlay_ready",
            "1: all is in place, and was at the last look.",
            float(self.ready and not self.failure),
        )
        yield GaugeMetricFamily(
            "narthex_overlay_last_sync_timestamp_seconds", "When the last look came to its end.", self.last_sync
        )
        yield CounterMetricFamily("narthex_overlay_syncs", "Looks that came to their end.", self.syncs)
        healed = CounterMetricFamily("narthex_overlay_healed", "What others removed and was put back.", labels=["kind"])
        for kind in KINDS:
            healed.add_metric([kind], self.healed[kind])
        yield healed
        checksums = GaugeMetricFamily(
            "narthex_overlay_checksums",
            "1: what the self-test of transmit checksums said last.",
            labels=["device", "verdict"],
        )
        for device, found in list(self.checksums.items()):
            for one in ChecksumVerdict:
                checksums.add_metric([device, one.value], float(one is found))
        yield checksums
        yield CounterMetricFamily(
            "narthex_overlay_checksums_repaired", "Times the offload was switched off.", self.repaired
        )
