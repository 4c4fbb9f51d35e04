"""Manual pages: one for each command, with its options, and without a warning of groff."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("man")
    argv = [sys.executable, str(ROOT / "scripts" / "man_pages.py"), str(folder)]
    subprocess.run(argv, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, check=True)
    return sorted(folder.iterdir())


def sections():
    """The commands of the reference, which is made from the same declarations: path and help."""
    text = (ROOT / "docs" / "reference" / "commands.md").read_text()
    return dict(re.findall(r"^## ((?:kubectl )?narthex[^\n]*)\n\n```\n(.*?)^```", text, re.MULTILINE | re.DOTALL))


def read(page):
    """The page as a reader sees it."""
    argv = ["groff", "-ww", "-man", "-k", "-Tutf8", "-P-c", str(page)]
    done = subprocess.run(argv, env={**os.environ, "LC_ALL": "C.UTF-8"}, capture_output=True, text=True, check=True)
    assert done.stderr == "", page.name
    return re.sub(r".\x08", "", done.stdout)


def test_each_command_has_a_page_that_groff_takes_without_a_warning(pages):
    assert sorted(page.stem for page in pages) == sorted(path.replace(" ", "-") for path in sections())
    for page in pages:
        shown = read(page)
        assert shown.count("NAME\n") and "SYNOPSIS" in shown
        assert max(map(len, shown.splitlines())) < 200


def test_a_page_has_all_options_of_its_command(pages):
    help_texts = {path.replace(" ", "-"): text for path, text in sections().items()}
    for page in pages:
        shown = "".join(read(page).split())
        for option in re.findall(r"^  (?:-\w, )?(--[\w-]+)", help_texts[page.stem], re.MULTILINE):
            assert option in shown, (page.stem, option)


def test_text_that_troff_would_take_for_requests(pages):
    (trace,) = [page for page in pages if page.stem == "narthex-trace"]
    shown = read(trace)
    assert "--rules iptables-save.txt" in shown and "[OPTIONS] SRC DST[:PORT][/PROTO]" in shown
    assert "        0  the packet's path is explained, wherever it ends" in shown
