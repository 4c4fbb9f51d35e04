"""Streams of what a container writes."""

from __future__ import annotations

from narthex.lab.api.errors import StatusError
from narthex.lab.api.requests import LogRequest
from narthex.lab.server.pods import PodRuntime
from narthex.lab.server.threads import ThreadedReader
from narthex.runtime.http.connection import HttpConnection


async def send_logs(connection: HttpConnection, pods: PodRuntime | None, options: LogRequest) -> None:
    """Send what a container writes until it or the client ends. Raises StatusError before anything is sent."""
    if pods is None:
        raise StatusError(
            501, "NotImplemented", f"no pod runs here, so that pod {options.namespace}/{options.pod} has no log"
        )
    pieces = pods.logs(
        options.namespace,
        options.pod,
        options.container,
        options.tail,
        options.follow,
        options.since,
        options.previous,
        options.timestamps,
    )
    reader = ThreadedReader(pieces, "api-logs")
    try:
        # A generator raises its error with the first piece.
        piece = await reader.next()
        await connection.begin(200, (("Content-Type", "text/plain"), ("Transfer-Encoding", "chunked")))
        left = options.limit
        while piece is not None and left != 0:
            piece = piece if left is None else piece[:left]
            left = None if left is None else left - len(piece)
            await connection.send([piece])
            if connection.is_reset or connection.writer.is_closing():
                raise ConnectionResetError
            piece = await reader.next()
        await connection.end()
    finally:
        reader.end()
