"""The file with pools, read again when it changes. A file that breaks changes nothing until it is mended."""

from __future__ import annotations

from pathlib import Path

from narthex.lb.resources import Configuration, read
from narthex.model.problem import Problem
from narthex.runtime.logs import LOGGER, printable

Stamp = tuple[int, int, int]


class PoolsFile:
    """One file. Not safe for threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: Stamp | None = None
        self._good = Configuration()
        self.ever_good = False
        """It could be used at least once."""
        self._said: tuple[Problem, ...] = ()

    def current(self) -> Configuration:
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
            found = Configuration(problems=(Problem(origin=str(self.path), message=why),))
        else:
            self._stamp = stamp
        self._say(found)
        if not found.failed:
            self._good, self.ever_good = found, True
        return self._good

    def _say(self, found: Configuration) -> None:
        if found.problems == self._said:
            return
        self._said = found.problems
        for problem in found.problems:
            LOGGER.warning("%s", printable(str(problem)))
        if found.failed and self.ever_good:
            LOGGER.warning("%s: the pools stay as they were until this is mended", self.path)
