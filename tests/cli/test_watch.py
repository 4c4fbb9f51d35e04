"""What runs until it is stopped: `check --watch`, the live screen of `top`, and the progress of long operations."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from narthex.cli import check as check_command
from narthex.cli import main
from narthex.proxy.backends import BACKENDS
from narthex.testing.build import endpoint, endpoint_slice, plan, service
from narthex.trace.reports.check import CheckReport, Discrepancy, DiscrepancyKind

_LONG = 60.0
"""Seconds that nothing here takes, on any machine."""


def report(*said: str, unknown: tuple[str, ...] = ()) -> tuple[CheckReport, ...]:
    findings = tuple(Discrepancy(kind=DiscrepancyKind.STALE, service="", frontend="", said=text) for text in said)
    return (CheckReport(node="n", family="IPv4", frontends=1, endpoints=1, findings=findings, unknown=unknown),)


def watched(
    steps: list[tuple[CheckReport, ...] | Exception], capsys: pytest.CaptureFixture[str], output: str = "text"
) -> tuple[int, str, str]:
    """Watch results in a row until nothing differs, or until they are used up as if Ctrl-C were pressed."""
    left = iter(steps[1:])

    def compared() -> tuple[CheckReport, ...]:
        step = next(left, KeyboardInterrupt())
        if isinstance(step, BaseException):
            raise step
        return step

    first = steps[0]
    assert isinstance(first, tuple)
    with pytest.raises(SystemExit) as ended:
        check_command._watch(compared, first, output, 0.0, _LONG)
    printed = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, printed.out, printed.err


def changes(text: str) -> list[str]:
    """Return lines without the time of day and durations."""
    return [line.split(" ", 1)[1].partition(" (after")[0] for line in text.splitlines()]


def test_differences_come_and_go_until_nothing_differs(capsys: pytest.CaptureFixture[str]) -> None:
    steps: list[tuple[CheckReport, ...] | Exception] = [
        report("a"),
        report("a"),
        report("a", "b"),
        report("b"),
        report(),
    ]
    status, out, _ = watched(steps, capsys)
    assert status == 0
    assert [line for line in changes(out) if not line.startswith("node n")] == [
        "+ stale: b",
        "- stale: a",
        "- stale: b",
    ]
    assert changes(out)[-1] == "node n, IPv4: 1 frontends, 1 endpoints: the same"
    assert "(after " in out


def test_a_failure_in_between_is_said_and_does_not_end_the_watch(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = watched([report("a"), click.ClickException("the API is gone"), report()], capsys)
    assert (status, err) == (0, "cannot tell: the API is gone\n")
    assert changes(out)[0] == "- stale: a"


@pytest.mark.parametrize(
    ("last", "status"), [(report("a"), 1), (report(unknown=("x",)), 2), (click.ClickException("gone"), 2)]
)
def test_ctrl_c_ends_with_the_last_answer(
    capsys: pytest.CaptureFixture[str], last: tuple[CheckReport, ...] | Exception, status: int
) -> None:
    assert watched([report("b"), last], capsys)[0] == status


def test_documents_are_printed_when_they_change(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = watched([report("a"), report("a"), report("b"), report("b"), report()], capsys, "json")
    assert out.count('"kind": "check"') == 2


def test_a_rollout_from_files_to_the_same(tmp_path: Path) -> None:
    """The command reads its sources again, and ends as soon as the rules are those of the objects."""
    manifests = Path(__file__).parents[2] / "examples" / "shop"
    backend = BACKENDS["iptables"]
    rules = tmp_path / "rules.txt"
    stale = plan(service("shop/web", "10.96.0.80"), endpoint_slice("shop/web", endpoint("10.244.9.9"), port=1))
    rules.write_text(backend.text(backend.render(stale)))
    words = ["--manifests", str(manifests), "--node", "node-a", "--cluster-cidr", "10.244.0.0/16", "--mode", "iptables"]
    right = CliRunner().invoke(main, ["render", *words, "--family", "4"])
    watch = [
        sys.executable,
        "-m",
        "narthex",
        "check",
        *words,
        "--rules",
        str(rules),
        "--watch",
        "--interval",
        "0.1",
        "--timeout",
        str(_LONG),
    ]
    with subprocess.Popen(watch, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            first = running.stdout.readline()
            new = tmp_path / "new.txt"
            new.write_text(right.stdout)
            new.replace(rules)
            out, err = running.communicate(timeout=_LONG)
        finally:
            running.kill()
    assert running.returncode == 0, (first, out, err)
    assert "of shop/" in first
    assert out.splitlines()[-1].endswith(": the same")


# ---- terminals -------------------------------------------------------------------------------------------------------


class Terminal:
    """A program with a terminal of 80 x 24 characters."""

    def __init__(self, program: str) -> None:
        self.master, self.slave = pty.openpty()
        termios.tcsetwinsize(self.slave, (24, 80))
        self.before = termios.tcgetattr(self.slave)
        self.text = ""
        self.running = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            env={**os.environ, "TERM": "xterm"},
        )

    def until(self, holds: Callable[[str], bool]) -> None:
        """Read until something holds for what was printed since the last key."""
        limit = time.monotonic() + _LONG
        while not holds(self.text):
            assert time.monotonic() < limit, self.text
            if select.select([self.master], [], [], 0.1)[0]:
                self.text += os.read(self.master, 65536).decode(errors="replace")

    def press(self, key: str) -> None:
        """Press a key."""
        self.text = ""
        os.write(self.master, key.encode())

    def close(self) -> None:
        """End the program."""
        self.running.kill()
        self.running.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal() -> Iterator[Callable[[str], Terminal]]:
    opened: list[Terminal] = []

    def start(program: str) -> Terminal:
        opened.append(Terminal(program))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


SCREEN = """
    from narthex.cli import top
    from narthex.trace.reports.counting import ConnectionCounter, CounterReading, ordered, rows

    counts = {"shop/slow:http": 5, "shop/busy:http": 5}

    def looking():
        counts["shop/busy:http"] += 100
        counts["shop/slow:http"] += 1
        return CounterReading(
            source="a test",
            counts=tuple(ConnectionCounter(name, name, "", count) for name, count in counts.items()),
        )

    def table(now, before, seconds, by):
        return ordered(rows(now, before, seconds), by)

    top._live(looking, table, "rate", 0.2, False, "text")
    print("the end")
"""


def order(text: str) -> list[str]:
    """Return the Services of the last picture, from top to bottom."""
    picture = text.rpartition("from a test")[2]
    return sorted((name for name in ("shop/slow", "shop/busy") if name in picture), key=picture.index)


def test_the_screen_of_top(terminal: Callable[[str], Terminal]) -> None:
    screen = terminal(SCREEN)
    screen.until(lambda text: order(text) == ["shop/busy", "shop/slow"] and text.count("from a test") > 1)
    assert "\x1b[?1049h" in screen.text
    screen.press("n")
    screen.until(lambda text: order(text) == ["shop/busy", "shop/slow"])
    screen.press("t")
    screen.until(lambda text: text.count("from a test") > 1)
    screen.press("q")
    screen.until(lambda text: "the end" in text)
    assert "\x1b[?1049l" in screen.text
    assert screen.running.wait(_LONG) == 0
    assert termios.tcgetattr(screen.slave) == screen.before


SLOW = """
    import time
    from narthex.cli import output

    output.PATIENCE = 0.1
    with output.working("reading a lot"):
        with output.working("a part of it"):
            time.sleep(0.5)
    with output.working("something quick"):
        pass
    print("the end")
"""


def test_progress_on_a_terminal(terminal: Callable[[str], Terminal]) -> None:
    screen = terminal(SLOW)
    screen.until(lambda text: "the end" in text)
    assert "reading a lot ... " in screen.text
    assert "a part of it" not in screen.text
    assert "something quick" not in screen.text
    assert screen.text.rpartition("\x1b[2K")[2].startswith("the end")


def test_no_progress_without_a_terminal() -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(SLOW)], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("the end\n", "")
