"""A Python of their own for the plugins: a directory with an interpreter and all that it loads, for nodes that have no Python.

    DIRECTORY/bin/python3             the interpreter
              lib/                    the dynamic loader and the libraries of the interpreter and its modules
              lib/python3.N/          the standard library

It is started by its own loader, so that it depends on nothing of the node but the kernel.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path

from narthex.linux.run import CommandError, run

_LEFT_OUT = (
    "__phello__", "config-*", "curses", "dbm", "distutils", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages",
    "dist-packages", "sqlite3", "test", "tests", "tkinter", "turtle*", "unittest", "venv", "wsgiref", "xml", "xmlrpc", "*.a", "*.pyo",
)  # fmt: skip
"""What plugins never load, half of the standard library by size."""


class InterpreterError(OSError):
    """The running interpreter cannot be copied; the message says why."""


def copy_interpreter(directory: Path) -> tuple[str, ...]:
    """Copy the running interpreter into a new directory, and return the start of the command that runs it there.

    Raises InterpreterError if it cannot be copied, and OSError.
    """
    executable = Path(sys.executable).resolve()
    library = Path(sysconfig.get_path("stdlib"))
    place = directory / "lib" / library.name
    shutil.copytree(library, place, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    (directory / "bin").mkdir()
    shutil.copy2(executable, directory / "bin" / "python3")
    modules = (place / "lib-dynload").glob("*.so")
    loaders = set()
    for file in (executable, *modules):
        for path in _libraries(file):
            if path.name.startswith("ld-"):
                loaders.add(path.name)
            if not (directory / "lib" / path.name).exists():
                shutil.copy2(path, directory / "lib" / path.name)
    if len(loaders) != 1:
        raise InterpreterError(
            f"{executable} is not linked dynamically by one loader, but by {sorted(loaders)}: use Debian's Python"
        )
    (loader,) = loaders
    libraries = f"{directory}/lib"
    return f"{libraries}/{loader}", "--inhibit-cache", "--library-path", libraries, f"{directory}/bin/python3"


def _libraries(file: Path) -> list[Path]:
    """Return the dynamic loader and libraries of a program or module. Raises InterpreterError."""
    try:
        listed = run(["ldd", str(file)])
    except (CommandError, OSError) as error:
        raise InterpreterError(f"the libraries of {file} are not known: {error}") from None
    found = []
    for line in listed.splitlines():
        words = line.replace("=>", " ").split()
        paths = [word for word in words if word.startswith("/")]
        if "not found" in line:
            raise InterpreterError(f"a library of {file} is missing: {line.strip()}")
        if paths:
            found.append(Path(paths[-1]))
    return found
