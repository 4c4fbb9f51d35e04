"""Unit tests in the interpreter of the page, with its substitutes: those of `make playground-tests`."""

import subprocess
import sys

import pytest
from tests.playground.inputs import ROOT

# It needs no root; but node is installed, and the page is built, where the kernel's tests run.
pytestmark = pytest.mark.kernel


def test_unit_tests_pass_in_the_interpreter_of_the_page():
    script = ROOT / "playground" / "run_tests.py"
    done = subprocess.run([sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout.splitlines()[-1]
