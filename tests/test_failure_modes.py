"""The page of failures names for each one the tests that show it, and these tests exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "explanation" / "failure-modes.md"
COLUMNS = ["failure", "what continues", "what stops", "how you see it", "how long", "test"]
TOPICS = {
    "crash": "proxy is killed",
    "out of memory": "runs out of memory",
    "API outage": "server is down",
    "lost store": "lost its data",
    "full disk": "disk is full",
    "flushed rules": "flushes all rules",
    "clock jump": "clock jumps",
    "two proxies": "second proxy",
    "kernel without something": "kernel or the tools lack",
}


def rows():
    found = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("| "):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if cells != COLUMNS:
                found.append(cells)
    return found


@cache
def names_in(path):
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("cells", rows(), ids=lambda cells: cells[0][:60])
def test_each_failure_names_tests_that_exist(cells):
    assert len(cells) == len(COLUMNS) and all(cells)
    named = re.findall(r"`([^`]+)`", cells[-1])
    assert named and ", ".join(f"`{each}`" for each in named) == cells[-1]
    for each in named:
        path, _, name = each.partition("::")
        assert name.startswith("test_") and name in names_in(path), f"{each} does not exist"


@pytest.mark.parametrize("topic", TOPICS)
def test_every_kind_of_failure_has_a_row(topic):
    assert [cells[0] for cells in rows() if TOPICS[topic] in cells[0]]
