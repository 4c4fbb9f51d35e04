"""Many calls for one container at the same time, from processes and through the agent, leave nothing behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cni.kernel.cni_place import Place

from narthex.linux.namespaces import in_namespace

pytestmark = pytest.mark.kernel
ROOT = Path(__file__).parents[3]
CALLS = int(os.environ.get("NARTHEX_TEST_CNI_CALLS", "240"))
"""The full count is 1,000."""


def raced(place, calls, seed):
    argv = [sys.executable, str(ROOT / "tests" / "cni" / "kernel" / "cni_races.py")]
    argv += [str(place.scratch), f"/run/netns/{place.name}a", str(calls), str(seed)]
    with in_namespace(place.name):
        done = subprocess.run(
            argv, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, timeout=600
        )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert outcomes.keys() == {"done", "refused"}, "calls saw each other's unfinished work"
    assert sum(outcomes.values()) > calls - 6 and outcomes["done"] > calls / 10


def test_racing_calls_for_one_container(tmp_path):
    with Place(tmp_path, agent=True) as place:
        place.pod("a")
        raced(place, CALLS, 1)
        place.good("DEL", place.portmap(None, (8080, 80)), "a")
        place.good("DEL", place.bridge(), "a")
        found = place.gc()
        # The subnet of the pods is shared, so DEL leaves it.
        assert [line.split()[1] for line in found.pop("elements")] == ["near4"]
        assert not any((found["attachments"], found["reservations"], found["files"], found["kept"]))
        again = place.gc()
        assert not any(again[name] for name in ("attachments", "elements", "reservations", "files", "kept"))
        place.nothing_left()
