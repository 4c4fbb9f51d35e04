"""A configuration file that is edited while the proxy runs (rows 27.25, 29.12).

Nearly all of it is taken over by the running process: what decides or paces, the status ports, kernel settings, logging. For
what a process is built around (the mode, the node's name, the API server) it replaces itself: same process id, same
arguments; the rules stay, and the new one writes only what differs. A file that cannot be used changes nothing.
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
from narthex.runtime.logs import LOGGER
from narthex.runtime.watched_files import file_stamp

LOOK_SECONDS = 0.25
"""A look is one stat(2). Unlike a watch it also sees a file behind links that are exchanged, as a ConfigMap is."""


ApplySettings = Callable[[ProxySettings], bool]
"""Lets the running process go by other settings from now on. False: that did not work, and the process must replace
itself."""


class ConfigurationFile:
    """Follows one file. `read` makes the settings of the file and the flags; `check` says by an exception of type
    RuntimeError that this machine cannot run them."""

    def __init__(self, path: Path, read: Callable[[], ProxySettings], check: Callable[[str], object]) -> None:
        self._path = path
        self._read = read
        self._check = check
        self._seen = file_stamp(self._path)
        self._stop = threading.Event()
        self.replace = False
        """The process is to replace itself when the proxy has stopped."""

    def followed(
        self, present: ProxySettings, take: ApplySettings, stop: Callable[[], object]
    ) -> AbstractContextManager[None]:
        """Inside the block, edits take effect: by `take` where that can be, else by `stop` and `replace`."""
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
        """Use the file as it is now; returns the settings that are in force then."""
        try:
            told = self._read()
        except SettingsError as error:
            LOGGER.error("the configuration is not taken over, the one before stays in force: %s", error)
            return present
        for warning in told.warnings:
            LOGGER.warning("%s", warning)
        changed = ", ".join(
            differences(present.configuration, told.configuration)
            + differences(present.own_configuration, told.own_configuration)
        )
        if not changed:
            return told
        if in_place(present, told) and take(told):
            LOGGER.info("the configuration has changed: %s; in force from now on", changed)
            return told
        try:
            self._check(told.mode)
        except RuntimeError as error:
            LOGGER.error("the configuration is not taken over, the one before stays in force: %s", error)
            return present
        LOGGER.info("the configuration has changed: %s; the process starts anew in its place, the rules stay", changed)
        self.replace = True
        return told


def in_place(before: ProxySettings, after: ProxySettings) -> bool:
    """Whether a running process can go over to other settings."""
    return (
        after.mode == before.mode
        and after.node.node_name == before.node.node_name
        and after.own.parts == before.own.parts
        and (after.client, after.config_sync_period) == (before.client, before.config_sync_period)
        and dataplane_of(after).fixed_options == dataplane_of(before).fixed_options
    )


def differences(before: Mapping[str, Any], after: Mapping[str, Any], path: str = "") -> list[str]:
    """Fields with another value, by their names as the file has them."""
    found = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += differences(old, new, f"{path}{name}.")
        elif old != new:
            found.append(f"{path}{name}")
    return found
