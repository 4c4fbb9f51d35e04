"""A proxy in mode ipvs that is killed between two writes: the next one completes addresses, sets, chains, and servers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.proxy.kernel.proxy_killed import points_of

from narthex.linux.namespaces import create_namespace, delete_namespace

ROOT = Path(__file__).parents[2]


@pytest.fixture
def space():
    name = f"nx-kill-{os.getpid()}"
    create_namespace(name)
    yield name
    delete_namespace(name)


def test_killed_between_two_writes(space):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    argv = [sys.executable, "-m", "tests.proxy.kernel.proxy_killed", "ipvs", space, "1"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["differences"] == []
    assert said["kills"].keys() == set(points_of("ipvs"))
