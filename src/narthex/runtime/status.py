"""The status ports of a process: its listeners and the handlers of their paths."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from narthex.model import join_port
from narthex.runtime.http import HttpRequest, HttpResponse, Responder, SlowResponse
from narthex.runtime.http.server import HttpServer, listen_tcp
from narthex.runtime.logs import LOGGER

RETRY_SECONDS = 5.0
"""Period at which a taken port is retried (row 17.8)."""

RouteHandler = Callable[[], HttpResponse | SlowResponse]
"""Answers a GET request for one path."""

Routes = Mapping[str, RouteHandler]


class PartReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one part of a process."""

    running: bool
    """False before the first start and during the backoff after a failure."""
    healthy: bool
    failures: int
    """Runs that ended without a call of `stop`."""
    error: str
    """Why the last failed run ended; empty while the part is healthy."""


class StatusPaths(Protocol):
    """The status ports of a process, as a part of that process sees them."""

    def offer(self, path: str, answer: RouteHandler) -> None:
        """Answer requests for `path` until `withdraw`."""
        ...

    def withdraw(self, path: str) -> None:
        """Stop answering requests for `path`."""
        ...


class StatusListener(NamedTuple):
    """One address to listen on, with its routes."""

    purpose: str
    """Named in messages, for example "health"."""
    address: str
    port: int
    routes: Routes

    @property
    def place(self) -> tuple[str, str, int]:
        """Return what identifies the listener."""
        return self.purpose, self.address, self.port

    def __str__(self) -> str:
        return f"{self.purpose} server on {join_port(self.address, self.port)}"


class BindError(RuntimeError):
    """An address is not available, and `bindAddressHardFail` makes that fatal."""

    def __init__(self, purpose: str, message: str) -> None:
        super().__init__(message)
        self.purpose = purpose


class StatusServer:
    """Keeps the listeners open. `serve` binds at once, so that the caller learns of a taken port."""

    def __init__(self, http: HttpServer, *, retry_seconds: float = RETRY_SECONDS) -> None:
        self._http = http
        self._retry_seconds = retry_seconds
        self._lock = threading.Lock()
        self._desired: tuple[StatusListener, ...] = ()
        self._bound: dict[tuple[str, str, int], socket.socket] = {}
        self._waiting = False
        self.addresses: dict[str, tuple[str, int]] = {}
        """The bound address by purpose."""

    def serve(self, listeners: Sequence[StatusListener], *, hard_fail: bool = False) -> None:
        """Listen at exactly these addresses, in the network namespace of the calling thread.

        Unchanged listeners stay open. Raises BindError if a taken port is fatal; the others are then served
        nevertheless.
        """
        with self._lock:
            self._desired = tuple(listeners)
            leaving = self._bound.keys() - {listener.place for listener in listeners}
            closing = [(place, self._bound.pop(place)) for place in leaving]
        for place, sock in closing:
            self.addresses.pop(place[0], None)
            self._http.close(sock)
        failed = self._listen(first=True)
        if failed and hard_fail:
            listener, error = failed[0]
            raise BindError(listener.purpose, f"{listener}: {error.strerror}; bindAddressHardFail is set")
        self._retry_later(failed)

    def _retry(self) -> None:
        self._waiting = False
        self._retry_later(self._listen(first=False))

    def _listen(self, *, first: bool) -> list[tuple[StatusListener, OSError]]:
        """Bind the missing listeners; return those that failed and why."""
        failed = []
        with self._lock:
            for listener in self._desired:
                if listener.place in self._bound:
                    continue
                try:
                    sock = _listen_at(listener.address, listener.port)
                except OSError as error:
                    failed.append((listener, error))
                    continue
                self._bound[listener.place] = sock
                self.addresses[listener.purpose] = sock.getsockname()[:2]
                self._http.open(sock, _answer(listener.routes))
                if not first:
                    LOGGER.info("%s: listening now", listener)
        for listener, refused in failed if first else ():
            LOGGER.error(
                "%s: %s; it is tried again every %g s; stop what else listens there, or give another address",
                listener,
                refused.strerror,
                self._retry_seconds,
            )
        return failed

    def _retry_later(self, failed: Sequence[object]) -> None:
        if failed and not self._waiting:
            self._waiting = True
            self._http.later(self._retry_seconds, self._retry)


def _listen_at(address: str, port: int) -> socket.socket:
    """Listen; 0.0.0.0 and `::` both mean all addresses of both families, as in Go's net.Listen and so in kube-proxy.

    Raises OSError.
    """
    if address == "0.0.0.0":
        try:
            return listen_tcp("::", port, both_families=True)
        except OSError as error:
            # The kernel has no IPv6.
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                raise
    return listen_tcp(address, port, both_families=address == "::")


def _answer(routes: Routes) -> Responder:
    """Return a request handler for GET and HEAD of fixed paths."""

    def answer(request: HttpRequest) -> HttpResponse | SlowResponse:
        """Return the route's response, 405 for other methods than GET and HEAD, or 404 with the list of routes."""
        route = routes.get(request.path)
        if request.method not in ("GET", "HEAD"):
            return HttpResponse(405, b"only GET and HEAD\n")
        if route is None:
            return HttpResponse(404, f"not found; there is {', '.join(routes)}\n".encode())
        return route()

    return answer
