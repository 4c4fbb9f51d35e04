"""How the C library keeps freed memory."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Parameters of glibc's `mallopt`."""
_LARGE_BYTES = 64 * 1024
"""Blocks of this size have pages of their own, which go back to the kernel when they are freed. glibc raises its limit of 128 KiB
to the size of whatever was freed, so that the buffers of the first lists would stay."""


def return_freed_memory() -> None:
    """Let the C library return freed memory to the kernel. Call it before the first thread; without glibc it has no effect."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    # Python's threads hold one lock while they allocate, so one arena is as fast as many.
    for parameter, value in ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, _LARGE_BYTES), (_TRIM_THRESHOLD, _LARGE_BYTES)):
        mallopt(parameter, value)
