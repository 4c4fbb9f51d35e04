"""Plugins that are killed between any two writes leave nothing behind once a runtime repeats the operation, or collects."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cni.kernel.cni_place import Place

from narthex.linux.failpoints import POINTS
from narthex.linux.namespaces import in_namespace

pytestmark = pytest.mark.kernel
ROOT = Path(__file__).parents[3]
KILLS = int(os.environ.get("NARTHEX_TEST_CNI_KILLS", "40"))
"""The full count is 200: each failpoint at each time that an operation passes it, and each failpoint with both backends."""


def test_killed_at_each_failpoint(tmp_path):
    with Place(tmp_path) as place:
        place.pod("a")
        argv = [sys.executable, str(ROOT / "tests" / "cni" / "kernel" / "cni_failpoints.py")]
        argv += [str(place.scratch), f"/run/netns/{place.name}a", str(KILLS)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        with in_namespace(place.name):
            done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert sum(said["kills"].values()) == KILLS
        assert said["kills"].keys() == {point for point in POINTS if point.startswith("cni.")}
        assert said["left"] == {"attachments": [], "elements": [], "reservations": [], "files": [], "kept": 0}
        place.nothing_left()
