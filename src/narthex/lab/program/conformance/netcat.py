"""The program `nc` of the image that the suite's pods run, with the options of OpenBSD's nc that tests use.

It is copied into the image and run there by the machine's Python, so it imports nothing of this package.
"""

from __future__ import annotations

import argparse
import os
import select
import socket
import sys
import time

_BYTES = 65536


def main() -> int:
    """Connect, send standard input, and print what comes back."""
    parser = argparse.ArgumentParser(prog="nc", add_help=False)
    for flag in "tuvznN":
        parser.add_argument(f"-{flag}", action="store_true")
    parser.add_argument("-w", type=float)
    parser.add_argument("-p", type=int, default=0)
    parser.add_argument("-s", default="")
    parser.add_argument("host")
    parser.add_argument("port")
    given = parser.parse_args()
    kind = socket.SOCK_DGRAM if given.u else socket.SOCK_STREAM
    try:
        sock = _connected(given, kind)
    except OSError as error:
        sys.stderr.write(f"nc: connect to {given.host} port {given.port} failed: {error.strerror or error}\n")
        return 1
    if given.v:
        sys.stderr.write(f"Connection to {given.host} {given.port} port [{'udp' if given.u else 'tcp'}/*] succeeded!\n")
    return 0 if given.z else _exchange(sock, given.w, shut=given.N)


def _connected(given: argparse.Namespace, kind: int) -> socket.socket:
    wrong: OSError | None = None
    for family, _, _, _, address in socket.getaddrinfo(given.host, given.port, type=kind):
        sock = socket.socket(family, kind)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if given.p or given.s:
                sock.bind((given.s, given.p))
            sock.settimeout(given.w)
            sock.connect(address)
            sock.settimeout(None)
            return sock
        except OSError as error:
            sock.close()
            wrong = error
    raise wrong or OSError("no address")


def _exchange(sock: socket.socket, patience: float | None, *, shut: bool) -> int:
    """Copy until the peer closes or both sides are silent for `patience` seconds."""
    reads: list[int | socket.socket] = [sock, 0]
    silent_at = None if patience is None else time.monotonic() + patience
    while True:
        ready = select.select(reads, [], [], None if silent_at is None else max(0.0, silent_at - time.monotonic()))[0]
        if not ready:
            return 0
        if patience is not None:
            silent_at = time.monotonic() + patience
        try:
            if 0 in ready:
                if data := os.read(0, _BYTES):
                    sock.sendall(data)
                else:
                    reads.remove(0)
                    if shut:
                        sock.shutdown(socket.SHUT_WR)
            if sock in ready:
                if not (data := sock.recv(_BYTES)):
                    return 0
                os.write(1, data)
        except OSError as error:
            sys.stderr.write(f"nc: {error.strerror}\n")
            return 1


if __name__ == "__main__":
    sys.exit(main())
