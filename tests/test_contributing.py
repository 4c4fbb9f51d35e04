"""CONTRIBUTING: files, tests, and targets that it names exist, and its commands select tests."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
COMMANDS = [
    line for block in re.findall(r"^```\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL) for line in block.splitlines()
]


def test_files_and_folders_exist():
    named = set(re.findall(r"`((?:src|tests|docs|scripts|examples)/[\w/.-]+)`", TEXT))
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"`make ([a-z-]+)", TEXT))
    assert {"setup", "demo", "unit", "test", "lint"} <= targets
    assert [name for name in targets if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []


def test_commands_select_tests():
    """In one process, since it imports much."""
    lines = [shlex.split(line.removeprefix("sudo ")) for line in COMMANDS if "-m pytest" in line]
    assert all(words[:3] == [".venv/bin/python", "-m", "pytest"] for words in lines)
    files = {word for words in lines for word in words[3:] if word.endswith(".py")}
    argv = [sys.executable, "-m", "pytest", "--collect-only", "-q", *sorted(files)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for words in lines:
        for name in words[words.index("-k") + 1 :] if "-k" in words else ():
            assert re.search(rf"\[{name}|_{name}", done.stdout), name


@pytest.mark.parametrize("name", ["cause", "match", "backend", "scenario", "DNS plugin"])
def test_there_is_an_example_with_a_test_and_its_time(name):
    (section,) = re.findall(rf"^### A new {name}.*?(?=^### |^## )", TEXT, re.MULTILINE | re.DOTALL)
    assert ".venv/bin/" in section and re.search(r"\d+ s\b", section)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("src/narthex/trace/causes/catalogue.py", '"link-down"'),
        ("src/narthex/trace/causes/routes.py", '"link-down"'),
        ("tests/trace/kernel/test_causes.py", 'cause="link-down"'),
        ("src/narthex/netfilter/xtables/matches.py", "def _statistic"),
        ("src/narthex/netfilter/xtables/matches.py", "_UNDECIDABLE"),
        ("tests/netfilter/test_xtables_parse.py", "def test_each_match_becomes_a_node_or_stays_as_text"),
        ("src/narthex/proxy/backends/base.py", "class Backend"),
        ("src/narthex/proxy/kernel/dataplanes.py", "DATAPLANES"),
        ("src/narthex/dns/corefile/settings.py", "whoami: bool"),
        ("src/narthex/dns/server/filters.py", "whoami"),
    ],
)
def test_the_examples_are_where_the_page_says(file, words):
    assert words in (ROOT / file).read_text()
