"""Requests that reach a container: logs, exec, attach, and port-forward."""

from __future__ import annotations

from narthex.lab.api.errors import not_implemented
from narthex.lab.api.requests import ApiRequest, ExecRequest, LogRequest, PortForwardRequest
from narthex.lab.server.pods import PodRuntime, ThreadedReader
from narthex.runtime.http.connection import HttpConnection


async def serve_from_pod(
    connection: HttpConnection,
    pods: PodRuntime | None,
    request: ApiRequest,
    reply: LogRequest | ExecRequest | PortForwardRequest,
) -> None:
    """Give the response that the pod's node gives. Raises StatusError before anything is sent, ConnectionResetError at the end of streams."""
    if isinstance(reply, LogRequest):
        await send_logs(connection, pods, reply)
        return
    # Only exec and port-forward need WebSockets, which take 20 ms to import.
    if isinstance(reply, ExecRequest):
        from narthex.lab.server.exec import serve_exec

        await serve_exec(connection, pods, request, reply)
    else:
        from narthex.lab.server.port_forward import serve_port_forward

        await serve_port_forward(connection, pods, request, reply)
    # The connection no longer speaks HTTP.
    await connection.close()
    raise ConnectionResetError


async def send_logs(connection: HttpConnection, pods: PodRuntime | None, options: LogRequest) -> None:
    """Send what a container writes until it or the client ends. Raises StatusError before anything is sent."""
    if pods is None:
        raise not_implemented(f"no pod runs here, so that pod {options.namespace}/{options.pod} has no log")
    reader = ThreadedReader(pods.logs(options), "api-logs")
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
