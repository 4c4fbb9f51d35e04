"""The begin of a lab's process: forked from the one that calls `up`, and told apart from it.

Everything is loaded already, so the fork costs nothing where a fresh interpreter would cost a tenth of the whole start.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from narthex.lab.program.state import StateDirectory

if TYPE_CHECKING:
    from narthex.lab.program.lab_process import LabProcess


@contextlib.contextmanager
def block_interrupts() -> Iterator[None]:
    """An interrupt is raised at the end of this, and not in it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_process(
    directory: StateDirectory, make: Callable[[], LabProcess], remove: Callable[[StateDirectory], None]
) -> bytes:
    """Fork the lab's process and wait for its word: `ready`, or what went wrong; empty when it died."""
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    # Raised in the hooks that libraries run around a fork, an interrupt would be lost.
    with block_interrupts():
        child = os.fork()
    if child == 0:
        # Forked twice, so that the caller has no child to collect when the lab ends.
        if os.fork() == 0:
            os.close(reader)
            _run_lab(directory, make, remove, writer)
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    message = b""
    try:
        while part := os.read(reader, 65536):
            message += part
        return message
    finally:
        os.close(reader)


def create_lab_process(
    directory: StateDirectory, source: Path, nodes: int, mode: str, overlay: str, pools: Sequence[str]
) -> LabProcess:
    # Loaded after the fork: who only asks need not wait for it. First comes the process that will fork the nodes, which
    # has much to load itself.
    from narthex.lab.containers.container import JOBS
    from narthex.lab.containers.forks import ForkServer
    from narthex.lab.program.node_process import NODE, preload, run_node

    forks = ForkServer({**JOBS, NODE: run_node}, preload)
    from narthex.lab.program.lab_process import LabProcess

    return LabProcess(directory, source, nodes, mode, overlay, pools, forks)


def _run_lab(
    directory: StateDirectory, make: Callable[[], LabProcess], remove: Callable[[StateDirectory], None], writer: int
) -> NoReturn:
    """The rest of the forked process's life. It keeps the lock, which it has inherited, until its end."""
    try:
        os.setsid()
        os.chdir("/")
        null = os.open(os.devnull, os.O_RDONLY)
        log = os.open(directory.logs / "lab.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for handle, number in ((null, 0), (log, 1), (log, 2)):
            os.dup2(handle, number)
        for handle in {null, log} - {0, 1, 2}:
            os.close(handle)
        process = make()
        process.start()
        from narthex.lab.program import control_socket

        control_socket.listen(process, directory)
        # Nobody at the other end any more: whoever wanted the lab is gone, and this raises.
        os.write(writer, b"ready")
        os.close(writer)
    except BaseException as error:
        traceback.print_exc()
        remove(directory)
        with contextlib.suppress(BrokenPipeError):
            os.write(writer, str(error).encode() or type(error).__name__.encode())
        os._exit(1)
    try:
        process.run()
    finally:
        traceback.print_exc()
        os._exit(1)
