"""Unit tests in the interpreter of the page, with its substitutes. `make playground-tests` runs all that can run there."""

import subprocess
import sys

import pytest
from tests.playground.inputs import ROOT

# It needs no root; but node is installed, and the page is built, where the kernel's tests run.
pytestmark = pytest.mark.kernel

SUBSET = (
    "tests/model/test_store.py",
    "tests/netfilter/test_ipvsadm.py",
    "tests/netfilter/test_walk_dumps.py",
    "tests/trace/test_model.py",
    "tests/trace/test_routing.py",
)


def test_unit_tests_pass_in_the_interpreter_of_the_page():
    script = ROOT / "playground" / "run_tests.py"
    done = subprocess.run(
        [sys.executable, str(script), "--tb=short", *SUBSET], cwd=ROOT, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout.splitlines()[-1]
