"""Runs foreign programs that may hang, start others, and print anything, so that nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from narthex.linux.run import CommandError, StartedProgram, TimeoutExpired

MOST_OUTPUT = 1 << 20
"""Bytes that a program may print: answers are some kilobytes long."""
_LOOK_SECONDS = 0.05
"""Interval at which the length of the output is looked at."""
_KILL_SECONDS = 5.0
"""Time for the supervisor to kill the program, which takes milliseconds; then it is killed itself."""

_SUPERVISOR = """
import os, select, signal, sys
program = os.fork()
if program == 0:
    os.setpgid(0, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        os.write(2, f"cannot be started: {error.strerror}".encode())
        os._exit(127)
try:
    os.setpgid(program, program)
except OSError:
    pass
select.select([0, os.pidfd_open(program)], [], [])
os.killpg(program, signal.SIGKILL)
_, status = os.waitpid(program, 0)
os._exit(os.waitstatus_to_exitcode(status) % 256)
"""
"""Runs a program in a process group of its own, and kills the group when the program or its standard input ends.

A signal of the kernel at the end of the parent would reach only the program, not those that it started.
"""


async def run_supervised(argv: Sequence[str], environment: Mapping[str, str], *, timeout: float) -> bytes:
    """Run a foreign program and return its output. Nothing of its process group is left afterwards.

    This also holds if the call is cancelled, or this process is killed. Raises CommandError if the program fails or
    prints more than `MOST_OUTPUT` bytes, TimeoutExpired after `timeout` seconds, and OSError if there are no resources.
    """
    printed, complained = os.memfd_create("printed"), os.memfd_create("complained")
    reading, lifeline = os.pipe()
    try:
        # Through a pipe, a program that leaves another one behind would keep its readers waiting.
        supervisor = subprocess.Popen(
            [sys.executable, "-ISc", _SUPERVISOR, *argv],
            stdin=reading,
            stdout=printed,
            stderr=complained,
            env=dict(environment),
            process_group=0,
        )
        try:
            await _end_of(supervisor, argv, (printed, complained), timeout)
        finally:
            _stop(supervisor, lifeline)
        if supervisor.returncode != 0:
            raise CommandError(argv[:1], supervisor.returncode, _text(complained) or _text(printed))
        return os.pread(printed, MOST_OUTPUT, 0)
    finally:
        for file in (printed, complained, reading, lifeline):
            os.close(file)


async def _end_of(
    supervisor: StartedProgram[bytes], argv: Sequence[str], outputs: tuple[int, ...], timeout: float
) -> None:
    """Wait for the end of the program. Raises CommandError and TimeoutExpired."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    process = os.pidfd_open(supervisor.pid)
    loop.add_reader(process, ended.set)
    try:
        async with asyncio.timeout(timeout):
            while not ended.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_SECONDS):
                        await ended.wait()
                if any(os.fstat(file).st_size > MOST_OUTPUT for file in outputs):
                    raise CommandError(argv[:1], 1, f"it printed more than {MOST_OUTPUT} bytes")
    except TimeoutError as error:
        raise TimeoutExpired(list(argv), timeout) from error
    finally:
        loop.remove_reader(process)
        os.close(process)


def _stop(supervisor: StartedProgram[bytes], lifeline: int) -> None:
    """Have the program killed, unless it has ended, and wait for the supervisor."""
    with suppress(BrokenPipeError):
        os.write(lifeline, b"\n")
    try:
        supervisor.wait(_KILL_SECONDS)
    except TimeoutExpired:
        supervisor.kill()
        supervisor.wait()


def _text(file: int) -> str:
    return os.pread(file, MOST_OUTPUT, 0).decode("utf-8", "replace")
