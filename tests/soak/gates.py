"""What a soak measured, the gates that it must pass, and the table of both."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

from narthex.testing.load import LoadFailure

EARLY, LATE = (0.2, 0.45), (0.75, 1.0)
"""The windows that are compared, as parts of the life of the process that lives to the end. It warms up before."""
LEAST_SAMPLES = 12
"""With fewer of them, a window would be one or two figures."""
GROWTH = {
    # figure: (factor, addition) of what is no growth
    "memory": (1.1, 3.0),
    "files": (1.0, 4.0),
    "threads": (1.0, 2.0),
    "conntrack": (1.5, 300.0),
}
"""Memory: the allocator gives pages back in large pieces only. Files: connections of probes. Conntrack: entries that a
flood left a moment ago."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """The proxy at one moment."""

    at: float
    """Seconds since the start."""
    run: int
    """Number of the process; kills begin another one."""
    memory: float
    """Resident, in MiB."""
    files: int
    threads: int
    conntrack: int
    """Entries of the node that have not expired."""


class FlushWindow(msgspec.Struct, kw_only=True):
    """One flush by a foreign hand, and the time until all routes worked again."""

    command: str
    began: float
    ended: float = math.inf

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def excuses(self, failure: LoadFailure) -> bool:
        """Whether a connection may have met the missing rules. The kernel translates open connections only while a chain
        of NAT is there, and a flush of everything takes that, too."""
        return failure.began <= self.ended and failure.ended >= self.began


class Findings(msgspec.Struct, kw_only=True):
    """Everything that a soak of one mode found, as it grows."""

    mode: str
    connections: int = 0
    """New ones that were made."""
    held: int = 0
    """Connections that were open all the time, or until their endpoint ended."""
    actions: dict[str, int] = msgspec.field(default_factory=dict)
    """How often each fault happened."""
    failures: list[LoadFailure] = []
    windows: list[FlushWindow] = []
    probes: int = 0
    lost_probes: list[str] = []
    """Of health ports, beside silent connections."""
    errors: list[str] = []
    """The proxy ended by itself, or a change did not arrive."""
    differences: list[str] = []
    """Between the objects and the rules, at the end."""
    samples: list[Sample] = []

    def did(self, action: str) -> None:
        self.actions[action] = self.actions.get(action, 0) + 1

    def failed(self) -> list[LoadFailure]:
        """Failures that no flush excuses."""
        return [each for each in self.failures if not any(window.excuses(each) for window in self.windows)]

    @property
    def longest(self) -> float:
        return max((window.seconds for window in self.windows), default=0.0)


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """One figure and its limit. `early` is None for what is no growth."""

    name: str
    value: float
    limit: float
    early: float | None = None
    note: str = ""

    @property
    def met(self) -> bool:
        return self.value <= self.limit


def windows(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """The early and the late samples of the last process."""
    of_last = [each for each in samples if each.run == samples[-1].run] if samples else []
    if len(of_last) < LEAST_SAMPLES:
        return [], []
    begin, length = of_last[0].at, of_last[-1].at - of_last[0].at

    def part(bounds: tuple[float, float]) -> list[Sample]:
        return [each for each in of_last if bounds[0] <= (each.at - begin) / length <= bounds[1]]

    return part(EARLY), part(LATE)


def judge(found: Findings, flush_seconds: float) -> list[Gate]:
    """All gates of one mode."""
    failed = found.failed()
    excused = [each.established for each in found.failures if each not in failed]
    note = f"after flushes, {excused.count(False)} new and {excused.count(True)} open ones more"
    gates = [
        Gate(name="failed connections", value=len(failed), limit=0, note=note),
        Gate(name="longest outage after a flush, s", value=found.longest, limit=flush_seconds),
        Gate(name="lost probes", value=len(found.lost_probes), limit=0, note=f"of {found.probes}"),
        Gate(name="errors", value=len(found.errors), limit=0),
        Gate(name="differences at the end", value=len(found.differences), limit=0),
    ]
    early, late = windows(found.samples)
    if not early or not late:
        gates.append(Gate(name="samples missing", value=LEAST_SAMPLES, limit=0))
        return gates
    for name, (factor, addition) in GROWTH.items():
        before, after = (statistics.median(getattr(each, name) for each in part) for part in (early, late))
        gates.append(Gate(name=name, value=after, limit=before * factor + addition, early=before))
    return gates


def table(judged: dict[str, list[Gate]]) -> str:
    """The gates of all modes as text."""
    lines = [f"{'mode':10} {'gate':32} {'early':>8} {'value':>8} {'limit':>8}"]
    for mode, gates in judged.items():
        for gate in gates:
            early = "" if gate.early is None else f"{gate.early:.1f}"
            verdict = f"{'ok' if gate.met else 'FAILED'}{f' ({gate.note})' if gate.note else ''}"
            lines.append(f"{mode:10} {gate.name:32} {early:>8} {gate.value:8.1f} {gate.limit:8.1f}  {verdict}")
    return "\n".join(lines)
