"""The server in front of Ingresses, on loopback: what clients and servers get."""

import base64
import contextlib
import http.client
import json
import socket
import ssl
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from narthex.lab.controllers.ingress.routing import (
    IngressBackend,
    IngressCertificate,
    IngressRoute,
    IngressTable,
    IngressTarget,
)
from narthex.lab.server import certificate
from narthex.lab.server.ingress import IngressServer
from narthex.testing.load import until

PATIENCE = 30


class Echo(BaseHTTPRequestHandler):
    """Answers with what it gets; WebSockets and others that change the protocol get their bytes back."""

    protocol_version = "HTTP/1.1"

    accepted: ClassVar[Counter[int]] = Counter()
    left: ClassVar[Counter[int]] = Counter()
    """Connections by port, and those that have ended."""

    def setup(self):
        super().setup()
        self.accepted[self.server.server_port] += 1

    def finish(self):
        super().finish()
        self.left[self.server.server_port] += 1

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        fields = {name.lower(): value for name, value in self.headers.items()}
        found = {"method": self.command, "target": self.path, "fields": fields, "body": body.decode()}
        answer = json.dumps({**found, "port": self.server.server_port}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def do_GET(self):
        if self.path == "/silent":
            self.close_connection = True
        elif self.headers.get("upgrade") == "websocket":
            self.send_response(101)
            self.send_header("Upgrade", "websocket")
            self.send_header("Connection", "Upgrade")
            self.end_headers()
            while data := self.rfile.readline():
                self.wfile.write(data.upper())
            self.close_connection = True
        else:
            self.do_POST()
            self.close_connection |= self.path == "/web/last"

    def log_message(self, *_):
        """Stay silent."""


@contextlib.contextmanager
def echo():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def servers():
    with echo() as one, echo() as other:
        Echo.accepted.clear()
        Echo.left.clear()
        yield one, other


def dial(target):
    sock = socket.create_connection((target.address, target.port), PATIENCE)
    sock.setblocking(False)
    return sock


class Front:
    """An IngressServer with a port for HTTP and one for HTTPS."""

    def __init__(self):
        self.server = IngressServer(dial)
        socks = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        self.http, self.https = (sock.getsockname()[1] for sock in socks)
        for sock, tls in zip(socks, (False, True), strict=True):
            self.server.listen(sock, tls=tls)

    def lead(self, *ports, certificates=(), **other):
        """Lead everything below /web to servers, and other paths to backends without any."""
        targets = tuple(IngressTarget("127.0.0.1", port) for port in ports)
        backends = {"/web": IngressBackend("Service shop/web port 80", targets), **other}
        routes = tuple(IngressRoute("a.example", path, False, backend) for path, backend in backends.items())
        self.server.use(IngressTable(routes, tuple(certificates)))

    def client(self):
        return http.client.HTTPConnection("127.0.0.1", self.http, timeout=PATIENCE)


@pytest.fixture
def front():
    made = Front()
    yield made
    made.server.close()


def ask(client, method="GET", target="/web", host="a.example", body=None, **fields):
    named = {name.replace("_", "-"): value for name, value in fields.items()}
    client.request(method, target, body=body, headers={"Host": host, **named})
    response = client.getresponse()
    return response.status, response.read().decode()


def test_a_connection_is_kept_and_servers_take_turns(front, servers):
    front.lead(*servers)
    client = front.client()
    ports = []
    for number in range(4):
        status, text = ask(client, "POST", f"/web/{number}?x=1", body=f"body {number}")
        found = json.loads(text)
        assert (status, found["method"], found["target"], found["body"]) == (
            200,
            "POST",
            f"/web/{number}?x=1",
            f"body {number}",
        )
        ports.append(found["port"])
    assert ports == [*servers, *servers]
    client.close()


def test_a_servers_connection_has_the_next_request_unless_that_must_not_be_repeated(front, servers):
    port = servers[0]
    front.lead(port)
    client = front.client()
    assert [ask(client)[0] for _ in range(4)] == [200] * 4
    assert Echo.accepted[port] == 1
    assert ask(client, "POST", body="b")[0] == 200
    assert Echo.accepted[port] == 2
    # Both are kept, and the client's next request needs one.
    assert [ask(client)[0] for _ in range(2)] == [200] * 2
    assert Echo.accepted[port] == 2
    front.lead(servers[1])
    until(lambda: Echo.left[port] == 2, "the end of connections to a server that no route leads to")
    client.close()


def test_a_connection_that_the_server_has_closed_costs_no_request(front, servers):
    front.lead(servers[0])
    client = front.client()
    for number in range(1, 6):
        assert ask(client, target="/web/last")[0] == 200
        assert Echo.accepted[servers[0]] == number
    client.close()


def test_the_server_learns_about_the_client(front, servers):
    front.lead(*servers)
    client = front.client()
    _, text = ask(client, X_Forwarded_For="192.0.2.9", X_Forwarded_Proto="gopher", Cookie="a=1", TE="trailers")
    fields = json.loads(text)["fields"]
    forwarded = {name: value for name, value in fields.items() if name.startswith("x-")}
    assert forwarded == {
        "x-forwarded-for": "192.0.2.9, 127.0.0.1",
        "x-forwarded-host": "a.example",
        "x-forwarded-port": str(front.http),
        "x-forwarded-proto": "http",
        "x-real-ip": "127.0.0.1",
    }
    assert (fields["host"], fields["cookie"], fields.get("te")) == ("a.example", "a=1", None)
    client.close()


def test_what_has_no_answer(front, servers):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        closed = unused.getsockname()[1]
    empty = IngressBackend("Service shop/empty port 80")
    lost = IngressBackend("Service shop/lost port 80", fault="there is no such Service")
    dead = IngressBackend("Service shop/dead port 80", (IngressTarget("127.0.0.1", closed),))
    front.lead(*servers, **{"/empty": empty, "/lost": lost, "/dead": dead})
    client = front.client()
    assert ask(client, host="b.example") == (404, "no Ingress has a rule for this host and path\n")
    assert ask(client, target="/empty") == (503, "Service shop/empty port 80: no pod is ready\n")
    assert ask(client, target="/lost") == (503, "Service shop/lost port 80: there is no such Service\n")
    assert ask(client, target="/dead")[0] == 502
    client.request("GET", "/web", headers={"Host": "a.example", "Content-Length": str(1 << 40)})
    assert client.getresponse().status == 413
    client.close()


def test_a_server_that_ends_without_an_answer_is_a_bad_gateway(front, servers):
    targets = (IngressTarget("127.0.0.1", servers[0]),)
    front.lead(**{"/silent": IngressBackend("Service shop/silent port 80", targets)})
    client = front.client()
    assert ask(client, target="/silent")[0] == 502
    client.close()


def test_a_server_that_is_gone_is_passed_over(front, servers):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        closed = unused.getsockname()[1]
    front.lead(closed, servers[0])
    client = front.client()
    assert [ask(client)[0] for _ in range(4)] == [200] * 4
    client.close()


def test_websockets_pass(front, servers):
    front.lead(*servers)
    with socket.create_connection(("127.0.0.1", front.http), PATIENCE) as sock:
        sock.sendall(
            b"GET /web HTTP/1.1\r\nHost: a.example\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nearly\n"
        )
        reader = sock.makefile("rb")
        assert b" 101 " in reader.readline()
        while reader.readline().strip():
            pass
        assert reader.readline() == b"EARLY\n"
        sock.sendall(b"late\n")
        assert reader.readline() == b"LATE\n"
        reader.close()


def certificate_for(host):
    made = certificate.make([host])
    encoded = (base64.b64encode(each.encode()).decode() for each in (made.certificate, made.key))
    return IngressCertificate((host,), *encoded), made.certificate


def test_the_server_name_decides_about_the_certificate(front, servers):
    (shop, shop_pem), (wild, _) = certificate_for("a.example"), certificate_for("*.example")
    unusable = IngressCertificate(("bad.example",), "eA==", "eA==")
    front.lead(*servers, certificates=(wild, unusable, shop))
    names = {}
    for name in ("a.example", "b.example", "bad.example", "other.org"):
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with (
            socket.create_connection(("127.0.0.1", front.https), PATIENCE) as sock,
            context.wrap_socket(sock, server_hostname=name) as tls,
        ):
            names[name] = ssl.DER_cert_to_PEM_cert(tls.getpeercert(binary_form=True)).split()
    assert names["a.example"] == shop_pem.split()
    assert len({tuple(each) for each in names.values()}) == 3
    assert names["bad.example"] == names["other.org"]

    context = ssl.create_default_context(cadata=shop_pem)
    client = http.client.HTTPSConnection("127.0.0.1", front.https, timeout=PATIENCE, context=context)
    client._create_connection = lambda *_: socket.create_connection(("127.0.0.1", front.https), PATIENCE)
    client.host = "a.example"
    status, text = ask(client)
    assert (status, json.loads(text)["fields"]["x-forwarded-proto"]) == (200, "https")
    client.close()
