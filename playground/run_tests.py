"""Run tests with the page's interpreter in node: `make playground-tests`, or `python playground/run_tests.py ARGUMENTS` of pytest."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
FILES = (
    "tests/model/test_store.py",
    "tests/netfilter/test_ipvsadm.py",
    "tests/netfilter/test_walk_dumps.py",
    "tests/trace/test_model.py",
    "tests/trace/test_routing.py",
)
"""Tests of the three folders that the page consists of, which `make test` runs as well."""
STACK = 250 << 20
"""Bytes. Hostile texts are nested deeper than the stack of a worker permits; the page then starts another worker."""


def main(words: list[str]) -> int:
    """Run pytest with the given arguments, by default with FILES, and return its exit status."""
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    most = STACK if hard == resource.RLIM_INFINITY else min(STACK, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (most, hard))
    packages = Path(pytest.__file__).parents[1]
    node = ("node", f"--stack-size={most // 1024 * 15 // 16}", str(HERE / "run_tests.mjs"), str(packages))
    return subprocess.run((*node, "-m", "not kernel", *(words or FILES)), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
