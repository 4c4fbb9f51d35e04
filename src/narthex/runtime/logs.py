"""Log lines for people (text) and for machines (JSON), on one stream.

Names of objects come from strangers, so control characters are written as escapes: no object can forge a line.
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
"""From this `-v` on, debug lines and tracebacks are written; kube-proxy's own scale."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


_USUAL = LoggingConfiguration()


def start_logging(stream: TextIO, told: LoggingConfiguration = _USUAL) -> None:
    """Send the log to a stream. To be called again when the settings change."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Json() if told.format == "json" else _Text())
    handler.addFilter(_Verbosity(told))
    LOGGER.handlers[:] = [handler]
    most = max((told.verbosity, *(verbosity for _, verbosity in told.vmodule)))
    LOGGER.setLevel(logging.DEBUG if most >= DEBUG_VERBOSITY else logging.INFO)
    LOGGER.propagate = False


class _Verbosity(logging.Filter):
    """Lets debug lines pass of files that are to be loud: the first pattern of `vmodule` that fits a file's name counts,
    else `verbosity`."""

    def __init__(self, told: LoggingConfiguration) -> None:
        super().__init__()
        self._told = told

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno > logging.DEBUG:
            return True
        own = (verbosity for pattern, verbosity in self._told.vmodule if fnmatchcase(record.module, pattern))
        return next(own, self._told.verbosity) >= DEBUG_VERBOSITY


def data(**fields: Any) -> dict[str, dict[str, Any]]:
    """Facts that JSON lines carry beside the message: `LOGGER.info(text, extra=data(family="IPv4"))`."""
    return {"narthex": fields}


def printable(text: str) -> str:
    """The text with control characters as escapes."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def printable_lines(text: str) -> str:
    """The same for a text that may have several lines, such as one for each fault of a file."""
    return "\n".join(map(printable, text.splitlines()))


def stamp(seconds: float) -> str:
    """RFC 3339 in UTC with milliseconds."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{int(seconds % 1 * 1000):03d}Z"


class _Text(logging.Formatter):
    """`2026-01-31T12:00:00.000Z warning  what happened`; a traceback follows, indented."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{stamp(record.created)} {record.levelname.lower():<7} {printable(record.getMessage())}"
        if record.exc_info:
            trace = self.formatException(record.exc_info).split("\n")
            line += "".join(f"\n    {printable(each)}" for each in trace)
        return line


class _Json(logging.Formatter):
    """One object per line: `ts`, `level`, `msg`, and whatever `data` gave."""

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
    """Remembers what was said already. Not safe for threads; one loop owns it."""

    def __init__(self) -> None:
        self._said: dict[Any, None] = {}

    def tell(self, present: Sequence[Any]) -> None:
        """What is wrong now: `Problem`s."""
        now = dict.fromkeys(present)
        for problem in now:
            if problem not in self._said:
                log = LOGGER.warning if problem.severity == "warning" else LOGGER.error
                log("%s", problem, extra=data(origin=problem.origin, object=problem.object, field=problem.field))
        for problem in self._said:
            if problem not in now:
                LOGGER.info("mended: %s", problem, extra=data(origin=problem.origin, object=problem.object))
        self._said = now
