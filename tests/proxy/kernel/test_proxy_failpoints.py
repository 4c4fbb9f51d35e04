"""A proxy that is killed between two writes of a Target: the next one completes the rules, and nothing else is left."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.proxy.kernel.proxy_killed import points_of

from narthex.linux.namespaces import create_namespace, delete_namespace
from narthex.linux.run import run

pytestmark = pytest.mark.kernel
ROOT = Path(__file__).parents[3]


@pytest.fixture
def namespace():
    name = f"nxt-{os.getpid()}-kill"
    create_namespace(name)
    try:
        yield name
    finally:
        delete_namespace(name)


@pytest.mark.parametrize("mode", ["nftables", "iptables"])
def test_killed_between_two_writes(namespace, mode):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    argv = [sys.executable, "-m", "tests.proxy.kernel.proxy_killed", mode, namespace]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["differences"] == []
    assert said["kills"].keys() == set(points_of(mode))
    rules = run(["nft", "list", "ruleset"], namespace=namespace)
    assert "narthex" not in rules and "KUBE-" not in rules
