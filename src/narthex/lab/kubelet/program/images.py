"""What an image stands for in a lab, which fetches none: a program or files of this machine, or the echo server.

`lab up --image PREFIX=PATH` names what the images whose names begin with PREFIX stand for:

    a program      the image's root has it, by its own name; it is the entry point, and words after PATH are its arguments
    a directory    its files lie over the machine's; its file image.json has Entrypoint, Cmd, Env, and WorkingDir as an OCI
                   image's configuration does

`busybox`, with any registry and tag, has the machine's busybox under the names of all its commands, before the machine's programs.
"""

from __future__ import annotations

import os
import shlex
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from narthex.lab.containers.root import BindMount
from narthex.linux.run import run

BUSYBOX = "busybox"
_BUSYBOX_AT = "/usr/local/sbin"
"""Where containers have the commands of busybox: the first directory of PATH, which machines leave empty."""
_LIST_SECONDS = 10.0
ECHO = "echo"
"""The image of the echo server, although machines have a command of this name."""
CONFIGURATION = "image.json"


class ContainerImage(msgspec.Struct, frozen=True, kw_only=True):
    """What an image stands for. Without `own_root` and `entry_point`: the echo server."""

    entry_point: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    """Used if the container has neither `command` nor `args`."""
    environment: Mapping[str, str] = {}
    directory: str = ""
    layer: str = ""
    """Directory of this machine whose files lie over the machine's."""
    files: tuple[BindMount, ...] = ()
    own_root: bool = False
    """True if programs are found in the container's root, not among the machine's."""
    missing: str = ""
    """Why it is unavailable."""

    @property
    def program(self) -> str:
        """Name of the program that a container without `command` runs; empty: the echo server."""
        return self.entry_point[0] if self.entry_point else CONFIGURATION if self.own_root else ""


class _Configuration(msgspec.Struct, rename="pascal"):
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    working_dir: str = ""


_CONFIGURATIONS = msgspec.json.Decoder(_Configuration)


class Images:
    """The images that were given to a lab, and those that are programs of this machine."""

    def __init__(self, given: Sequence[str] = (), directory: Path | None = None) -> None:
        """Read `PREFIX=PATH [ARGUMENT...]`. Raises ValueError with the reason if one is unusable.

        `directory` is for files of images; without it, images can be found but not run.
        """
        self._directory = directory
        # The nodes look for images in threads of their own.
        self._lock = threading.Lock()
        self._busybox: ContainerImage | None = None
        self.given = tuple(given)
        self._by_prefix: dict[str, ContainerImage] = {}
        for text in given:
            prefix, _, rest = text.partition("=")
            words = shlex.split(rest)
            if not prefix or not words or not words[0].startswith("/"):
                raise ValueError(f"{text!r} is not PREFIX=PATH with an absolute path")
            self._by_prefix[prefix] = _read(words)

    def find(self, container: Mapping[str, Any]) -> ContainerImage:
        """Return what a container's image stands for: the longest given prefix, else a path or command, else the echo server.

        Any thread may call it. Raises OSError if the files of an image cannot be written.
        """
        name = str(container.get("image") or "")
        for prefix in sorted(self._by_prefix, key=len, reverse=True):
            if name.startswith(prefix):
                return self._by_prefix[prefix]
        if name.rpartition("/")[2].partition("@")[0].partition(":")[0] == BUSYBOX:
            with self._lock:
                self._busybox = self._busybox or _busybox(self._directory)
            return self._busybox
        if name.startswith("/"):
            if _is_program(Path(name)):
                return ContainerImage(entry_point=(name,))
            return ContainerImage(missing=f"{name} is not a program on this machine")
        if not name or name == ECHO or "/" in name or ":" in name:
            return ContainerImage()
        found = shutil.which(name)
        return ContainerImage(entry_point=(found,)) if found else ContainerImage()


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _busybox(images: Path | None) -> ContainerImage:
    """Return the image of busybox, the echo server if the machine has none. Links to it are written into a directory."""
    program = shutil.which(BUSYBOX)
    if program is None:
        return ContainerImage()
    if images is None:
        return ContainerImage(arguments=("sh",), own_root=True)
    directory = images / BUSYBOX
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(program, directory / BUSYBOX)
    for name in run([program, "--list"], timeout=_LIST_SECONDS).split():
        if not (directory / name).exists():
            (directory / name).symlink_to(BUSYBOX)
    files = (BindMount(str(directory), _BUSYBOX_AT, read_only=True),)
    return ContainerImage(arguments=("sh",), files=files, own_root=True)


def _read(words: Sequence[str]) -> ContainerImage:
    path = Path(words[0])
    if path.is_dir():
        return _of_directory(path, words[1:])
    if not _is_program(path):
        raise ValueError(f"{path} is neither a directory nor a program on this machine")
    at = f"/{path.name}"
    files = (BindMount(str(path.resolve()), at, read_only=True),)
    return ContainerImage(entry_point=(at,), arguments=tuple(words[1:]), files=files, own_root=True)


def _of_directory(path: Path, arguments: Sequence[str]) -> ContainerImage:
    configuration = _Configuration()
    try:
        if (path / CONFIGURATION).exists():
            configuration = _CONFIGURATIONS.decode((path / CONFIGURATION).read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{path / CONFIGURATION} cannot be read as an image's configuration: {error}") from error
    return ContainerImage(
        entry_point=configuration.entrypoint,
        arguments=tuple(arguments) or configuration.cmd,
        environment=dict(each.partition("=")[::2] for each in configuration.env),
        directory=configuration.working_dir,
        layer=str(path.resolve()),
        own_root=True,
    )
