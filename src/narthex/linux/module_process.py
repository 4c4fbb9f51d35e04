"""A module of this package as a child process, and the messages to and from it: a length, then MessagePack."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import TypeVar

import msgspec

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


class ModuleProcess:
    """The process ends when this end of the socket closes, in whatever way."""

    def __init__(
        self, module: str, *arguments: str, timeout: float, keep: Sequence[int] = (), namespace: str | None = None
    ) -> None:
        """Start a module with the number of its socket and `arguments`; see `start_module` for the rest.

        `timeout` is in seconds, for each message. Raises OSError if it cannot be started.
        """
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(timeout)
        with theirs:
            self.program: StartedProgram[bytes] = start_module(
                module, str(theirs.fileno()), *arguments, keep=[theirs.fileno(), *keep], namespace=namespace
            )

    @property
    def pid(self) -> int:
        """Process ID."""
        return self.program.pid

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self.program.poll() is None

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
            self.program.wait(patience)
        except TimeoutExpired:
            self.program.kill()
            self.program.wait()
