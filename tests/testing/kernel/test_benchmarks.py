"""Benchmarks at a small size: they run, and their ratios hold. Seconds are nobody's business here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.kernel

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "argv",
    [
        ["nft_load.py", "--rounds", "2", "--changes", "50"],
        ["one_change.py", "--changes", "60", "--mode", "nftables"],
        ["connect.py", "--connections", "300"],
        ["cost_model.py"],
    ],
    ids=lambda argv: argv[0].removesuffix(".py"),
)
def test_ratios_hold_at_a_small_size(argv, tmp_path):
    program, *more = argv
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    saved = tmp_path / "saved.json"
    command = [sys.executable, str(ROOT / "benchmarks" / program), "--quick", "--json", str(saved), *more]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    tables = json.loads(saved.read_text())["tables"]
    assert tables and all(table["rows"] for table in tables)
    assert any(row["met"] for table in tables for row in table["rows"]) or program == "connect.py"


def test_all_of_them_make_a_page(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "run.py"),
        "--quick",
        "--only",
        "cost_model",
        "--into",
        str(tmp_path),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "index.html").read_text()
    pictures = sorted(path.name for path in tmp_path.glob("cost_model-*.svg"))
    assert pictures and all(f"src='{name}'" in page for name in pictures)


def test_each_program_is_one_that_runs():
    said = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "run.py"), "--list"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    named = {line.split()[0] for line in said.splitlines()}
    there = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"run"}
    assert named == there
