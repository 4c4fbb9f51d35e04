"""Puts the plugins' programs and a configuration in place."""

from __future__ import annotations

import importlib.util
import os
import py_compile
import sys
from pathlib import Path

import msgspec

import narthex
from narthex.apps.cni import launcher
from narthex.apps.cni.run import PLUGINS

_CONFLIST = "10-narthex.conflist"


class Installed(msgspec.Struct, frozen=True):
    """What an installation has written."""

    programs: tuple[str, ...]
    configuration: str
    """Empty when none was asked for, or one was there."""


def install(
    bin_dir: Path, conf_dir: Path | None, *, socket: str, state: str, subnet: str, name: str = "narthex"
) -> Installed:
    """Write the programs, each by a rename, so that one that runs is not disturbed; and a configuration where none of
    ours is. Raises OSError."""
    bin_dir.mkdir(parents=True, exist_ok=True)
    text = program(socket, state)
    for plugin in PLUGINS:
        _write(bin_dir / plugin, text, 0o755)
    _compile()
    written = ""
    if conf_dir is not None:
        conf_dir.mkdir(parents=True, exist_ok=True)
        path = conf_dir / _CONFLIST
        if not path.exists():
            _write(
                path, msgspec.json.format(msgspec.json.encode(conflist(name, subnet)), indent=2).decode() + "\n", 0o644
            )
            written = str(path)
    return Installed(tuple(str(bin_dir / plugin) for plugin in PLUGINS), written)


def program(socket: str, state: str) -> str:
    """The program: the launcher's own text, with the interpreter, the socket, the state and the modules' place."""
    source = Path(launcher.__file__).read_text()
    lines = []
    for line in source.splitlines():
        for start, value in (
            ("SOCKET = ", socket),
            ("STATE = ", state),
            ("PATHS: ", _paths()),
        ):
            if line.startswith(start):
                line = f"{line.partition(' = ')[0]} = {value!r}"
        lines.append(line)
    # -I and -S: neither the caller's environment nor site-packages decide what a program of root loads.
    return f"#!{sys.executable} -ISE\n" + "\n".join(lines) + "\n"


def _paths() -> list[str]:
    """Where our modules are, and those that they need for the few things that are not in the standard library."""
    return list(dict.fromkeys(str(Path(module.__file__ or "").parents[1]) for module in (narthex, msgspec)))


def conflist(name: str, subnet: str) -> dict[str, object]:
    """A configuration for a container runtime: a bridge, addresses, host ports."""
    route = "::/0" if ":" in subnet else "0.0.0.0/0"
    return {
        "cniVersion": "1.0.0",
        "name": name,
        "plugins": [
            {
                "type": "bridge",
                "bridge": "cni0",
                "isGateway": True,
                "ipMasq": True,
                "hairpinMode": True,
                "ipam": {"type": "host-local", "ranges": [[{"subnet": subnet}]], "routes": [{"dst": route}]},
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }


def _write(path: Path, text: str, mode: int) -> None:
    unfinished = path.with_name(f".{path.name}.new")
    unfinished.write_text(text)
    unfinished.chmod(mode)
    unfinished.rename(path)


def _compile() -> None:
    """Compile what the programs load, so that the first call does not have to."""
    root = Path(narthex.__file__).parent
    for path in (*(root / "cni").glob("*.py"), *(root / "host").rglob("*.py"), *(root / "apps" / "cni").glob("*.py")):
        if not os.access(importlib.util.cache_from_source(str(path)), os.R_OK):
            py_compile.compile(str(path), quiet=2)
