"""One direction of a relayed TCP connection: moves bytes from one socket to the other until the first one ends.

Small amounts are read and written. Once a read fills the whole buffer, the kernel moves the bytes itself, by splice
through a pipe, so bulk data never enters this process. While the receiving socket is full nothing more is read, so a
slow reader slows down its writer (backpressure). Nothing blocks the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
from collections.abc import Callable

CHUNK = 64 << 10
"""Maximum bytes of one read; a full read counts as bulk data."""
PIPE_BYTES = 1 << 20
TURNS = 8
"""Maximum reads before other connections are served."""
MOST_PIPES = 128
"""Maximum number of pipes; further bulk connections copy. Each pipe takes two open files and kernel memory."""

_F_SETPIPE_SZ = 1031
_FLAGS = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK


class Pipe:
    """A kernel pipe, and the number of bytes in it."""

    __slots__ = ("held", "into", "out")

    def __init__(self) -> None:
        self.out, self.into = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.held = 0
        # More than this user may have (fs.pipe-max-size): the usual 64 KB do, too.
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.into, _F_SETPIPE_SZ, PIPE_BYTES)

    def close(self) -> None:
        """Close both ends, and discard the content."""
        os.close(self.out)
        os.close(self.into)


class Pipes:
    """A pool of pipes for connections."""

    def __init__(self, most: int = MOST_PIPES) -> None:
        self._most = most
        self._free: list[Pipe] = []
        self.lent = 0

    def borrow(self) -> Pipe | None:
        """Return an empty pipe; None if the limit is reached or no more files can be opened."""
        if self._free:
            self.lent += 1
            return self._free.pop()
        if self.lent >= self._most:
            return None
        try:
            pipe = Pipe()
        except OSError:
            return None
        self.lent += 1
        return pipe

    def give_back(self, pipe: Pipe) -> None:
        """Return a pipe to the pool; only an empty pipe is reused."""
        self.lent -= 1
        if pipe.held or len(self._free) >= self._most // 8:
            pipe.close()
        else:
            self._free.append(pipe)

    def close(self) -> None:
        """Close all unused pipes."""
        while self._free:
            self._free.pop().close()


class RelayDirection:
    """Moves bytes from `source` to `sink`.

    `ended` is called after the end of the source once everything is delivered, `broke` if either socket fails. After
    either call both sockets are released. `bulk` is called at the first read that fills the whole buffer.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        source: socket.socket,
        sink: socket.socket,
        pipes: Pipes,
        ended: Callable[[], object],
        broke: Callable[[OSError], object],
        bulk: Callable[[], object] = lambda: None,
    ) -> None:
        self._loop = loop
        self._source, self._sink = source, sink
        self._from, self._to = source.fileno(), sink.fileno()
        self._pipes = pipes
        self._pipe: Pipe | None = None
        self._rest = memoryview(b"")
        self._ended = ended
        self._broke = broke
        self._bulk = bulk
        self._active = False

    def start(self) -> None:
        """Start to move bytes."""
        self._active = True
        self._loop.add_reader(self._from, self._readable)

    def stop(self) -> None:
        """Release both sockets immediately."""
        if not self._active:
            return
        self._active = False
        self._loop.remove_reader(self._from)
        if self._waiting:
            self._loop.remove_writer(self._to)
        if self._pipe is not None:
            self._pipes.give_back(self._pipe)
            self._pipe = None

    @property
    def idle(self) -> bool:
        """True if no bytes are held here. The kernel may hold some in either socket."""
        return not self._waiting

    @property
    def _waiting(self) -> bool:
        """True if there are bytes that the sink has not accepted yet."""
        return bool(self._rest) or (self._pipe is not None and self._pipe.held > 0)

    def _readable(self) -> None:
        try:
            for _ in range(TURNS):
                if not (self._splice(self._pipe) if self._pipe is not None else self._copy()):
                    return
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(error)

    def _copy(self) -> bool:
        """Read and write once. Returns True if more can be read. Raises BlockingIOError if the source is empty."""
        data = self._source.recv(CHUNK)
        if not data:
            self._end()
            return False
        if len(data) == CHUNK:
            self._pipe = self._pipes.borrow()
            self._bulk()
        self._rest = memoryview(data)
        return self._pushed() and len(data) == CHUNK

    def _splice(self, pipe: Pipe) -> bool:
        """Move bytes once through the pipe; returns and raises like `_copy`."""
        moved = os.splice(self._from, pipe.into, PIPE_BYTES, flags=_FLAGS)
        if not moved:
            self._end()
            return False
        pipe.held += moved
        return self._pushed()

    def _pushed(self) -> bool:
        """Deliver pending bytes. Returns False if the sink is full."""
        if self._push():
            return True
        self._loop.remove_reader(self._from)
        self._loop.add_writer(self._to, self._writable)
        return False

    def _push(self) -> bool:
        try:
            while self._rest:
                self._rest = self._rest[self._sink.send(self._rest) :]
            pipe = self._pipe
            while pipe is not None and pipe.held:
                pipe.held -= os.splice(pipe.out, self._to, pipe.held, flags=_FLAGS)
        except BlockingIOError:
            return False
        return True

    def _writable(self) -> None:
        try:
            if not self._push():
                return
        except OSError as error:
            self._fail(error)
            return
        self._loop.remove_writer(self._to)
        self._loop.add_reader(self._from, self._readable)

    def _end(self) -> None:
        self.stop()
        self._ended()

    def _fail(self, error: OSError) -> None:
        # `stop` looks at what is under way to know whether the sink is watched.
        self.stop()
        self._broke(error)
