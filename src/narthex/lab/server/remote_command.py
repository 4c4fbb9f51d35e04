"""Answers to `exec`: the connection becomes a WebSocket and carries a program's channels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec

from narthex.lab.api import websocket
from narthex.lab.api.errors import ApiFault
from narthex.lab.api.requests import Exec, Request
from narthex.lab.server.connection import Connection
from narthex.lab.server.conversation import converse
from narthex.lab.server.pods import Pods, Process

_PIECE = 64 * 1024


async def serve_exec(connection: Connection, pods: Pods | None, request: Request, asked: Exec) -> None:
    """Start what is asked for, and carry the conversation. Raises ApiFault before anything is answered."""
    if not asked.argv:
        raise ApiFault(501, "NotImplemented", "attach is not served by the lab; use exec, or logs -f")
    if pods is None:
        raise ApiFault(501, "NotImplemented", f"no pod runs here, so that nothing can be started in {asked.pod}")
    headers = websocket.handshake(request.headers) if websocket.wanted(request.headers) else None
    if headers is None:
        raise ApiFault(
            400,
            "BadRequest",
            "this client asks for exec in a protocol that is not spoken here: use a newer kubectl (1.31), "
            "or `narthex lab exec`",
        )
    try:
        process = await asyncio.get_running_loop().run_in_executor(None, _start, pods, asked)
    except ApiFault as fault:
        # A refusal before the upgrade means to clients that they should try an older protocol.
        carrier = _WebSocket(connection)
        await connection.head(101, headers)
        await carrier.send(websocket.ERROR, msgspec.json.encode(fault.status()))
        await carrier.close()
        return
    try:
        await connection.head(101, headers)
        await converse(_WebSocket(connection), process)
    finally:
        process.kill()


def _start(pods: Pods, asked: Exec) -> Process:
    return pods.exec(asked.namespace, asked.pod, asked.container, asked.argv, asked.stdin, asked.tty)


class _WebSocket:
    """Channels in messages of a WebSocket: the first byte is the channel."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def send(self, channel: int, data: bytes) -> None:
        await self._connection.write(websocket.message(bytes((channel,)) + data))

    async def close(self) -> None:
        await self._connection.write(websocket.closing())

    async def received(self) -> AsyncIterator[tuple[int, bytes]]:
        incoming = websocket.Incoming()
        while not incoming.ended and (data := await self._connection.reader.read(_PIECE)):
            try:
                for each in incoming.feed(data):
                    if each:
                        yield each[0], each[1:]
            except websocket.BadFrame:
                return
            for reply in incoming.replies:
                await self._connection.write(reply)
            incoming.replies.clear()
