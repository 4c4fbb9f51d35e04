"""The plugins' agent: a part of a node like any other, whatever is sent to it."""

import socket
import threading
import time
from pathlib import Path

import pytest

from narthex.cni.program import launcher
from narthex.cni.program.agent import Agent
from narthex.node.parts import MeasuredPart, NodePart


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "run" / "cni.sock")


@pytest.fixture
def agent(path, tmp_path):
    one = Agent(path, str(tmp_path / "state"))
    part: NodePart = one
    thread = threading.Thread(target=part.run)
    thread.start()
    end = time.monotonic() + 30
    while not one.healthy and time.monotonic() < end:
        time.sleep(0.01)
    yield one
    one.stop()
    thread.join(30)
    assert not thread.is_alive() and not one.healthy and not Path(path).exists()


def ask(monkeypatch, path, plugin, environment, stdin=b""):
    monkeypatch.setattr(launcher, "SOCKET", path)
    return launcher._ask(plugin, environment, stdin)


def test_it_answers_a_launcher(agent, path, monkeypatch):
    assert agent.healthy
    status, said = ask(monkeypatch, path, "bridge", {"CNI_COMMAND": "VERSION"})
    assert status == 0 and b'"supportedVersions"' in said
    status, said = ask(monkeypatch, path, "no-such", {"CNI_COMMAND": "ADD"})
    assert status == 1 and b"there is no plugin" in said
    long = b'{"pad":"' + b"x" * 500_000 + b'"}'
    status, said = ask(monkeypatch, path, "ptp", {"CNI_COMMAND": "STATUS"}, long)
    assert status == 1 and b"config version does not allow" in said


def test_it_counts_answers_and_not_words(agent, path, monkeypatch):
    for plugin, command in (("bridge", "VERSION"), ("bridge", "VERSION"), ("bridge", "ADD"), ("no-such", "n/a")):
        ask(monkeypatch, path, plugin, {"CNI_COMMAND": command})
    assert isinstance(agent, MeasuredPart)
    (metric,) = agent.collect()
    numbers = {tuple(sample.labels.values()): sample.value for sample in metric.samples}
    assert numbers == {("bridge", "VERSION", "ok"): 2, ("bridge", "ADD", "error"): 1, ("", "", "error"): 1}


def test_only_its_owner_may_ask(agent, path):
    assert agent.healthy and Path(path).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"\xff\xff\xff\xff", b"\0\0\0\4\0\0\0\xff", b"\0\0\0\0", b"\0\0\0\2ab", b"x" * 3_000_000]
)
def test_nonsense_is_dropped(agent, path, monkeypatch, data):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(path)
        sock.settimeout(60)
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(10) in (b"", b"\xff")
        except OSError:
            pass
    assert agent.healthy
    assert ask(monkeypatch, path, "bridge", {"CNI_COMMAND": "VERSION"})[0] == 0


def test_there_is_one_at_a_place(agent, path, tmp_path):
    with pytest.raises(FileExistsError, match="another agent"):
        Agent(path, str(tmp_path)).open()
    assert agent.healthy


def test_without_an_agent_the_launcher_is_told(tmp_path, monkeypatch):
    assert ask(monkeypatch, str(tmp_path / "none"), "bridge", {"CNI_COMMAND": "ADD"}) is None


def test_an_agent_that_goes_away_in_an_add(tmp_path, monkeypatch):
    path = str(tmp_path / "sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        for command, expected in (("ADD", 1), ("DEL", None)):
            thread = threading.Thread(target=lambda: listener.accept()[0].close())
            thread.start()
            said = ask(monkeypatch, path, "bridge", {"CNI_COMMAND": command})
            thread.join()
            assert (said and said[0]) == expected
            assert expected is None or b'"code":11' in said[1]
