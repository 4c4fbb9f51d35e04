"""The life of a long-running process: signals, status ports, and its replacement by a new one."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
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
    """Call `stop` once in another thread on SIGTERM or SIGINT while the block runs. For the main thread.

    Python runs signal handlers in the main thread alone, once it wakes up. The kernel may give a signal to any thread, so a main
    thread that waits for a lock wouldn't wake up. A signal handler could also interrupt the main thread while it holds a lock
    that `stop` needs. The interpreter writes to the file descriptor of
    `signal.set_wakeup_fd` at once, whichever thread receives the signal.
    """
    heard, bell = socket.socketpair()
    bell.setblocking(False)
    listener = threading.Thread(target=_stop_at_signal, args=(heard, stop), name="signals", daemon=True)
    with heard, bell:
        listener.start()
        descriptor = signal.set_wakeup_fd(bell.fileno(), warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, _ignored) for number in _END_SIGNALS}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(descriptor)
            bell.close()
            listener.join()


def _stop_at_signal(heard: socket.socket, stop: Callable[[], None]) -> None:
    while numbers := heard.recv(64):
        if not _END_SIGNALS.isdisjoint(numbers):
            stop()
            return


def _ignored(number: int, frame: FrameType | None) -> None:
    """Handle a signal that another thread acts on."""


_END_SIGNALS = frozenset((signal.SIGTERM, signal.SIGINT))

# Signals to a forked process concern that process alone.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


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


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable garbage collection while many objects are made that have no cycles, or live long.

    Collections take a quarter of the time of a first sync of 5,000 Services, for example.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
