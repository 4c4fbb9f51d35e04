"""Flags that commands share, and the completion of commands in a shell."""

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from narthex.cli import main
from narthex.lab.program import state

WITH_LAB = ("trace", "check", "top", "bundle", "lb pools", "lb why")
WITH_NETNS = ("trace", "check", "top", "bundle")


def found(words: str) -> click.Command:
    command: click.Command | None = main
    for word in words.split():
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), word)
    assert command is not None
    return command


@pytest.mark.parametrize(
    ("flag", "words"), [*(("--lab", each) for each in WITH_LAB), *(("--netns", each) for each in WITH_NETNS)]
)
def test_commands_share_flags(flag: str, words: str) -> None:
    assert flag in [name for param in found(words).params for name in param.opts]


@pytest.mark.parametrize(
    ("labs", "said"),
    [
        ((), "--lab: there is no lab"),
        (("one", "two"), "which lab? Name it with --lab: one, two"),
        (("one",), "lab 'one' is not running"),
    ],
)
@pytest.mark.parametrize(
    "words", [["trace", "outside", "10.0.0.1:80"], ["check"], ["top"], ["bundle"], ["lb", "pools"]]
)
def test_a_lab_without_a_name_is_the_only_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], labs: tuple[str, ...], said: str
) -> None:
    for name in labs:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(state, "LABS", tmp_path)
    done = CliRunner().invoke(main, [*words, "--lab"])
    assert done.exit_code in (1, 2)
    assert said in done.output or (labs == ("one",) and "one" in done.output)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("trace --lab outside 10.0.0.1:80", "there is no lab 'one'"),
        ("trace outside --lab 10.0.0.1:80", "there is no lab 'one'"),
        ("trace outside 10.0.0.1:80 --lab --all", "there is no lab 'one'"),
        ("trace --lab one outside 10.0.0.1:80", "there is no lab 'one'"),
        ("lb why --lab shop/web", "there is no lab 'one'"),
        ("trace outside 10.0.0.1:80 --lab other", "there is no lab 'other'"),
        ("check --lab other", "there is no lab 'other'"),
        ("trace outside --lab one", "Missing argument 'DST"),
        ("trace --lab", "Missing argument 'SRC"),
    ],
)
def test_the_name_of_a_lab_may_be_left_out_in_any_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    (tmp_path / "one").mkdir()
    monkeypatch.setattr(state, "LABS", tmp_path)
    assert said in CliRunner().invoke(main, words.split()).output


@pytest.mark.parametrize("words", [["check", "--live"], ["top", "--netns", "x"], ["lb", "pools", "--config", "x"]])
def test_a_lab_has_its_own_sources(words: list[str]) -> None:
    done = CliRunner().invoke(main, [*words, "--lab", "none"])
    assert done.exit_code == 2
    assert "a lab has its own" in done.output


def completed(*words: str) -> list[str]:
    environment = {
        "_NARTHEX_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(("narthex", *words)),
        "COMP_CWORD": str(len(words)),
    }
    done = CliRunner().invoke(main, [], prog_name="narthex", env=environment)
    return [line.partition(",")[2] for line in done.output.splitlines()]


def test_a_shell_completes_commands_options_modes_and_labs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "blue").mkdir()
    monkeypatch.setattr(state, "LABS", tmp_path)
    assert completed("tr") == ["trace"]
    assert "--netns" in completed("check", "--n")
    assert completed("plan", "--mode", "ipv") == ["ipvs"]
    assert completed("trace", "--lab", "b") == ["blue"]


def test_the_module_has_the_name_of_the_program() -> None:
    done = subprocess.run([sys.executable, "-m", "narthex", "trace"], capture_output=True, text=True, check=False)
    assert done.stderr.startswith("Usage: narthex trace ")
