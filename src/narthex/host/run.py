"""The only place that starts other programs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import narthex
from narthex.host import netns

Started = subprocess.Popen
"""The handle of a program that stays."""
TimeoutExpired = subprocess.TimeoutExpired
"""For those who catch it: nobody else needs the module that it comes from."""


class CommandError(RuntimeError):
    """A program ended with an error; the message holds the command and what it said."""

    def __init__(self, argv: Sequence[str], status: int, said: str) -> None:
        super().__init__(f"{' '.join(argv)}: exit status {status}: {said.strip() or 'no message'}")
        self.argv = tuple(argv)
        self.status = status
        self.said = said


def with_package(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which a Python finds the package that this process runs from, installed or not."""
    others = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**environment, "PYTHONPATH": os.pathsep.join([str(Path(narthex.__file__).parents[1]), *others])}


def start_module(module: str, *arguments: str, keep: Sequence[int], namespace: str | None = None) -> Started[bytes]:
    """Start a module of ours as a program that stays, and return its handle. `keep` are the files that it inherits besides
    the standard error stream.

    `namespace` is a named network namespace, None for the present one. Raises OSError when it cannot be started.
    """
    with netns.entered(namespace):
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=tuple(keep),
            env=with_package(os.environ),
            # Signals for the foreground group, as Ctrl-C, are for whoever started it.
            process_group=0,
        )


def start_program(argv: Sequence[str], *, namespace: str | None = None) -> Started[bytes]:
    """Start a program that tells what it sees, and return its handle: its standard output, with what it says of errors
    among it, is a pipe.

    `namespace` is a named network namespace, None for the present one. Raises OSError when it cannot be started.
    """
    with netns.entered(namespace):
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )


@contextmanager
def _file_of(text: str) -> Iterator[int]:
    """A file that holds it, in memory: through a pipe ten megabytes take as long as some programs do with them."""
    if not text:
        yield subprocess.DEVNULL
        return
    file = os.memfd_create("input")
    try:
        with open(file, "w", encoding="utf-8", closefd=False) as writer:
            writer.write(text)
        os.lseek(file, 0, os.SEEK_SET)
        yield file
    finally:
        os.close(file)


def run(argv: Sequence[str], *, stdin: str = "", namespace: str | None = None, timeout: float = 300) -> str:
    """Run a program without a shell and return what it printed.

    `namespace` is a named network namespace, None for the present one. Raises CommandError when the program fails,
    FileNotFoundError when it is not installed, subprocess.TimeoutExpired after `timeout` seconds.
    """
    with netns.entered(namespace), _file_of(stdin) as file:
        done = subprocess.run(argv, stdin=file, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode != 0:
        raise CommandError(argv, done.returncode, done.stderr or done.stdout)
    return done.stdout
