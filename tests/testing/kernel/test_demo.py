"""The demo: it ends well, and it ends clean also when it is interrupted."""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from narthex.lab.program import labs as lab

pytestmark = pytest.mark.kernel

ROOT = Path(__file__).parents[3]
DEMO = [sys.executable, str(ROOT / "scripts" / "demo.py")]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}


@pytest.fixture(autouse=True)
def one_at_a_time():
    """All demos go by one name, so they take turns, whichever process of the test run they are in."""
    with (Path(tempfile.gettempdir()) / "narthex-demo.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def demo_labs():
    return {name for name in lab.all_names() if name.startswith("demo")}


def test_the_demo_shows_that_everything_answers():
    before = demo_labs()
    done = subprocess.run(DEMO, env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(", asked by ") >= 5
    assert "plan and rules agree" in done.stdout
    assert demo_labs() <= before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupted_demo_leaves_nothing(number):
    before = demo_labs()
    running = subprocess.Popen(DEMO, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    with running.stdout as output:
        for line in output:
            if line.startswith("$ narthex lab exec"):
                break
        time.sleep(0.05)
        running.send_signal(number)
        output.read()
    assert running.wait(60) == 130
    assert demo_labs() <= before
