"""The soak itself: it runs, and each of its gates can fail."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.soak.gates import EARLY, GROWTH, LATE, LEAST_SAMPLES, Findings, FlushWindow, Sample, judge, table, windows

from narthex.linux.namespaces import namespace_names
from narthex.testing.load import LoadFailure, until

ROOT = Path(__file__).parents[2]
FLUSH_SECONDS = 10.0
QUICK = ["--minutes", "0.01", "--mode", "nftables", "--pause", "0.1", "--flood", "100", "--silent", "80"]


def soak(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    argv = [sys.executable, "-m", "tests.soak", *QUICK, *map(str, arguments)]
    return subprocess.Popen(
        argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def left_of(process):
    return [name for name in namespace_names() if name.startswith(f"nxs-{process.pid}-")]


@pytest.mark.kernel
def test_it_does_all_harm_and_writes_what_it_found(tmp_path):
    process = soak("--json", tmp_path / "found.json", "--flush-seconds", 300)
    said, _ = process.communicate(timeout=300)
    report = json.loads((tmp_path / "found.json").read_text())
    (found,) = report["findings"]
    assert set(found["actions"]) == {"kill", "flush", "UDP flood", "SYN flood", "silent connections"}, said
    assert found["connections"] > 0 and found["probes"] > 0 and found["samples"] and found["windows"]
    gates = {gate["name"]: gate for gate in report["gates"]["nftables"]}
    for name in ("failed connections", "lost probes", "errors", "differences at the end"):
        assert gates[name]["value"] == 0, said
        assert name in said
    # So short a run warms up to its end; only the gates on growth may fail.
    assert process.returncode == (0 if report["passed"] else 1)
    assert left_of(process) == []


@pytest.mark.kernel
def test_interrupted_it_leaves_nothing(tmp_path):
    process = soak("--minutes", 5, "--json", tmp_path / "found.json")
    until(lambda: left_of(process) or process.poll() is not None, "the namespaces")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    assert process.returncode == 130
    assert json.loads((tmp_path / "found.json").read_text())["interrupted"]
    assert left_of(process) == []


def sample(at, run=1, **figures):
    usual = {"memory": 40.0, "files": 25, "threads": 6, "conntrack": 1000}
    return Sample(at=at, run=run, **{**usual, **figures})


def good():
    """Findings that pass all gates."""
    samples = [sample(float(at), run=int(at > 20), conntrack=1000 + at % 7) for at in range(100)]
    flush = FlushWindow(command="nft flush ruleset", began=50.0, ended=51.0)
    excused = [LoadFailure(began, ended, "new", False) for began, ended in ((50.5, 70.0), (49.9, 50.1))]
    return Findings(mode="nftables", samples=samples, windows=[flush], failures=excused, probes=40)


def failed_gates(found):
    return [gate.name for gate in judge(found, FLUSH_SECONDS) if not gate.met]


def test_good_findings_pass():
    assert failed_gates(good()) == []


def grown(figure):
    """The figure leaks in small steps until it is beyond its limit."""
    factor, addition = GROWTH[figure]
    found = good()
    first = getattr(found.samples[0], figure)
    leak = (first * (factor - 1) + addition) / 15
    found.samples = [
        msgspec.structs.replace(each, **{figure: type(first)(first + leak * each.at)}) for each in found.samples
    ]
    return found


@pytest.mark.parametrize(
    ("gate", "change"),
    [
        ("failed connections", {"failures": [LoadFailure(52.0, 53.0, "new", False)]}),
        ("failed connections", {"failures": [LoadFailure(10.0, 49.0, "open", True)]}),
        ("longest outage after a flush, s", {"windows": [FlushWindow(command="nft", began=50.0, ended=60.5)]}),
        ("lost probes", {"lost_probes": ["port 10256: timed out"]}),
        ("errors", {"errors": ["the proxy ended"]}),
        ("differences at the end", {"differences": ["wrote 1 element"]}),
        ("samples missing", {"samples": [sample(float(at)) for at in range(LEAST_SAMPLES - 1)]}),
        *((figure, None) for figure in GROWTH),
    ],
)
def test_each_gate_can_fail(gate, change):
    found = grown(gate) if change is None else msgspec.structs.replace(good(), **change)
    if "failures" in (change or {}):
        found.failures += good().failures
    assert failed_gates(found) == [gate]
    assert "FAILED" in table({"nftables": judge(found, FLUSH_SECONDS)})


def test_growth_is_that_of_the_process_that_lives_to_the_end():
    early, late = windows(good().samples)
    begin, length = 21, 99 - 21
    assert [each.at for each in (early[0], late[-1])] == [begin + -(-length * EARLY[0] // 1), begin + length * LATE[1]]
    assert {each.run for each in (*early, *late)} == {1}
