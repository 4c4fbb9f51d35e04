"""Log lines as text or JSON on one stream.

Object names are untrusted, so control characters are escaped: no object can forge a line.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
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
        line = f"{stamp(record.created)} {record.levelname.lower():<7} {printable(record.getMessage())}"
        if record.exc_info:
            trace = self.formatException(record.exc_info).split("\n")
            line += "".join(f"\n    {printable(each)}" for each in trace)
        return line


class _Json(logging.Formatter):
    """One object per line: `ts`, `level`, `msg`, and the fields of `data`."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "ts": stamp(record.created),
            "level": record.levelname.lower(),
            "msg": record.getMessage(),
            **getattr(record, "narthex", {}),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields).decode()


class ProblemLog:
    """Logs each problem of a source once when it appears and once when it is resolved. Not thread-safe."""

    def __init__(self) -> None:
        self._said: dict[Any, None] = {}

    def update(self, present: Sequence[Any]) -> list[Any]:
        """Log the differences to the previous problems, and return the new ones."""
        now = dict.fromkeys(present)
        for problem in now:
            if problem not in self._said:
                log = LOGGER.warning if problem.severity == "warning" else LOGGER.error
                log("%s", problem, extra=data(origin=problem.origin, object=problem.object, field=problem.field))
        for problem in self._said:
            if problem not in now:
                LOGGER.info("mended: %s", problem, extra=data(origin=problem.origin, object=problem.object))
        new = [problem for problem in now if problem not in self._said]
        self._said = now
        return new
