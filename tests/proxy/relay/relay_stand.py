"""A relay on loopback, endpoints to connect to, and a clock that a test sets."""

import asyncio
import contextlib
import random
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from narthex.proxy.relay.relay import Relay
from narthex.proxy.relay.wire import RelayOrder, RelayPort

LOOPBACK = "127.0.0.1"


class Stand:
    """Everything in one loop, closed at the end."""

    def __init__(self, loop: asyncio.AbstractEventLoop, family: int = socket.AF_INET, **options: Any) -> None:
        self.loop = loop
        self.family = family
        self.host = LOOPBACK if family == socket.AF_INET else "::1"
        self.relay = Relay(loop, family, host=self.host, rng=random.Random(7), **options)
        self.servers: list[Any] = []

    def listen(
        self,
        *endpoints: Any,
        protocol: str = "tcp",
        service: tuple[str, str, str] = ("shop", "web", ""),
        affinity: Any = None,
        port: int = 0,
    ) -> Any:
        """Let the relay lead to these; the address to connect to."""
        entry = RelayPort(protocol, port, service, tuple(endpoints), affinity)
        answer = self.relay.obey(RelayOrder(listen=(entry,)))
        assert not answer.failed, answer.failed
        return self.host, self.relay.port_of((protocol, port))

    async def server(self, handler: Any) -> Any:
        """A TCP endpoint; its address."""
        server = await asyncio.start_server(handler, self.host, 0, family=self.family, limit=1 << 22)
        self.servers.append(server)
        return server.sockets[0].getsockname()[:2]

    async def named(self, *names: str) -> list[Any]:
        """TCP endpoints that say their names and close."""

        def saying(name: str) -> Any:
            async def handler(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.write(name.encode())
                writer.close()

            return handler

        return [await self.server(saying(name)) for name in names]

    def dead(self, kind: int = socket.SOCK_STREAM) -> Any:
        """An address where nobody listens."""
        with socket.socket(self.family, kind) as sock:
            sock.bind((self.host, 0))
            return sock.getsockname()[:2]

    async def ask(self, where: Any) -> str:
        """Connect and read to the end."""
        reader, writer = await asyncio.open_connection(*where)
        try:
            return (await reader.read()).decode()
        finally:
            writer.close()


def run(test: Callable[["Stand"], Awaitable[None]], **options: Any) -> None:
    """Run a coroutine function with a Stand, within a generous time."""

    async def within() -> None:
        stand = Stand(asyncio.get_running_loop(), **options)
        try:
            return await asyncio.wait_for(test(stand), 60)
        finally:
            stand.relay.close()
            for server in stand.servers:
                server.close()
            # What was closed above and in the test is told to its owners in the loop's next turns.
            for _ in range(10):
                await asyncio.sleep(0)

    return asyncio.run(within())


async def until(condition: Callable[[], Any], patience: float = 20.0) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(patience):
        while not condition():
            await asyncio.sleep(0.005)


@contextlib.contextmanager
def udp_socket(where: Any = None, family: int = socket.AF_INET) -> Iterator[socket.socket]:
    """A UDP socket on loopback, perhaps connected."""
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        sock.bind((LOOPBACK if family == socket.AF_INET else "::1", 0))
        if where:
            sock.connect(where)
        yield sock
