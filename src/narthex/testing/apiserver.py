"""An API server for tests: the lab's API over real HTTP on loopback, with faults on request.

    with FaultyApiServer() as server:
        server.put(service("shop/web", "10.110.0.1"))
        ... http://127.0.0.1:PORT is server.url

It neither completes nor validates objects, so that tests can store anything.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

from narthex.lab.api.api import ApiHandler, error_response
from narthex.lab.api.errors import StatusError
from narthex.lab.api.reads import PRESENT, ServerFeatures
from narthex.lab.api.registry import Registry
from narthex.lab.api.requests import ApiRequest
from narthex.lab.api.store import ObjectStore
from narthex.lab.encode import encode
from narthex.lab.server.server import ApiConnection
from narthex.lab.server.server import ApiServer as Server
from narthex.linux.setns import EnteredNamespace, open_namespace
from narthex.model import AnyObject
from narthex.runtime.http.connection import HeaderFields

T = TypeVar("T")


class FaultyApiServer:
    """One server and its data, which survive `stop` and `start`, as does the port."""

    def __init__(
        self,
        abilities: ServerFeatures = PRESENT,
        *,
        bookmark_seconds: float = 60.0,
        faults: Faults = lambda _: None,
        tls: ssl.SSLContext | None = None,
        token: str = "",
    ) -> None:
        """Create a stopped server. With a `token`, requests without it get status 401."""
        self.faults = faults
        self.port = 0
        self.requests: list[ApiRequest] = []
        self.writes: list[tuple[ApiRequest, int]] = []
        """What was written or refused, with the status, in the order in which it was done."""
        self.sent_at = 0.0
        """When something was last sent to a watcher, in seconds of `time.monotonic`."""
        self._api = ApiHandler(Registry(lambda: datetime.now(UTC), os.urandom), abilities)
        self._tls = tls
        self._namespace = -1
        self._lock = threading.RLock()
        self._server = _Faulty(self, self._api, self._lock, token=token, bookmark_seconds=bookmark_seconds)

    @property
    def abilities(self) -> ServerFeatures:
        """What it can do."""
        return self._api.abilities

    @abilities.setter
    def abilities(self, abilities: ServerFeatures) -> None:
        """Change what the server can do, from the next request on."""
        self._api.abilities = abilities

    @property
    def token(self) -> str:
        """What requests must bring."""
        return self._server.token

    @token.setter
    def token(self, token: str) -> None:
        """Require another token, from the next request on."""
        self._server.token = token

    @property
    def url(self) -> str:
        """Where it is."""
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen on a free port the first time, and on the same port and in the same network namespace afterwards."""
        if self._namespace < 0:
            self._namespace = open_namespace("/proc/thread-self/ns/net")
        with EnteredNamespace(self._namespace):
            self._server.start()
            self.port = self._server.listen(("127.0.0.1", self.port), self._tls)

    def stop(self) -> None:
        """Stop the server and reset open connections."""
        self._server.stop()

    def __enter__(self) -> FaultyApiServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._server.close()
        os.close(self._namespace)

    def put(self, *objects: AnyObject) -> None:
        """Create or replace objects."""
        manifests = [(type(each).__name__, encode(each)) for each in objects]
        self.do(lambda data: [data.put(kind, raw) for kind, raw in manifests])

    def put_raw(self, kind: str, raw: Mapping[str, Any]) -> None:
        """Create or replace an object of any content."""
        self.do(lambda data: data.put(kind, raw))

    def delete(self, each: AnyObject) -> bool:
        """Delete an object, and return whether it existed."""
        return self.do(lambda data: data.delete(type(each).__name__, each.namespace, each.name))

    def do(self, what: Callable[[ObjectStore], T]) -> T:
        """Read or change the data under the lock, then wake the watchers."""
        with self._lock:
            done = what(self._api.registry.store)
        self._server.wake()
        return done

    def go_back(self, data: ObjectStore) -> None:
        """Replace the data, for example by a backup. Call it while the server is stopped."""
        with self._lock:
            self._api.registry.store = data

    def drop(self) -> None:
        """Reset all connections."""
        self._server.drop()

    def freeze(self) -> None:
        """Send nothing more on the open connections, without closing them."""
        self._server.freeze()

    @property
    def connections(self) -> int:
        """How many are open."""
        return self._server.connections


class _FaultyConnection(ApiConnection):
    """A connection, and the fault of the answer that is being sent on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(reader, writer)
        self.fault: Fault | None = None
        self.frozen = False
        self.written = 0

    async def respond(self, status: int, body: bytes, headers: HeaderFields) -> None:
        """Send a whole response; the fault `Garble` damages a byte of its body."""
        await super().respond(status, self._garbled(body), headers)

    async def send(self, pieces: Sequence[bytes]) -> None:
        """Send pieces of a stream; the fault `Garble` damages a byte of each."""
        await super().send([self._garbled(piece) for piece in pieces])

    async def write(self, data: bytes) -> None:
        """Send, as far as the fault lets."""
        fault, room = self.fault, len(data)
        if isinstance(fault, DropConnection | Silence):
            room = max(0, fault.after - self.written)
        if self.frozen:
            room = 0
        self.written += len(data)
        self.writer.write(data[:room])
        if room < len(data) or (isinstance(fault, DropConnection) and room == len(data) == 0):
            if isinstance(fault, DropConnection) and not self.frozen:
                await self.writer.drain()
                self.reset()
                raise ConnectionResetError
            # Silence lasts until the other side has enough of it.
            await self.reader.read()
            raise ConnectionResetError
        await self.writer.drain()

    def _garbled(self, body: bytes) -> bytes:
        if not isinstance(self.fault, Garble) or not body:
            return body
        at = min(self.fault.at, len(body) - 1)
        return body[:at] + b"\x07" + body[at + 1 :]


class _Faulty(Server):
    """The lab's API server, which injects the fault that the test requests before each answer."""

    connection_type = _FaultyConnection

    def __init__(
        self, test: FaultyApiServer, api: ApiHandler, lock: threading.RLock, *, token: str, bookmark_seconds: float
    ) -> None:
        super().__init__(api, lock, token=token, bookmark_seconds=bookmark_seconds)
        self._test = test

    async def answer(self, connection: ApiConnection, request: ApiRequest) -> None:
        """Record the request, and answer it with the fault that the test requests for it."""
        if not isinstance(connection, _FaultyConnection):
            raise TypeError("a connection of another server")
        self._test.requests.append(request)
        connection.fault = fault = self._test.faults(request)
        connection.written = 0
        if isinstance(fault, Refuse):
            headers = {"Retry-After": str(fault.retry_after)} if fault.retry_after is not None else {}
            said = error_response(StatusError(fault.code, "Fault", "requested by the test"))
            await connection.respond(said.status, said.body, [("Content-Type", said.content_type), *headers.items()])
        else:
            await super().answer(connection, request)

    def answered(self, request: ApiRequest, code: int) -> None:
        """Record a write with its status."""
        if request.method != "GET":
            self._test.writes.append((request, code))

    def sent(self) -> None:
        """Record when a watcher last got something."""
        self._test.sent_at = time.monotonic()

    def freeze(self) -> None:
        """Send nothing more on the connections that are open."""

        def freeze() -> None:
            """Freeze the open connections, in the server's thread."""
            for connection in self._http.connections:
                if isinstance(connection, _FaultyConnection):
                    connection.frozen = True

        self._http.call(freeze)


class DropConnection(msgspec.Struct, frozen=True):
    """Reset the connection after this many bytes of the answer, including its head."""

    after: int = 0


class Refuse(msgspec.Struct, frozen=True):
    """Answer with another status."""

    code: int
    retry_after: int | None = None


class Garble(msgspec.Struct, frozen=True):
    """Change one byte of the body: the byte at this offset, or the last one."""

    at: int = 0


class Silence(msgspec.Struct, frozen=True):
    """Send nothing after this many bytes, and keep the connection open."""

    after: int = 0


Fault = DropConnection | Refuse | Garble | Silence


Faults = Callable[[ApiRequest], Fault | None]
"""What goes wrong with the answer to a request; None: nothing."""
