"""Files that the load balancer reads: the heartbeat keys and the pools."""

from __future__ import annotations

from pathlib import Path

from narthex.lb.resources import LoadBalancerConfiguration, read
from narthex.model import Problem
from narthex.runtime.files import FileStamp, file_stamp
from narthex.runtime.logs import LOGGER, printable

LEAST_BYTES = 16
_MOST_BYTES = 65536


class HeartbeatKeyError(ValueError):
    """The key file has no usable key; the message says why and how to fix it."""


def read_keys(path: str) -> tuple[bytes, ...]:
    """Read the heartbeat keys of a file, one per line. Raises HeartbeatKeyError.

    The first key signs; any of them verifies. To rotate a key without an interruption, add the new one as the second line on
    all nodes, then make it the first, then remove the old one.
    """
    if not path:
        raise HeartbeatKeyError(
            "announcers need a key that they share: write 32 random characters into a file, the same on every node, "
            "and name it with --announcer-key-file (`announcer.keyFile`)"
        )
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise HeartbeatKeyError(f"announcer.keyFile: {path}: {error.strerror or error}") from error
    keys = tuple(line.strip() for line in data.splitlines() if line.strip())
    if len(data) > _MOST_BYTES or not keys:
        raise HeartbeatKeyError(f"announcer.keyFile: {path} holds no key: write 32 random characters into it")
    if short := [key for key in keys if len(key) < LEAST_BYTES]:
        raise HeartbeatKeyError(
            f"announcer.keyFile: {path} holds a key of {len(short[0])} characters; it must be {LEAST_BYTES} or more"
        )
    return keys


class PoolsFile:
    """The pools file, read again when it changes. An invalid file leaves the previous content in force. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: FileStamp | None = None
        self._good = LoadBalancerConfiguration()
        self.ever_good = False
        self._said: tuple[Problem, ...] = ()

    def current(self) -> LoadBalancerConfiguration:
        """Return the last valid content."""
        try:
            stamp = file_stamp(self.path)
            if stamp is not None and stamp == self._stamp:
                return self._good
            found = read(self.path.read_bytes(), str(self.path))
        except OSError as error:
            self._stamp = None
            why = f"cannot be read: {error.strerror or error}"
            found = LoadBalancerConfiguration(problems=(Problem(origin=str(self.path), message=why),))
        else:
            self._stamp = stamp
        self._say(found)
        if not found.failed:
            self._good, self.ever_good = found, True
        return self._good

    def _say(self, found: LoadBalancerConfiguration) -> None:
        if found.problems == self._said:
            return
        self._said = found.problems
        for problem in found.problems:
            LOGGER.warning("%s", printable(str(problem)))
        if found.failed and self.ever_good:
            LOGGER.warning("%s: the previous pools stay in force until this is fixed", self.path)
