"""A module of this package as a child process, and the messages to and from it: a length, then MessagePack."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import socket
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from narthex.linux.forks import ForkedProcess, ForkServer, report_start
from narthex.linux.namespaces import in_namespace
from narthex.linux.run import StartedProgram, TimeoutExpired, start_module

T = TypeVar("T")

LENGTH_BYTES = 4


def frame(message: msgspec.Struct) -> bytes:
    """Return a message as it is sent."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def receive(sock: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Wait for a message. Raises EOFError if the other side has closed, TimeoutError after the socket's timeout."""
    return decoder.decode(_exactly(sock, int.from_bytes(_exactly(sock, LENGTH_BYTES), "big")))


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise EOFError("the other side has closed")
        data += part
    return bytes(data)


class _ModuleStart(msgspec.Struct, frozen=True):
    """Parameters of a forked module."""

    module: str
    arguments: tuple[str, ...]
    files: tuple[int, ...]
    """Numbers of the files that come with the order."""
    namespace: str | None


_STARTS = msgspec.json.Decoder(_ModuleStart)
_MODULE = "module"
_forks: ForkServer | None = None


def preload(*modules: str) -> None:
    """Load modules in a process that ModuleProcess forks from now on: an interpreter takes a tenth of a second to load them.

    Called by a process with one thread. Without that process, modules start in an interpreter of their own.
    """

    def load() -> None:
        """Import the modules."""
        for each in modules:
            importlib.import_module(each)

    global _forks
    _forks = ForkServer({_MODULE: _run_forked}, load)


def _run_forked(control: socket.socket, order: bytes, files: Sequence[int]) -> None:
    """Run a module in a forked process (a job of `ForkServer`)."""
    start = _STARTS.decode(order)
    os.setpgid(0, 0)
    report_start(control)
    control.close()
    # A number may be that of another one of the files: copies first.
    copies = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, max(start.files) + 1) for file in files]
    for copy, number in zip(copies, start.files, strict=True):
        os.dup2(copy, number, inheritable=False)
        os.close(copy)
    with in_namespace(start.namespace):
        importlib.import_module(start.module).main(list(start.arguments))


def _start(
    module: str, arguments: tuple[str, ...], files: Sequence[int], namespace: str | None
) -> StartedProgram[bytes] | ForkedProcess:
    if _forks is not None:
        order = _ModuleStart(module, arguments, tuple(files), namespace)
        with contextlib.suppress(OSError):
            return ForkedProcess(_forks, _MODULE, msgspec.json.encode(order), files)
    return start_module(module, *arguments, keep=files, namespace=namespace)


class ModuleProcess:
    """The process ends when this end of the socket closes, in whatever way."""

    def __init__(
        self, module: str, *arguments: str, timeout: float, keep: Sequence[int] = (), namespace: str | None = None
    ) -> None:
        """Start the function `main` of a module with the number of its socket and `arguments`.

        It inherits the files `keep` in addition to standard error. `namespace` is a named network namespace, None for that
        of the calling thread, or, if modules are preloaded, of the thread that did so. `timeout` is in seconds, for each
        message. Raises OSError if it cannot be started.
        """
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(timeout)
        with theirs:
            files = (theirs.fileno(), *keep)
            self._program = _start(module, (str(files[0]), *arguments), files, namespace)

    @property
    def pid(self) -> int:
        """Process ID."""
        return self._program.pid

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while the process runs."""
        return self._program.poll()

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self.status is None

    def send(self, *messages: msgspec.Struct) -> None:
        """Send messages. Raises OSError, also after the timeout."""
        self._socket.sendall(b"".join(map(frame, messages)))

    def receive(self, decoder: msgspec.msgpack.Decoder[T]) -> T:
        """Wait for a message. Raises EOFError if the process has ended, and OSError, also after the timeout."""
        return receive(self._socket, decoder)

    def close(self, patience: float) -> None:
        """Close the socket, which ends the process; kill it if it runs on after so many seconds."""
        self._socket.close()
        try:
            self._program.wait(patience)
        except TimeoutExpired:
            self._program.kill()
            self._program.wait()
