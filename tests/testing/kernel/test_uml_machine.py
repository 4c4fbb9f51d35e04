"""The machine that the tests in `tests/uml` run on: what it gives back, and what it says when it cannot."""

import time
from pathlib import Path

import pytest
from tests.uml import machine
from tests.uml.machine import Machine, MachineError

pytestmark = pytest.mark.kernel


def test_a_command_inside_gives_back_status_output_and_files(tmp_path):
    script = 'echo "$WORD" && echo oops >&2 && pwd && cp /proc/version "$OLDPWD/made" ; touch /elsewhere; exit 7'
    argv = ["sh", "-c", f"cd {tmp_path} && cd / && {script}"]
    with Machine(tmp_path, argv, env={"WORD": "a b"}) as booted:
        assert booted.wait(200) == 7
    assert booted.output == "a b\n/\noops\n"
    assert (tmp_path / "made").read_text().startswith("Linux version")
    assert (tmp_path / "made").read_text() != Path("/proc/version").read_text()
    assert not Path("/elsewhere").exists()


def test_what_cannot_run_is_told(tmp_path):
    with Machine(tmp_path, ["no-such-program"]) as booted, pytest.raises(MachineError) as told:
        booted.wait(200)
    assert "broke down" in str(told.value)
    assert "No such file or directory: 'no-such-program'" in str(told.value)


def test_leaving_ends_it(tmp_path):
    with Machine(tmp_path, ["sleep", "1000"]) as booted:
        with pytest.raises(MachineError, match="is still running when its time is up"):
            booted.wait(0.2)
        assert booted.running
    assert not booted.running
    deadline = time.monotonic() + 60
    mine = lambda: [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in _read(p)]  # noqa: E731
    while mine():
        assert time.monotonic() < deadline, f"still there: {mine()}"
        time.sleep(0.02)


def test_a_missing_kernel_names_its_package(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "KERNEL", "linux.nowhere")
    with pytest.raises(MachineError, match=r"linux\.nowhere is not installed: install the package user-mode-linux"):
        Machine(tmp_path, ["true"]).__enter__()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
