"""Status ports beside connections on which nobody sends anything."""

import asyncio
import contextlib
import errno
import os
import resource
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from narthex.runtime.connection_slots import SlotLimits
from narthex.runtime.http import HttpResponse, SlowResponse
from narthex.runtime.http import server as http_server
from narthex.runtime.http.connection import HttpConnection
from narthex.runtime.http.server import HttpServer, listen_tcp
from narthex.runtime.status import StatusListener, StatusServer
from narthex.testing.load import until

SILENT = 1000
PROBES = 60
OTHER = "127.0.1.1"
"""A client without silent connections."""
PATIENCE = 60.0


@pytest.fixture(autouse=True)
def many_files():
    """Allow as many open files as the connections of both ends need."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert before[1] >= 4 * SILENT, "the hard limit of open files is too low: ulimit -Hn"
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def http():
    made = HttpServer()
    yield made
    made.stop()


@pytest.fixture
def ports(http):
    """The addresses of two status ports of one server."""
    server = StatusServer(http)
    routes = {"/healthz": lambda: HttpResponse(200, b"ok")}
    server.serve([StatusListener(name, "127.0.0.1", 0, routes) for name in ("health", "metrics")])
    return server.addresses


@pytest.fixture
def silent():
    """Open silent connections, each from the next of some addresses."""
    with contextlib.ExitStack() as opened:

        def connect(to, clients, count=SILENT):
            sources = [(f"127.0.0.{number % clients + 1}", 0) for number in range(count)]
            return [opened.enter_context(socket.create_connection(to, PATIENCE, source)) for source in sources]

        yield connect


def probe(to, source):
    with socket.create_connection(to, PATIENCE, (source, 0)) as sock:
        try:
            sock.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            answer = b"".join(iter(lambda: sock.recv(65536), b""))
        except ConnectionError:
            return False
        return answer.startswith(b"HTTP/1.1 200 ")


def small(http, answer, **limits):
    """The address of a port with few slots."""
    sock = listen_tcp("127.0.0.1", 0)
    http.open(sock, lambda _: answer, PATIENCE, SlotLimits(**limits))
    return sock.getsockname()


def is_open(sock):
    sock.setblocking(False)
    try:
        return sock.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


@pytest.mark.parametrize("clients", [1, 40])
def test_every_probe_is_answered_beside_silent_connections(ports, silent, clients):
    silent(ports["health"], clients)
    answered = [probe(ports["health"], source) for _ in range(PROBES) for source in ("127.0.0.1", OTHER)]
    assert answered.count(True) == 2 * PROBES


def test_probes_are_answered_while_silent_connections_come_again_and_again(ports, silent):
    end = threading.Event()

    def flood():
        while not end.is_set():
            for sock in silent(ports["health"], 40, SILENT // 4):
                sock.close()

    with ThreadPoolExecutor(1) as pool:
        flooding = pool.submit(flood)
        try:
            answered = [probe(ports["health"], OTHER) for _ in range(PROBES)]
        finally:
            end.set()
        flooding.result(PATIENCE)
    assert answered.count(True) == PROBES


def test_each_port_has_slots_of_its_own(http, silent):
    many, one = (small(http, HttpResponse(200, b""), port=4, client=4) for _ in range(2))
    (other,) = silent(one, 1, 1)
    crowd = silent(many, 40, 100)
    until(lambda: not any(map(is_open, crowd[:-4])), "the end of the others", PATIENCE)
    assert is_open(other)
    assert [is_open(sock) for sock in crowd[-4:]] == [True] * 4


def test_a_connection_is_silent_since_it_was_accepted():
    """Not since the server began to read from it, which is later on a busy machine and in another order."""

    async def ask():
        reader = asyncio.StreamReader()
        reader.feed_data(b"GET / HTTP/1.1\r\nHost: node\r\n\r\n")
        reader.feed_eof()
        connection, notes = HttpConnection(reader, None), []
        connection.on_waiting = notes.append
        await connection.request()
        return notes

    assert asyncio.run(ask()) == [False]


def test_who_is_being_answered_stays(http, silent):
    begun, go_on = threading.Event(), threading.Event()

    def make():
        begun.set()
        assert go_on.wait(PATIENCE)
        return HttpResponse(200, b"at last")

    port = small(http, SlowResponse(make), port=4, client=4)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(probe, port, OTHER)
        assert begun.wait(PATIENCE)
        silent(port, 10, 50)
        until(lambda: http._slots and len(http.connections) == 4, "the end of the others", PATIENCE)
        go_on.set()
        assert answer.result(PATIENCE)


def test_half_a_request_is_silence(http, silent):
    port = small(http, HttpResponse(200, b""), port=4, client=2)
    (dribble,) = silent(port, 1, 1)
    until(lambda: len(http.connections) == 1, "the connection", PATIENCE)
    (other,) = silent(port, 1, 1)
    dribble.sendall(b"GET / HT")
    silent(port, 1, 1)
    until(lambda: not is_open(dribble), "the end of the first connection", PATIENCE)
    assert is_open(other)


def test_one_line_on_many_closed_connections(ports, silent, caplog):
    silent(ports["health"], 1)
    assert probe(ports["health"], OTHER)
    lines = [line for line in caplog.messages if f"port {ports['health'][1]} has too many connections" in line]
    assert len(lines) == 1, lines
    assert "the last one from 127.0.0.1" in lines[0]


def test_a_silent_connection_leaves_when_files_run_out(http, silent, monkeypatch, caplog):
    monkeypatch.setattr(http_server, "ACCEPT_RETRY_SECONDS", 10 * PATIENCE)
    port = small(http, HttpResponse(200, b""))
    first, second = silent(port, 2, 2)
    until(lambda: len(http.connections) == 2, "the connections", PATIENCE)
    accept, failures, calls = socket.socket.accept, [errno.EMFILE], []

    def scarce(sock):
        calls.append(sock)
        if failures:
            raise OSError(failures[0], os.strerror(failures.pop()))
        return accept(sock)

    monkeypatch.setattr(socket.socket, "accept", scarce)
    assert probe(port, OTHER)
    assert (is_open(first), is_open(second)) == (False, True)
    assert len(calls) < 10
    assert "a connection cannot be accepted: Too many open files" in caplog.text
