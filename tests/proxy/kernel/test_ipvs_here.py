"""Mode ipvs on the kernel that this machine has: many have no IP_VS."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.proxy.backends import BACKENDS
from narthex.proxy.program.dataplane import check_machine, refusal
from narthex.runtime.process import StartError

pytestmark = [pytest.mark.kernel, pytest.mark.row("24.1")]

ROOT = Path(__file__).parents[3]


def working_modes():
    return [mode for mode in BACKENDS if not refusal(mode)]


def narthex(namespace, *words):
    with in_namespace(namespace):
        return subprocess.run(
            [sys.executable, "-m", "narthex", *words],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def space():
    name = f"nx-noipvs-{os.getpid()}"
    create_namespace(name)
    yield name
    delete_namespace(name)


def test_a_kernel_without_it_names_the_modes_that_work(space):
    others = [mode for mode in working_modes() if mode != "ipvs"]
    if "ipvs" in working_modes():
        assert check_machine("ipvs")
        return
    with pytest.raises(StartError) as told:
        check_machine("ipvs")
    assert str(told.value).startswith("mode ipvs ")
    manifests = str(ROOT / "examples" / "shop")
    proxy = narthex(space, "proxy", "--manifests", manifests, "--proxy-mode", "ipvs", "--hostname-override", "node-a")
    lab = narthex(space, "lab", "up", manifests, "--name", f"nx-noipvs-{os.getpid()}", "--mode", "ipvs")
    for done in (proxy, lab):
        assert done.returncode == 1
        assert str(told.value) in done.stderr
        assert not done.stdout
    assert "no IP_VS" not in str(told.value) or all(mode in str(told.value) for mode in others)
