"""Log lines as text or JSON on one stream.

Object names are untrusted, so control characters are escaped: no object can forge a line.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, TextIO

import msgspec

from narthex.runtime.configuration.values import LoggingConfiguration

LOGGER = logging.getLogger("narthex")
DEBUG_VERBOSITY = 4
"""The `-v` level from which on debug lines and tracebacks are written, on kube-proxy's scale."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")

_USUAL = LoggingConfiguration()


def start_logging(stream: TextIO, configuration: LoggingConfiguration = _USUAL) -> None:
    """Send the log to a stream. Call it again when the settings change."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Json() if configuration.format == "json" else _Text())
    handler.addFilter(_Verbosity(configuration))
    LOGGER.handlers[:] = [handler]
    most = max((configuration.verbosity, *(verbosity for _, verbosity in configuration.vmodule)))
    LOGGER.setLevel(logging.DEBUG if most >= DEBUG_VERBOSITY else logging.INFO)
    LOGGER.propagate = False


class _Verbosity(logging.Filter):
    """Passes debug lines by the first pattern of `vmodule` that matches the file's name, otherwise by `verbosity`."""

    def __init__(self, configuration: LoggingConfiguration) -> None:
        super().__init__()
        self._configuration = configuration

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True for messages above debug level, and for debug messages of modules with enough verbosity."""
        if record.levelno > logging.DEBUG:
            return True
        own = (verbosity for pattern, verbosity in self._configuration.vmodule if fnmatchcase(record.module, pattern))
        return next(own, self._configuration.verbosity) >= DEBUG_VERBOSITY


def data(**fields: Any) -> dict[str, dict[str, Any]]:
    """Return fields for JSON lines: `LOGGER.info(text, extra=data(family="IPv4"))`."""
    return {"narthex": fields}


def printable(text: str) -> str:
    """Return the text with escaped control characters."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def printable_lines(text: str) -> str:
    """Return a text of several lines with escaped control characters."""
    return "\n".join(map(printable, text.splitlines()))


def stamp(seconds: float) -> str:
    """Return a time as RFC 3339 in UTC with milliseconds."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{int(seconds % 1 * 1000):03d}Z"


class _Text(logging.Formatter):
    """`2026-01-31T12:00:00.000Z warning what happened`, followed by an indented traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, followed by the indented lines of a traceback."""
        line = f"{stamp(record.created)} {record.levelname.lower():<7} {printable(record.getMessage())}"
        if record.exc_info:
            trace = self.formatException(record.exc_info).split("\n")
            line += "".join(f"\n    {printable(each)}" for each in trace)
        return line


class _Json(logging.Formatter):
    """One object per line: `ts`, `level`, `msg`, and the fields of `data`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one JSON object with the record's own fields."""
        fields: dict[str, Any] = {
            "ts": stamp(record.created),
            "level": record.levelname.lower(),
            "msg": record.getMessage(),
            **getattr(record, "narthex", {}),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields).decode()


class LimitedLog:
    """Writes at most some lines per period, and how many it left out. Not thread-safe."""

    def __init__(
        self,
        write: Callable[[str], object],
        schedule: Callable[[float, Callable[[], None]], object],
        lines: int,
        seconds: float,
    ) -> None:
        """`schedule` calls back after a number of seconds, in the same thread."""
        self._write = write
        self._schedule = schedule
        self._lines = lines
        self._seconds = seconds
        self._count = 0
        """Lines of the current period, which begins with its first line."""

    def write(self, line: str) -> None:
        """Write a line, or count it."""
        if not self._count:
            self._schedule(self._seconds, self._end)
        self._count += 1
        if self._count <= self._lines:
            self._write(line)

    def _end(self) -> None:
        more, self._count = self._count - self._lines, 0
        if more > 0:
            self._write(f"{more} more lines like the last ones were left out in {self._seconds:g} s")


MAX_LOGGED = 100
"""Problems of one source that are logged at a time."""


class ProblemLog:
    """Logs each problem of a source once when it appears and once when it is resolved. Not thread-safe.

    At most `MAX_LOGGED` problems are logged at a time; of the others, the number is.
    """

    def __init__(self) -> None:
        self._said: dict[Any, None] = {}
        self._unsaid = 0

    def update(self, present: Sequence[Any]) -> list[Any]:
        """Log the differences to the previous problems, and return those that are logged for the first time."""
        now = dict.fromkeys(present)
        said = {problem: None for problem in self._said if problem in now}
        for problem in self._said:
            if problem not in now:
                LOGGER.info("mended: %s", problem.logged, extra=data(origin=problem.origin, object=problem.object))
        new = []
        for problem in now:
            if len(said) >= MAX_LOGGED:
                break
            if problem not in said:
                said[problem] = None
                new.append(problem)
                log = LOGGER.warning if problem.severity == "warning" else LOGGER.error
                log("%s", problem.logged, extra=data(origin=problem.origin, object=problem.object, field=problem.field))
        unsaid = sum(getattr(problem, "count", 1) for problem in now if problem not in said)
        if unsaid and unsaid != self._unsaid:
            LOGGER.error("%d more problems of objects are not logged; mend the first ones to see others", unsaid)
        self._said, self._unsaid = said, unsaid
        return new
