"""Modules as child processes: forked from a process that has loaded them, or in an interpreter of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

from narthex.linux.run import with_package

MODULE = """
import os, socket, sys

def main(argv):
    control = socket.socket(fileno=int(argv[0]))
    for number in argv[1:]:
        os.write(int(number), number.encode())
    control.sendall(open("/proc/self/cmdline", "rb").read().split(bytes(1))[-2])
    control.recv(1)
    sys.exit(7)

if __name__ == "__main__":
    main(sys.argv[1:])
"""
CALLER = """
import os, signal, sys
from narthex.linux import module_process
from narthex.linux.module_process import ModuleProcess

if sys.argv[1] != "alone":
    module_process.preload("child")
if sys.argv[1] == "killed":
    os.kill(module_process._forks.pid, signal.SIGKILL)
    os.waitpid(module_process._forks.pid, 0)
reader, writer = os.pipe()
other_reader, other_writer = os.pipe()
# The numbers cross those that the files get on their way.
process = ModuleProcess("child", str(other_writer), str(writer), timeout=60, keep=[other_writer, writer])
os.close(writer), os.close(other_writer)
assert (os.read(other_reader, 9), os.read(reader, 9)) == (str(other_writer).encode(), str(writer).encode())
print("forked" if process._socket.recv(99) == sys.argv[1].encode() else "started", process.alive, process.status)
process.close(60)
print(process.status)
process = ModuleProcess("child", timeout=60)
process._socket.recv(99)
os.kill(process.pid, signal.SIGKILL)
process.close(60)
print(process.status)
"""


@pytest.mark.parametrize(("preloaded", "way"), [("alone", "started"), ("preloaded", "forked"), ("killed", "started")])
def test_modules_start_the_same_way_whether_they_are_preloaded_or_not(tmp_path: Path, preloaded: str, way: str) -> None:
    (tmp_path / "child.py").write_text(MODULE)
    (tmp_path / "caller.py").write_text(CALLER)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "caller.py"), preloaded],
        env=with_package({"PYTHONPATH": str(tmp_path)}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines() == [f"{way} True None", "7", "-9"], done.stderr
