"""Exec credential plugins that hang, leave programs behind, or print what is no token."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from narthex.kube.exec_plugin import ExecPlugin, PluginError
from narthex.linux.run import with_package

GOOD = json.dumps({"kind": "ExecCredential", "status": {"token": "open-sesame"}})
HANGS = 'sleep 1000 & echo $! >> "$PIDS"; echo $$ >> "$PIDS"; sleep 1000'
PATIENCE = 60.0


def plugin(script: str, tmp_path: Path, seconds: float = PATIENCE, *arguments: str) -> ExecPlugin:
    return ExecPlugin(("sh", "-c", script, "plugin", *arguments), {"PIDS": str(tmp_path / "pids")}, seconds)


def started(tmp_path: Path, number: int) -> list[int]:
    """Wait for the numbers of so many processes."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        lines = (tmp_path / "pids").read_text().split() if (tmp_path / "pids").exists() else []
        if len(lines) >= number:
            return [int(line) for line in lines]
        time.sleep(0.01)
    raise AssertionError("the plugin does not start")


def gone(pids: list[int]) -> None:
    """Wait until none of these runs."""
    deadline = time.monotonic() + PATIENCE
    while left := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_the_token_is_kept_until_it_is_refused(tmp_path):
    it = plugin('echo run >> "$PIDS"; cat "$1"', tmp_path, PATIENCE, str(tmp_path / "answer"))
    (tmp_path / "answer").write_text(GOOD)

    async def ask():
        first = [await it.token() for _ in range(3)]
        (tmp_path / "answer").write_text(GOOD.replace("open", "close"))
        return [*first, await it.token(refused="open-sesame"), await it.token(refused="open-sesame")]

    assert asyncio.run(ask()) == ["open-sesame"] * 3 + ["close-sesame"] * 2
    assert (tmp_path / "pids").read_text().split() == ["run"] * 2


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 3", "exit status 3"),
        ("echo why not >&2; exit 1", "why not"),
        ("echo hello", "no ExecCredential"),
        ("printf '\\377'", "no ExecCredential"),
        ("echo '{}'", "without status.token"),
        ("""printf '%s' '{"status": {"token": "a\\nb"}}'""", "no HTTP header"),
        ("head -c 3000000 /dev/zero; sleep 1000", "more than 1048576 bytes"),
        ("kill -9 $$", "exit status"),
    ],
)
def test_what_is_no_token_is_named(tmp_path, script, message):
    with pytest.raises(PluginError, match=message):
        asyncio.run(plugin(script, tmp_path).token())


def test_a_plugin_that_is_not_installed_is_named():
    with pytest.raises(PluginError, match=r"no-such-plugin.*No such file"):
        asyncio.run(ExecPlugin(("/no-such-plugin",), {}).token())


def test_a_plugin_that_hangs_is_killed_with_all_that_it_started(tmp_path):
    with pytest.raises(PluginError, match=r"did not end within 0\.5 s"):
        asyncio.run(plugin(HANGS, tmp_path, 0.5).token())
    if (tmp_path / "pids").exists():
        gone(started(tmp_path, 1))


def test_what_a_plugin_leaves_behind_is_killed(tmp_path):
    it = plugin(f"sleep 1000 & echo $! >> \"$PIDS\"; echo '{GOOD}'", tmp_path)
    assert asyncio.run(it.token()) == "open-sesame"
    gone(started(tmp_path, 1))


def test_a_client_that_stops_ends_the_plugin(tmp_path):
    async def stop() -> None:
        task = asyncio.create_task(plugin(HANGS, tmp_path).token())
        await asyncio.to_thread(started, tmp_path, 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(stop())
    gone(started(tmp_path, 2))


def test_a_process_that_is_killed_leaves_no_plugin_behind(tmp_path):
    code = (
        "import asyncio, sys; from narthex.kube.exec_plugin import ExecPlugin\n"
        f"asyncio.run(ExecPlugin(('sh', '-c', {HANGS!r}), {{'PIDS': sys.argv[1]}}).token())"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "pids")], env=with_package(os.environ))
    try:
        pids = started(tmp_path, 2)
        assert all(map(_runs, pids))
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    gone(pids)


def test_many_clients_run_one_plugin_at_a_time(tmp_path):
    """Clients of several threads, and several requests of each, as the lists of a proxy are."""
    script = f"mkdir {tmp_path}/lock || exit 9; sleep 0.2; rmdir {tmp_path}/lock; echo x >> \"$PIDS\"; echo '{GOOD}'"
    it = plugin(script, tmp_path)
    tokens = []

    async def ask() -> None:
        tokens.extend(await asyncio.gather(*(it.token() for _ in range(4))))

    threads = [threading.Thread(target=lambda: asyncio.run(ask())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tokens == ["open-sesame"] * 16
    assert (tmp_path / "pids").read_text().split() == ["x"]


def test_those_that_waited_for_a_failure_do_not_repeat_it(tmp_path):
    it = plugin('sleep 0.3; echo x >> "$PIDS"; exit 1', tmp_path)

    async def ask() -> list[object]:
        return await asyncio.gather(*(it.token() for _ in range(6)), return_exceptions=True)

    assert all(isinstance(each, PluginError) for each in asyncio.run(ask()))
    assert (tmp_path / "pids").read_text().split() == ["x"]
