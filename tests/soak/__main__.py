"""`python -m tests.soak`: an hour of faults under load, with gates. Needs root."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import click
import msgspec
from benchmarks.frame.machine import Machine, describe
from tests.soak.gates import Findings, Gate, judge, table
from tests.soak.soak import SoakSettings, soak

from narthex.linux.privileges import allow_many_files
from narthex.testing.kernel.world import sweep

FLUSH_SECONDS = 10.0
"""Limit of an outage after a flush. A machine at rest needs a tenth of it; here, two modes and their load share it."""
MODES = ("nftables", "iptables")
EXIT_INTERRUPTED = 130
SHOWN = 20
"""Lines on what went wrong, for each mode."""


class SoakReport(msgspec.Struct, frozen=True, kw_only=True):
    """The file of results."""

    machine: Machine
    settings: SoakSettings
    flush_seconds: float
    passed: bool
    interrupted: bool
    gates: dict[str, list[Gate]]
    """By mode."""
    findings: list[Findings]


@click.command()
@click.option("--minutes", type=click.FloatRange(0.01, 24 * 60), default=60.0, show_default=True, help="Duration.")
@click.option("--mode", "modes", multiple=True, type=click.Choice(MODES), help="Default: both, side by side.")
@click.option("--seed", type=int, default=1, show_default=True, help="Order of the faults.")
@click.option("--pause", type=click.FloatRange(0.0), default=5.0, show_default=True, help="Seconds between two faults.")
@click.option("--flood", type=click.IntRange(1, 20_000), default=4000, show_default=True, help="Packets of a flood.")
@click.option(
    "--silent", type=click.IntRange(1, 2000), default=300, show_default=True, help="Silent connections to a port."
)
@click.option(
    "--flush-seconds", type=float, default=FLUSH_SECONDS, show_default=True, help="Limit of an outage after a flush."
)
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write all results to this file.")
def main(minutes: float, modes: tuple[str, ...], flush_seconds: float, file: Path | None, **more: Any) -> None:
    """Kill the proxy, flush its rules, and flood it, while Services change and connections are open.

    Exits with status 1 if a gate fails, and with 130 if it was interrupted.
    """
    ended, interrupted = threading.Event(), threading.Event()

    def end(*_: object) -> None:
        interrupted.set()
        ended.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    os.environ["PYTHONFAULTHANDLER"] = "1"
    allow_many_files()
    sweep()
    settings = SoakSettings(modes=modes or MODES, seconds=minutes * 60, **more)
    findings = soak(settings, ended, lambda line: print(line, flush=True))
    gates = {found.mode: judge(found, flush_seconds) for found in findings}
    passed = not interrupted.is_set() and all(gate.met for judged in gates.values() for gate in judged)
    print(table(gates))
    for found in findings:
        texts = [*found.errors, *found.differences, *found.lost_probes, *(each.what for each in found.failed())]
        for text in texts[:SHOWN]:
            print(f"{found.mode}: {text}")
        if len(texts) > SHOWN:
            print(f"{found.mode}: {len(texts) - SHOWN} more; --json FILE has all")
    if file is not None:
        report = SoakReport(
            machine=describe(),
            settings=settings,
            flush_seconds=flush_seconds,
            passed=passed,
            interrupted=interrupted.is_set(),
            gates=gates,
            findings=findings,
        )
        file.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    sys.exit(EXIT_INTERRUPTED if interrupted.is_set() else 0 if passed else 1)


if __name__ == "__main__":
    main()
