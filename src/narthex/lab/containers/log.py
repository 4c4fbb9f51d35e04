"""A container's log file in the format of the Container Runtime Interface: time, stream, tag, text.

    2016-10-06T00:17:09.669794202Z stdout F The content of the log entry

The tag `F` ends a line, `P` does not (`k8s.io/cri-client/pkg/logs`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

_LONGEST = 16 * 1024
"""Maximum bytes of an entry; longer lines become several."""
_MOST_BYTES = 10 * 1024 * 1024
"""Size at which the file is rotated. One rotated file is kept (a kubelet's `containerLogMaxSize`)."""


class LogWriter:
    """Writes the two streams of a container."""

    def __init__(self, path: str) -> None:
        """Open the file. Raises OSError."""
        self._path = path
        self._open()
        self._rest = {"stdout": b"", "stderr": b""}

    def _open(self) -> None:
        self._handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._handle).st_size

    def take(self, stream: str, data: bytes) -> None:
        """Write more of a stream; an incomplete line waits for its rest. Raises OSError."""
        now = log_time(time.time_ns())
        *lines, rest = (self._rest[stream] + data).split(b"\n")
        entries = [entry for line in lines for entry in _entries(now, stream, line, whole=True)]
        while len(rest) >= _LONGEST:
            entries += _entries(now, stream, rest[:_LONGEST], whole=False)
            rest = rest[_LONGEST:]
        self._rest[stream] = rest
        self._write(b"".join(entries))

    def close(self) -> None:
        """Write incomplete lines and close the file."""
        for stream, rest in self._rest.items():
            if rest:
                self._write(b"".join(_entries(log_time(time.time_ns()), stream, rest, whole=False)))
        os.close(self._handle)

    def _write(self, data: bytes) -> None:
        if not data:
            return
        if self._size + len(data) > _MOST_BYTES:
            os.close(self._handle)
            Path(self._path).replace(f"{self._path}.1")
            self._open()
        self._size += os.write(self._handle, data)


def _entries(now: str, stream: str, line: bytes, *, whole: bool) -> list[bytes]:
    parts = [line[at : at + _LONGEST] for at in range(0, len(line), _LONGEST)] or [b""]
    tags = [b"P"] * (len(parts) - 1) + [b"F" if whole else b"P"]
    head = f"{now} {stream} ".encode()
    return [head + tag + b" " + part + b"\n" for tag, part in zip(tags, parts, strict=True)]


def log_time(nanoseconds: int) -> str:
    """Format a time since 1970 as entries begin."""
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"


class LogReader:
    """Reads a log file, also while it grows."""

    def __init__(self, path: Path, *, timestamps: bool = False, since: str = "") -> None:
        """Open a file. Entries before `since` (as by `log_time`) are omitted."""
        self._path = path
        self._timestamps = timestamps
        self._since = since
        self._file = path.open("rb") if path.exists() else None

    def tail(self, lines: int | None) -> list[bytes]:
        """Return the last lines so far. None: all."""
        found = list(self.more())
        if lines is None:
            return found
        if lines <= 0:
            return []
        ends = [at for at, entry in enumerate(found) if entry.endswith(b"\n")]
        open_end = bool(found) and not found[-1].endswith(b"\n")
        count = lines - 1 if open_end else lines
        first = 0 if len(ends) <= count else ends[-count - 1] + 1 if count else ends[-1] + 1
        return found[first:]

    def more(self) -> Iterator[bytes]:
        """Yield what was written since the last call."""
        if self._file is None:
            if not self._path.exists():
                return
            self._file = self._path.open("rb")
        while True:
            begin = self._file.tell()
            line = self._file.readline()
            if not line.endswith(b"\n"):
                self._file.seek(begin)
                if not line and self._rotate():
                    self._file.close()
                    self._file = self._path.open("rb")
                    continue
                return
            entry = self._read(line)
            if entry is not None:
                yield entry

    def _rotate(self) -> bool:
        assert self._file is not None
        try:
            return not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False

    def _read(self, line: bytes) -> bytes | None:
        when, _, rest = line.partition(b" ")
        _, _, rest = rest.partition(b" ")
        tag, _, text = rest.partition(b" ")
        if self._since and when.decode("ascii", "replace") < self._since:
            return None
        content = text if tag == b"F" else text[:-1]
        return when + b" " + content if self._timestamps else content

    def __enter__(self) -> LogReader:
        """Return the reader."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
