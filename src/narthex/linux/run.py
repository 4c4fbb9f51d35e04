"""Starts other programs. No other module does."""

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
from narthex.linux.namespaces import in_namespace

_PIPE_BYTES = 1 << 20
"""With the default of 64 kB, two programs alternate every few hundred lines."""

StartedProgram = subprocess.Popen
"""The handle of a long-running program."""
TimeoutExpired = subprocess.TimeoutExpired
"""Exported so that callers need not import subprocess."""


class CommandError(RuntimeError):
    """A program failed; the message has the command and its error output."""

    def __init__(self, argv: Sequence[str], status: int, said: str) -> None:
        super().__init__(f"{' '.join(argv)}: exit status {status}: {said.strip() or 'no message'}")
        self.status = status
        self.said = said


def with_package(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which Python finds the package of this process, installed or not."""
    others = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**environment, "PYTHONPATH": os.pathsep.join([str(Path(narthex.__file__).parents[1]), *others])}


def start_module(
    module: str, *arguments: str, keep: Sequence[int], namespace: str | None = None
) -> StartedProgram[bytes]:
    """Start a module of this package as a long-running program and return its handle.

    It inherits the files `keep` in addition to standard error. `namespace` is a named network namespace, None for the
    present one. Raises OSError if it cannot be started.
    """
    with in_namespace(namespace):
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=tuple(keep),
            env=with_package(os.environ),
            # Signals for the foreground process group, such as Ctrl-C, are meant for the parent.
            process_group=0,
        )


def start_program(
    argv: Sequence[str],
    *,
    namespace: str | None = None,
    output: int = subprocess.PIPE,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> StartedProgram[bytes]:
    """Start a program in a process group of its own and return its handle.

    Its standard output, which includes errors, is a pipe, or the file `output`. `namespace` is a named network namespace;
    None for it, `environment`, and `directory` are those of this process. Raises OSError if it cannot be started.
    """
    with in_namespace(namespace):
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=directory,
            process_group=0,
        )


@contextmanager
def _file_of(text: str) -> Iterator[int]:
    """Return a file in memory with this content.

    Through a pipe, ten megabytes take as long as some programs need for them.
    """
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
    """Run a program without a shell and return its output.

    `namespace` is a named network namespace, None for the present one. Raises CommandError if the program fails,
    FileNotFoundError if it is not installed, and subprocess.TimeoutExpired after `timeout` seconds.
    """
    with in_namespace(namespace), _file_of(stdin) as file:
        done = subprocess.run(argv, stdin=file, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode != 0:
        raise CommandError(argv, done.returncode, done.stderr or done.stdout)
    return done.stdout


def run_bytes(argv: Sequence[str], *, stdin: str = "", timeout: float = 300) -> bytes:
    """Run a program whose output is no text; otherwise as `run`."""
    with _file_of(stdin) as file:
        done = subprocess.run(argv, stdin=file, capture_output=True, timeout=timeout, check=False)
    if done.returncode != 0:
        raise CommandError(argv, done.returncode, (done.stderr or done.stdout).decode(errors="replace"))
    return done.stdout


def feed(argv: Sequence[str], blocks: Iterable[str], *, namespace: str | None = None, timeout: float = 300) -> str:
    """Run a program with a long input, whose blocks are computed while it reads; return its output.

    Raises what `run` raises, and the exceptions of the blocks: the program is then ended before the end of its input.
    """
    with _memory("printed") as printed, _memory("complained") as complained:
        with in_namespace(namespace):
            program = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=printed, stderr=complained)
        late = threading.Event()

        def end() -> None:
            """Kill the program and note that it took too long."""
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
    """Write the input. A program that ignores the rest reports the reason by its status."""
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
    """Return a file in memory; unlike a pipe, it needs no reader while it is written."""
    file = os.memfd_create(name)
    try:
        yield file
    finally:
        os.close(file)


def _text(file: int) -> str:
    return os.pread(file, os.fstat(file).st_size, 0).decode("utf-8", "replace")
