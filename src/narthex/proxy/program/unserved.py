"""Logs which Service ports a mode cannot serve and why, when this begins and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from narthex.model.names import ServicePortName
from narthex.model.net import IPFamily
from narthex.proxy.program.sync import SyncResult
from narthex.runtime.logs import LOGGER, data


class UnservedReporter:
    """Reports each unserved Service port once.

    `known` returns the Service ports of a family that the rules in force refuse, with the reason.
    """

    def __init__(self, known: Callable[[IPFamily], Mapping[ServicePortName, str]]) -> None:
        self._known = known
        self._said: dict[IPFamily, Mapping[ServicePortName, str]] = {}

    def after(self, done: SyncResult) -> None:
        """Report changes after a successful sync."""
        family = done.family
        now, before = self._known(family), self._said.get(family, {})
        for name, reason in now.items():
            if before.get(name) != reason:
                LOGGER.warning(
                    "Service port %s (%s, %s) is refused: %s",
                    name,
                    name.protocol.value,
                    family.label,
                    reason,
                    extra=data(object=f"Service {name.service}"),
                )
        for name in before:
            if name not in now:
                LOGGER.info("Service port %s (%s, %s) is not refused any more", name, name.protocol.value, family.label)
        self._said[family] = now
