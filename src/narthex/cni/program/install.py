"""Installation of the plugins' programs, the code that they load, and a configuration."""

from __future__ import annotations

import hashlib
import importlib.util
import marshal
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import msgspec

import narthex
from narthex.cni.program import launcher, start
from narthex.cni.program.interpreter import copy_interpreter
from narthex.cni.program.run import PLUGINS
from narthex.runtime.files import replace_file

BUNDLE, LAUNCHER = ".narthex-plugins", ".narthex-launcher"
"""Next to the programs; runtimes ignore such names."""
PYTHONS = ".narthex-python"
"""Next to the programs: the interpreters of self-contained ones, each in a directory named by its version."""
_MAGIC = importlib.util.MAGIC_NUMBER
BUNDLED = (
    "narthex",
    "narthex.cni",
    *(f"narthex.cni.{name}" for name in ("errors", "fields", "json", "keys", "plan", "request", "result")),
    "narthex.cni.plugins",
    *(f"narthex.cni.plugins.{name}" for name in ("bridge", "host_local", "iptables", "masquerade", "pod")),
    *(f"narthex.cni.plugins.{name}" for name in ("portmap", "ptp")),
    "narthex.cni.kernel",
    *(f"narthex.cni.kernel.{name}" for name in ("files", "locks", "records", "tables")),
    "narthex.cni.program",
    *(f"narthex.cni.program.{name}" for name in ("delegate", "elements", "flannel", "ipam", "iptables", "masquerade")),
    *(f"narthex.cni.program.{name}" for name in ("node", "pod_interfaces", "portmap", "run")),
    "narthex.linux",
    *(
        f"narthex.linux.{name}"
        for name in ("failpoints", "libnftables", "namespaces", "netlink", "nfnetlink", "rtnetlink", "run", "setns")
    ),
    "narthex.model",
    *(f"narthex.model.{name}" for name in ("links", "values")),
    *(f"narthex.netfilter{name}" for name in ("", ".netlink", ".netlink.attributes")),
)
"""Modules that the programs can load without an agent."""
_CONFLIST = "10-narthex.conflist"


class Installed(msgspec.Struct, frozen=True):
    """The written files."""

    programs: tuple[str, ...]
    configuration: str
    """Empty if none was requested, or one existed."""


def install(
    bin_dir: Path,
    conf_dir: Path | None,
    *,
    socket: str,
    state: str,
    subnets: Sequence[str] = (),
    masquerade: bool = False,
    name: str = "narthex",
    self_contained: bool = False,
    configuration: bytes = b"",
) -> Installed:
    """Write the programs, atomically so that running ones are not disturbed, and a configuration unless one exists.

    `subnets` are the pods' networks on this node, one per IP family. `self_contained` brings an interpreter along, for nodes that
    have no Python. `configuration` is written in the place of a bridge with addresses of `subnets`, and replaces what an earlier
    installation has written. Raises OSError.
    """
    bin_dir.mkdir(parents=True, exist_ok=True)
    at = bin_dir.absolute()
    text = launcher_text(socket, state, str(at / BUNDLE))
    replace_file(at / BUNDLE, bundle(), 0o644)
    replace_file(at / f"{LAUNCHER}.py", text.encode(), 0o644)
    replace_file(at / LAUNCHER, _MAGIC + marshal.dumps(compile(text, f"{at / LAUNCHER}.py", "exec")), 0o644)
    python = _own_interpreter(at / PYTHONS) if self_contained else ""
    for plugin in PLUGINS:
        text = program(str(at / LAUNCHER))
        if python:
            replace_file(at / PYTHONS / plugin, text.encode(), 0o644)
            text = f'#!/bin/sh\nexec {python} -ISE {shlex.quote(str(at / PYTHONS / plugin))} "$@"\n'
        replace_file(at / plugin, text.encode(), 0o755)
    written = ""
    if conf_dir is not None:
        conf_dir.mkdir(parents=True, exist_ok=True)
        path = conf_dir / _CONFLIST
        if configuration or not path.exists():
            made = msgspec.json.encode(conflist(name, subnets, masquerade))
            replace_file(path, configuration or msgspec.json.format(made, indent=2) + b"\n", 0o644)
            written = str(path)
    return Installed(tuple(str(bin_dir / plugin) for plugin in PLUGINS), written)


def uninstall(bin_dir: Path, conf_dir: Path | None) -> tuple[str, ...]:
    """Remove what `install` has written, and return it. Programs of other origin stay. Raises OSError."""
    own = [path for name in PLUGINS if (path := bin_dir / name).is_file() and b"/.narthex-" in path.read_bytes()]
    found = [*own, *(bin_dir / each for each in (BUNDLE, LAUNCHER, f"{LAUNCHER}.py"))]
    if conf_dir is not None:
        # First: without a configuration the node is not ready, and no pod is started.
        found.insert(0, conf_dir / _CONFLIST)
    gone = [path for path in found if path.exists()]
    for path in gone:
        path.unlink()
    shutil.rmtree(bin_dir / PYTHONS, ignore_errors=True)
    return tuple(map(str, gone))


def _own_interpreter(directory: Path) -> str:
    """Return the start of the shell command that runs an interpreter in `directory`, copied unless it is there. Raises OSError."""
    version = hashlib.sha256(f"{narthex.__version__} {sys.version}".encode()).hexdigest()[:12]
    place, complete = directory / version, directory / version / "command"
    if not complete.exists():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        complete.write_text(shlex.join(copy_interpreter(place)))
    for other in directory.iterdir():
        if other.is_dir() and other != place:
            shutil.rmtree(other, ignore_errors=True)
    return complete.read_text()


def launcher_text(socket: str, state: str, bundle: str) -> str:
    """Return the launcher's source with socket, state directory, and module paths."""
    return _filled(launcher, {"SOCKET = ": socket, "STATE = ": state, "PATHS: ": _paths(), "BUNDLE = ": bundle})


def program(launcher: str) -> str:
    """Return the program's source with interpreter and launcher path."""
    # -I and -S: neither the caller's environment nor site-packages influence what a program that runs as root loads.
    return f"#!{sys.executable} -ISE\n" + _filled(start, {"LAUNCHER = ": launcher})


def _filled(module: ModuleType, values: Mapping[str, object]) -> str:
    """Return a module's source with other values for some assignments, selected by the start of their lines."""
    lines = []
    for line in Path(module.__file__ or "").read_text().splitlines():
        for beginning, value in values.items():
            if line.startswith(beginning):
                line = f"{line.partition(' = ')[0]} = {value!r}"
        lines.append(line)
    return "\n".join(lines) + "\n"


@lru_cache(maxsize=1)
def bundle() -> bytes:
    """Return the code of the modules for this interpreter. Raises OSError.

    Its magic number, then, marshalled, for each name the directory if it is a package, and its marshalled code: not all modules
    are loaded each time.
    """
    modules = {}
    for name in BUNDLED:
        found = importlib.util.find_spec(name)
        assert found is not None and found.origin is not None, name
        code = SourceFileLoader(name, found.origin).get_code(name)
        assert code is not None, name
        folder = str(Path(found.origin).parent) if found.submodule_search_locations is not None else None
        modules[name] = folder, marshal.dumps(code)
    return _MAGIC + marshal.dumps(modules)


def _paths() -> list[str]:
    """Return the directories of our modules and of those that they need beyond the standard library."""
    return list(dict.fromkeys(str(Path(module.__file__ or "").parents[1]) for module in (narthex, msgspec)))


def conflist(name: str, subnets: Sequence[str], masquerade: bool) -> dict[str, object]:
    """Return a configuration for a container runtime: a bridge with addresses and host ports.

    The plugin `bridge` knows only this node's subnets. With `masquerade`, packets to pods of other nodes get the node's address, too.
    """
    routes = [{"dst": "::/0" if ":" in subnet else "0.0.0.0/0"} for subnet in subnets]
    return {
        "cniVersion": "1.0.0",
        "name": name,
        "plugins": [
            {
                "type": "bridge",
                "bridge": "cni0",
                "isGateway": True,
                "ipMasq": masquerade,
                "hairpinMode": True,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": subnet}] for subnet in subnets],
                    "routes": routes,
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }
