"""Containers of one owner: begun by `ForkServer`, watched by one thread, told of by calls."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from narthex.lab.containers.forks import ForkServer
from narthex.lab.containers.keeper import KeeperReport, KeeperRequest, keep_entry, keep_program
from narthex.lab.containers.program import ExecSpec, ProgramSpec

RUN, ENTER = "run", "enter"
JOBS = {RUN: keep_program, ENTER: keep_entry}
"""What a `ForkServer` must know."""

_START_SECONDS = 60.0


class ContainerStartError(RuntimeError):
    """A program could not be started; the message says why."""

    def __init__(self, message: str, *, missing: bool) -> None:
        super().__init__(message)
        self.missing = missing
        """There is no such program, or it cannot be executed."""


class RunningContainer:
    """A program that runs."""

    def __init__(self, control: socket.socket, pid: int) -> None:
        self.pid = pid
        self.control = control
        self._ended = threading.Event()
        self.end = KeeperReport()

    def signal(self, number: int) -> None:
        """Send a signal to it; nothing happens when it has ended."""
        with contextlib.suppress(OSError):
            self.control.sendall(msgspec.json.encode(KeeperRequest(signal=number)) + b"\n")

    def wait(self, timeout: float | None = None) -> int | None:
        """Its exit status when it has ended, None when it goes on after so many seconds."""
        return self.end.status if self._ended.wait(timeout) else None

    def note_end(self, told: KeeperReport) -> None:
        """For `Containers`."""
        self.end = told
        self._ended.set()


class Containers:
    """Starts programs and watches them. `watch` belongs to one thread, the rest is safe from any."""

    def __init__(self, forks: ForkServer) -> None:
        self._forks = forks
        self._selector = selectors.DefaultSelector()
        self._new: deque[tuple[RunningContainer, Callable[[RunningContainer], None]]] = deque()
        self._doorbell, self._door = socket.socketpair()
        self._door.setblocking(False)
        self._selector.register(self._door, selectors.EVENT_READ)
        self._stopping = False

    def run(
        self,
        program: ProgramSpec,
        files: Sequence[int] = (),
        ended: Callable[[RunningContainer], None] = lambda _: None,
    ) -> RunningContainer:
        """Start a program in namespaces of its own; returns when it runs. `ended` is called once it has, by the thread of
        `watch`. Raises StartError."""
        return self._begin(RUN, msgspec.json.encode(program), files, ended)

    def enter(self, entry: ExecSpec, files: Sequence[int]) -> RunningContainer:
        """Start a program beside another one. Raises StartError."""
        return self._begin(ENTER, msgspec.json.encode(entry), files, lambda _: None)

    def _begin(
        self, job: str, order: bytes, files: Sequence[int], ended: Callable[[RunningContainer], None]
    ) -> RunningContainer:
        try:
            control = self._forks.start(job, order, files)
            control.settimeout(_START_SECONDS)
            told = _told(control)
            control.settimeout(None)
        except OSError as error:
            raise ContainerStartError(f"cannot be started: {error}", missing=False) from error
        if told is None or told.failed or not told.pid:
            control.close()
            raise ContainerStartError(
                told.failed if told else "its keeper has ended", missing=bool(told and told.missing)
            )
        container = RunningContainer(control, told.pid)
        self._new.append((container, ended))
        self._doorbell.send(b"!")
        return container

    def stop(self) -> None:
        """End `watch`, when nothing is begun any more."""
        self._stopping = True
        self._doorbell.send(b"!")

    def watch(self) -> None:
        """See containers end, until `stop`."""
        while not self._stopping:
            for key, _ in self._selector.select():
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        self._door.recv(4096)
                    continue
                container, ended = key.data
                told = _told(container.control)
                if told is None or told.status is not None:
                    self._selector.unregister(container.control)
                    container.control.close()
                    container.note_end(told or KeeperReport(status=137, signal=9))
                    ended(container)
            while self._new:
                container, ended = self._new.popleft()
                self._selector.register(container.control, selectors.EVENT_READ, (container, ended))
        for key in tuple(self._selector.get_map().values()):
            if key.data is not None:
                key.data[0].control.close()
        self._selector.close()
        self._door.close()
        self._doorbell.close()


def _told(control: socket.socket) -> KeeperReport | None:
    """The next line; None when the keeper is gone. Lines are short and are sent at once."""
    line = b""
    try:
        while not line.endswith(b"\n"):
            part = control.recv(1)
            if not part:
                return None
            line += part
    except ConnectionError:
        return None
    return msgspec.json.decode(line, type=KeeperReport)
