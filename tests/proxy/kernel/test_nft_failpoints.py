"""A proxy that is killed between two nft batches: the next one completes the rules, and nothing else is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.proxy.kernel.nft_killed import PLANS, applied

from narthex.linux import failpoints
from narthex.linux.failpoints import POINTS
from narthex.linux.namespaces import create_namespace, delete_namespace
from narthex.linux.run import run

pytestmark = pytest.mark.kernel
ROOT = Path(__file__).parents[3]
NFT_POINTS = [name for name in POINTS if name.startswith("proxy.nftables.")]


@pytest.fixture
def namespace():
    name = f"nxt-{os.getpid()}-nfk"
    create_namespace(name)
    try:
        yield name
    finally:
        delete_namespace(name)


@pytest.mark.parametrize("point", NFT_POINTS)
def test_killed_between_two_batches(namespace, point):
    environment = {**os.environ, failpoints.ENVIRONMENT: point, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    for number in range(len(PLANS)):
        argv = [sys.executable, "-m", "tests.proxy.kernel.nft_killed", namespace, str(number)]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120, cwd=ROOT)
        assert done.returncode == -signal.SIGKILL, done.stderr
        there, expected = applied(namespace, number)
        assert there == expected, f"plan {number}, killed at {point}"
        tables = [
            line for line in run(["nft", "list", "ruleset"], namespace=namespace).splitlines() if line[:5] == "table"
        ]
        assert tables == ["table ip narthex {"]
