"""Files a resolver follows: looked at now and then, read when they are another's than before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from narthex.dns import resolv_conf
from narthex.dns.corefile.settings import Upstream
from narthex.dns.interfaces import Loop, Timer
from narthex.runtime.watched_files import FileStamp, file_stamp

LOOK = 5.0
"""Seconds between two looks at a resolv.conf."""
_LARGEST = 64 * 1024 * 1024
"""Bytes. Lists of names to block have some tens of thousands of lines; a million of them is still below."""


class Followed:
    """A file whose text goes to `take` at the start and after each change. None: it cannot be read (and why is said)."""

    def __init__(
        self, loop: Loop, path: str, every: float, take: Callable[[str | None], None], say: Callable[[str], None]
    ) -> None:
        """`every`: seconds between two looks; 0: only one at the start."""
        self._loop = loop
        self._path = path
        self._every = every
        self._take = take
        self._say = say
        self._stamp: FileStamp | None = None
        self._timer: Timer | None = None

    def open(self) -> None:
        """Read it, and go on looking."""
        self._stamp = file_stamp(self._path)
        self._read()
        self._next()

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _next(self) -> None:
        if self._every > 0:
            self._timer = self._loop.at(self._loop.now() + self._every, self._look)

    def _look(self) -> None:
        now = file_stamp(self._path)
        if now != self._stamp:
            self._stamp = now
            self._read()
        self._next()

    def _read(self) -> None:
        try:
            self._take(text(self._path))
        except OSError as error:
            self._say(f"{self._path} cannot be read: {error.strerror or error}")
            self._take(None)


def text(path: str) -> str:
    """A file's text. Raises OSError."""
    with Path(path).open("rb") as file:
        raw = file.read(_LARGEST + 1)
    if len(raw) > _LARGEST:
        raise OSError(f"it is larger than {_LARGEST} bytes")
    return raw.decode("utf-8", errors="replace")


def servers(
    path: str,
    found: str | None,
    ours: tuple[str, ...],
    say: Callable[[str], None],
    systemd: str = resolv_conf.SYSTEMD_FILE,
) -> tuple[Upstream, ...]:
    """The servers of a resolv.conf's text. Stubs are left out, which is said; when nothing else is named, the file is
    taken that systemd-resolved writes for such as us."""
    upstreams, left_out = resolv_conf.upstreams(resolv_conf.parse(found or ""), ours)
    if not left_out:
        return upstreams
    why = "a stub of this machine, or this server itself, which would ask in a circle"
    if upstreams:
        say(f"{path}: {', '.join(left_out)} left out: {why}")
        return upstreams
    try:
        upstreams, _ = resolv_conf.upstreams(resolv_conf.parse(text(systemd)), ours)
    except OSError as error:
        say(f"{path} names nobody but {', '.join(left_out)}: {why}; {systemd}: {error.strerror or error}")
        return ()
    names = ", ".join(str(each) for each in upstreams) or "nobody"
    say(f"{path} names nobody but {', '.join(left_out)}: {why}; servers are taken from {systemd}: {names}")
    return upstreams
