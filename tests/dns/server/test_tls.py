"""Upstreams over TLS: who they must be, and connections used again."""

import socket
import ssl
import threading
from pathlib import Path

import pytest
from tests.dns.fake_upstream import answer

from narthex.dns.corefile.settings import ForwardSettings, Upstream, UpstreamTlsSettings
from narthex.dns.message import names
from narthex.dns.message import query as question
from narthex.dns.message.query import parse_query
from narthex.dns.server.counters import UpstreamCounter
from narthex.dns.server.event_loop import EventLoop
from narthex.dns.server.queries_in_flight import Forwarder, tls_context

CERTIFICATES = Path(__file__).parents[2] / "kube/certificates"
AUTHORITY = str(CERTIFICATES / "ca.pem")
LONG = 60.0


class Server:
    """Answers over TLS on loopback, one connection after the other, in a thread."""

    def __init__(self, client_authority=None):
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(CERTIFICATES / "server.pem", CERTIFICATES / "server.key")
        if client_authority:
            self._context.load_verify_locations(client_authority)
            self._context.verify_mode = ssl.CERT_REQUIRED
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(LONG)
        self.upstream = Upstream("127.0.0.1", self._listener.getsockname()[1], "tls")
        self.connections = 0
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(LONG)
        assert not self._thread.is_alive()

    def _serve(self):
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            plain.settimeout(LONG)
            try:
                with self._context.wrap_socket(plain, server_side=True) as sock:
                    while head := sock.recv(2):
                        packet = sock.recv(int.from_bytes(head, "big"))
                        message = answer(parse_query(packet), "192.0.2.1")
                        sock.sendall(len(message).to_bytes(2, "big") + message)
            except OSError:
                continue


@pytest.fixture
def server():
    made = Server()
    yield made
    made.close()


def asked(server, count=1, **tls):
    loop = EventLoop()
    meter = UpstreamCounter()
    forward = ForwardSettings(zone=".", to=(server.upstream,), tls=UpstreamTlsSettings(**tls), max_fails=0)
    forwarder = Forwarder(loop, forward, (server.upstream,), meter)
    found = []
    try:
        for number in range(count):
            forwarder.forward(question.UpstreamQuery(names.wire(f"n{number}"), 1, 1, 0x100), "udp", found.append)
            end = loop.now() + LONG
            while len(found) <= number:
                loop.turn(1.0)
                assert loop.now() < end
    finally:
        forwarder.close()
        loop.close()
    return found, meter.counts.connections


def test_an_authority_of_ones_own_and_one_connection_for_many_questions(server):
    found, connections = asked(server, 4, authority=AUTHORITY)
    assert all(how.response is not None for how in found) and server.connections == 1
    assert connections[str(server.upstream), "tcp-tls", False] == 1
    assert connections[str(server.upstream), "tcp-tls", True] == 3


def test_a_name_of_ones_choice(server):
    assert asked(server, authority=AUTHORITY, server_name="api.test")[0][0].response is not None


@pytest.mark.parametrize(
    ("tls", "reason"), [({"authority": AUTHORITY, "server_name": "other.test"}, "TLS: "), ({}, "TLS: ")]
)
def test_who_is_somebody_else_is_not_believed(server, tls, reason):
    ((how,), _) = asked(server, **tls)
    assert how.response is None and how.reason.startswith(reason) and "CERTIFICATE_VERIFY_FAILED" in how.reason


def test_a_certificate_of_ours():
    server = Server(client_authority=AUTHORITY)
    try:
        files = {"certificate": str(CERTIFICATES / "client.pem"), "key": str(CERTIFICATES / "client.key")}
        assert asked(server, authority=AUTHORITY, **files)[0][0].response is not None
        assert asked(server, authority=AUTHORITY)[0][0].response is None
    finally:
        server.close()


def test_files_that_are_none(tmp_path):
    with pytest.raises(OSError):
        tls_context(UpstreamTlsSettings(authority=str(tmp_path / "none")))
    (tmp_path / "empty").write_text("nothing")
    with pytest.raises(ssl.SSLError):
        tls_context(UpstreamTlsSettings(authority=str(tmp_path / "empty")))
