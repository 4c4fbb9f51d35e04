"""A second kernel on this machine: Debian's user-mode-linux, which has IP_VS, runs a command on the machine's own files.

It boots in two seconds, needs no virtualisation, and ends with whoever started it. What is written inside stays inside
(`guest.py`); only the shared directory is the same on both sides.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
KERNEL = "linux.uml"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MODULES = (
    *("ip_vs", "dummy", "veth", "bridge", "nf_conntrack_netlink", "sctp"),
    *("ip_tables", "iptable_nat", "iptable_filter", "iptable_mangle"),
    *("ip6_tables", "ip6table_nat", "ip6table_filter", "ip6table_mangle"),
    *("ip_set", "ip_set_hash_ip", "ip_set_hash_ipport", "ip_set_hash_ipportip", "ip_set_hash_ipportnet"),
    *("ip_set_bitmap_port", "xt_set", "xt_comment", "xt_conntrack", "xt_addrtype"),
)
LEGACY = ("iptables", "ip6tables")
"""This kernel's nf_tables has no IP families, so inside the plain commands are those of the old tables."""
_TOGETHER = ("setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child=KILL")
"""A process inside is one outside, too. They share a process namespace, which ends with its first process, and that with
this one: none of them ever runs without the kernel that holds it."""
_BOOT_SECONDS = 120.0
_TAIL = 15


class MachineError(RuntimeError):
    """The machine did not boot, or broke down; the message says why."""


class Machine:
    """One boot that runs one command and ends. Use it in a `with` block: leaving ends it, whatever happened.

    It stays on one processor: the kernel and its processes take turns at every system call, and going from one processor
    to another and back takes longer than the call.
    """

    def __init__(
        self,
        shared: Path,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        memory: str = "1G",
        modules: Sequence[str] = MODULES,
        turn: int | None = None,
    ) -> None:
        """`shared` is an empty directory, and exists inside under the same name. `modules` are loaded before the
        command runs; it may load others. Machines of different `turn` have different processors as far as there are
        any; by default it is the process that decides."""
        self.shared = shared
        self._task: dict[str, object] = {
            "argv": list(argv),
            "env": {"PATH": PATH, "LANG": "C.UTF-8", "HOME": "/root", **dict(env or {})},
            "cwd": str(cwd or Path.cwd()),
            "modules": list(modules),
            "alternatives": [[name, f"/usr/sbin/{name}-legacy"] for name in LEGACY],
        }
        self._memory = memory
        processors = sorted(os.sched_getaffinity(0))
        self._processor = processors[(os.getpid() if turn is None else turn) % len(processors)]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Machine:
        (self.shared / "task.json").write_text(json.dumps(self._task))
        init = self.shared / "init"
        guest = shlex.join([sys.executable, "-I", str(HERE / "guest.py"), str(self.shared)])
        init.write_text(f"#!/bin/sh\nexec {guest}\n")
        init.chmod(0o755)
        kernel = _found(KERNEL, "user-mode-linux")
        words = [
            *("root=/dev/root", "rootfstype=hostfs", "rootflags=/", "rw", f"mem={self._memory}", "quiet"),
            *("con=null", "con0=null,fd:1", f"uml_dir={self.shared}/", "umid=uml", f"init={init}"),
        ]
        with (self.shared / "console").open("wb") as console:
            self._process = subprocess.Popen(
                # What it does takes the longest of all, on one processor: a test run ends when it does.
                ["taskset", "--cpu-list", str(self._processor), "nice", "-n", "-3", *_TOGETHER, kernel, *words],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env={"PATH": PATH, "LD_PRELOAD": str(_wide_registers(self.shared))},
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def running(self) -> bool:
        """Whether its command has not ended yet. What comes after, this kernel's way of switching off, it hangs in now
        and then; leaving the block ends it anyway."""
        assert self._process is not None, "the machine is not started"
        return not (self._text("status") or self._text("broken")) and self._process.poll() is None

    @property
    def output(self) -> str:
        """What the command has printed, and then what it has said on standard error."""
        return "".join(self._text(name) for name in ("stdout", "stderr"))

    def wait(self, timeout: float) -> int:
        """The command's exit status. Raises MachineError when there is none within the time, in seconds."""
        deadline = time.monotonic() + timeout
        while self.running and time.monotonic() < deadline:
            self.check_boot()
            time.sleep(0.02)
        return self.status()

    def check_boot(self) -> None:
        """Raises MachineError when it ought to have booted by now and has not."""
        begun = self.shared / "init"
        if begun.exists() and not (self.shared / "up").exists() and time.time() - begun.stat().st_mtime > _BOOT_SECONDS:
            raise self._trouble(f"did not boot within {_BOOT_SECONDS:.0f} s")

    def status(self) -> int:
        """The command's exit status. Raises MachineError when it has not ended."""
        said = self._text("status")
        if said:
            return int(said)
        if self._process is not None and self.running:
            raise self._trouble("is still running when its time is up")
        if not (self.shared / "up").exists():
            raise self._trouble("did not boot")
        raise self._trouble("broke down")

    def _trouble(self, what: str) -> MachineError:
        said = self._text("broken") or self._text("console")
        tail = "\n".join(["", *said.splitlines()[-_TAIL:]]).replace("\n", "\n    ")
        return MachineError(f"the user-mode-linux machine {what}; it last said:{tail}")

    def _text(self, name: str) -> str:
        path = self.shared / name
        return path.read_text(errors="replace") if path.exists() else ""


def _found(program: str, package: str) -> str:
    path = shutil.which(program, path=PATH)
    if path is None:
        raise MachineError(f"{program} is not installed: install the package {package}")
    return path


def _wide_registers(folder: Path) -> Path:
    """The library that the kernel is started with; `xstate.c` says why."""
    library = folder / "xstate.so"
    argv = [_found("tcc", "tcc"), "-shared", "-nostdlib", "-o", str(library), str(HERE / "xstate.c")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MachineError(f"xstate.c does not compile: {done.stderr}")
    return library
