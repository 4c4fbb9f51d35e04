"""An API server for tests: real HTTP over loopback, lists and watches as kube-apiserver has them, faults on request.

    with ApiServer() as server:
        server.put(service("shop/web", "10.110.0.1"))
        ... http://127.0.0.1:PORT is server.url

It knows the kinds that nodes and controllers read and write (`apiserver_data.KINDS`), each at its own path; discovery,
admission and all that goes on behind an API are not here. It runs in a thread of its own.
"""

from __future__ import annotations

import asyncio
import gzip
import ssl
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

from narthex.lab.encode import encode
from narthex.model.objects import AnyObject
from narthex.testing.apiserver_data import Data
from narthex.testing.apiserver_faults import Drop, Fault, Faults, Garble, Refuse, Seen, Silence
from narthex.testing.apiserver_paths import place
from narthex.testing.apiserver_protocol import PRESENT, Abilities, Cursor, Whole, answer, status
from narthex.testing.apiserver_writes import read_one, write

T = TypeVar("T")

_LEAST_GZIP = 128 * 1024
"""Shorter answers are sent as they are, as upstream does."""


class ApiServer:
    """One server and its data. `start` and `stop` may take turns; the port and the data stay."""

    def __init__(
        self,
        abilities: Abilities = PRESENT,
        *,
        bookmark_seconds: float = 60.0,
        faults: Faults = lambda _: None,
        tls: ssl.SSLContext | None = None,
        token: str = "",
    ) -> None:
        """With a `token`, requests without it are answered 401."""
        self.abilities = abilities
        self.faults = faults
        self.token = token
        self.port = 0
        self.requests: list[Seen] = []
        self.writes: list[tuple[Seen, int]] = []
        """What was written or refused, with the status, in the order in which it was done."""
        self.sent_at = 0.0
        """When a watcher was last told of something, as `time.monotonic` counts."""
        self._data = Data()
        self._bookmark_seconds = bookmark_seconds
        self._tls = tls
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="apiserver", daemon=True)
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen: on any free port at first, then on the same again."""
        if not self._thread.is_alive():
            self._thread.start()
        self._run(self._listen())

    def stop(self) -> None:
        """Be gone: connections are reset, and nobody listens."""
        self._run(self._close())

    def __enter__(self) -> ApiServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def put(self, *objects: AnyObject) -> None:
        """Make or change objects, at once."""
        manifests = [(type(each).__name__, encode(each)) for each in objects]
        self.do(lambda data: [data.put(kind, raw) for kind, raw in manifests])

    def put_raw(self, kind: str, raw: Mapping[str, Any]) -> None:
        """Make or change an object that may be anything."""
        self.do(lambda data: data.put(kind, raw))

    def delete(self, each: AnyObject) -> bool:
        """Take an object away."""
        return self.do(lambda data: data.delete(type(each).__name__, each.namespace, each.name))

    def do(self, what: Callable[[Data], T]) -> T:
        """Read or change the data; watchers are told afterwards."""
        with self._lock:
            done = what(self._data)
        self._loop.call_soon_threadsafe(self._wake)
        return done

    def go_back(self, data: Data) -> None:
        """Hold other data, a `backup` perhaps. To be called while it is stopped."""
        with self._lock:
            self._data = data

    def drop(self) -> None:
        """Reset all connections."""
        self._loop.call_soon_threadsafe(self._reset)

    def freeze(self) -> None:
        """Say nothing more on the connections that are open; nobody is told."""

        def freeze() -> None:
            for connection in self._connections:
                connection.frozen = True

        self._loop.call_soon_threadsafe(freeze)

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._connections)

    def _run(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            # asyncio loses connections that are just being accepted when their server closes: let them come first.
            for sock in server.sockets:
                asyncio.get_running_loop().remove_reader(sock.fileno())
            await asyncio.sleep(0.001)
            server.close()
        while asyncio.all_tasks() - {asyncio.current_task()}:
            self._reset()
            await asyncio.sleep(0.001)

    def _reset(self) -> None:
        for connection in self._connections:
            connection.reset()

    def _wake(self) -> None:
        for connection in self._connections:
            connection.news.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(reader, writer)
        self._connections.add(connection)
        try:
            while self._server is not None and (seen := await connection.request()) is not None:
                self.requests.append(seen)
                await self._answer(connection, seen)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(connection)
            connection.reset()

    async def _answer(self, connection: _Connection, seen: Seen) -> None:
        connection.fault = fault = self.faults(seen)
        connection.written = 0
        if isinstance(fault, Refuse):
            headers = {"Retry-After": str(fault.retry_after)} if fault.retry_after is not None else {}
            await connection.whole(fault.code, status(fault.code, "Fault", "as the test wishes").body, headers)
        elif self.token and seen.headers.get("authorization") != f"Bearer {self.token}":
            await connection.whole(401, status(401, "Unauthorized", "Unauthorized").body, {})
        else:
            reply = self._reply(seen)
            if isinstance(reply, Whole):
                packed = "gzip" in seen.headers.get("accept-encoding", "") and len(reply.body) >= _LEAST_GZIP
                body = gzip.compress(reply.body, 1) if packed else reply.body
                await connection.whole(reply.status, body, {"Content-Encoding": "gzip"} if packed else {})
            else:
                await self._stream(connection, reply)

    def _reply(self, seen: Seen) -> Whole | Cursor:
        where = place(seen.path, self.abilities.service_cidrs, self.abilities.missing)
        with self._lock:
            if where is None or (seen.method == "GET" and not where.name):
                return answer(self._data, seen.path, seen.query, self.abilities)
            if seen.method == "GET":
                return read_one(self._data, where)
            done = write(self._data, seen.method, where, seen.body, seen.headers.get("content-type", ""))
            self.writes.append((seen, done.status))
        self._wake()
        return done

    async def _stream(self, connection: _Connection, cursor: Cursor) -> None:
        """A watch, until its time is over."""
        loop = asyncio.get_running_loop()
        end, bookmark = loop.time() + cursor.timeout, loop.time() + self._bookmark_seconds
        await connection.head(200, {"Transfer-Encoding": "chunked"})
        while True:
            connection.news.clear()
            with self._lock:
                lines = list(cursor.lines())
                if self.abilities.bookmarks and loop.time() >= bookmark:
                    bookmark = loop.time() + self._bookmark_seconds
                    lines += [line] if (line := cursor.bookmark()) else []
            if lines:
                self.sent_at = loop.time()
            # Each event is a chunk of its own upstream, too.
            await connection.chunks(lines)
            if connection.gone:
                raise ConnectionResetError
            if cursor.broken or loop.time() >= end:
                break
            try:
                async with asyncio.timeout_at(min(end, bookmark)):
                    await connection.news.wait()
            except TimeoutError:
                continue
        await connection.write(b"0\r\n\r\n")


class _Connection:
    """One connection, and the fault of the answer that is being sent on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.news = asyncio.Event()
        self.fault: Fault | None = None
        self.frozen = False
        self.gone = False
        self.written = 0

    async def request(self) -> Seen | None:
        """The next request, None when there is none."""
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ", 2)
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        body = await self._reader.readexactly(int(headers.get("content-length", "0")))
        url = urlsplit(target)
        return Seen(method, url.path, dict(parse_qsl(url.query)), headers, body)

    async def whole(self, code: int, body: bytes, headers: Mapping[str, str]) -> None:
        """An answer in one piece."""
        await self.head(code, {**headers, "Content-Length": str(len(body))})
        await self.write(self._garbled(body))

    async def head(self, code: int, headers: Mapping[str, str]) -> None:
        """The status and headers."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        await self.write(f"HTTP/1.1 {code} -\r\nContent-Type: application/json\r\n{lines}\r\n".encode())

    async def chunks(self, lines: list[bytes]) -> None:
        """Parts of a stream."""
        if lines:
            await self.write(b"".join(b"%x\r\n%b\r\n" % (len(line), self._garbled(line)) for line in lines))

    async def write(self, data: bytes) -> None:
        """Send, as far as the fault lets."""
        fault, room = self.fault, len(data)
        if isinstance(fault, Drop | Silence):
            room = max(0, fault.after - self.written)
        if self.frozen:
            room = 0
        self.written += len(data)
        self._writer.write(data[:room])
        if room < len(data) or (isinstance(fault, Drop) and room == len(data) == 0):
            if isinstance(fault, Drop) and not self.frozen:
                await self._writer.drain()
                self.reset()
                raise ConnectionResetError
            # Silence lasts until the other side has enough of it.
            await self._reader.read()
            raise ConnectionResetError
        await self._writer.drain()

    def reset(self) -> None:
        """End it without ceremony."""
        self.gone = True
        self.news.set()
        self._writer.transport.abort()

    def _garbled(self, body: bytes) -> bytes:
        if not isinstance(self.fault, Garble) or not body:
            return body
        at = min(self.fault.at, len(body) - 1)
        return body[:at] + b"\x07" + body[at + 1 :]
