"""The root of a container: a view of the machine's files that it can read, but not change.

The functions are for a process with one thread, in a mount namespace of its own. Each file system of the machine is the lower
layer of an overlay; the upper layers, and the directories that are private anyway, are in one memory file system, which the kernel
frees with the container. Where overlayfs cannot be used, the file system is mounted read-only.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 0x1, 0x2, 0x4, 0x8, 0x20
_MS_BIND, _MS_REC, _MS_SLAVE = 0x1000, 0x4000, 0x80000
_KEPT_FLAGS = _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
"""Flags of a mount that survive a remount. statvfs(3) has the same bits."""
_MNT_DETACH = 2
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT = 428, 429
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH = 0x1, 0x4
_AT_FDCWD, _AT_EMPTY_PATH = -100, 0x1000

_OVERLAY = b"overlay"
SCRATCH_BYTES = 512 * 1024 * 1024
"""Size of a container's memory file system. The bound keeps one container from taking all memory by writing files."""
_SCRATCH = b"mode=755,size=%d,nr_inodes=100k" % SCRATCH_BYTES
_MOST_MOUNTS = 200
"""File systems of the machine that a container sees: a machine has some dozens, and each takes 50 us of a container's start."""

PRIVATE = ("/tmp", "/run", "/dev/shm", "/root")
"""Directories that are empty and private in each container."""
_PRIVATE_PREFIXES = tuple(f"{path}/" for path in PRIVATE)
_STATE = ("/run/narthex/", "/var/lib/narthex/")
"""Where labs and other programs of ours keep keys and state."""
_HIDDEN = (
    *("/var/lib/narthex", "/var/lib/docker", "/var/lib/containerd", "/var/lib/containers", "/var/lib/kubelet"),
    *("/etc/kubernetes", "/etc/rancher", "/var/lib/rancher", "/boot", "/lost+found"),
)
"""Directories that are empty in each container: keys, and files of other containers."""
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_DEVICE_LINKS = (
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
)
_PROC_READ_ONLY = ("bus", "fs", "irq", "sys", "sysrq-trigger")
_PROC_HIDDEN = ("acpi", "asound", "kcore", "keys", "latency_stats", "sched_debug", "scsi", "timer_list", "timer_stats")
"""As container runtimes do: root may otherwise change the machine by these files, also without capabilities."""
_NO_FILES = frozenset(
    [
        "autofs",
        "binfmt_misc",
        "bpf",
        "cgroup",
        "cgroup2",
        "configfs",
        "debugfs",
        "devpts",
        "devtmpfs",
        "efivarfs",
        "fusectl",
        "hugetlbfs",
        "mqueue",
        "nsfs",
        "proc",
        "pstore",
        "rpc_pipefs",
        "securityfs",
        "selinuxfs",
        "sysfs",
        "tracefs",
    ]
)
"""File systems without files of the machine."""
_ELSEWHERE = tuple(f"{path}/" for path in (*PRIVATE, *_HIDDEN, "/proc", "/sys", "/dev", "/var/run"))
"""What is not taken from the machine's mounts."""

_libc = ctypes.CDLL(None, use_errno=True)


class BindMount(msgspec.Struct, frozen=True):
    """A file or directory that a container sees at a path. It has no device nodes."""

    source: str
    at: str
    read_only: bool = False
    in_view: bool = False
    """The source is a path in the container's own view of the machine, so the machine's files stay as they are."""
    resolved: bool = False
    """The source has no symbolic links. The start fails if there are some now."""


def change_root(shows: Sequence[BindMount], executable: str, layer: str = "") -> None:
    """Make a container's view of the machine the root of this process. Raises OSError that names the failed step.

    The files of the directory `layer` lie over those of the machine.
    Mount points that do not exist are created, except where the machine's files are mounted read-only.
    """
    # Mounts made here stay here; unmounts elsewhere take effect here, too.
    _mount(b"none", "/", None, _MS_REC | _MS_SLAVE)
    shows = [*_of_the_program(executable), *shows]
    sources = {show: _clone_source(show) for show in shows if not show.in_view}
    devices = {name: _open(f"/dev/{name}") for name in _DEVICES if Path(f"/dev/{name}").is_char_device()}
    # The memory file system may hide it.
    layers = [_open(layer)] if layer else []
    scratch = "/tmp"
    _mount(b"tmpfs", scratch, b"tmpfs", _MS_NOSUID | _MS_NODEV, _SCRATCH)
    _mount_machine(scratch, [f"/proc/self/fd/{each}" for each in layers])
    own, old = _open(scratch), _open("/")
    os.chdir(f"{scratch}/view")
    # Both roots are at the same place afterwards: ours is where paths begin, and the machine's lies above it.
    _check(_libc.pivot_root(b".", b"."), "pivot_root")
    _mount(b"proc", "/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    _mount_private(f"/proc/self/fd/{own}", devices)
    sources |= {show: _open(str(Path(show.source).resolve())) for show in shows if show.in_view}
    os.fchdir(old)
    _check(_libc.umount2(b".", _MNT_DETACH), "unmount the machine's root")
    os.chdir("/")
    for handle in (own, old, *layers, *devices.values()):
        os.close(handle)
    # The machine's root is gone before anything of a manifest is mounted, since a recursive mount of / would contain it.
    # A directory of the node shows nothing of the container's image, so it is mounted first.
    for show in sorted(shows, key=lambda show: not show.in_view):
        _show(show, sources[show])
        os.close(sources[show])


def _mount_machine(scratch: str, layers: Sequence[str]) -> None:
    """Mount the file systems of the machine at `view` in the memory file system."""
    view = f"{scratch}/view"
    Path(view).mkdir()
    for number, at in enumerate(("/", *_machine_mounts())):
        target = view if at == "/" else view + at
        if not Path(target).exists():
            # A later mount hides it.
            continue
        upper, work = f"{scratch}/upper-{number}", f"{scratch}/work-{number}"
        if at == "/" and layers:
            _mount_image(scratch, layers, view)
            continue
        if Path(at).is_dir() and _mount_overlay([at], target, upper, work):
            continue
        flags = os.statvfs(at).f_flag & _KEPT_FLAGS
        _mount(os.fsencode(at), target, None, _MS_BIND)
        _mount(None, target, None, _MS_REMOUNT | _MS_BIND | flags | _MS_NODEV | _MS_RDONLY)


def _mount_image(scratch: str, layers: Sequence[str], view: str) -> None:
    """Mount an image's files over the machine's. Raises OSError, also if the machine's root is an overlay of overlays itself."""
    # The kernel rejects a layer that lies in another one, as an image in /opt does in /: so / becomes an overlay first.
    machine = f"{scratch}/machine"
    Path(machine).mkdir()
    for lower, target, number in ((["/"], machine, "machine"), ([*layers, machine], view, "image")):
        if not _mount_overlay(lower, target, f"{scratch}/upper-{number}", f"{scratch}/work-{number}"):
            text = os.strerror(ctypes.get_errno())
            raise OSError(errno.ENOTSUP, f"the image's files cannot be mounted over the machine's by overlayfs: {text}")


def _mount_overlay(lower: Sequence[str], target: str, upper: str, work: str) -> bool:
    """Mount an overlay over directories, the highest first; return False if it cannot be used here."""
    if any(character in each for each in lower for character in ",:\\"):
        return False
    there = Path(lower[-1]).stat()
    Path(work).mkdir()
    Path(upper).mkdir()
    # The overlay's root has the attributes of its upper layer.
    os.chown(upper, there.st_uid, there.st_gid)
    Path(upper).chmod(there.st_mode & 0o7777)
    options = f"lowerdir={':'.join(lower)},upperdir={upper},workdir={work}"
    mounted: int = _libc.mount(b"overlay", os.fsencode(target), _OVERLAY, _MS_NODEV, os.fsencode(options))
    return mounted == 0


def _machine_mounts() -> Iterator[str]:
    """Yield the mount points of the machine's file systems below /, parents first, without those that containers do not see."""
    found = set()
    with Path("/proc/self/mountinfo").open("rb") as mounts:
        for line in mounts:
            at = os.fsdecode(line.split(b" ", 5)[4])
            if at == "/" or "\\" in at or f"{at}/".startswith(_ELSEWHERE):
                continue
            if line.partition(b" - ")[2].split(b" ", 1)[0].decode() not in _NO_FILES:
                found.add(at)
    yield from sorted(found)[:_MOST_MOUNTS]


def _mount_private(scratch: str, devices: dict[str, int]) -> None:
    """Mount what a container has of its own. `scratch` is the path of its memory file system."""
    private = {"/run": 0o755, "/root": 0o700, "/tmp": 0o1777, "/dev": 0o755}
    if not Path("/var/run").is_symlink() and Path("/var/run").is_dir():
        private["/var/run"] = 0o755
    for number, (at, mode) in enumerate(private.items()):
        folder = Path(f"{scratch}/own-{number}")
        folder.mkdir()
        folder.chmod(mode)
        if Path(at).is_dir():
            _mount(bytes(folder), at, None, _MS_BIND)
    Path("/dev/shm").mkdir()
    Path("/dev/shm").chmod(0o1777)
    for name, device in devices.items():
        os.close(os.open(f"/dev/{name}", os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o666))
        _mount(f"/proc/self/fd/{device}".encode(), f"/dev/{name}", None, _MS_BIND)
    for name, target in _DEVICE_LINKS:
        Path(f"/dev/{name}").symlink_to(target)
    _mount(b"sysfs", "/sys", b"sysfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    empty = Path(f"{scratch}/empty")
    empty.mkdir(0o555)
    for at in (*_HIDDEN, "/sys/firmware", *(f"/proc/{name}" for name in _PROC_HIDDEN)):
        if Path(at).is_dir():
            _mount(bytes(empty), at, None, _MS_BIND)
            _read_only(at)
        elif at.startswith("/proc/") and Path(at).exists() and "null" in devices:
            _mount(b"/dev/null", at, None, _MS_BIND)
    # Not at the mount itself: another one of the same network namespace could not write any more.
    _read_only("/sys")
    for name in _PROC_READ_ONLY:
        at = f"/proc/{name}"
        if Path(at).exists():
            _mount(at.encode(), at, None, _MS_BIND | _MS_REC)
            _read_only(at)


def _read_only(at: str) -> None:
    _mount(None, at, None, _MS_REMOUNT | _MS_BIND | os.statvfs(at).f_flag & _KEPT_FLAGS | _MS_RDONLY)


def _of_the_program(executable: str) -> list[BindMount]:
    """Return the mounts of a program in a private directory: its directory, and the libraries next to `bin`.

    Of /tmp or /root itself, a container sees only the program. The interpreter of a virtual environment is a symbolic link, so
    both the link and the file that it leads to may be in such a directory.
    """
    paths = dict.fromkeys((str(Path(executable).absolute()), str(Path(executable).resolve()))) if executable else ()
    found: dict[str, None] = {}
    for path in paths:
        if not path.startswith(_PRIVATE_PREFIXES) or path.startswith(_STATE):
            continue
        folder = Path(path).parent
        if str(folder) in PRIVATE:
            found[path] = None
            continue
        found[str(folder)] = None
        if folder.name in ("bin", "sbin"):
            siblings = (folder.parent / name for name in ("lib", "lib64", "libexec", "pyvenv.cfg"))
            found |= {str(each): None for each in siblings if each.exists()}
    return [BindMount(each, each, read_only=True) for each in found]


def is_private(path: str) -> bool:
    """Return True if a path is below a directory that is private in each container."""
    return str(Path(path).resolve()).startswith(_PRIVATE_PREFIXES)


def _clone_source(show: BindMount) -> int:
    """Return a mount of a file or directory of the machine that is attached nowhere."""
    handle = _open(show.source)
    if show.resolved and str(Path(f"/proc/self/fd/{handle}").readlink()) != show.source:
        raise PermissionError(errno.EPERM, f"{show.source} has become a symbolic link, so it is not mounted")
    tree: int = _libc.syscall(_SYS_OPEN_TREE, handle, b"", _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_EMPTY_PATH)
    _check(min(tree, 0), f"clone the mount of {show.source}")
    os.close(handle)
    return tree


def _show(show: BindMount, source: int) -> None:
    origin = f"/proc/self/fd/{source}"
    # As text, since a symbolic link in a volume could lead to the files that this process has open.
    at = Path(show.at).resolve()
    if not at.exists():
        directory = Path(origin).is_dir()
        (at if directory else at.parent).mkdir(parents=True, exist_ok=True)
        if not directory:
            at.touch()
    what = f"mount {show.source} at {show.at}"
    if show.in_view:
        _check(_libc.mount(origin.encode(), bytes(at), None, _MS_BIND | _MS_REC, None), what)
    else:
        moved = _libc.syscall(_SYS_MOVE_MOUNT, source, b"", _AT_FDCWD, bytes(at), _MOVE_MOUNT_F_EMPTY_PATH)
        _check(moved, what)
    flags = os.statvfs(at).f_flag & _KEPT_FLAGS | (_MS_RDONLY if show.read_only else 0)
    _mount(None, str(at), None, _MS_REMOUNT | _MS_BIND | flags | (0 if show.in_view else _MS_NODEV))


def _open(path: str) -> int:
    return os.open(path, os.O_PATH | os.O_CLOEXEC)


def _mount(source: bytes | None, at: str, kind: bytes | None, flags: int, data: bytes | None = None) -> None:
    _check(_libc.mount(source, os.fsencode(at), kind, flags, data), f"mount {at}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
