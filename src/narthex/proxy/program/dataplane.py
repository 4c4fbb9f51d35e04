"""The dataplane of a mode as a proxy uses it: its backend and its Targets, set up as the settings say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from narthex.linux.monitor import Foreign
from narthex.model.net import IPFamily
from narthex.proxy.backends import BACKENDS
from narthex.proxy.backends.base import Backend, Target
from narthex.proxy.kernel.targets import target_for
from narthex.proxy.program.foreign import foreign_changes, transactions
from narthex.proxy.program.settings import Settings

R = TypeVar("R")
C = TypeVar("C")


class _Closing(Protocol):
    def close(self) -> None: ...


class Dataplane:
    """For the network namespace of the calling thread. Nothing is started or written yet."""

    def __init__(self, settings: Settings, families: tuple[IPFamily, ...]) -> None:
        mode = settings.mode
        self.foreign: Foreign = foreign_changes(mode, families)
        """Tells of rules changed by others."""
        self.backend = backend_of(settings)
        self._closing: list[_Closing] = []
        count = transactions(mode)
        self.targets = {
            family: AnnouncedTarget(self._target(settings, family), self.foreign, count) for family in families
        }

    def close(self) -> None:
        """End what lives in this process' company: a relay, and listening for changes by others. The rules stay."""
        for each in (*self._closing, self.foreign):
            each.close()

    def _target(self, settings: Settings, family: IPFamily) -> Any:
        if settings.mode == "ipvs":
            from narthex.proxy.kernel.ipvs.target import IpvsTarget

            return IpvsTarget(family, excluded=settings.ipvs.exclude_cidrs)
        if settings.mode != "userspace":
            return target_for(settings.mode, family)
        from narthex.proxy.kernel.userspace import UserspaceTarget

        target = UserspaceTarget(family, udp_idle_seconds=settings.own.udp_idle_timeout)
        self._closing.append(target)
        return target


def backend_of(settings: Settings) -> Backend[Any, Any]:
    """The mode's backend."""
    if settings.mode == "userspace" and settings.relay_ports is not None:
        from narthex.proxy.backends.userspace.backend import UserspaceBackend

        return UserspaceBackend(settings.relay_ports)
    if settings.mode == "ipvs":
        from narthex.proxy.backends.ipvs.backend import IpvsBackend

        return IpvsBackend(settings.ipvs.scheduler)
    return BACKENDS[settings.mode]


class AnnouncedTarget(Generic[R, C]):
    """A Target whose writes are not taken for somebody else's. `transactions` says how many some changes are; 0: they
    are few, and go through sockets of ours alone, which the monitor knows."""

    def __init__(self, target: Target[R, C], foreign: Foreign, transactions: Callable[[C], int]) -> None:
        self._target = target
        self._foreign = foreign
        self._transactions = transactions

    def read(self) -> R | None:
        return self._target.read()

    def apply(self, changes: C) -> None:
        count = self._transactions(changes)
        if not count:
            self._target.apply(changes)
            return
        with self._foreign.writing() as own:
            self._target.apply(changes)
            own.transactions += count

    def clean(self) -> None:
        self._target.clean()

    def tend(self) -> float | None:
        """What the Target has to do between syncs, if it has anything; seconds until it wants to be asked again."""
        tend: Callable[[], float | None] | None = getattr(self._target, "tend", None)
        return tend() if tend else None
