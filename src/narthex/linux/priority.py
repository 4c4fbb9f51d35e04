"""A program's turn at the processor (nice(2))."""

from __future__ import annotations

import os

_STEPS = -10


def go_first() -> bool:
    """Be given the processor before programs that calculate, for one that works for microseconds and is waited for. False:
    this process may not (CAP_SYS_NICE), and waits its turn."""
    try:
        os.nice(_STEPS)
    except OSError:
        return False
    return True
