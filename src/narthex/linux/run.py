"""The only place that starts other programs."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import narthex
from narthex.linux import namespaces as netns

_PIPE_BYTES = 1 << 20
"""With the usual 64 kB two programs take turns at every few hundred lines."""

StartedProgram = subprocess.Popen
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


def start_module(
    module: str, *arguments: str, keep: Sequence[int], namespace: str | None = None
) -> StartedProgram[bytes]:
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


def start_program(argv: Sequence[str], *, namespace: str | None = None) -> StartedProgram[bytes]:
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


def feed(argv: Sequence[str], blocks: Iterable[str], *, namespace: str | None = None, timeout: float = 300) -> str:
    """Run a program that reads a long text, whose blocks are made while it reads; returns what it printed.

    Raises what `run` raises, and what the making of a block raises: then the program is ended before the end of its input.
    """
    with _memory("printed") as printed, _memory("complained") as complained:
        with netns.entered(namespace):
            program = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=printed, stderr=complained)
        late = threading.Event()

        def end() -> None:
            late.set()
            program.kill()

        watch = threading.Timer(timeout, end)
        watch.daemon = True
        watch.start()
        try:
            _write(program, blocks)
            status = program.wait()
        except BaseException:
            program.kill()
            program.wait()
            raise
        finally:
            watch.cancel()
        if late.is_set():
            raise TimeoutExpired(argv, timeout)
        if status != 0:
            raise CommandError(argv, status, _text(complained) or _text(printed))
        return _text(printed)


def _write(program: StartedProgram[bytes], blocks: Iterable[str]) -> None:
    """Give it its input. One that does not want the rest says by its status why."""
    pipe = program.stdin
    if pipe is None:
        raise ValueError("the program has no pipe for its input")
    with suppress(OSError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    with suppress(BrokenPipeError), pipe:
        for block in blocks:
            pipe.write(block.encode())
            pipe.flush()


@contextmanager
def _memory(name: str) -> Iterator[int]:
    """A file in memory: unlike a pipe, nobody has to read it while it is written."""
    file = os.memfd_create(name)
    try:
        yield file
    finally:
        os.close(file)


def _text(file: int) -> str:
    return os.pread(file, os.fstat(file).st_size, 0).decode("utf-8", "replace")


class ApplyError(RuntimeError):
    """The kernel or its tool refused a change."""
