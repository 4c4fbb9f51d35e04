"""Configuration changes while the proxy runs (rows 27.25, 29.12).

The running process applies most settings: planning, periods, status ports, kernel settings, logging. For others
(mode, node name, API server) it executes itself again with the same process id and arguments; the rules stay, and the
new process writes only the differences. An invalid file changes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from narthex.linux.background import in_background
from narthex.proxy.program.dataplane import dataplane_of
from narthex.proxy.program.settings import ProxySettings, SettingsError
from narthex.runtime.files import file_stamp
from narthex.runtime.logs import LOGGER

LOOK_SECONDS = 0.25
"""Period at which the file's stamp is compared."""


ApplySettings = Callable[[ProxySettings], bool]
"""Applies settings to the running process; returns False if the process must be replaced."""


class ConfigurationFile:
    """Follows one configuration file.

    `read` returns the settings of the file and the flags. `check` raises RuntimeError if this machine cannot run a
    mode.
    """

    def __init__(self, path: Path, read: Callable[[], ProxySettings], check: Callable[[str], object]) -> None:
        self._path = path
        self._read = read
        self._check = check
        self._seen = file_stamp(self._path)
        self._stop = threading.Event()
        self.replace = False
        """The process must be replaced once the proxy has stopped."""

    def followed(
        self, present: ProxySettings, take: ApplySettings, stop: Callable[[], object]
    ) -> AbstractContextManager[None]:
        """Return a context in which edits take effect, by `take` if possible, otherwise by `stop` and `replace`."""
        return in_background("config", lambda: self._follow(present, take, stop), self._stop.set)

    def _follow(self, present: ProxySettings, take: ApplySettings, stop: Callable[[], object]) -> None:
        while not self.replace and not self._stop.wait(LOOK_SECONDS):
            stamp = file_stamp(self._path)
            # A file that is away is about to come back: editors and kubelet rename.
            if stamp != self._seen and stamp is not None:
                self._seen = stamp
                present = self._go_over(present, take)
        if self.replace:
            stop()

    def _go_over(self, present: ProxySettings, take: ApplySettings) -> ProxySettings:
        try:
            fresh = self._read()
        except SettingsError as error:
            LOGGER.error("the new configuration is invalid, the previous one stays in force: %s", error)
            return present
        for warning in fresh.warnings:
            LOGGER.warning("%s", warning)
        changed = ", ".join(
            differences(present.configuration, fresh.configuration)
            + differences(present.own_configuration, fresh.own_configuration)
        )
        if not changed:
            return fresh
        if in_place(present, fresh) and take(fresh):
            LOGGER.info("the configuration has changed: %s; now in force", changed)
            return fresh
        try:
            self._check(fresh.mode)
        except RuntimeError as error:
            LOGGER.error("this machine cannot run the new configuration, the previous one stays in force: %s", error)
            return present
        LOGGER.info("the configuration has changed: %s; the process replaces itself, the rules stay", changed)
        self.replace = True
        return fresh


def in_place(before: ProxySettings, after: ProxySettings) -> bool:
    """Return True if a running process can change from one settings value to the other."""
    return (
        after.mode == before.mode
        and after.node.node_name == before.node.node_name
        and after.own.parts == before.own.parts
        and (after.client, after.config_sync_period) == (before.client, before.config_sync_period)
        and after.own.verify_changes == before.own.verify_changes
        and dataplane_of(after).fixed_options == dataplane_of(before).fixed_options
    )


def differences(before: Mapping[str, Any], after: Mapping[str, Any], path: str = "") -> list[str]:
    """Return the names of the fields with different values, as the file writes them."""
    found = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += differences(old, new, f"{path}{name}.")
        elif old != new:
            found.append(f"{path}{name}")
    return found
