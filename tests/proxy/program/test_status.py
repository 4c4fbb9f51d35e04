"""The HTTP servers, asked over real loopback sockets."""

import errno
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.free_ports import free_port

from narthex.model.net import FAMILIES, IPFamily
from narthex.proxy.program.health import ProxyHealth
from narthex.proxy.program.metrics import ProxyMetrics
from narthex.proxy.program.status import health_routes, metrics_routes
from narthex.runtime import status
from narthex.runtime.http import HttpResponse, SlowResponse
from narthex.runtime.http import connection as http_connection
from narthex.runtime.http import server as http_server
from narthex.runtime.http.server import HttpServer, listen_tcp
from narthex.runtime.status import BindError, StatusListener, StatusServer
from narthex.testing.fakes import FakeClock


def get(server, purpose, path):
    address, port = server.addresses[purpose]
    where = f"[{address}]" if ":" in address else address
    try:
        with urllib.request.urlopen(f"http://{where}:{port}{path}", timeout=30) as response:
            return response.status, response.read(), response.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers


def ask(server, purpose, raw):
    """Send bytes, read all that comes back."""
    with socket.create_connection(server.addresses[purpose], timeout=30) as sock:
        sock.sendall(raw)
        return b"".join(iter(lambda: sock.recv(65536), b""))


@pytest.fixture
def health():
    return ProxyHealth(FAMILIES, 30.0, FakeClock())


@pytest.fixture
def metrics():
    return ProxyMetrics("nftables")


@pytest.fixture
def http():
    serving = HttpServer()
    yield serving
    serving.stop()


@pytest.fixture
def server(http, health, metrics):
    serving = StatusServer(http)
    shown = {"kubeproxy.config.k8s.io": {"mode": "nftables"}, "narthex": {}}
    serving.serve(
        [
            StatusListener("health", "127.0.0.1", 0, health_routes(health, metrics)),
            StatusListener("metrics", "::1", 0, metrics_routes(metrics, health, "nftables", shown)),
        ]
    )
    return serving


def test_healthz_follows_the_health(server, health):
    code, body, headers = get(server, "health", "/healthz")
    assert code == 503
    assert json.loads(body)["healthy"] is False
    assert headers["Content-Type"] == "application/json"
    for family in FAMILIES:
        health.synced(family)
    code, body, _ = get(server, "health", "/healthz")
    assert code == 200
    assert json.loads(body).keys() == {"lastUpdated", "currentTime", "nodeEligible", "healthy", "status"}
    assert get(server, "health", "/livez")[0] == 200


def test_the_metrics_port(server):
    assert get(server, "metrics", "/proxyMode")[:2] == (200, b"nftables")
    assert get(server, "metrics", "/healthz")[:2] == (200, b"ok")
    assert json.loads(get(server, "metrics", "/configz")[1]) == {
        "kubeproxy.config.k8s.io": {"mode": "nftables"},
        "narthex": {},
    }
    code, body, _ = get(server, "metrics", "/metrics?x=1")
    assert code == 200
    assert b"kubeproxy_proxy_healthz_total" in body


def test_unknown_paths_say_what_there_is(server):
    code, body, _ = get(server, "metrics", "/nothing")
    assert code == 404
    assert b"/metrics" in body


@pytest.mark.parametrize(
    "raw, start",
    [
        (b"POST /healthz HTTP/1.1\r\n\r\n", b"HTTP/1.1 405 "),
        (b"\r\n\r\n", b"HTTP/1.1 400 "),
        (b"GET\r\n\r\n", b"HTTP/1.1 400 "),
        (b"GET /\xff\xfe HTTP/1.1\r\n\r\n", b"HTTP/1.1 404 "),
        (b"x" * 40000 + b"\r\n\r\n", b""),
    ],
)
def test_strange_requests(server, raw, start):
    try:
        answer = ask(server, "health", raw)
    except ConnectionResetError:
        answer = b""
    assert answer.startswith(start)
    assert get(server, "health", "/healthz")[0] == 503


def test_head_has_no_body(server):
    answer = ask(server, "metrics", b"HEAD /proxyMode HTTP/1.1\r\n\r\n")
    assert b"Content-Length: 8" in answer
    assert answer.endswith(b"\r\n\r\n")


def test_a_silent_client_is_hung_up_on(server, monkeypatch):
    monkeypatch.setattr(http_connection, "_REQUEST_SECONDS", 0.1)
    assert ask(server, "health", b"GET /hea") == b""


def test_a_large_body_does_not_cost_the_client_the_answer(server):
    head = b"POST /healthz HTTP/1.1\r\nContent-Length: 12000\r\n\r\n"
    with socket.create_connection(server.addresses["health"], timeout=30) as sock:
        sock.sendall(head)
        assert sock.recv(65536).startswith(b"HTTP/1.1 405 ")
        sock.sendall(b"x" * 12000)
        assert sock.recv(65536) == b""


def test_without_file_descriptors_it_waits_and_continues(server, monkeypatch, caplog):
    monkeypatch.setattr(http_server, "ACCEPT_RETRY_SECONDS", 0.05)
    accept, failures = socket.socket.accept, [errno.EMFILE, errno.ENFILE]

    def scarce(sock):
        if failures:
            number = failures.pop(0)
            raise OSError(number, os.strerror(number))
        return accept(sock)

    monkeypatch.setattr(socket.socket, "accept", scarce)
    assert get(server, "health", "/healthz")[0] == 503
    assert "a connection cannot be accepted: Too many open files; the next try is in 0.05 s" in caplog.text
    assert "a connection cannot be accepted: Too many open files in system" in caplog.text


def test_a_route_that_fails_answers_500(http):
    bad = {"/": lambda: HttpResponse(1 // 0, b""), "/slow": lambda: SlowResponse(lambda: HttpResponse(1 // 0, b""))}
    with_bug = StatusServer(http)
    with_bug.serve([StatusListener("health", "127.0.0.1", 0, bad)])
    assert get(with_bug, "health", "/")[0] == 500
    assert get(with_bug, "health", "/slow")[0] == 500


def test_a_slow_answer_holds_nobody_up(http):
    go_on = threading.Event()

    def slow():
        assert go_on.wait(30)
        return HttpResponse(200, b"at last")

    both = StatusServer(http)
    both.serve(
        [
            StatusListener(
                "health", "127.0.0.1", 0, {"/": lambda: HttpResponse(200, b"now"), "/slow": lambda: SlowResponse(slow)}
            )
        ]
    )
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(get, both, "health", "/slow")
        assert get(both, "health", "/")[1] == b"now"
        assert not waiting.done()
        go_on.set()
        assert waiting.result()[1] == b"at last"


@pytest.mark.row("17.8")
def test_a_taken_port_is_tried_again(http):
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        waiting = StatusServer(http, retry_seconds=0.05)
        waiting.serve([StatusListener("health", "127.0.0.1", port, {"/": lambda: HttpResponse(200, b"here")})])
        time.sleep(0.1)
        assert waiting.addresses == {}
    end = time.monotonic() + 30
    while not waiting.addresses and time.monotonic() < end:
        time.sleep(0.02)
    assert get(waiting, "health", "/")[1] == b"here"


@pytest.mark.row("17.8")
def test_a_taken_port_is_fatal_with_hard_fail(http):
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        listeners = [StatusListener("metrics", "127.0.0.1", 0, {}), StatusListener("health", "127.0.0.1", port, {})]
        strict = StatusServer(http)
        with pytest.raises(BindError, match=f"health server on 127.0.0.1:{port}: Address already in use") as caught:
            strict.serve(listeners, hard_fail=True)
        assert caught.value.purpose == "health"


@pytest.mark.row("29.12")
def test_ports_move_while_it_runs(http):
    def routes(body):
        return {"/": lambda: HttpResponse(200, body)}

    moving = StatusServer(http)
    moving.serve(
        [
            StatusListener("health", "127.0.0.1", 0, routes(b"h")),
            StatusListener("metrics", "127.0.0.1", 0, routes(b"m")),
        ]
    )
    health, metrics = moving.addresses["health"], moving.addresses["metrics"]
    # The same address again is the same listener; the metrics go elsewhere, and then nowhere.
    moving.serve(
        [StatusListener("health", "127.0.0.1", 0, routes(b"h")), StatusListener("metrics", "::1", 0, routes(b"m"))]
    )
    assert moving.addresses["health"] == health
    assert moving.addresses["metrics"][0] == "::1"
    assert get(moving, "metrics", "/")[1] == b"m"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(metrics, timeout=30)
    moving.serve([])
    assert moving.addresses == {}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(health, timeout=30)


def test_a_port_of_ones_own_is_free_again_when_it_moves(http):
    """From one address to all of them, with the same number."""
    moving = StatusServer(http)
    port = free_port()
    for address in ("127.0.0.1", "0.0.0.0", "127.0.0.1"):
        moving.serve(
            [StatusListener("health", address, port, {"/": lambda: HttpResponse(200, b"here")})], hard_fail=True
        )
        assert moving.addresses["health"] == (address.replace("0.0.0.0", "::"), port)


def test_a_wish_of_the_past_is_not_tried_again(http):
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        moving = StatusServer(http, retry_seconds=0.05)
        moving.serve([StatusListener("health", "127.0.0.1", port, {})])
        moving.serve([])
    done = threading.Event()
    http.later(0.3, done.set)
    assert done.wait(30)
    assert moving.addresses == {}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=30)


def test_a_server_without_listeners_does_nothing(http):
    StatusServer(http).serve([])
    assert "http" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_an_unspecified_address_is_of_both_families(http, address, host):
    both = StatusServer(http)
    both.serve([StatusListener("health", address, 0, {"/": lambda: HttpResponse(200, b"both")})])
    with urllib.request.urlopen(f"http://{host}:{both.addresses['health'][1]}/", timeout=30) as response:
        assert response.read() == b"both"


@pytest.mark.parametrize(
    ("reason", "address"), [(errno.EAFNOSUPPORT, "0.0.0.0"), (errno.EADDRINUSE, None)], ids=["no IPv6", "taken"]
)
def test_a_kernel_without_ipv6_has_the_ipv4_address(http, monkeypatch, reason, address):
    def listen(address, port, *, both_families=False):
        if ":" in address:
            raise OSError(reason, os.strerror(reason))
        return listen_tcp(address, port, both_families=both_families)

    monkeypatch.setattr(status, "listen_tcp", listen)
    four = StatusServer(http)
    four.serve([StatusListener("health", "0.0.0.0", 0, {})])
    assert four.addresses.get("health", (None,))[0] == address


@pytest.mark.row("17.9")
def test_answers_are_counted_by_code(server, health):
    get(server, "health", "/healthz")
    health.synced(IPFamily.IPV4), health.synced(IPFamily.IPV6)
    get(server, "health", "/healthz")
    text = get(server, "metrics", "/metrics")[1].decode()
    assert 'kubeproxy_proxy_healthz_total{code="200"} 1.0' in text
    assert 'kubeproxy_proxy_healthz_total{code="503"} 1.0' in text
    assert 'kubeproxy_proxy_livez_total{code="503"} 0.0' in text
