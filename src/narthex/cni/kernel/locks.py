"""Locks of single attachments among all threads and processes of a node: launchers, agents, and GC.

One file has the locks of all attachments, as locks of single bytes that belong to an open file description (Linux 3.15): they end
with the process, need no cleanup, and need no space on a full disk.
"""

from __future__ import annotations

import errno
import fcntl
import posix
import struct
import time

from narthex.cni.errors import TRY_AGAIN, CniError
from narthex.cni.kernel import files

FILE = "attachments.lock"
PODS, PORTS, IPAM, FLANNEL, SUBNETS = range(5)
"""What is locked of an attachment, in the order of the file's bytes: its interface with addresses and masquerading; its host
ports; addresses by host-local alone; the configuration of its delegate. Or, for one name, what all attachments share.

A request may lock FLANNEL first, PODS second, and IPAM or SUBNETS last; PORTS stands alone. So requests never wait in a circle.
"""
_KINDS = 8
WAIT_SECONDS = 90.0
"""Longer than any request holds a lock (a delegate has 60 seconds), shorter than a launcher waits for the agent."""
_FIRST_PAUSE, _MOST_PAUSE = 0.0005, 0.05
"""Seconds between two attempts. A blocking call would be fairer, but has no time limit."""
_MOST_HASH = (1 << 59) - 1
_FNV_OFFSET, _FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3
_FILE_MODE = 0o600
_SEEK_SET = 0


class AttachmentLock:
    """Context manager that holds one lock. Raises OSError, and CniError if another request holds it for too long."""

    def __init__(self, state: str, kind: int, name: str, wait: float = WAIT_SECONDS, shared: bool = False) -> None:
        """Describe the lock. `state` is the directory of the records, `name` the attachment as `owner_of` returns it.

        `wait` is a number of seconds.
        """
        self._wait = wait
        self._state = state
        self._name = name
        self._range = struct.pack(
            "@hhqqi", fcntl.F_RDLCK if shared else fcntl.F_WRLCK, _SEEK_SET, _hash(name) * _KINDS + kind, 1, 0
        )
        self._descriptor = -1

    def __enter__(self) -> None:
        self._descriptor = self._opened()
        try:
            self._acquire()
        except BaseException:
            posix.close(self._descriptor)
            raise

    def __exit__(self, *_: object) -> None:
        posix.close(self._descriptor)

    def _opened(self) -> int:
        path, flags = f"{self._state}/{FILE}", posix.O_RDWR | posix.O_CREAT | posix.O_CLOEXEC
        try:
            return posix.open(path, flags, _FILE_MODE)
        except FileNotFoundError:
            files.make_directory(self._state)
            return posix.open(path, flags, _FILE_MODE)

    def _acquire(self) -> None:
        end, pause = time.monotonic() + self._wait, _FIRST_PAUSE
        while True:
            try:
                fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, self._range)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            else:
                return
            if time.monotonic() >= end:
                message = f"another request for {self._name or 'all pods'} is running, after {self._wait:.0f} s"
                raise CniError(TRY_AGAIN, message, "it holds the lock of the attachment")
            time.sleep(pause)
            pause = min(2 * pause, _MOST_PAUSE)


def _hash(name: str) -> int:
    """Return the FNV-1a hash of a name; two attachments with the same one only wait for each other."""
    value = _FNV_OFFSET
    for byte in name.encode("utf-8", "surrogateescape"):
        value = (value ^ byte) * _FNV_PRIME & 0xFFFFFFFFFFFFFFFF
    return value & _MOST_HASH
