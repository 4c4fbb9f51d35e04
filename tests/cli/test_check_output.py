"""The text of `narthex check`: wrapped and colored on a terminal, one line for each difference elsewhere."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARGV = [
    sys.executable, "-m", "narthex", "check", "--manifests", "examples/shop", "--node", "node-a",
    "--cluster-cidr", "10.244.0.0/16", "--rules", "examples/bug-report/shop-node-a.txt",
]  # fmt: skip
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def environment(**more):
    kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS")}
    return {**kept, "PYTHONPATH": str(ROOT / "src"), "TERM": "xterm", **more}


def on_a_terminal(*more, **variables):
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as output:
        with os.fdopen(theirs, "wb") as terminal:
            argv = [*ARGV, *more]
            process = subprocess.Popen(
                argv, cwd=ROOT, env=environment(COLUMNS="80", **variables), stdout=terminal, stderr=subprocess.DEVNULL
            )
        text = b""
        try:
            while part := output.read(65536):
                text += part
        except OSError:
            # A terminal that nobody has open any more.
            pass
        assert process.wait(60) == 1
    return text.decode().replace("\r\n", "\n")


def plain(*more, **variables):
    done = subprocess.run([*ARGV, *more], cwd=ROOT, env=environment(**variables), capture_output=True, text=True)
    assert done.returncode == 1
    return done.stdout


def test_elsewhere_each_difference_is_one_line_without_color():
    text = plain()
    assert not ESCAPE.search(text)
    lines = text.splitlines()
    assert [line.split(":")[0] for line in lines] == ["missing"] * 3 + ["node node-a, IPv4"]


def test_on_a_terminal_lines_wrap_and_kinds_have_a_color():
    text = on_a_terminal()
    lines = ESCAPE.sub("", text).splitlines()
    assert max(map(len, lines)) <= 80
    assert [
        " ".join(part.split()) for part in re.split(r"\n(?! )", ESCAPE.sub("", text).strip())
    ] == plain().splitlines()
    assert "\x1b[31m\x1b[1mmissing: \x1b[0m" in text


@pytest.mark.parametrize(("more", "variables"), [((), {"NO_COLOR": "1"}), (("--color", "never"), {})])
def test_color_can_be_switched_off(more, variables):
    assert not ESCAPE.search(on_a_terminal(*more, **variables))


def test_color_can_be_switched_on():
    assert ESCAPE.search(plain("--color", "always"))
