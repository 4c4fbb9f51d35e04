"""Start of a lab's process: forked from `lab up`, then detached.

All modules are loaded already, so a fork is free; a new interpreter would take a tenth of the whole start.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

from narthex.lab.program.state import StateDirectory

if TYPE_CHECKING:
    from narthex.lab.program.lab_process import LabProcess
    from narthex.lab.program.options import LabOptions

Progress = Callable[[str], object]
_SEPARATOR = b"\x1e"
"""Ends each sentence about the start; the report follows the last one."""


@contextlib.contextmanager
def block_interrupts() -> Iterator[None]:
    """Defer SIGINT until the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_process(
    directory: StateDirectory,
    make: Callable[[Progress], LabProcess],
    remove: Callable[[StateDirectory], None],
    progress: Progress,
) -> bytes:
    """Fork the lab's process and return its report: `ready`, or an error message; empty if it died.

    Args:
        directory: The lab's files, whose lock the process inherits.
        make: Creates the lab in the new process.
        remove: Removes the lab's remains after an error.
        progress: Called with sentences that tell how far a long start is.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    # Libraries' fork hooks would swallow a KeyboardInterrupt.
    with block_interrupts():
        child = os.fork()
    if child == 0:
        # Fork twice, so that the caller has no child to reap.
        if os.fork() == 0:
            os.close(reader)
            _run_lab(directory, make, remove, writer)
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    message = b""
    try:
        while part := os.read(reader, 65536):
            *reported, message = (message + part).split(_SEPARATOR)
            for each in reported:
                progress(each.decode())
        return message
    finally:
        os.close(reader)


def create_lab_process(directory: StateDirectory, options: LabOptions, progress: Progress) -> LabProcess:
    """Create a lab in its new process. The fork server is created first, because its preloading takes longest."""
    # Imported after the fork, so that other commands start faster.
    from narthex.lab.program.node_process import create_fork_server

    forks = create_fork_server()
    from narthex.lab.kubelet.program.images import Images
    from narthex.lab.program.lab_process import LabProcess

    return LabProcess(directory, options, Images(options.images, directory.images), forks, progress)


class StartProgress:
    """Reports to the caller of `lab up` how far the start is, until it ends.

    Later sentences, such as those of an API server that comes back after a fault, go to the log.
    """

    def __init__(self, writer: int) -> None:
        """Write to a pipe, which `end` closes."""
        self._writer = writer
        self._ended = False
        self._lock = threading.Lock()

    def __call__(self, text: str) -> None:
        """Send a sentence. Raises BrokenPipeError if the caller is gone."""
        with self._lock:
            if self._ended:
                print(text, flush=True)
            else:
                os.write(self._writer, text.encode() + _SEPARATOR)

    def end(self, result: bytes) -> None:
        """Send the result, and close the pipe."""
        with self._lock:
            self._ended = True
            os.write(self._writer, result)
            os.close(self._writer)


def _run_lab(
    directory: StateDirectory,
    make: Callable[[Progress], LabProcess],
    remove: Callable[[StateDirectory], None],
    writer: int,
) -> NoReturn:
    """Detach from the caller, start the lab, report the result, and run until the process is killed."""
    try:
        os.setsid()
        os.chdir("/")
        from narthex.lab.program.node_process import redirect_to_log

        redirect_to_log(directory.logs / "lab.log")
        progress = StartProgress(writer)
        process = make(progress)
        process.start()
        from narthex.lab.program import control_socket

        control_socket.listen(process, directory)
        progress.end(b"ready")
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
