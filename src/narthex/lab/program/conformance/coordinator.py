"""The coordinator of the suite's processes: hands out tests, and collects their reports.

The suite's framework, Ginkgo, has such a server in its own command, which most machines lack. With GINKGO_PARALLEL_PROTOCOL=HTTP its
processes speak HTTP and JSON:

    GET  /up                                    whether the server is there
    GET  /counter                               the position of the next test to run; one beyond the last ends the process
    POST /did-run                               the report of a test, or of a step before and after all tests
    POST /before-suite-completed                what process 1 prepared for all, which the others ask for:
    GET  /before-suite-state
    POST /report-before-suite-completed         likewise
    GET  /report-before-suite-state
    GET  /have-nonprimary-procs-finished        425 until all processes but the first have ended
    GET  /aggregated-nonprimary-procs-report
    GET  /abort                                 410 if all shall end

A process asks for positions in an order of the whole suite in which most tests are not chosen. A dry run reports the order, so that only
chosen tests are handed out. If it does not match, all positions are, as Ginkgo's own server does.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable

import msgspec

from narthex.lab.conformance import CaseReport, ChosenCases
from narthex.runtime.http import HttpRequest, HttpResponse
from narthex.runtime.http.connection import HttpConnection, HttpLimits, MalformedRequest
from narthex.runtime.http.server import HttpServer, listen_tcp

_LIMITS = HttpLimits(body=256 * 1024 * 1024)
"""A report has all that a test wrote, and the last one of a process those of all tests that it looked at."""
_BEYOND = 1 << 30
_EARLY, _GONE = 425, 410
_REPORT = msgspec.json.Decoder(CaseReport)
_JSON = "application/json"


class Coordinator:
    """The server for one run of the suite."""

    def __init__(self, chosen: ChosenCases, processes: int) -> None:
        """Start the server on loopback for `processes` processes, the first of which prepares the cluster."""
        self.reports: queue.SimpleQueue[CaseReport] = queue.SimpleQueue()
        """Reports of chosen tests, and of failed steps before and after them."""
        self._chosen = chosen
        self._lock = threading.Lock()
        self._positions = deque(chosen.by_position)
        self._taken: set[int] = set()
        self._guessed = True
        self._running = set(range(1, processes + 1))
        self._states: dict[str, bytes] = {}
        self._routes: dict[tuple[str, str], Callable[[bytes], HttpResponse]] = {
            ("GET", "/up"): lambda _: _json(b"{}"),
            ("GET", "/abort"): lambda _: _json(b"{}"),
            ("GET", "/counter"): lambda _: self._next(),
            ("POST", "/did-run"): self._did_run,
            ("GET", "/have-nonprimary-procs-finished"): lambda _: self._others_ended(),
            ("GET", "/aggregated-nonprimary-procs-report"): lambda _: self._others_ended(),
        }
        for name in ("before-suite", "report-before-suite"):
            self._routes["POST", f"/{name}-completed"] = lambda body, name=name: self._keep(name, body)  # type: ignore[misc]
            self._routes["GET", f"/{name}-state"] = lambda _, name=name: self._state(name)  # type: ignore[misc]
        sock = listen_tcp("127.0.0.1", 0)
        self.address = f"http://127.0.0.1:{sock.getsockname()[1]}"
        self._http = HttpServer("suite")
        self._http.serve(sock, _connect, self._serve)

    def ended(self, process: int) -> None:
        """Note that a process has ended."""
        with self._lock:
            self._running.discard(process)

    def close(self) -> None:
        """Stop the server."""
        self._http.stop()

    async def _serve(self, connection: HttpConnection) -> None:
        try:
            while (request := await connection.request()) is not None:
                response = self.answer(request)
                await connection.respond(response.status, response.body, (("Content-Type", response.content_type),))
        except MalformedRequest as error:
            await connection.respond(error.status, str(error).encode(), (("Connection", "close"),))

    def answer(self, request: HttpRequest) -> HttpResponse:
        """Answer one request. What only reports progress is accepted without a look at it."""
        route = self._routes.get((request.method, request.path))
        with self._lock:
            return _json(b"{}") if route is None else route(request.body)

    def _next(self) -> HttpResponse:
        position = self._positions.popleft() if self._positions else _BEYOND
        self._taken.add(position)
        return _json(msgspec.json.encode({"Index": position}))

    def _did_run(self, body: bytes) -> HttpResponse:
        report = _REPORT.decode(body)
        if report.is_test and report.name not in self._chosen.names:
            if self._guessed and not report.is_serial:
                self._guessed = False
                self._positions = deque(each for each in range(self._chosen.positions) if each not in self._taken)
        elif report.is_test or not (report.is_skipped or report.state == "passed"):
            self.reports.put(report)
        return _json(b"{}")

    def _keep(self, name: str, body: bytes) -> HttpResponse:
        self._states[name] = body
        return _json(b"{}")

    def _state(self, name: str) -> HttpResponse:
        if name in self._states:
            return _json(self._states[name])
        return _json(b"{}", _EARLY if 1 in self._running else _GONE)

    def _others_ended(self) -> HttpResponse:
        return _json(b"{}", _EARLY if self._running - {1} else 200)


def _connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> HttpConnection:
    return HttpConnection(reader, writer, _LIMITS)


def _json(body: bytes, status: int = 200) -> HttpResponse:
    return HttpResponse(status, body, _JSON)
