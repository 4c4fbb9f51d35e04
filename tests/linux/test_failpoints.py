"""Failpoints: off unless one is named, each passed in one part of the code, and deadly when armed."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from narthex.linux import failpoints

SOURCE = Path(failpoints.__file__).parents[1]


def test_each_point_is_somewhere_in_the_code():
    names = {name for name, value in vars(failpoints).items() if isinstance(value, str) and value in failpoints.POINTS}
    assert len(names) == len(failpoints.POINTS)
    text = "".join(path.read_text() for path in SOURCE.rglob("*.py") if path.name != "failpoints.py")
    assert set(re.findall(r"(?:failpoint\(|_takeover\(changes, )([A-Z_]+)\)", text)) == names


def test_off_they_do_nothing():
    assert failpoints._armed is None
    failpoints.failpoint(failpoints.FILE_WRITTEN)


@pytest.mark.parametrize(
    ("value", "status"), [("cni.file.written=2", -signal.SIGKILL), ("cni.file.written=3", 0), ("x", 1)]
)
def test_the_environment_arms_one(value, status):
    program = "from narthex.linux.failpoints import failpoint\nfor _ in range(2): failpoint('cni.file.written')"
    environment = {**os.environ, failpoints.ENVIRONMENT: value, "PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == status
    assert status != 1 or "there is no failpoint 'x'" in done.stderr
