"""Kernel settings of the calling thread's network namespace: read them, and write those that differ."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from narthex.model.kernel_setting import KernelSetting

PROC_SYS = Path("/proc/sys")


class SysctlOutcome(msgspec.Struct, frozen=True):
    """The result for one setting that differed."""

    setting: KernelSetting
    was: int | None
    """The previous value; None if the kernel lacks the setting."""
    error: str = ""
    """Why the write failed; empty for success."""


def read_sysctl(path: str, root: Path = PROC_SYS) -> int | None:
    """Return the value of a setting (`net/netfilter/nf_conntrack_max`); None if it is missing or not a number."""
    try:
        return int((root / path).read_text())
    except (OSError, ValueError):
        return None


def apply_sysctls(settings: Iterable[KernelSetting], root: Path = PROC_SYS) -> list[SysctlOutcome]:
    """Write the settings that differ, in order. Errors are part of the result and stop nothing (row 29.8)."""
    outcomes = []
    for setting in settings:
        was = read_sysctl(setting.path, root)
        if was is not None and setting.held_by(was):
            continue
        error = "" if was is not None else "this kernel does not have it (is its module loaded?)"
        if not error:
            try:
                # Not write_text: that would make the file where there is none.
                descriptor = os.open(root / setting.path, os.O_WRONLY | os.O_CLOEXEC)
                try:
                    os.write(descriptor, str(setting.value).encode())
                finally:
                    os.close(descriptor)
            except OSError as refused:
                error = refused.strerror or str(refused)
        outcomes.append(SysctlOutcome(setting, was, error))
    return outcomes
