"""The dataplane of a mode as a proxy uses it: its backend and its Targets, set up as the settings say."""

from __future__ import annotations

from typing import Any, Protocol

from narthex.linux.monitor import AnnouncedTarget, Foreign
from narthex.model.net import IPFamily
from narthex.proxy.backends import BACKENDS
from narthex.proxy.backends.base import Backend
from narthex.proxy.kernel.targets import target_for
from narthex.proxy.program.foreign import foreign_changes, transactions
from narthex.proxy.program.settings import Settings


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
