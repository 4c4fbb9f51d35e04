"""`narthex scenario run`: what it prints and how it ends."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from narthex.cli.scenario import command
from narthex.proxy import backends
from narthex.testing.scenario import load

FOLDER = Path(__file__).parents[1] / "scenarios"
GOOD = str(FOLDER / "nodeport-hairpin.yaml")
CHECKS = 2 * 2 * sum(mode in backends.BACKENDS for mode in load(Path(GOOD)).modes)
"""Two flows before two witnesses in each mode."""
PURE = ["--against", "plan", "--against", "rules"]


@pytest.fixture
def run():
    """Run the command with the witnesses that need no root."""
    return lambda *argv: CliRunner().invoke(command, ["run", *PURE, *argv])


def test_json_has_one_object_per_flow_and_witness_and_then_the_counts(run):
    result = run(GOOD, "-o", "json")
    *findings, counts = map(json.loads, result.stdout.splitlines())
    assert result.exit_code == 0
    assert all(list(f) == ["scenario", "label", "mode", "against", "expect", "got", "ok"] for f in findings)
    assert len(findings) == CHECKS and all(f["ok"] is True for f in findings)
    assert counts == {"scenarios": 1, "flows": CHECKS, "ok": CHECKS, "failed": 0, "invalid": 0}


def test_text_names_what_failed(run, tmp_path):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(Path(GOOD).read_text().replace("masq: true", "masq: false", 1))
    result = run(str(wrong), "--mode", "nftables")
    assert result.exit_code == 1
    assert "FAIL nodeport-hairpin, backend (nftables, plan)" in result.stdout
    assert "expected 10.64.1.10:80, source kept" in result.stdout
    assert "got      10.64.1.10:80, masq" in result.stdout
    assert result.stdout.splitlines()[-1] == "1 scenarios, 4 checks: 2 ok, 2 failed"


def test_an_invalid_file_is_named_and_the_others_go_on(run, tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text("flows: [{from: 10.0.0.1, to: 10.0.0.2, port: 0, expect: none}]")
    result = run(str(bad), GOOD, "-o", "json")
    assert result.exit_code == 1
    assert result.stderr == f"error: {bad}: flows[0].port: 0 is no port\n"
    assert json.loads(result.stdout.splitlines()[-1]) == {
        "scenarios": 1, "flows": CHECKS, "ok": CHECKS, "failed": 0, "invalid": 1,
    }  # fmt: skip


def test_nothing_checked_is_no_success(run, monkeypatch):
    monkeypatch.delitem(backends._CLASSES, "ipvs")
    result = run(str(FOLDER / "ipvs-virtual-servers.yaml"))
    assert result.exit_code == 1 and "nothing was checked" in result.stderr


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((GOOD, "--mode", "nft"), "'nft' is not one of"),
        (("missing.yaml",), "missing.yaml: no such file"),
        ((GOOD, "--against", "ear"), "'ear' is not one of"),
    ],
)
def test_usage_errors(run, argv, said):
    result = run(*argv)
    assert result.exit_code == 2 and said in result.stderr


def test_a_mode_without_backend_is_a_usage_error(run, monkeypatch):
    monkeypatch.delitem(backends._CLASSES, "ipvs")
    result = run(GOOD, "--mode", "ipvs")
    assert result.exit_code == 2 and "mode ipvs is not supported" in result.stderr
