"""DNS over TCP beside connections on which nobody asks anything, and without file descriptors."""

import contextlib
import errno
import os
import resource
import socket
import threading

import dns.message
import pytest

from narthex.dns.message import wire
from narthex.dns.message.response import local_response
from narthex.dns.server import tcp
from narthex.dns.server.counters import AnswerCounter
from narthex.dns.server.dispatcher import BlockPlugins, Dispatcher, Recursion, ServerContext
from narthex.dns.server.event_loop import EventLoop
from narthex.dns.server.tcp import TcpServer
from narthex.testing.load import until

SILENT = 1000
OTHER = "127.0.1.1"
PATIENCE = 60.0
QUERY = dns.message.make_query("www.example.org", "A").to_wire()
FRAMED = len(QUERY).to_bytes(2, "big") + QUERY


@pytest.fixture(autouse=True)
def many_files():
    """Allow as many open files as the connections of both ends need."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert before[1] >= 4 * SILENT, "the hard limit of open files is too low: ulimit -Hn"
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Worker:
    """A TCP server whose loop runs in a thread. Queries are refused, since it has no zone."""

    def __init__(self):
        self.loop = EventLoop()
        self.turns = 0
        self.calls = []
        self.counter = AnswerCounter(lambda: None)
        recursion = Recursion((), self.counter, self.loop.now)
        context = ServerContext(Dispatcher([]), self.counter, self.loop, recursion)
        sock = socket.create_server(("127.0.0.1", 0), backlog=512)
        sock.setblocking(False)
        self.address = sock.getsockname()
        self.server = TcpServer(sock, context, 100_000)
        self.server.open()
        self.ended = False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while not self.ended:
            self.loop.turn(0.05)
            self.turns += 1
            while self.calls:
                self.calls.pop()()

    def close(self):
        self.ended = True
        self.thread.join()
        self.server.close()
        self.loop.close()


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.setattr(tcp, "IDLE_SECONDS", 10 * PATIENCE)
    made = Worker()
    yield made
    made.close()


@pytest.fixture
def silent(worker):
    """Open silent connections, each from the next of some addresses."""
    with contextlib.ExitStack() as opened:

        def connect(clients, count):
            sources = [(f"127.0.0.{number % clients + 1}", 0) for number in range(count)]
            return [
                opened.enter_context(socket.create_connection(worker.address, PATIENCE, source)) for source in sources
            ]

        yield connect


def asks(sock):
    try:
        sock.sendall(FRAMED)
        return len(sock.recv(65536)) > 2
    except ConnectionError:
        return False


def ask(worker, source=OTHER):
    with socket.create_connection(worker.address, PATIENCE, (source, 0)) as sock:
        return asks(sock)


@pytest.mark.parametrize("clients", [1, 40])
def test_all_others_are_answered_beside_silent_connections(worker, silent, clients):
    silent(clients, SILENT)
    answered = [ask(worker, source) for _ in range(60) for source in ("127.0.0.1", OTHER)]
    assert answered.count(True) == 120


def test_without_file_descriptors_the_loop_rests(worker, monkeypatch):
    def scarce(_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket.socket, "accept", scarce)
    with socket.create_connection(worker.address, PATIENCE):
        before = worker.turns
        rest = threading.Event()
        rest.wait(0.5)
        assert worker.turns - before < 100


def test_without_file_descriptors_a_silent_connection_leaves(worker, silent, monkeypatch):
    monkeypatch.setattr(tcp, "ACCEPT_RETRY_SECONDS", 10 * PATIENCE)
    first, second = silent(2, 2)
    until(lambda: len(worker.server.slots) == 2, "the connections", PATIENCE)
    accept, failures = socket.socket.accept, [errno.EMFILE]

    def scarce(sock):
        if failures:
            raise OSError(failures[0], os.strerror(failures.pop()))
        return accept(sock)

    monkeypatch.setattr(socket.socket, "accept", scarce)
    assert ask(worker)
    assert (asks(first), asks(second)) == (False, True)


def test_who_asks_stays_and_who_is_silent_leaves(worker, silent, monkeypatch):
    monkeypatch.setattr(tcp, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(tcp, "MAX_CONNECTIONS_PER_CLIENT", 3)
    crowd = silent(4, 4)
    until(lambda: len(worker.server.slots) == 4, "the connections", PATIENCE)
    assert asks(crowd[0])
    crowd += silent(4, 3)
    until(lambda: worker.counter.refused_connections == 3, "the end of the others", PATIENCE)
    assert asks(crowd[0])
    assert [asks(sock) for sock in crowd[1:4]] == [False] * 3


def test_waiting_for_a_resolver_is_not_silence(worker, silent, monkeypatch):
    monkeypatch.setattr(tcp, "MAX_CONNECTIONS", 2)
    waiting = []

    class Slow:
        def resolve(self, query, _client, reply, _now):
            waiting.append(lambda: reply(local_response(query, wire.REFUSED)))

    block = BlockPlugins((".",), None, Slow())
    worker.server.dispatcher = Dispatcher([block])
    worker.server.recursion = Recursion(("127.0.0.0/8",), worker.counter, worker.loop.now)
    (patient,) = silent(1, 1)
    patient.sendall(FRAMED)
    until(lambda: waiting, "the query", PATIENCE)
    silent(40, 10)
    until(lambda: worker.counter.refused_connections == 9, "the end of the others", PATIENCE)
    worker.calls.append(waiting[0])
    assert len(patient.recv(65536)) > 2
