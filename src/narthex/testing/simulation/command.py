"""`narthex-sim`: run seeds of the simulation, or replay one."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

import click

from narthex.testing.simulation.schedule import ACTIONS, simulate
from narthex.testing.simulation.world import SimulationResult


def _seed_range(_context: click.Context, _parameter: click.Parameter, text: str) -> range:
    """Return the seeds of a number, or of a range with both ends.

    Raises:
        click.BadParameter: The text is anything else, or a range without seeds.
    """
    first, dash, last = text.partition("-")
    if first.isdecimal() and (last.isdecimal() or not dash):
        seeds = range(int(first), int(last or first) + 1)
        if seeds:
            return seeds
    raise click.BadParameter(f"{text!r} is no seed or range of seeds: use a number such as 42, or 0-999")


@click.command()
@click.argument("seeds", callback=_seed_range, default="0-999")
@click.option("--steps", type=int, default=0, help="Run further seeds until this many steps are done.")
@click.option("--actions", type=int, default=ACTIONS, show_default=True, help="Changes and faults of each run.")
@click.option("--jobs", type=int, default=0, help="Processes; 0: one for each processor.")
def main(seeds: range, steps: int, actions: int, jobs: int) -> None:
    """Simulate the whole proxy process under faults, once for each seed.

    SEEDS is one number, whose run is printed in full, or a range such as 0-999. Equal seeds give equal runs.
    """
    _fix_hashes()
    if len(seeds) == 1:
        result = simulate(seeds[0], actions)
        click.echo("\n".join(result.log))
        click.echo(f"seed {result.seed}: {result.steps} steps, digest {result.digest}: {result.violation or 'passed'}")
        sys.exit(bool(result.violation))
    start, done, bad = time.monotonic(), 0, []
    number = 0
    for result in _results(seeds, actions, jobs, steps):
        number, done = number + 1, done + result.steps
        if result.violation:
            bad.append(result.seed)
            click.echo(f"seed {result.seed}: {result.violation}")
        if number % 100 == 0:
            click.echo(f"{number} seeds, {done:,} steps, {time.monotonic() - start:.0f} s", err=True)
    click.echo(f"{number} seeds, {done:,} steps: {len(bad)} with a violation")
    if bad:
        click.echo(f"replay one with: narthex-sim {bad[0]}")
    sys.exit(bool(bad))


def _fix_hashes() -> None:
    """Start over with fixed hashes, so that sets have the same order in each run."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})


def _results(seeds: Iterable[int], actions: int, jobs: int, steps: int) -> Iterator[SimulationResult]:
    done = 0
    with ProcessPoolExecutor(jobs or os.cpu_count()) as pool:
        batch = list(seeds)
        while batch:
            for result in pool.map(simulate, batch, [actions] * len(batch), chunksize=8):
                done += result.steps
                yield result
            following = batch[-1] + 1
            batch = list(range(following, following + len(batch))) if done < steps else []
