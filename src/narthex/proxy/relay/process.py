"""The relay as a process of its own, and the proxy's handle of it.

It is a process, not a thread, because two threads would compete for Python's global lock: a sync of thousands of
Services would delay every connection, and a busy relay every sync (measured in benchmarks/userspace_relay.py; ADR
0006). The process runs in the network namespace that it serves, and ends when the proxy's end of the socket between
them closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import struct
import sys

import msgspec

from narthex.linux.module_process import LENGTH_BYTES, ModuleProcess, frame
from narthex.linux.privileges import allow_many_files
from narthex.proxy.relay.relay import UDP_IDLE_SECONDS, Relay
from narthex.proxy.relay.wire import RelayAnswer, RelayOrder, shown_at

_PATIENCE = 60.0
"""Timeout in seconds for an answer: thousands of ports take a moment, longer on a busy machine."""


class RelaySetup(msgspec.Struct, frozen=True):
    """Parameters of a relay process."""

    family: int
    udp_idle_seconds: float = UDP_IDLE_SECONDS
    host: str = ""
    """Address to listen on; empty: any."""


_ORDERS, _ANSWERS = msgspec.msgpack.Decoder(RelayOrder), msgspec.msgpack.Decoder(RelayAnswer)
_SETUPS = msgspec.json.Decoder(RelaySetup)


class RelayGoneError(RuntimeError):
    """The relay process has ended, or does not answer."""


class RelayProcess:
    """A relay in another process. It ends on `close`, or with this process."""

    def __init__(self, setup: RelaySetup, namespace: str | None = None) -> None:
        """Start the relay in a named network namespace; None: the current one. Raises OSError."""
        parameters = msgspec.json.encode(setup).decode()
        self._process = ModuleProcess(__name__, parameters, timeout=_PATIENCE, namespace=namespace)
        self._silent = False

    def __del__(self) -> None:
        """End the process."""
        if hasattr(self, "_process"):
            self.close()

    @property
    def pid(self) -> int:
        """Process ID."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._process.alive

    @property
    def end(self) -> str:
        """Why the process has ended."""
        if self._silent:
            return f"it gave no answer within {_PATIENCE:g} s"
        status = self._process.status or 0
        return f"signal {-status} ({signal.strsignal(-status)})" if status < 0 else f"exit status {status}"

    def ask(self, order: RelayOrder) -> RelayAnswer:
        """Send an order and return the answer. Raises RelayGoneError, whose message begins with `relay`."""
        try:
            self._process.send(order)
            return self._process.receive(_ANSWERS)
        except (EOFError, OSError, msgspec.DecodeError) as error:
            self._silent = isinstance(error, TimeoutError)
            self.close()
            raise RelayGoneError(f"relay (process {self.pid}) gave no answer: {error}") from error

    def close(self) -> None:
        """End the process, and with it all connections."""
        self._process.close(1.0)


async def serve(control: socket.socket, setup: RelaySetup) -> None:
    """Run a relay until the other side of `control` closes."""
    loop = asyncio.get_running_loop()
    control.setblocking(False)
    relay = Relay(loop, setup.family, host=setup.host, udp_idle_seconds=setup.udp_idle_seconds)
    reader, writer = await asyncio.open_connection(sock=control)
    showing = await _show(relay, setup.family)
    try:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
                order = _ORDERS.decode(await reader.readexactly(size))
                writer.write(frame(relay.obey(order)))
                await writer.drain()
    finally:
        relay.close()
        writer.close()
        if showing is not None:
            showing.close()


async def _show(relay: Relay, family: int) -> asyncio.Server | None:
    """Show the table to root in this network namespace.

    None: another relay shows its table already, because it is about to end or was started by mistake. Serving is more
    important.
    """

    async def show(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Write the relay's table to a client that runs as root; close every other connection without an answer."""
        credentials = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("iII", credentials)[1] == 0:
            writer.write(frame(relay.table))
        writer.close()

    try:
        return await asyncio.start_unix_server(show, shown_at(family))
    except OSError:
        return None


def main(argv: list[str]) -> None:
    """Run the relay process. Arguments: number of the inherited socket, and the RelaySetup as JSON."""
    # A signal to the whole service ends the proxy, too; the relay ends after the proxy.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    allow_many_files()
    control = socket.socket(fileno=int(argv[0]))
    asyncio.run(serve(control, _SETUPS.decode(argv[1])))


if __name__ == "__main__":
    main(sys.argv[1:])
