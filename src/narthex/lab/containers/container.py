"""The containers of one owner: started by a ForkServer, watched by one thread."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from narthex.lab.containers.keeper import (
    KEEPER_REPORTS,
    KeeperReport,
    KeeperRequest,
    keep_entry,
    keep_pause,
    keep_program,
)
from narthex.lab.containers.program import ExecSpec, ProgramSpec
from narthex.linux.forks import ForkServer

RUN, ENTER, PAUSE = "run", "enter", "pause"
JOBS = {RUN: keep_program, ENTER: keep_entry, PAUSE: keep_pause}
"""Jobs that the ForkServer must have."""

_START_SECONDS = 60.0


class ContainerStartError(RuntimeError):
    """A program that could not be started; the message says why."""

    def __init__(self, message: str, *, missing: bool) -> None:
        """Create the error. `missing` is True if the program does not exist or is not executable."""
        super().__init__(message)
        self.missing = missing


class RunningContainer:
    """A program in a container."""

    def __init__(self, control: socket.socket, pid: int) -> None:
        """Wrap a program. `control` is the socket to its keeper."""
        self.pid = pid
        self.control = control
        self._ended = threading.Event()
        self.end = KeeperReport()

    def signal(self, number: int) -> None:
        """Send a signal, if the program still runs."""
        with contextlib.suppress(OSError):
            self.control.sendall(msgspec.json.encode(KeeperRequest(signal=number)) + b"\n")

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end, at most `timeout` seconds. Return the exit status, None if the program still runs."""
        return self.end.status if self._ended.wait(timeout) else None

    def note_end(self, report: KeeperReport) -> None:
        """Record the end. For `Containers`."""
        self.end = report
        self._ended.set()


class Containers:
    """Starts programs and watches them. `watch` is called by one thread; the other methods by any."""

    def __init__(self, forks: ForkServer) -> None:
        """Start containers by a ForkServer that has `JOBS`."""
        self._forks = forks
        self._selector = selectors.DefaultSelector()
        self._new: deque[tuple[RunningContainer, Callable[[RunningContainer], None]]] = deque()
        self._waker, self._wakened = socket.socketpair()
        self._wakened.setblocking(False)
        self._selector.register(self._wakened, selectors.EVENT_READ)
        self._stopping = False

    def run(
        self,
        program: ProgramSpec,
        files: Sequence[int] = (),
        ended: Callable[[RunningContainer], None] = lambda _: None,
    ) -> RunningContainer:
        """Start a program in namespaces of its own and return once it runs.

        The thread of `watch` calls `ended` when the program has ended. Raises ContainerStartError.
        """
        return self._begin(RUN, msgspec.json.encode(program), files, ended)

    def pause(self) -> RunningContainer:
        """Start a process that holds a PID namespace, for programs that name it. Raises ContainerStartError."""
        return self._begin(PAUSE, b"", (), lambda _: None)

    def enter(self, entry: ExecSpec, files: Sequence[int]) -> RunningContainer:
        """Start a program in the namespaces of another one. Raises ContainerStartError."""
        return self._begin(ENTER, msgspec.json.encode(entry), files, lambda _: None)

    def _begin(
        self, job: str, order: bytes, files: Sequence[int], ended: Callable[[RunningContainer], None]
    ) -> RunningContainer:
        try:
            control = self._forks.start(job, order, files)
            control.settimeout(_START_SECONDS)
            report = _next_report(control)
            control.settimeout(None)
        except OSError as error:
            raise ContainerStartError(f"cannot be started: {error}", missing=False) from error
        if report is None or report.failed or not report.pid:
            control.close()
            raise ContainerStartError(
                report.failed if report else "its keeper has ended", missing=bool(report and report.missing)
            )
        container = RunningContainer(control, report.pid)
        self._new.append((container, ended))
        self._waker.send(b"!")
        return container

    def stop(self) -> None:
        """End `watch`. Nothing may be started afterwards."""
        self._stopping = True
        self._waker.send(b"!")

    def watch(self) -> None:
        """Wait for containers to end, until `stop`."""
        while not self._stopping:
            for key, _ in self._selector.select():
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        self._wakened.recv(4096)
                    continue
                container, ended = key.data
                report = _next_report(container.control)
                if report is None or report.status is not None:
                    self._selector.unregister(container.control)
                    container.control.close()
                    container.note_end(report or KeeperReport(status=137, signal=9))
                    ended(container)
            while self._new:
                container, ended = self._new.popleft()
                self._selector.register(container.control, selectors.EVENT_READ, (container, ended))
        for key in tuple(self._selector.get_map().values()):
            if key.data is not None:
                key.data[0].control.close()
        self._selector.close()
        self._wakened.close()
        self._waker.close()


def _next_report(control: socket.socket) -> KeeperReport | None:
    """Return the keeper's next report, None if it is gone. Reports are short and sent at once."""
    line = b""
    try:
        while not line.endswith(b"\n"):
            part = control.recv(1)
            if not part:
                return None
            line += part
    except ConnectionError:
        return None
    return KEEPER_REPORTS.decode(line)
