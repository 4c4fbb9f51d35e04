"""Files that a worker follows: polled for changes, and read when they have changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from narthex.dns.server.event_loop import EventLoop, EventTimer
from narthex.runtime.watched_files import FileStamp, file_stamp

RESOLV_CONF_INTERVAL = 5.0
"""Seconds between two checks of a resolv.conf."""
_MAX_BYTES = 64 * 1024 * 1024
"""Blocklists have some ten thousand lines; a file of a million lines is still smaller."""


class FollowedFile:
    """Passes the text of a file to `take` at the start and after each change."""

    def __init__(
        self,
        loop: EventLoop,
        path: str,
        interval: float,
        take: Callable[[str | None], None],
        warn: Callable[[str], None],
    ) -> None:
        """`interval` is in seconds; 0 reads the file only once. `take` gets None if the file cannot be read."""
        self._loop = loop
        self._path = path
        self._interval = interval
        self._take = take
        self._warn = warn
        self._stamp: FileStamp | None = None
        self._timer: EventTimer | None = None

    def open(self) -> None:
        """Read the file and start to poll it."""
        self._stamp = file_stamp(self._path)
        self._read()
        self._schedule()

    def close(self) -> None:
        """Stop polling."""
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self) -> None:
        if self._interval > 0:
            self._timer = self._loop.at(self._loop.now() + self._interval, self._poll)

    def _poll(self) -> None:
        stamp = file_stamp(self._path)
        if stamp != self._stamp:
            self._stamp = stamp
            self._read()
        self._schedule()

    def _read(self) -> None:
        try:
            self._take(read_text(self._path))
        except OSError as error:
            self._warn(f"{self._path} cannot be read: {error.strerror or error}")
            self._take(None)


def read_text(path: str) -> str:
    """Return the text of a file. Raises OSError."""
    with Path(path).open("rb") as file:
        raw = file.read(_MAX_BYTES + 1)
    if len(raw) > _MAX_BYTES:
        raise OSError(f"it is larger than {_MAX_BYTES} bytes")
    return raw.decode("utf-8", errors="replace")
