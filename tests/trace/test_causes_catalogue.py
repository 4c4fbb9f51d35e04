"""The table of causes, its pages and its tests agree."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from narthex.trace.causes.catalogue import CAUSES

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "reference" / "causes"
KERNEL = ROOT / "tests" / "trace" / "kernel"
TESTS = [KERNEL / "test_causes.py", KERNEL / "test_lab_law.py", Path(__file__).with_name("test_causes_found.py")]
HEADINGS = ["Symptoms", "Cause", "Evidence", "What to do", "Reproduction"]


def test_each_cause_has_a_page_and_each_page_a_cause() -> None:
    assert {page.stem for page in PAGES.glob("*.md")} - {"README"} == set(CAUSES)
    assert len(CAUSES) >= 30


@pytest.mark.parametrize("name", CAUSES)
def test_a_page_has_its_parts(name: str) -> None:
    text = (PAGES / f"{name}.md").read_text()
    assert text.startswith(f"# {CAUSES[name].title}\n")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == HEADINGS
    assert CAUSES[name].page == f"docs/reference/causes/{name}.md"


def test_each_cause_has_a_test_that_finds_it() -> None:
    found: set[str] = set()
    for path in TESTS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "cause" and isinstance(node.value, ast.Constant):
                found.add(str(node.value.value))
    assert set(CAUSES) - found == set()
    assert found - set(CAUSES) == set()


def test_the_index_is_what_the_table_says() -> None:
    argv = [sys.executable, str(ROOT / "scripts" / "causes_page.py"), "-"]
    done = subprocess.run(argv, env={"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, check=True)
    assert (PAGES / "README.md").read_text() == done.stdout, "run `python scripts/causes_page.py`"
