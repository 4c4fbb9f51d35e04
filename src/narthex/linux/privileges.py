"""The privileges and limits of this process, and the tools and kernel of the machine."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
from collections.abc import Iterable
from pathlib import Path

from narthex.linux.run import run

_CAP_NET_ADMIN = 12


def may_change_network(status: Path = Path("/proc/thread-self/status")) -> bool:
    """Return True if the calling thread has CAP_NET_ADMIN, as root has, also in a user namespace."""
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", status.read_text(), re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> _CAP_NET_ADMIN & 1)


def kernel_release() -> tuple[int, int]:
    """Return major and minor version of the running kernel."""
    match = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(match[1]), int(match[2])) if match else (0, 0)


def nft_release() -> tuple[int, ...]:
    """Return the version of the installed nft, such as (1, 0, 6); () if unknown."""
    match = re.search(r"\bv(\d+)\.(\d+)(?:\.(\d+))?", run(["nft", "--version"]))
    return tuple(int(number or 0) for number in match.groups()) if match else ()


def allow_many_files() -> None:
    """Raise the limit of open files to the hard limit.

    The usual 1024 is a limit of `select`, which is not used here, and each health check node port needs one file per
    address.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def missing_tools(tools: Iterable[str]) -> tuple[str, ...]:
    """Return the programs that are not on the PATH."""
    return tuple(tool for tool in tools if shutil.which(tool) is None)


_OWN = Path("/proc/self/oom_score_adj")


def set_oom_score(score: int, path: Path = _OWN) -> None:
    """Set how soon the kernel kills this process without memory, from -1000 (never) to 1000 (first).

    Raises OSError; a value below the present one needs CAP_SYS_RESOURCE.
    """
    path.write_text(f"{score}\n")


_STEPS = -10


def go_first() -> bool:
    """Raise the scheduling priority (nice), for a program that works for microseconds and whose answer is awaited.

    Returns False without CAP_SYS_NICE.
    """
    try:
        os.nice(_STEPS)
    except OSError:
        return False
    return True
