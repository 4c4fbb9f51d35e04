"""The key that announcers share, from a file that a Secret may be mounted at."""

from __future__ import annotations

from pathlib import Path

from narthex.lb.resources import LoadBalancerConfiguration, read
from narthex.model.problem import Problem
from narthex.runtime.logs import LOGGER, printable

LEAST_BYTES = 16
_MOST_BYTES = 65536


class HeartbeatKeyError(ValueError):
    """There is no key that can be used; the message says why and what to do."""


def read_keys(path: str) -> tuple[bytes, ...]:
    """The keys of a file, one a line: the first one signs, all may have signed what comes in. So a key is exchanged without
    a gap: add the new one as the second line everywhere, then make it the first, then take the old one out.
    Raises NoKey."""
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


Stamp = tuple[int, int, int]


class PoolsFile:
    """One file. Not safe for threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: Stamp | None = None
        self._good = LoadBalancerConfiguration()
        self.ever_good = False
        """It could be used at least once."""
        self._said: tuple[Problem, ...] = ()

    def current(self) -> LoadBalancerConfiguration:
        """What is in force: the file's last good content."""
        try:
            stat = self.path.stat()
            stamp = stat.st_ino, stat.st_mtime_ns, stat.st_size
            if stamp == self._stamp:
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
            LOGGER.warning("%s: the pools stay as they were until this is mended", self.path)
