"""The limits of a process, which has none in WebAssembly. Programs import this module; no explanation calls it."""

from __future__ import annotations

RLIMIT_NOFILE = 7
RLIM_INFINITY = -1


def getrlimit(_which: int) -> tuple[int, int]:
    """Return that nothing is limited."""
    return RLIM_INFINITY, RLIM_INFINITY


def setrlimit(_which: int, _limits: tuple[int, int]) -> None:
    """Accept every limit."""
