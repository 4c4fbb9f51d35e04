"""The life of a long-running process: signals, status ports, and its replacement by a new one."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from narthex.runtime.http.server import HttpServer
from narthex.runtime.status import BindError, StatusListener, StatusServer


class StartError(RuntimeError):
    """The program cannot start on this machine. The message states the reason and what to do."""


class Runnable(Protocol):
    """The work of a process."""

    def run(self) -> None:
        """Work until `stop`."""
        ...

    def stop(self) -> None:
        """Let `run` return. Safe in a signal handler and from any thread."""
        ...


@contextmanager
def ended_by_signal(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on SIGTERM and SIGINT while the block runs. For the main thread; further signals have no effect."""

    def on_signal(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        """Begin the program's orderly end."""
        stop()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_until_signal(work: Runnable, listeners: Sequence[StatusListener] = ()) -> None:
    """Run `work` until SIGTERM or SIGINT and serve its status ports. Raises StartError if a port is taken."""
    http = HttpServer()
    try:
        if listeners:
            StatusServer(http).serve(listeners, hard_fail=True)
        with ended_by_signal(work.stop):
            work.run()
    except BindError as error:
        raise StartError(str(error)) from error
    finally:
        http.stop()


def replace_process() -> None:
    """Execute this program again with the same arguments. It keeps the process id and the namespaces."""
    sys.stderr.flush()
    os.execv(sys.executable, sys.orig_argv)
