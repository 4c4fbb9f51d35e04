"""The first process of a user-mode-linux machine: gives it a file system that is its own, loads modules, runs one command.

The machine's root is the host's, read through hostfs. A tmpfs is laid over it, so that whatever is written inside stays
inside; only the shared directory is the host's own. Nothing is imported but what comes with Python.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import traceback
from pathlib import Path

MODULES = Path("/usr/lib/uml/modules")
"""Where Debian's package puts them; programs look below /lib/modules."""
ROOT = Path("/run/root")

_MS_BIND, _MS_MOVE = 0x1000, 0x2000
_POWER_OFF = 0x4321FEDC
_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str | Path, target: Path, kind: str, flags: int = 0, options: str = "") -> None:
    """Mount a file system; the target is made when it is not there."""
    target.mkdir(parents=True, exist_ok=True)
    words = [os.fsencode(word) for word in (source, target, kind)]
    if _libc.mount(*words, ctypes.c_ulong(flags), options.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {kind} {target}: {os.strerror(number)}")


def modprobe(*words: str) -> None:
    """Load modules. The message of a failure goes to the console."""
    subprocess.run(["modprobe", *words], check=True, env={"PATH": os.defpath + ":/sbin:/usr/sbin"})


def own_root(shared: Path) -> None:
    """Lay a tmpfs over the host's files, and make that the root."""
    mount("proc", Path("/proc"), "proc")
    mount("tmpfs", Path("/run"), "tmpfs")
    release = os.uname().release
    (link := Path("/run/boot/lib/modules") / release).parent.mkdir(parents=True)
    link.symlink_to(MODULES / release)
    modprobe("-d", "/run/boot", "overlay")
    for name in ("upper", "work"):
        Path("/run", name).mkdir()
    mount("overlay", ROOT, "overlay", options="lowerdir=/,upperdir=/run/upper,workdir=/run/work")
    for source, place, kind in (
        ("proc", "proc", "proc"),
        ("sysfs", "sys", "sysfs"),
        ("devtmpfs", "dev", "devtmpfs"),
        ("devpts", "dev/pts", "devpts"),
        ("tmpfs", "dev/shm", "tmpfs"),
        ("tmpfs", "run", "tmpfs"),
    ):
        mount(source, ROOT / place, kind)
    mount(shared, ROOT / shared.relative_to("/"), "none", _MS_BIND)
    os.chdir(ROOT)
    if _libc.mount(b".", b"/", b"none", ctypes.c_ulong(_MS_MOVE), None) != 0:
        raise OSError(ctypes.get_errno(), "the new root cannot be moved into place")
    os.chroot(".")
    os.chdir("/")
    link = Path("/lib/modules") / release
    if not link.exists():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(MODULES / release)


def run(shared: Path) -> int:
    """Run the command of the shared directory; return its exit status."""
    task = json.loads((shared / "task.json").read_text())
    modprobe("-a", *task["modules"])
    for name, program in task["alternatives"]:
        subprocess.run(["update-alternatives", "--quiet", "--set", name, program], check=True, env=task["env"])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True, env=task["env"])
    socket.sethostname("uml")
    (shared / "up").touch()
    with (shared / "stdout").open("wb") as out, (shared / "stderr").open("wb") as err:
        done = subprocess.run(
            task["argv"], cwd=task["cwd"], env=task["env"], stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )
    return done.returncode


def main() -> None:
    shared = Path(sys.argv[1])
    try:
        own_root(shared)
        status = run(shared)
        (shared / "status").write_text(str(status))
    except BaseException:
        (shared / "broken").write_text(traceback.format_exc())
    finally:
        os.sync()
        _libc.reboot(_POWER_OFF)


main()
