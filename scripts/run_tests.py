"""Run pytest; in CI, repeat each failed test once, alone, after all others.

A test that passes when repeated is flaky: the summary lists it by name. The run fails if a test fails twice, or if more
than three tests are flaky. Arguments go to pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

MAX_FLAKY = 3
MAX_REPEATED = 30
"""If more tests fail, something is broken, and repeating them one by one explains nothing."""
FAILED_TESTS = "NARTHEX_FAILED_TESTS"
"""The environment variable that names the file for the IDs of failed tests; tests/conftest.py writes it."""
TESTS_FAILED = 1
"""The exit status of pytest if all tests were run and some failed."""


def main(arguments: list[str]) -> int:
    """Run the tests and return an exit status for the shell."""
    status, failed = pytest(arguments)
    if status != TESTS_FAILED or not failed or not os.environ.get("CI"):
        return status
    if len(failed) > MAX_REPEATED:
        print(f"{len(failed)} tests failed; more than {MAX_REPEATED} are not repeated.", flush=True)
        return status
    flaky: list[str] = []
    broken: list[str] = []
    for test in failed:
        print(f"\nRepeating alone: {test}", flush=True)
        (broken if pytest([test])[0] else flaky).append(test)
    for title, tests in (("failed twice", broken), ("flaky (failed once, passed when repeated alone)", flaky)):
        print(f"\n{len(tests)} {title}:", *tests, sep="\n  ", flush=True)
    if len(flaky) > MAX_FLAKY:
        print(f"More than {MAX_FLAKY} tests are flaky.", flush=True)
    return int(bool(broken) or len(flaky) > MAX_FLAKY)


def pytest(arguments: list[str]) -> tuple[int, list[str]]:
    """Run pytest once. Return its exit status and the IDs of the tests that failed or had an error."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "failed"
        argv = [sys.executable, "-m", "pytest", *arguments]
        status = subprocess.run(argv, env={**os.environ, FAILED_TESTS: str(file)}, check=False).returncode
        return status, file.read_text().splitlines() if file.exists() else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
