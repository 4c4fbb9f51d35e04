"""The image that the suite's pods run: a directory with the program agnhost and what tests expect with it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

import narthex
from narthex.lab.containers.root import is_private
from narthex.lab.program.conformance import netcat
from narthex.lab.server import certificate
from narthex.linux.run import CommandError, TimeoutExpired, run

_REGISTRY = "images.example"
"""In the place of all registries that the suite takes images from."""
_CHECK_SECONDS = 30.0
"""Time for the start of an interpreter, which takes a tenth of a second unless the machine is busy."""
_IMAGES = f"{_REGISTRY}/e2e-test-images/"
REGISTRIES = {"promoterE2eRegistry": _IMAGES.rstrip("/"), "gcRegistry": _REGISTRY}
"""What the suite reads from the file that KUBE_TEST_REPO_LIST names."""
PROGRAMS = {"curl": "curl", "dig": "bind9-dnsutils"}
"""Programs of the real image that tests run, by the package that has them. Pods see those of the machine."""


def make_image(directory: Path, agnhost: Path) -> tuple[str, ...]:
    """Fill the directory, and return what images stand for, as `lab up --image` takes it. Raises OSError and CommandError."""
    (directory / "usr" / "bin").mkdir(parents=True)
    for each in (directory, directory / "usr", directory / "usr" / "bin"):
        each.chmod(0o755)
    shutil.copy(agnhost, directory / "agnhost")
    (directory / "agnhost").chmod(0o755)
    pair = certificate.make(["localhost", "127.0.0.1", "::1"])
    (directory / "localhost.crt").write_text(pair.certificate)
    (directory / "localhost.key").write_text(pair.key)
    if python := _python_of_pods():
        nc = directory / "usr" / "bin" / "nc"
        # Without site-packages and the user's settings it starts in half the time.
        nc.write_text(f"#!{python} -IS\n{Path(netcat.__file__).read_text()}")
        nc.chmod(0o755)
        _add_dns(directory / "coredns", python)
    (directory / "image.json").write_text(json.dumps({"Entrypoint": ["/agnhost"], "Cmd": ["pause"]}))
    return (
        f"{_IMAGES}={directory}",
        f"{_IMAGES}nginx={directory} netexec --http-port=80 --udp-port=-1",
        f"{_REGISTRY}/pause={directory}",
    )


def _add_dns(at: Path, python: str) -> None:
    """Write the image's DNS server, which is `narthex dns`, unless pods do not see this package or cannot load it."""
    folders = dict.fromkeys([str(Path(narthex.__file__).parents[1]), *map(sysconfig.get_path, ("purelib", "platlib"))])
    if any(map(is_private, folders)):
        return
    path = os.pathsep.join(folders)
    try:
        run(["env", f"PYTHONPATH={path}", python, "-c", "import narthex.cli.dns"], timeout=_CHECK_SECONDS)
    except (CommandError, TimeoutExpired):
        # The interpreter that pods see has another version than that of the package's libraries.
        return
    at.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(path)} exec {shlex.quote(python)} -P -m narthex dns "$@"\n')
    at.chmod(0o755)


def missing_programs() -> list[str]:
    """Return what to install on this machine, so that all tests find their programs."""
    needed = PROGRAMS if _python_of_pods() else {**PROGRAMS, "nc": "netcat-openbsd"}
    return [package for program, package in needed.items() if shutil.which(program) is None]


def _python_of_pods() -> str:
    """Return a Python that pods see; empty if there is none. This process's own may be in a home directory."""
    found = (shutil.which("python3", path=os.defpath), sys.executable)
    return next((real for real in (str(Path(each).resolve()) for each in found if each) if not is_private(real)), "")
