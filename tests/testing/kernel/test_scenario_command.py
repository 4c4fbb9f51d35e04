"""`narthex scenario run` with real packets, and what is left when it is stopped in the middle."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from narthex.cli import main
from narthex.linux.namespaces import namespace_names
from narthex.proxy.program.dataplane import refusal
from narthex.testing.kernel.world import PREFIX

pytestmark = pytest.mark.kernel

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "tests" / "scenarios"


def started(*argv: str) -> subprocess.Popen[bytes]:
    """The command as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "narthex", "scenario", "run", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )


def children(pid: int) -> set[int]:
    """The process and those that it has started."""
    return {pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())}


def worlds(pids: set[int]) -> list[str]:
    """Namespaces that these processes made."""
    return [name for name in namespace_names() if any(name.startswith(f"{PREFIX}{pid}-") for pid in pids)]


def wait_for(condition, seconds: float = 60) -> bool:
    """Whether the condition comes true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_all_three_witnesses():
    with started(str(FOLDER / "nodeport-hairpin.yaml"), "-o", "json") as process:
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    *findings, counts = map(json.loads, out.splitlines())
    # Where the kernel has no IP_VS, all but that witness of mode ipvs.
    expected = 22 if refusal("ipvs") else 24
    assert counts == {"scenarios": 1, "flows": expected, "ok": expected, "failed": 0, "invalid": 0}
    witnesses = {(finding["mode"], finding["against"]) for finding in findings}
    assert len(witnesses) == expected // 2
    assert {("nftables", "kernel"), ("iptables", "kernel"), ("userspace", "kernel"), ("ipvs", "rules")} <= witnesses


def test_a_mode_that_this_kernel_cannot_do_is_an_error_when_asked_for():
    reason = refusal("ipvs")
    done = CliRunner().invoke(main, ["scenario", "run", str(FOLDER / "nodeport-hairpin.yaml"), "--mode", "ipvs"])
    assert (done.exit_code != 0) is bool(reason)
    assert reason in done.output


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_stopped_in_the_middle_nothing_stays(how):
    with started(str(FOLDER), "--against", "kernel", "-j", "3") as process:
        assert wait_for(lambda: len(worlds(children(process.pid))) >= 6)
        pids = children(process.pid)
        process.send_signal(how)
        process.stdout.close()
        process.wait(timeout=30)
    assert wait_for(lambda: not worlds(pids)), worlds(pids)
    assert wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
