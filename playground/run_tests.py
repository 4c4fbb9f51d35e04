"""Run tests with the page's interpreter in node: `make playground-tests`, or `python playground/run_tests.py ARGUMENTS` of pytest."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
FOLDERS = ("tests/model", "tests/netfilter", "tests/trace")
NOT_HERE = (
    # Processes, sockets of Linux, and processor time, which WebAssembly lacks.
    "--ignore-glob=*/kernel/*",
)
STACK = 250 << 20
"""Bytes. Hostile texts are nested deeper than the stack of a worker permits; the page then starts another worker."""


def main(words: list[str]) -> int:
    """Run pytest with the given arguments, by default with all tests that can run, and return its exit status."""
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    most = STACK if hard == resource.RLIM_INFINITY else min(STACK, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (most, hard))
    packages = Path(pytest.__file__).parents[1]
    node = ("node", f"--stack-size={most // 1024 * 15 // 16}", str(HERE / "run_tests.mjs"), str(packages))
    return subprocess.run((*node, "-m", "not kernel", *NOT_HERE, *(words or FOLDERS)), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
