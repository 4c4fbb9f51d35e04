"""What tests/uml does when its kernel hangs or breaks down: once more, for what is left, and no third time."""

import json

import pytest
from tests.uml import boots as module
from tests.uml.boots import Boots
from tests.uml.machine import MachineError

NAMES = ["t.py::one", "t.py::two", "t.py::three"]


def lines(name, *parts):
    return "".join(json.dumps({"nodeid": name, "when": part}) + "\n" for part in parts)


class Script:
    """Machines that each tell something, and then end well, hang or break down."""

    def __init__(self, *plays):
        self.plays = list(plays)
        self.asked = []

    def __call__(self, folder, argv, env, cwd, turn):  # noqa: ARG002
        self.asked.append([word for word in argv if word in NAMES])
        self.told, self.end = self.plays.pop(0)
        self.reports = folder / "reports"
        self.output = "what the tests printed"
        return self

    def __enter__(self):
        self.reports.write_text(self.told)

    def __exit__(self, *_):
        pass

    def check_boot(self):
        pass

    @property
    def running(self):
        return self.end == "hangs"

    def status(self):
        if self.end == "breaks":
            raise MachineError("the machine broke down; it last said: oops")
        return 1


ALL = ("setup", "call", "teardown")
HALF = lines(NAMES[0], *ALL) + lines(NAMES[1], "setup") + '{"nodeid": "t.py::t'
REST = lines(NAMES[1], *ALL) + lines(NAMES[2], *ALL)


@pytest.fixture
def booted(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "STALL_SECONDS", 0.1)

    def boot(*plays):
        script = Script(*plays)
        monkeypatch.setattr(module, "Machine", script)
        made = Boots(tmp_path / "group", NAMES, tmp_path)
        made.close(at_once=False)
        return made, script

    return boot


def test_all_is_told_at_once(booted):
    made, script = booted((lines(NAMES[0], *ALL) + REST, "ends"))
    assert [made.wait(name) for name in NAMES] == ["", "", ""]
    assert (script.asked, made.notes) == ([NAMES], {})


@pytest.mark.parametrize(("end", "said"), [("hangs", "has told nothing for"), ("breaks", "it last said: oops")])
def test_what_is_left_is_run_once_more(booted, end, said):
    made, script = booted((HALF, end), (REST, "ends"))
    assert [made.wait(name) for name in NAMES] == ["", "", ""]
    assert script.asked == [NAMES, NAMES[1:]]
    assert [report["when"] for report in made.told[NAMES[1]]] == [*ALL]
    assert made.notes.keys() == set(NAMES[1:])
    assert said in made.notes[NAMES[1]]


def test_a_second_time_is_a_failure(booted):
    made, script = booted((HALF, "hangs"), (lines(NAMES[1], *ALL), "hangs"))
    assert [made.wait(name) for name in NAMES[:2]] == ["", ""]
    assert "has told nothing for" in made.wait(NAMES[2])
    assert script.plays == [] and len(script.asked) == 2


def test_tests_that_end_without_a_report_are_not_the_kernels_fault(booted):
    made, script = booted((HALF, "ends"))
    assert "ended with exit status 1, without this one:\nwhat the tests printed" in made.wait(NAMES[1])
    assert len(script.asked) == 1
