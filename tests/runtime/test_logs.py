"""Log lines as people and machines read them."""

import io
import json
import logging

import pytest

from narthex.runtime import logs
from narthex.runtime.configuration.values import LoggingConfiguration


@pytest.fixture
def log():
    return logging.getLogger("narthex")


def written(style="text", verbosity=0):
    stream = io.StringIO()
    logs.start_logging(stream, LoggingConfiguration(format=style, verbosity=verbosity))
    return stream


def test_text_lines(log):
    out = written()
    log.warning("%s is odd", "shop/web")
    log.debug("not shown")
    (line,) = out.getvalue().splitlines()
    assert line.endswith("Z warning shop/web is odd")


def test_control_characters_cannot_forge_a_line(log):
    out = written()
    log.info("name %s", "a\nb\x1b[31m\u2028c")
    (line,) = out.getvalue().splitlines()
    assert line.endswith(r"name a\nb\x1b[31m\u2028c")


def test_json_lines_carry_the_facts(log):
    out = written("json")
    log.info("synced\n", extra=logs.data(family="IPv4", wrote=True))
    line = json.loads(out.getvalue())
    assert line.pop("ts").endswith("Z")
    assert line == {"level": "info", "msg": "synced\n", "family": "IPv4", "wrote": True}


@pytest.mark.parametrize("style", ["text", "json"])
def test_tracebacks_come_with_debug(log, style):
    out = written(style, verbosity=4)
    log.debug("where", exc_info=ValueError("x"))
    assert "ValueError: x" in out.getvalue()


@pytest.mark.row("27.3")
@pytest.mark.parametrize(
    ("told", "shown"),
    [
        (LoggingConfiguration(verbosity=4), True),
        (LoggingConfiguration(verbosity=3), False),
        (LoggingConfiguration(vmodule=(("test_log*", 5),)), True),
        (LoggingConfiguration(vmodule=(("other", 5),)), False),
        (LoggingConfiguration(verbosity=9, vmodule=(("test_*", 0),)), False),
        (LoggingConfiguration(vmodule=(("test_*", 4), ("test_logs", 0))), True),
    ],
)
def test_single_files_can_be_loud_or_quiet(log, told, shown):
    stream = io.StringIO()
    logs.start_logging(stream, told)
    log.debug("detail")
    log.info("news")
    assert ("detail" in stream.getvalue()) is shown
    assert "news" in stream.getvalue()


def test_lines_beyond_a_limit_are_counted():
    written, scheduled = [], []
    log = logs.LimitedLog(written.append, lambda seconds, callback: scheduled.append((seconds, callback)), 2, 60.0)
    for number in range(5):
        log.write(f"line {number}")
    assert written == ["line 0", "line 1"]
    ((seconds, end),) = scheduled
    end()
    assert (seconds, written[2:]) == (60.0, ["3 more lines like the last ones were left out in 60 s"])
    log.write("line 5")
    assert written[3:] == ["line 5"]
    scheduled[1][1]()
    assert len(written) == 4
