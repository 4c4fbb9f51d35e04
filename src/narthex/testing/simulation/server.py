"""A simulated API server and the network in front of it.

The server is the lab's API over one object store. The network splits, delays, cuts, and loses responses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from random import Random
from typing import Any

from narthex.kube.access import Access
from narthex.kube.client import Unreachable
from narthex.kube.messages import WatchRequest
from narthex.kube.resources import of_a_proxy
from narthex.kube.source import KubeSource
from narthex.lab.api.api import ApiHandler
from narthex.lab.api.reads import ServerFeatures, WatchCursor, expired
from narthex.lab.api.registry import Registry
from narthex.lab.api.requests import ApiRequest, ApiResponse
from narthex.lab.api.store import ObjectStore
from narthex.lab.encode import encode
from narthex.model import AnyObject, Event
from narthex.model.decode.objects import decode
from narthex.testing.simulation.time import WALL_CLOCK_START, VirtualLoop

BOOKMARK_SECONDS = 60.0
LOST_STORE_VERSION = 5
"""Version of a store that starts empty after its data was lost."""


class ServerFaults:
    """What may go wrong between the proxy and the server. The schedule changes these while the simulation runs."""

    def __init__(self) -> None:
        self.down = False
        """The server refuses connections."""
        self.silent = False
        """Responses stop, and connections stay open."""
        self.refuse = 0.0
        """Probability that a request gets an error status."""
        self.retry_after = 0
        """Seconds in the Retry-After header of these responses; 0: no header."""
        self.cut = 0.0
        """Probability that a response is cut at some point."""
        self.garble = 0.0
        """Probability that one byte of a chunk is changed."""
        self.watch_seconds = 0.0
        """The server ends each watch after this time; 0: as requested."""
        self.latency = 0.0
        """Longest delay of a response or of an event."""


class ServerSource:
    """The lists of the simulated server, as one process follows them."""

    def __init__(self, server: SimulatedServer, node_name: str, random: Random) -> None:
        """Prepare to follow the lists of a node's proxy."""
        self._server = server
        self._source = KubeSource(Access(), of_a_proxy(node_name), random_number=random.random)

    @property
    def problems(self) -> Sequence[Any]:
        """Return the present problems."""
        return self._source.problems

    def batches(self) -> AsyncIterator[Sequence[Event]]:
        """Yield events."""
        return self._source.follow(self._server, asyncio.Event())


class SimulatedServer:
    """The objects of a cluster, and all connections to them."""

    def __init__(self, loop: VirtualLoop, random: Random, features: ServerFeatures) -> None:
        """Create a server without objects."""
        self.loop = loop
        self.random = random
        self.faults = ServerFaults()
        self._api = ApiHandler(
            Registry(lambda: datetime.fromtimestamp(WALL_CLOCK_START + loop.time(), UTC), random.randbytes), features
        )
        self.refuses_future = random.random() < 0.5
        """Watches from a version of the future get status 410; otherwise they wait for it."""
        self._wake = asyncio.Event()
        self._epoch = 0
        """Rises when all connections are cut."""

    @property
    def store(self) -> ObjectStore:
        """The present objects."""
        return self._api.registry.store

    @store.setter
    def store(self, store: ObjectStore) -> None:
        """Replace all objects, and cut the connections, as after a restore of the API server's data."""
        self._api.registry.store = store
        self.drop()

    def put(self, obj: AnyObject) -> None:
        """Create or replace an object."""
        self.store.put(type(obj).__name__, encode(obj))
        self._changed()

    def delete(self, obj: AnyObject) -> None:
        """Delete an object."""
        self.store.delete(type(obj).__name__, obj.namespace, obj.name)
        self._changed()

    def drop(self) -> None:
        """Cut all connections."""
        self._epoch += 1
        self._changed()

    def _changed(self) -> None:
        self._wake.set()
        self._wake = asyncio.Event()

    def source(self, node_name: str, random: Random) -> ServerSource:
        """Return the source of a process that starts."""
        return ServerSource(self, node_name, random)

    def objects(self) -> Iterator[AnyObject]:
        """Yield the present objects as a proxy sees them."""
        for kind in self.store.kinds():
            for _, stored in self.store.entries(kind):
                decoded = decode(stored.raw)
                assert decoded.object is not None
                yield decoded.object

    # ---- the network: what `narthex.kube.source` calls -------------------------------------------------------------

    @asynccontextmanager
    async def get(self, request: WatchRequest) -> AsyncIterator[SimulatedResponse]:
        """Send a request. Raises Unreachable."""
        epoch, faults = self._epoch, self.faults
        await self.delay()
        if faults.down or epoch != self._epoch:
            raise Unreachable("connection refused")
        if faults.silent:
            await asyncio.Event().wait()
        if self.happens(faults.refuse):
            code = self.random.choice((429, 500, 503))
            yield SimulatedResponse(self, epoch, code, b"{}", float(faults.retry_after) or None)
            return
        answer = self._api.answer(ApiRequest("GET", request.path, dict(request.query), {}))
        if isinstance(answer, ApiResponse):
            retry = answer.headers.get("Retry-After", "")
            yield SimulatedResponse(self, epoch, answer.status, answer.body, float(retry) if retry else None)
        elif self.refuses_future and int(dict(request.query).get("resourceVersion", "0")) > self.store.version:
            yield SimulatedResponse(self, epoch, 200, expired())
        else:
            assert isinstance(answer, WatchCursor)
            yield SimulatedResponse(self, epoch, 200, answer)

    async def delay(self) -> None:
        """Wait for the network."""
        await asyncio.sleep(0.001 + self.faults.latency * self.random.random())

    def happens(self, probability: float) -> bool:
        """Draw whether a fault happens."""
        return probability > 0 and self.random.random() < probability

    def is_cut(self, epoch: int) -> bool:
        """Return True if a connection of that epoch has been cut."""
        return self.faults.down or epoch != self._epoch

    async def change(self, seconds: float) -> None:
        """Wait for a change of the store or of connections."""
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass


class SimulatedResponse:
    """A response whose head has arrived."""

    def __init__(
        self,
        server: SimulatedServer,
        epoch: int,
        code: int,
        content: bytes | WatchCursor,
        retry_after: float | None = None,
    ) -> None:
        """Prepare a response."""
        self.code = code
        self.retry_after = retry_after
        self._server = server
        self._epoch = epoch
        self._content = content

    async def refusal(self) -> bytes:
        """Return the body of an error response."""
        assert isinstance(self._content, bytes)
        return self._content

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body. Raises Unreachable where it is cut."""
        if isinstance(self._content, bytes):
            async for chunk in self._sent(self._content):
                yield chunk
            return
        server, loop = self._server, self._server.loop
        end = loop.time() + (server.faults.watch_seconds or self._content.timeout)
        bookmark = loop.time() + BOOKMARK_SECONDS
        while True:
            lines = list(self._content.lines())
            if loop.time() >= bookmark:
                bookmark = loop.time() + BOOKMARK_SECONDS
                lines += [line] if (line := self._content.bookmark()) else []
            async for chunk in self._sent(b"".join(lines)):
                yield chunk
            if self._content.broken or loop.time() >= end:
                return
            await server.change(max(0.0, min(end, bookmark) - loop.time()))
            if server.is_cut(self._epoch):
                raise Unreachable("connection reset")

    async def _sent(self, data: bytes) -> AsyncIterator[bytes]:
        """Yield data in chunks as the network delivers it."""
        server = self._server
        while data:
            await server.delay()
            size = server.random.randint(1, 2 * len(data))
            chunk, data = data[:size], data[size:]
            if server.faults.silent:
                await asyncio.Event().wait()
            if server.is_cut(self._epoch) or server.happens(server.faults.cut):
                raise Unreachable("connection reset")
            if server.happens(server.faults.garble):
                at = server.random.randrange(len(chunk))
                chunk = chunk[:at] + b"\x07" + chunk[at + 1 :]
            yield chunk
