"""Answers with the name of its pod and the client's address: HTTP on port 8080, UDP on 8081.

A pod that is told to stop still answers, as applications should, until clients have found others: proxies learn of its end when it does.
"""

import asyncio
import os
import signal
import time

_LAMEDUCK_SECONDS, _QUIET_SECONDS = 8.0, 4.0
"""It ends after the first one and when it had no requests for the second one, which takes longer on a busy machine."""
_PROBE = b"kube-probe"
_NAME = os.uname().nodename
_last = [0.0]
"""When the last request came."""


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        if _PROBE not in await reader.readuntil(b"\r\n\r\n"):
            _last[:] = [time.monotonic()]
        body = f"{_NAME} {writer.get_extra_info('peername')[0]}\n"
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode())
        await writer.drain()
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        pass
    finally:
        writer.close()


class _Datagrams(asyncio.DatagramProtocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, peer: tuple[str, int]) -> None:
        del data
        self.transport.sendto(f"{_NAME} {peer[0]}\n".encode(), peer)  # type: ignore[attr-defined]


async def main() -> None:
    """Serve until some seconds after SIGTERM and the last request."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    await asyncio.start_server(_answer, None, 8080, backlog=1024)
    await loop.create_datagram_endpoint(_Datagrams, local_addr=("::", 8081))
    await stop.wait()
    await asyncio.sleep(_LAMEDUCK_SECONDS)
    while time.monotonic() < _last[0] + _QUIET_SECONDS:
        await asyncio.sleep(_QUIET_SECONDS / 8)


if __name__ == "__main__":
    asyncio.run(main())
