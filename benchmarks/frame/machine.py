"""The machine a figure is from, in words that another reader can compare."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path

import msgspec

_TOOLS = {"nft": ["nft", "--version"], "iptables": ["iptables", "--version"], "ip": ["ip", "-V"]}


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What was found."""

    system: str
    kernel: str
    python: str
    processors: int
    model: str
    memory_gib: float
    tools: dict[str, str]
    load: float
    """Of the last minute, when asked: what others did on the machine."""


def describe() -> Machine:
    """This machine, now."""
    memory = re.search(r"MemTotal:\s+(\d+)", _text("/proc/meminfo"))
    model = re.search(r"model name\s*:\s*(.+)", _text("/proc/cpuinfo"))
    name = re.search(r'PRETTY_NAME="([^"]+)"', _text("/etc/os-release"))
    return Machine(
        system=name[1] if name else platform.system(),
        kernel=platform.release(),
        python=platform.python_version(),
        processors=len(os.sched_getaffinity(0)),
        model=model[1] if model else platform.machine(),
        memory_gib=round(int(memory[1]) / 1024**2, 1) if memory else 0.0,
        tools={name: version for name, argv in _TOOLS.items() if (version := _version(argv))},
        load=os.getloadavg()[0],
    )


def _version(argv: list[str]) -> str:
    try:
        said = subprocess.run(argv, capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""
    return said.splitlines()[0].strip() if said else ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
