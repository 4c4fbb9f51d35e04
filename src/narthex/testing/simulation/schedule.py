"""Schedules: changes and faults drawn from a seed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from narthex.model import IPFamily
from narthex.runtime.logs import LOGGER
from narthex.testing.simulation.foreign import flushed, foreign_change
from narthex.testing.simulation.time import VirtualLoop
from narthex.testing.simulation.world import CHANGING, STEADY, Simulation, SimulationResult

ACTIONS = 25
"""Actions of one run."""

Action = Callable[[Simulation], None]


def simulate(seed: int, actions: int = ACTIONS) -> SimulationResult:
    """Run the simulation of one seed."""

    async def schedule(world: Simulation) -> None:
        """Draw kinds of actions, and perform actions of these kinds after drawn pauses."""
        draw = world.random
        # A few kinds of actions in one run reach further than a little of each.
        every = (*_OBJECTS, *(_SERVER if world.files is None else _FILES), *_KERNEL, *_PROCESS)
        kinds = [kind for kind in every for _ in range(draw.choice((0, 0, 1, 3)))] or [_change_endpoints, _flush]
        await asyncio.sleep(draw.uniform(0.0, 20.0))
        for _ in range(actions):
            await asyncio.sleep(draw.choice((0.0, 0.01, 0.3, 2.0, 8.0)) * draw.random())
            action = draw.choice(kinds)
            world.note(action.__name__.strip("_").replace("_", " "))
            world.steps += 1
            action(world)

    loop = VirtualLoop()
    world = Simulation(seed, loop)
    with _logged_by(world):
        try:
            return loop.run_until_complete(world.run(schedule))
        finally:
            loop.close()


class _WorldLog(logging.Handler):
    """Adds what the proxy logs to the log of the run."""

    def __init__(self, world: Simulation) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        """Add the indented message to the log of the run."""
        self._world.note(f"  {record.getMessage()}")


@contextmanager
def _logged_by(world: Simulation) -> Iterator[None]:
    """Send the proxy's log to the run's, and nowhere else."""
    handler, propagate = _WorldLog(world), LOGGER.propagate
    LOGGER.addHandler(handler)
    LOGGER.propagate = False
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.propagate = propagate


# ---- the cluster's life --------------------------------------------------------------------------------------------


def _change_endpoints(world: Simulation) -> None:
    if not world.lost:
        name = world.random.randrange(CHANGING)
        world.put_slices(f"changing{name}")


def _change_service(world: Simulation) -> None:
    if not world.lost:
        name = world.random.randrange(CHANGING)
        world.put_service(f"changing{name}", 100 + name)


def _delete_service(world: Simulation) -> None:
    if not world.lost:
        world.delete_service(f"changing{world.random.randrange(CHANGING)}")


def _move_steady_endpoints(world: Simulation) -> None:
    if not world.lost:
        name = world.random.randrange(STEADY)
        world.put_slices(f"steady{name}")


# ---- the API server ------------------------------------------------------------------------------------------------


def _drop_connections(world: Simulation) -> None:
    world.server.drop()


def _stop_server(world: Simulation) -> None:
    world.for_a_while(world.server.faults, "down", True, world.random.uniform(0.1, 30.0))
    world.server.drop()


def _silence_server(world: Simulation) -> None:
    world.for_a_while(world.server.faults, "silent", True, world.random.uniform(1.0, 60.0))


def _refuse_requests(world: Simulation) -> None:
    world.server.faults.retry_after = world.random.choice((0, 1, 600))
    world.for_a_while(world.server.faults, "refuse", world.random.choice((0.3, 1.0)), world.random.uniform(0.1, 20.0))
    world.server.drop()


def _cut_responses(world: Simulation) -> None:
    world.for_a_while(world.server.faults, "cut", 0.2, world.random.uniform(1.0, 20.0))


def _garble_responses(world: Simulation) -> None:
    world.for_a_while(world.server.faults, "garble", 0.1, world.random.uniform(1.0, 20.0))


def _end_watches_early(world: Simulation) -> None:
    world.for_a_while(world.server.faults, "watch_seconds", 1.0, world.random.uniform(5.0, 60.0))
    world.server.drop()


def _compact(world: Simulation) -> None:
    world.server.store.compact()
    if world.random.random() < 0.5:
        world.server.drop()


def _lose_store(world: Simulation) -> None:
    world.lose()
    world.loop.call_later(world.random.uniform(1.0, 60.0), world.recover)


def _restore_backup(world: Simulation) -> None:
    """Take a backup, or return to the one that was taken before."""
    if world.lost:
        return
    if world.backup is None:
        world.backup = world.server.store.backup()
    else:
        world.server.store, world.backup, world.reused_versions = world.backup, None, True


# ---- files ---------------------------------------------------------------------------------------------------------


def _rewrite_file(world: Simulation) -> None:
    assert world.files is not None
    world.files.rewrite()


def _deafen(world: Simulation) -> None:
    assert world.files is not None
    world.for_a_while(world.files, "deaf", True, world.random.uniform(1.0, 60.0))


# ---- the kernel and other programs ---------------------------------------------------------------------------------


def _flush(world: Simulation) -> None:
    _flush_family(world, world.random.choice(world.families))


def _flush_family(world: Simulation, family: IPFamily) -> None:
    rules = world.kernel.rules.get(family)
    if rules is not None:
        world.kernel.commit(family, flushed(rules))


def _change_rules(world: Simulation) -> None:
    family = world.random.choice(world.families)
    rules = world.kernel.rules.get(family)
    if rules is not None:
        world.kernel.commit(family, foreign_change(rules, world.random))


def _change_silently(world: Simulation) -> None:
    world.change_silently(world.random.choice(world.families))


def _reload_firewall(world: Simulation) -> None:
    """Let a firewall flush everything several times in a row, as one that is restarted in a loop."""
    every, times = world.random.choice((0.2, 1.0, 3.0)), world.random.randint(2, 20)

    async def reload() -> None:
        """Flush the rules of all families `times` times, about `every` seconds apart."""
        for _ in range(times):
            for family in world.families:
                _flush_family(world, family)
            await asyncio.sleep(every * world.random.uniform(0.5, 1.5))

    world.run_along(reload())


def _rival(world: Simulation) -> None:
    """Run a program that changes the rules back soon after each of our writes, and never gives in."""
    until = world.loop.time() + world.random.uniform(2.0, 60.0)
    delay = world.random.choice((0.05, 0.5, 2.0))
    family = world.random.choice(world.families)

    async def compete() -> None:
        """Change the rules of one family `delay` seconds after each write of the proxy, until the time is over."""
        written = -1
        while world.loop.time() < until:
            await asyncio.sleep(delay * world.random.uniform(0.5, 1.5))
            rules = world.kernel.rules.get(family)
            if rules is not None and world.kernel.transactions != written:
                world.kernel.commit(family, foreign_change(rules, world.random))
                written = world.kernel.transactions

    world.run_along(compete())


def _second_proxy(world: Simulation) -> None:
    world.compete(world.random.uniform(1.0, 90.0))


def _neighbor(world: Simulation) -> None:
    """Run a program that writes next to our rules, as a kubelet does with its chains, and touches none of ours."""
    times, every = world.random.randint(1, 200), world.random.choice((0.01, 0.5, 2.0))

    async def write() -> None:
        """Commit the present rules of all families again, `times` times, `every` seconds apart."""
        for _ in range(times):
            for family in world.families:
                world.kernel.commit(family, world.kernel.rules.get(family))
            await asyncio.sleep(every)

    world.run_along(write())


def _refuse_writes(world: Simulation) -> None:
    world.for_a_while(world.kernel.faults, "refuse", 0.5, world.random.uniform(0.5, 10.0))


def _refuse_reads(world: Simulation) -> None:
    world.for_a_while(world.kernel.faults, "unreadable", 0.5, world.random.uniform(0.5, 10.0))


def _kill_between_writes(world: Simulation) -> None:
    world.for_a_while(world.kernel.faults, "crash", 0.2, world.random.uniform(0.5, 10.0))


def _interfere_between_writes(world: Simulation) -> None:
    world.for_a_while(world.kernel.faults, "meanwhile", 0.3, world.random.uniform(0.5, 10.0))


# ---- the process ---------------------------------------------------------------------------------------------------


def _kill(world: Simulation) -> None:
    world.kill(world.random.choice((0.0, 0.5, 5.0)))


def _move_wall_clock(world: Simulation) -> None:
    if world.process is not None:
        world.process.clock.wall_offset += world.random.choice((-86400.0, -1.0, 3600.0))


_OBJECTS: tuple[Action, ...] = (_change_endpoints, _change_service, _delete_service, _move_steady_endpoints)
_SERVER: tuple[Action, ...] = (
    _drop_connections,
    _stop_server,
    _silence_server,
    _refuse_requests,
    _cut_responses,
    _garble_responses,
    _end_watches_early,
    _compact,
    _lose_store,
    _restore_backup,
)
_FILES: tuple[Action, ...] = (_rewrite_file, _rewrite_file, _rewrite_file, _deafen, _change_endpoints, _delete_service)
_KERNEL: tuple[Action, ...] = (
    _flush,
    _change_rules,
    _change_silently,
    _reload_firewall,
    _rival,
    _second_proxy,
    _neighbor,
    _refuse_writes,
    _refuse_reads,
    _kill_between_writes,
    _interfere_between_writes,
)
_PROCESS: tuple[Action, ...] = (_kill, _move_wall_clock)
