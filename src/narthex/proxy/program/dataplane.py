"""The dataplane of the configured mode, with a Target for each IP family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from narthex.linux.monitor import ForeignChanges
from narthex.model.net import IPFamily
from narthex.proxy.backends.base import Target
from narthex.proxy.kernel.dataplanes import Dataplane, DataplaneOptions, dataplane
from narthex.proxy.program.settings import ProxySettings

R = TypeVar("R")
C = TypeVar("C")


def dataplane_of(settings: ProxySettings) -> Dataplane:
    """Return the dataplane of the configured mode."""
    options = DataplaneOptions(
        ipvs=settings.ipvs, relay_ports=settings.relay_ports, udp_idle_seconds=settings.own.udp_idle_timeout
    )
    return dataplane(settings.mode, options)


class RunningDataplane:
    """A dataplane at work in the network namespace of the calling thread. Nothing is started or written at first."""

    def __init__(self, settings: ProxySettings, families: tuple[IPFamily, ...]) -> None:
        self.dataplane = plane = dataplane_of(settings)
        self.backend = plane.backend
        self.foreign: ForeignChanges = plane.foreign_changes(families)
        self.targets: dict[IPFamily, Target[Any, Any]] = {
            family: AnnouncedTarget(plane.target(family), self.foreign, plane.transactions) for family in families
        }

    def close(self) -> None:
        """End relays and stop watching for changes by other programs. The rules stay."""
        for target in self.targets.values():
            target.close()
        self.foreign.close()


class AnnouncedTarget(Target[R, C], Generic[R, C]):
    """A Target that announces its writes to the monitor, so that they do not count as changes by other programs.

    Changes without transactions need no announcement: they are small and go through sockets that the monitor knows.
    """

    def __init__(self, target: Target[R, C], foreign: ForeignChanges, transactions: Callable[[C], int]) -> None:
        self._target = target
        self._foreign = foreign
        self._transactions = transactions

    def read(self) -> R | None:
        """Return the rules in the kernel."""
        return self._target.read()

    def apply(self, changes: C) -> None:
        """Announce and make the changes."""
        count = self._transactions(changes)
        if not count:
            self._target.apply(changes)
            return
        with self._foreign.writing() as own:
            self._target.apply(changes)
            own.transactions += count

    def clean(self) -> None:
        """Remove everything that is ours."""
        self._target.clean()

    def tend(self) -> float | None:
        """Do the work that is due between syncs."""
        return self._target.tend()

    def close(self) -> None:
        """Release what the Target holds; the rules stay."""
        self._target.close()
