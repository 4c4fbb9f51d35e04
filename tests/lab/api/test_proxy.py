"""The subresource `proxy` of pods, Services, and nodes: which server gets a request, and what comes back."""

import contextlib
import http.server
import json
import socket
import ssl
import threading

import httpx2
import pytest

from narthex.lab.server import certificate
from narthex.lab.server.proxy import LinkRewriter

from .bare_server import TOKEN, bare

PAGE = b'<html><a href="/next?a=1#b">n</a><img SRC=\'/i.png\'><a href="../up">u</a><a href="https://other/x">o</a> href="/text"'
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers with what was asked."""

    protocol_version = "HTTP/1.1"

    def answer(self):
        length = int(self.headers.get("Content-Length") or 0)
        body, kind, status, more = b"", "application/json", 200, {}
        asked = {"method": self.command, "path": self.path, "body": self.rfile.read(length).decode()}
        asked["headers"] = {name.lower(): value for name, value in self.headers.items()}
        match self.path.partition("?")[0]:
            case "/page":
                body, kind = PAGE, "text/html; charset=utf-8"
            case "/away":
                status, more = 302, {"Location": f"http://{self.headers['Host']}/page"}
            case "/status":
                status, body = 418, b"{}"
            case _:
                body = json.dumps(asked).encode()
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), "Connection": "x", **more}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = answer

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving(tls=None):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    """A server with a pod and a Service, and a client of it."""
    secured = certificate.make(["x"]).context()
    with bare(tmp_path_factory.mktemp("bare")) as running, serving() as plain, serving(secured) as secure:
        ports = [{"containerPort": 8080, "name": "web"}, {"containerPort": 8443}]
        spec = {"nodeName": "node-1", "containers": [{"name": "c", "image": "echo", "ports": ports}]}
        pod = running.create("Pod", {"metadata": {"name": "web", "namespace": "default"}, "spec": spec})
        status = {"phase": "Running", "podIP": "192.0.2.7"}
        running.update("Pod", {**pod, "status": status}, subresource="status")
        ports = [{"name": "http", "port": 80, "targetPort": "web"}, {"name": "tls", "port": 443, "targetPort": 8443}]
        for name in ("web", "empty"):
            running.create("Service", {"metadata": {"name": name, "namespace": "default"}, "spec": {"ports": ports}})
        target = {"kind": "Pod", "namespace": "default", "name": "web"}
        found = [{"name": "http", "port": 8080}, {"name": "tls", "port": 8443}]
        subset = {"addresses": [{"ip": "192.0.2.7", "targetRef": target}], "ports": found}
        running.create("Endpoints", {"metadata": {"name": "web", "namespace": "default"}, "subsets": [subset]})
        node = running.create("Node", {"metadata": {"name": "node-1"}})
        address = {"type": "InternalIP", "address": "192.0.2.1"}
        running.update("Node", {**node, "status": {"addresses": [address]}}, subresource="status")
        running.pods.ports = {
            ("node-1", "192.0.2.7", 8080): plain,
            ("node-1", "192.0.2.7", 8443): secure,
            ("node-1", "192.0.2.1", 10249): plain,
        }
        log = tmp_path_factory.mktemp("logs") / "log"
        log.write_text("a line\n")
        running.pods.files = {"a.log": log, "pods/b/b?c.log": log}
        context = ssl.create_default_context(cafile=str(running.certificate))
        with httpx2.Client(base_url=running.url, headers=HEADERS, verify=context, timeout=60) as client:
            yield client


BASE = "/api/v1/namespaces/default"


@pytest.mark.parametrize(
    "name",
    [
        "pods/web", "pods/web:8080", "pods/web:web", "pods/http:web:8080", "pods/http:web:", "pods/https:web:8443",
        "services/web:http", "services/web:80", "services/http:web:http", "services/https:web:tls",
        "services/https%3Aweb%3A443",
    ],
)  # fmt: skip
def test_where_a_request_goes(api, name):
    answer = api.get(f"{BASE}/{name}/proxy/a%2Fb/c?d=e&d=f")
    assert answer.status_code == 200 and answer.json()["path"] == "/a%2Fb/c?d=e&d=f"


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_methods_and_bodies(api, method):
    answer = api.request(
        method, f"{BASE}/pods/web/proxy/x", content=b"body", headers={"X-Own": "1", "Cookie": "a"}
    ).json()
    assert (answer["method"], answer["path"], answer["body"]) == (method, "/x", "body")
    sent = answer["headers"]
    assert (sent["x-own"], sent["cookie"], sent["host"]) == ("1", "a", "192.0.2.7:8080")
    # The token of the lab is not for programs in pods.
    assert "authorization" not in sent and sent["x-forwarded-uri"] == f"{BASE}/pods/web/proxy/x"


def test_status_and_head(api):
    assert api.get(f"{BASE}/pods/web/proxy/status").status_code == 418
    answer = api.head(f"{BASE}/pods/web/proxy/page")
    assert (answer.status_code, answer.content, answer.headers["Content-Length"]) == (200, b"", str(len(PAGE)))


def test_links_and_redirects_lead_through_the_api(api):
    prefix = f"{BASE}/pods/web/proxy"
    page = api.get(f"{prefix}/page").text
    assert f'<a href="{prefix}/next?a=1#b">' in page and f"SRC='{prefix}/i.png'" in page
    assert '<a href="../up">' in page and 'href="https://other/x"' in page and page.endswith(' href="/text"')
    assert api.get(f"{prefix}/away").headers["Location"] == f"{prefix}/page"
    for method in ("GET", "HEAD"):
        answer = api.request(method, f"{prefix}?a=b")
        assert (answer.status_code, answer.headers["Location"]) == (301, f"{prefix}/?a=b")
    assert api.post(prefix).json()["path"] == "/"


@pytest.mark.parametrize(
    ("path", "code", "message"),
    [
        (f"{BASE}/pods/none/proxy/", 404, 'pods "none" not found'),
        (f"{BASE}/services/none/proxy/", 404, 'services "none" not found'),
        (f"{BASE}/services/empty:http/proxy/", 503, 'no endpoints available for service "empty"'),
        (f"{BASE}/services/web/proxy/", 503, 'no endpoints available for service "web"'),
        (f"{BASE}/services/web:81/proxy/", 503, 'no service port 81 found for service "web"'),
        (f"{BASE}/pods/ftp:web:80/proxy/", 400, 'invalid pod request "ftp:web:80"'),
        (f"{BASE}/pods/web:none/proxy/", 400, 'pod "web" has no port "none"'),
        (f"{BASE}/pods/web:81/proxy/", 503, "error trying to reach service: dial tcp 192.0.2.7:81: Connection refused"),
        ("/api/v1/nodes/node-1/proxy/", 404, "404 page not found"),
        ("/api/v1/nodes/node-1/proxy/logs/none", 404, "404 page not found"),
        ("/api/v1/nodes/node-1:web/proxy/", 400, 'node "node-1" has no port "web"'),
        ("/api/v1/nodes/none/proxy/", 404, 'nodes "none" not found'),
    ],
)
def test_what_cannot_be_reached(api, path, code, message):
    answer = api.get(path)
    assert answer.status_code == code and message in answer.json()["message"]


def test_a_port_of_a_node(api):
    assert api.get("/api/v1/nodes/node-1:10249/proxy/metrics").json()["path"] == "/metrics"


@pytest.mark.parametrize("name", ["node-1", "node-1:10250", "https:node-1:"])
def test_the_kubelet_of_a_node(api, name):
    base = f"/api/v1/nodes/{name}/proxy"
    assert api.get(f"{base}/healthz").text == "ok"
    assert '<a href="a.log">a.log</a>\n<a href="pods/">pods/</a>\n' in api.get(f"{base}/logs/").text
    assert '<a href="b%3Fc.log">b?c.log</a>' in api.get(f"{base}/logs/pods/b/").text
    assert api.get(f"{base}/logs/pods").headers["Location"] == "pods/"
    for path in ("a.log", "pods/b/b%3Fc.log"):
        answer = api.get(f"{base}/logs/{path}")
        assert (answer.status_code, answer.text) == (200, "a line\n")


def test_an_upgraded_connection_is_a_pipe(tmp_path):
    with bare(tmp_path) as running, socket.create_server(("127.0.0.1", 0)) as listener:
        spec = {"nodeName": "n", "containers": [{"name": "c", "image": "echo", "ports": [{"containerPort": 1}]}]}
        pod = running.create("Pod", {"metadata": {"name": "web", "namespace": "default"}, "spec": spec})
        running.update("Pod", {**pod, "status": {"podIP": "192.0.2.7"}}, subresource="status")
        running.pods.ports["n", "192.0.2.7", 1] = listener.getsockname()[1]
        context = ssl.create_default_context(cafile=str(running.certificate))
        host, port = "localhost", int(running.url.rpartition(":")[2])
        with context.wrap_socket(socket.create_connection(("127.0.0.1", port), 60), server_hostname=host) as client:
            head = f"GET {BASE}/pods/web/proxy/ws HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
            client.sendall(f"{head}Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n".encode())
            listener.settimeout(60)
            server, _ = listener.accept()
            with server:
                server.settimeout(60)
                received = b""
                while b"\r\n\r\n" not in received:
                    received += server.recv(4096)
                assert received.startswith(b"GET /ws HTTP/1.1\r\n") and b"Upgrade: websocket\r\n" in received
                server.sendall(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")
                assert client.recv(4096) == b"HTTP/1.1 101 Switching Protocols\r\n\r\n"
                client.sendall(b"ping")
                assert server.recv(4096) == b"ping"
                server.sendall(b"pong")
                assert client.recv(4096) == b"pong"
            assert client.recv(4096) == b""


def test_links_that_lead_elsewhere_stay():
    links = LinkRewriter("/p", "192.0.2.7:80", "lab:6443")
    assert [links.url(each) for each in ("/a/", "http://192.0.2.7:80/a", "//lab:6443/a", "/p/a", "a", "http://[", "#x")] == [
        "/p/a/", "/p/a", "/p/a", "/p/a", "a", "http://[", "#x",
    ]  # fmt: skip
