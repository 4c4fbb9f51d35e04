"""Capabilities (capabilities(7)) that a process gives up for itself and for the programs that it becomes."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable
from pathlib import Path

NUMBERS = {
    "CHOWN": 0,
    "DAC_OVERRIDE": 1,
    "FOWNER": 3,
    "FSETID": 4,
    "KILL": 5,
    "SETGID": 6,
    "SETUID": 7,
    "SETPCAP": 8,
    "NET_BIND_SERVICE": 10,
    "NET_BROADCAST": 11,
    "NET_ADMIN": 12,
    "NET_RAW": 13,
    "IPC_LOCK": 14,
    "SYS_CHROOT": 18,
    "MKNOD": 27,
    "AUDIT_WRITE": 29,
    "SETFCAP": 31,
}
"""Numbers by name, as in a container's `securityContext` (linux/capability.h). Others are never given to a container."""

_PR_CAPBSET_READ, _PR_CAPBSET_DROP = 23, 24
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_VERSION_3 = 0x20080522
_MOST = 64
"""Capability sets have 64 bits."""

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def bounding_set(process: int) -> frozenset[int]:
    """Return the numbers of the capabilities that a process and its programs can have. Raises OSError."""
    match = re.search(r"^CapBnd:\s*([0-9a-f]+)$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    bits = int(match[1], 16) if match else 0
    return frozenset(number for number in range(_MOST) if bits >> number & 1)


def limit_capabilities(keep: Iterable[int]) -> None:
    """Let the programs that this process executes have these capabilities only. Its own stay until then.

    Raises OSError without CAP_SETPCAP.
    """
    kept = frozenset(keep)
    for number in range(_MOST):
        # 1: in the set; 0: not; -1: the kernel has no such capability.
        if number not in kept and _libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0) == 1:
            _check(_libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0), f"drop capability {number}")
    _check(_libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "clear the ambient capabilities")
    header = (ctypes.c_uint32 * 2)(_VERSION_3, 0)
    # Effective, permitted, inheritable: each in two halves. Inheritable ones would pass the bounding set.
    sets = (ctypes.c_uint32 * 6)()
    _check(_libc.capget(header, sets), "read the capabilities")
    sets[2] = sets[5] = 0
    _check(_libc.capset(header, sets), "clear the inheritable capabilities")
