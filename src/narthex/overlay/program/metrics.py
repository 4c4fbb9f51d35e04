"""State and counters of the overlay, for metrics, health checks, and the log."""

from __future__ import annotations

import enum
import threading
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from narthex.runtime.logs import LOGGER
from narthex.runtime.metrics import counter, gauge

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
        self.last_reconcile = 0.0
        """Monotonic time of the last reconciliation."""
        self.last_sync = 0.0
        """Unix time of the last successful reconciliation."""
        self.syncs = 0
        self.healed: Counter[str] = Counter()
        self.checksums: dict[str, enum.Enum] = {}
        """Last `ChecksumVerdict` of the self-test, by device."""
        self.repaired = 0
        self._lock = threading.Lock()
        self._logged = False
        """True while the log says that there are problems. Waiting for the first list of Nodes is none."""

    def report(self, failure: str, problems: tuple[str, ...]) -> None:
        """Set the current problems, and log new ones."""
        with self._lock:
            before = {self.failure, *self.problems}
            self.failure, self.problems = failure, problems
        for text in (failure, *problems):
            if text and text not in before:
                LOGGER.error("overlay: %s", text)
                self._logged = True
        if self._logged and not failure and not problems:
            self._logged = False
            LOGGER.info("overlay: all problems are resolved")

    def state(self) -> dict[str, object]:
        """Return the state for `/readyz` and `-o json`."""
        return {
            "ready": self.ready and not self.failure,
            "failure": self.failure,
            "problems": list(self.problems),
            "peers": self.peers,
            "healed": dict(self.healed),
            "checksums": {device: found.value for device, found in list(self.checksums.items())},
        }

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics for prometheus-client."""
        yield gauge("narthex_overlay_nodes", "Peer nodes with routes.", self.peers)
        problems = len(self.problems) + bool(self.failure)
        yield gauge("narthex_overlay_problems", "Current problems of this node and its peers.", problems)
        ready = self.ready and not self.failure
        yield gauge("narthex_overlay_ready", "1 if the last reconciliation succeeded.", ready)
        text = "Time of the last successful reconciliation."
        yield gauge("narthex_overlay_last_sync_timestamp_seconds", text, self.last_sync)
        yield counter("narthex_overlay_syncs", "Successful reconciliations.", self.syncs)
        healed: dict[tuple[str, ...], float] = {(kind,): self.healed[kind] for kind in KINDS}
        text = "Entries that other programs removed and that were restored."
        yield counter("narthex_overlay_healed", text, healed, "kind")
        checksums: dict[tuple[str, ...], float] = {
            (device, one.value): one is found for device, found in list(self.checksums.items()) for one in type(found)
        }
        text = "1 for the last result of the transmit checksum self-test."
        yield gauge("narthex_overlay_checksums", text, checksums, "device", "verdict")
        yield counter("narthex_overlay_checksums_repaired", "Times the checksum offload was disabled.", self.repaired)
