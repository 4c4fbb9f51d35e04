"""Run tests with the page's interpreter in node: `make playground-tests`, or `python playground/run_tests.py ARGUMENTS` of pytest."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
TESTS = ("tests/model", "tests/netfilter", "tests/trace")
"""The three folders that the page consists of."""
LEFT_OUT = {
    "tests/netfilter/kernel": "it needs a kernel",
    "tests/trace/kernel": "it needs a kernel",
    "tests/netfilter/laws": "the page proves nothing",
    "tests/trace/proof": "the page proves nothing",
    "tests/trace/query": "the page answers no questions",
    "tests/trace/laws": "many minutes, and the laws hold for the same code outside of the page",
    "tests/trace/issue/test_issue_laws.py": "many minutes, and the laws hold for the same code outside of the page",
    "tests/trace/program": "the page reads no node",
    "tests/trace/agents": "it starts processes",
    "tests/trace/test_compare.py": "the page compares no modes",
    "tests/trace/test_migration.py": "the page compares no modes",
    "tests/trace/test_check.py": "the page checks no node",
    "tests/trace/test_check_kernel.py": "the page checks no node",
    "tests/trace/test_counting.py": "the page counts nothing",
    "tests/trace/test_difference.py": "the page compares no bundles",
    "tests/model/test_vocabulary.py::test_a_name_of_addresses_loads_no_objects": "it starts a process",
    "tests/trace/test_causes_catalogue.py::test_the_index_is_what_the_table_says": "it starts a process",
}
"""What does not run there, and why. Everything else does, and `make test` runs it as well."""
STACK = 250 << 20
"""Bytes. Hostile texts are nested deeper than the stack of a worker permits; the page then starts another worker."""


def main(words: list[str]) -> int:
    """Run pytest with the given arguments, by default with TESTS, and return its exit status."""
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    most = STACK if hard == resource.RLIM_INFINITY else min(STACK, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (most, hard))
    packages = Path(pytest.__file__).parents[1]
    node = ("node", f"--stack-size={most // 1024 * 15 // 16}", str(HERE / "run_tests.mjs"), str(packages))
    left_out = (f"--{'deselect' if '::' in path else 'ignore'}={path}" for path in LEFT_OUT)
    return subprocess.run((*node, "-m", "not kernel", *(words or (*TESTS, *left_out))), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
