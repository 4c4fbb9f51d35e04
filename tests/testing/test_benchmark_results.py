"""Results of benchmarks: the table of all figures, and what changed between the results of two commits."""

import argparse
import os

import msgspec
import pytest
from benchmarks.frame import history
from benchmarks.frame.history import changes, previous
from benchmarks.frame.report import Report, Saved
from benchmarks.frame.summary import summary


@pytest.fixture
def measured(monkeypatch):
    """Return results with a time, a rate, and a ratio, each multiplied by a factor, of a machine of half the speed."""
    monkeypatch.setattr("benchmarks.frame.report.slowness", lambda: 2.0)

    def made(time=1.0, rate=1.0, ratio=1.0):
        report = Report("example", argparse.Namespace(json=None, quick=False))
        times = report.table("Start", unit="s", floor="the bare tool")
        bare = times.row("bare", 1.0)
        other = times.row("other program", 4.0, floor=bare)
        times.row("Narthex", [2.0 * ratio], floor=bare, peer=other, most_ratio=3.0)
        report.table("Load", unit="s").row("load", 20.0 * time, most=1e9)
        report.table("Answers", unit="per s").row("answers", 100.0 * rate, least=1.0)
        return report.saved

    return made


def test_the_table_has_limit_peer_ratio_and_bar_within_80_columns(measured):
    lines = list(summary([measured(), measured(ratio=2.0)]))
    assert all(len(line) <= 80 for line in lines)
    narthex = [line.split() for line in lines if line.split()[:1] == ["Narthex"]]
    assert narthex == [["Narthex", "1", "4", "2", "2.00", "met"], ["Narthex", "1", "4", "4", "4.00", "MISSED"]]
    assert not any("bare" in line.split()[:1] for line in lines), "the limit itself is no figure"


@pytest.mark.parametrize(
    ("factors", "worse", "better"),
    [
        ({}, [], []),
        ({"time": 1.1, "rate": 0.9}, [], []),
        ({"time": 1.5, "rate": 0.5, "ratio": 1.4}, ["Answers", "Load", "Start"], []),
        ({"time": 0.5, "rate": 2.0, "ratio": 0.7}, [], ["Answers", "Load", "Start"]),
    ],
)
def test_what_became_worse_comes_first(measured, factors, worse, better):
    found = changes({"example": measured()}, {"example": measured(**factors)})
    titles = [each.name.split(": ")[1] for each in found]
    assert titles == worse + better
    assert [str(each).split(":")[0] for each in found] == ["worse"] * len(worse) + ["better"] * len(better)


def test_the_previous_results_are_the_newest_of_another_commit(tmp_path, measured):
    for age, name in ((30, "oldest"), (20, "newer"), (10, "now")):
        (tmp_path / name).mkdir()
        file = tmp_path / name / "example.json"
        file.write_bytes(msgspec.json.encode(measured()))
        os.utime(file, (1e9 - age, 1e9 - age))
    (tmp_path / "empty").mkdir()
    assert previous(tmp_path, tmp_path / "now") == tmp_path / "newer"
    assert previous(tmp_path, tmp_path / "newer") == tmp_path / "now"
    assert isinstance(history.read(tmp_path / "now")["example"], Saved)


def test_there_are_no_previous_results_at_first(tmp_path):
    assert previous(tmp_path, tmp_path / "now") is None
