"""Operations of a node with socket load balancing while clients connect: none may fail, of 2,000 during each."""

import itertools
import os
import signal
import time

import msgspec
import pytest
from tests.cgroup_client import cgroup_client
from tests.proxy.kernel.test_sockets import PODS, SERVICE, plan_of, socket_world

from narthex.bpf import Compute, Operation, Register
from narthex.linux.namespaces import in_namespace
from narthex.model import IPFamily
from narthex.proxy.backends.sockets.layout import Capacity, family_maps
from narthex.proxy.backends.sockets.programs import programs
from narthex.proxy.kernel import sockets as kernel_sockets

pytestmark = pytest.mark.kernel

FAMILY = IPFamily.IPV4
CONNECTIONS = 2000
"""New connections during each operation."""
HELD_EVERY = 16
"""Every so many of them are held to the end."""
KILLS = 8


class Traffic:
    """A client that connects without a pause."""

    def __init__(self, client):
        self.client = client
        self.made, self.failed, self.held = 0, [], 0

    def __enter__(self):
        self.client.ask("begin", SERVICE[FAMILY], 80, every=HELD_EVERY)
        return self

    def __exit__(self, *_):
        self._read("end")

    def _read(self, order):
        said = self.client.ask(order)
        self.made, self.failed, self.held = said["made"], said["failed"], said["held"]

    def wait_for(self, more):
        """Wait until so many more connections were made."""
        self._read("made")
        goal, limit = self.made + more, time.monotonic() + 300
        while self.made < goal:
            assert time.monotonic() < limit, "the client makes no connections"
            time.sleep(0.02)
            self._read("made")


@pytest.fixture
def world(tmp_path):
    with socket_world(tmp_path) as made:
        yield made


def shown(pods, number):
    """Return the endpoints of a rolling update's step: two of three, in turn."""
    return tuple(sorted(pods[(number + index) % len(pods)] for index in range(2)))


def roll(world, accelerator, traffic, steps):
    for number in range(steps):
        world.follow(accelerator, FAMILY, shown(PODS[FAMILY], number))
        traffic.wait_for(CONNECTIONS // steps)


def kill_while_writing(world, traffic):
    """End processes by SIGKILL at any point of their start and of their changes."""
    for number in range(KILLS):
        process = os.fork()
        if not process:
            try:
                accelerator = world.accelerator()
                for step in itertools.count():
                    with in_namespace(world.node):
                        accelerator.follow(plan_of(FAMILY, shown(PODS[FAMILY], step)))
            finally:
                os._exit(1)
        traffic.wait_for(CONNECTIONS // KILLS)
        if number % 2:
            time.sleep(0.003 * number)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def restart(world, traffic):
    for _ in range(10):
        accelerator = world.accelerator()
        world.follow(accelerator, FAMILY, PODS[FAMILY])
        traffic.wait_for(CONNECTIONS // 10)
        accelerator.close()


def upgrade(world, traffic, monkeypatch):
    """Other instructions, then another layout."""

    def with_one_more(maps, cookie):
        nop = Compute(Operation.MOV, Register.R0, 0)
        return tuple(
            msgspec.structs.replace(spec, statements=(spec.statements[0], nop, *spec.statements[1:]))
            for spec in programs(maps, cookie)
        )

    def with_more_sockets(family, capacity):
        return family_maps(family, msgspec.structs.replace(capacity, sockets=2 * capacity.sockets))

    for name, changed in (("programs", with_one_more), ("family_maps", with_more_sockets)):
        before = world.pinned()
        monkeypatch.setattr(kernel_sockets, name, changed)
        accelerator = world.accelerator()
        world.follow(accelerator, FAMILY, PODS[FAMILY])
        assert world.pinned() != before and len(world.pinned()) == len(before)
        traffic.wait_for(CONNECTIONS // 2)


def test_no_connection_fails(world, monkeypatch):
    accelerator = world.accelerator()
    world.follow(accelerator, FAMILY, PODS[FAMILY])
    with cgroup_client(world.cgroup, world.pod) as client:
        with Traffic(client) as traffic:
            roll(world, accelerator, traffic, 20)
            accelerator.close()
            kill_while_writing(world, traffic)
            restart(world, traffic)
            upgrade(world, traffic, monkeypatch)
        assert traffic.failed == [] and traffic.made >= 4 * CONNECTIONS
        assert traffic.held >= CONNECTIONS // HELD_EVERY
        assert client.ask("alive") == {"alive": traffic.held}


def test_room_that_is_restored_is_that_of_the_pins(world):
    """A restart does not replace maps that have grown by smaller ones."""
    accelerator = world.accelerator()
    with in_namespace(world.node):
        accelerator.follow(plan_of(FAMILY, PODS[FAMILY]))
        accelerator._target.ensure(FAMILY, 3 * Capacity().services, 1, 1)
        accelerator._rows.clear()
        accelerator._plans.clear()
        accelerator.follow(plan_of(FAMILY, PODS[FAMILY]))
    before = world.pinned()
    again = world.accelerator()
    world.follow(again, FAMILY, PODS[FAMILY])

    assert world.pinned() == before and again.status["writes"] == 0
