"""The standard files of a container with `stdin` or `tty`, which clients can attach to.

A thread writes the container's output to its log and to all attached clients. As with other runtimes, a client that does not read
makes the container wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

from narthex.lab.containers.log import LogWriter

_PIECE = 32 * 1024
_REPLAYED_BYTES = 32 * 1024
"""Output before the first client that it gets; less than a pipe holds, so that writing it does not wait."""


class Console:
    """The files of one run of a container."""

    def __init__(self, log: Path, *, stdin: bool, once: bool, tty: bool) -> None:
        """Open the files. `once`: the end of the first client's input is that of the container's. Raises OSError."""
        self.tty = tty
        self._once = once
        self._log = LogWriter(str(log))
        self._clients: dict[str, list[int]] = {"stdout": [], "stderr": []}
        self._early = {"stdout": b"", "stderr": b""} if once else {}
        """Output that the first client is to get as well: `kubectl run -i` attaches after the start."""
        self._lock = threading.Lock()
        self._input: int | None
        if tty:
            master, slave = os.openpty()
            self.files: tuple[int, ...] = (slave, slave, slave)
            self._input, self._outputs = master, {master: "stdout"}
        else:
            (its_in, to), (out, its_out), (err, its_err) = os.pipe(), os.pipe(), os.pipe()
            self.files = (its_in, its_out, its_err)
            self._input, self._outputs = to, {out: "stdout", err: "stderr"}
            if not stdin:
                os.close(to)
                self._input = None

    def start(self) -> None:
        """Close the container's ends of the files, which it has by now, and begin to read."""
        self._release()
        threading.Thread(target=self._pump, name="console", daemon=True).start()

    def discard(self) -> None:
        """Close all files of a container that could not be started."""
        self._release()
        self._end()

    def _release(self) -> None:
        for handle in set(self.files):
            os.close(handle)
        self.files = ()

    def attach(self, stream: str) -> int:
        """Return the end of a pipe that carries a stream of the container from now on.

        The first client of a container with `stdinOnce` also gets what the container wrote before.
        """
        reader, writer = os.pipe()
        with self._lock:
            os.write(writer, self._early.pop(stream, b""))
            if stream in self._outputs.values():
                self._clients[stream].append(writer)
            else:
                os.close(writer)
        return reader

    def forget_early(self) -> None:
        """Forget the output so far: the first client has it from the log."""
        with self._lock:
            self._early = dict.fromkeys(self._early, b"")

    def input(self) -> int | None:
        """Return a file for the container's input, None if it has none any more."""
        with self._lock:
            if self._input is None:
                return None
            handle = os.dup(self._input)
            if self._once and not self.tty:
                os.close(self._input)
                self._input = None
            return handle

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of the terminal."""
        with self._lock, contextlib.suppress(OSError):
            if self.tty and self._input is not None:
                fcntl.ioctl(self._input, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _pump(self) -> None:
        for stream, data in self._output():
            with contextlib.suppress(OSError):
                self._log.take(stream, data)
            with self._lock:
                if stream in self._early:
                    self._early[stream] = (self._early[stream] + data)[-_REPLAYED_BYTES:]
                clients = tuple(self._clients[stream])
            for client in clients:
                self._pass_on(stream, client, data)
        self._end()

    def _end(self) -> None:
        self._log.close()
        with self._lock:
            for client in (each for clients in self._clients.values() for each in clients):
                os.close(client)
            self._clients = {"stdout": [], "stderr": []}
            # From now on there is nothing to attach to.
            handles = {*self._outputs, *([self._input] if self._input is not None else [])}
            self._outputs, self._input = {}, None
        for handle in handles:
            os.close(handle)

    def _output(self) -> Iterator[tuple[str, bytes]]:
        """Yield what the container writes until it has closed its files."""
        poll, left = select.poll(), dict(self._outputs)
        for handle in left:
            poll.register(handle, select.POLLIN)
        while left:
            for handle, _ in poll.poll():
                # Reading a terminal that no process has open any more fails with EIO.
                data = b""
                with contextlib.suppress(OSError):
                    data = os.read(handle, _PIECE)
                if data:
                    yield left[handle], data
                else:
                    poll.unregister(handle)
                    del left[handle]

    def _pass_on(self, stream: str, client: int, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(client, data) :]
        except OSError:
            # The client is gone.
            with self._lock:
                self._clients[stream].remove(client)
            os.close(client)
