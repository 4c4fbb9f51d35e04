"""Health-check node ports: what is listened on and what is answered (rows of group 16)."""

import contextlib
import errno
import json
import logging
import math
import os
import socket
import threading

import msgspec
import pytest
from immutables import Map
from tests.free_ports import free_port

from narthex.linux.addresses import OwnAddress
from narthex.model.net import IPFamily
from narthex.proxy.plan.ir import NodePorts, Plan, ServiceHealthCheck
from narthex.proxy.program.service_health import AGAIN_SECONDS, ServiceHealth
from narthex.runtime.http import HttpRequest
from narthex.runtime.http.server import HttpServer, listen_tcp
from narthex.testing.build import name
from narthex.testing.load import until

V4, V6 = IPFamily.IPV4, IPFamily.IPV6
WEB, CART = name("shop/web"), name("shop/cart")


class FakeSocket:
    """Stands for a listening socket: what it listens on."""

    def __init__(self, address, port):
        self.place = (address, port)


class FakeHttp:
    """Remembers who answers where."""

    def __init__(self):
        self.answers = {}

    def open(self, sock, answer):
        self.answers[sock.place] = answer

    def close(self, sock):
        del self.answers[sock.place]


class Bench:
    """Health ports of a node with everything around them faked."""

    def __init__(self):
        self.http = FakeHttp()
        self.healthy = True
        self.own = [own("10.20.0.11"), own("192.168.1.5"), own("127.0.0.1"), own("fd20::11")]
        self.taken = {}
        self.asked = 0
        self.health = ServiceHealth(self.http, lambda: self.healthy, self.addresses, self.listen)

    def addresses(self):
        self.asked += 1
        if self.own is None:
            raise OSError(errno.ENOBUFS, "No buffer space available")
        return self.own

    def listen(self, address, port):
        if number := self.taken.get((address, port)):
            raise OSError(number, os.strerror(number))
        return FakeSocket(address, port)

    def follow(self, checks, family=V4, cidrs=None):
        health_checks = Map({key: ServiceHealthCheck(*value) for key, value in checks.items()})
        plan = Plan(family=family, services={}, node_ports=NodePorts(cidrs=cidrs), health_checks=health_checks)
        self.again = self.health.follow(plan)
        return plan

    @property
    def places(self):
        return set(self.http.answers)

    def ask(self, address="0.0.0.0", port=32000, method="GET", path="/"):
        reply = self.http.answers[address, port](HttpRequest(method, path))
        return reply.status, json.loads(reply.body)


def own(address, interface=2):
    return OwnAddress(address=address, prefix=24, interface=interface, is_global=True)


@pytest.fixture
def bench():
    return Bench()


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.INFO, "narthex")
    return caplog


def said(log, level):
    return [record.getMessage() for record in log.records if record.levelname == level]


@pytest.mark.row("16.2", "16.4", "16.5")
@pytest.mark.parametrize(
    "ready, healthy, status", [(2, True, 200), (1, True, 200), (0, True, 503), (2, False, 503), (0, False, 503)]
)
def test_the_answer(bench, ready, healthy, status):
    bench.follow({WEB: (32000, ready)})
    bench.healthy = healthy
    reply = bench.http.answers["0.0.0.0", 32000](HttpRequest("GET", "/"))
    assert reply.status == status
    assert reply.content_type == "application/json"
    assert reply.headers == (("X-Load-Balancing-Endpoint-Weight", str(ready)),)
    assert reply.body == (
        b'{"service":{"namespace":"shop","name":"web"},"localEndpoints":%d,"serviceProxyHealthy":%s}'
        % (ready, b"true" if healthy else b"false")
    )


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "BREW"])
@pytest.mark.parametrize("path", ["/", "/healthz", "/a/b", "*"])
def test_any_path_and_any_method(bench, method, path):
    bench.follow({WEB: (32000, 1)})
    assert bench.ask(method=method, path=path)[0] == 200


def test_counts_follow_the_plan_without_another_socket(bench):
    bench.follow({WEB: (32000, 2)})
    answer = bench.http.answers["0.0.0.0", 32000]
    bench.follow({WEB: (32000, 0)})
    assert bench.http.answers["0.0.0.0", 32000] is answer
    assert bench.ask() == (
        503,
        {"service": {"namespace": "shop", "name": "web"}, "localEndpoints": 0, "serviceProxyHealthy": True},
    )


@pytest.mark.row("16.8", "16.11")
def test_ports_come_and_go_and_change(bench):
    bench.follow({WEB: (32000, 1), CART: (32001, 1)})
    assert bench.places == {("0.0.0.0", 32000), ("0.0.0.0", 32001)}
    bench.follow({CART: (32001, 1)})
    assert bench.places == {("0.0.0.0", 32001)}
    bench.follow({WEB: (32002, 1), CART: (32001, 1)})
    assert bench.places == {("0.0.0.0", 32001), ("0.0.0.0", 32002)}
    bench.follow({})
    assert bench.places == set()


def test_a_number_that_passes_to_another_service_stays_open(bench):
    bench.follow({WEB: (32000, 1)})
    bench.follow({CART: (32000, 2)})
    assert bench.ask()[1]["service"]["name"] == "cart"


@pytest.mark.row("16.6", "16.10")
def test_each_family_counts_its_own(bench):
    bench.follow({WEB: (32000, 1)})
    bench.follow({WEB: (32000, 0)}, family=V6)
    assert bench.ask("0.0.0.0")[0] == 200
    assert bench.ask("::")[0] == 503
    bench.follow({})
    assert bench.places == {("::", 32000)}


@pytest.mark.parametrize(
    "family, cidrs, addresses",
    [
        (V4, None, {"0.0.0.0"}),
        (V6, None, {"::"}),
        (V4, ("0.0.0.0/0",), {"0.0.0.0"}),
        (V4, ("10.20.0.0/16", "192.168.0.0/16"), {"10.20.0.11", "192.168.1.5"}),
        (V4, ("10.20.0.11/32",), {"10.20.0.11"}),
        (V4, ("172.16.0.0/12",), set()),
        (V4, (), set()),
        (V6, ("fd20::/64",), {"fd20::11"}),
        (V6, ("fd21::/64",), set()),
    ],
)
def test_it_listens_where_node_ports_answer(bench, family, cidrs, addresses):
    bench.follow({WEB: (32000, 1)}, family, cidrs)
    assert bench.places == {(address, 32000) for address in addresses}


def test_link_local_addresses_carry_their_interface(bench):
    bench.own = [own("fe80::1", 2), own("fe80::1", 3)]
    bench.follow({WEB: (32000, 1)}, V6, ("fe80::/10",))
    assert bench.places == {("fe80::1%2", 32000), ("fe80::1%3", 32000)}


def test_addresses_that_come_and_go_are_followed(bench):
    plan = bench.follow({WEB: (32000, 1)}, cidrs=("10.0.0.0/8",))
    bench.own = [own("10.20.7.7")]
    bench.health.follow(plan)
    assert bench.places == {("10.20.7.7", 32000)}


def test_when_to_look_again(bench):
    bench.follow({WEB: (32000, 1)})
    assert bench.again == math.inf
    bench.follow({WEB: (32000, 1)}, V6, ("fd20::/64",))
    assert bench.again == AGAIN_SECONDS, "addresses may come"
    bench.follow({}, V6, ("fd20::/64",))
    assert bench.again == math.inf
    bench.taken["0.0.0.0", 32001] = errno.EADDRINUSE
    bench.follow({WEB: (32001, 1)})
    assert bench.again == AGAIN_SECONDS, "a port may become free"
    bench.taken.clear()
    bench.follow({WEB: (32001, 1)})
    assert bench.again == math.inf


def test_while_the_addresses_are_not_known_all_stays(bench, log):
    plan = bench.follow({WEB: (32000, 1)}, cidrs=("10.0.0.0/8",))
    bench.own = None
    bench.health.follow(plan)
    assert bench.places == {("10.20.0.11", 32000)}
    assert "No buffer space available" in said(log, "WARNING")[0]


def test_without_health_checks_nothing_is_asked_of_the_kernel(bench):
    bench.follow({}, cidrs=("10.0.0.0/8",))
    bench.follow({WEB: (32000, 1)})
    assert bench.asked == 0


@pytest.mark.row("16.7")
def test_a_taken_port_is_reported_once_and_tried_again(bench, log):
    bench.taken["0.0.0.0", 32000] = errno.EADDRINUSE
    plan = bench.follow({WEB: (32000, 1), CART: (32001, 1)})
    assert bench.places == {("0.0.0.0", 32001)}
    bench.health.follow(plan)
    (warning,) = said(log, "WARNING")
    assert warning.startswith(
        "Service shop/web: cannot listen on health check node port 0.0.0.0:32000: Address already in use; "
    )
    bench.taken.clear()
    bench.health.follow(plan)
    assert bench.ask()[0] == 200
    assert said(log, "INFO") == ["Service shop/web: health check node port 0.0.0.0:32000 is open now"]


def test_another_reason_and_another_service_are_reported_anew(bench, log):
    bench.taken["0.0.0.0", 32000] = errno.EADDRINUSE
    bench.follow({WEB: (32000, 1)})
    bench.taken["0.0.0.0", 32000] = errno.EMFILE
    bench.follow({WEB: (32000, 1)})
    bench.follow({CART: (32000, 1)})
    assert [line.split(";")[0].rpartition(": ")[2] for line in said(log, "WARNING")] == [
        "Address already in use",
        "Too many open files",
        "Too many open files",
    ]
    assert said(log, "WARNING")[2].startswith("Service shop/cart:")


def test_a_taken_port_whose_service_goes_is_forgotten(bench, log):
    bench.taken["0.0.0.0", 32000] = errno.EADDRINUSE
    bench.follow({WEB: (32000, 1)})
    bench.follow({})
    bench.taken.clear()
    bench.follow({WEB: (32000, 1)})
    assert bench.places == {("0.0.0.0", 32000)}
    assert not said(log, "INFO")


def test_one_address_of_several_may_be_taken(bench):
    bench.taken["192.168.1.5", 32000] = errno.EADDRINUSE
    bench.follow({WEB: (32000, 1)}, cidrs=("10.0.0.0/8", "192.168.0.0/16"))
    assert bench.places == {("10.20.0.11", 32000)}


def test_of_two_services_with_one_number_the_first_by_name_has_it(bench, log):
    checks = {WEB: (32000, 1), CART: (32000, 2)}
    bench.follow(checks)
    bench.follow(checks, family=V6)
    assert bench.ask()[1]["service"]["name"] == "cart"
    assert said(log, "WARNING") == [
        "Service shop/web cannot have health check node port 32000: Service shop/cart has it; "
        "give one of the two another port"
    ]
    bench.follow({WEB: (32000, 1)})
    assert not said(log, "INFO")
    bench.follow({WEB: (32000, 1)}, family=V6)
    assert said(log, "INFO") == ["settled: Service shop/web has no rival for health check node port 32000 any more"]
    assert bench.ask()[1]["service"]["name"] == "web"


def test_a_connection_older_than_the_ports_end_gets_an_answer(bench):
    bench.follow({WEB: (32000, 1)})
    answer = bench.http.answers["0.0.0.0", 32000]
    bench.follow({})
    assert answer(HttpRequest("GET", "/")).status == 404


def fetch(address, port, raw=b"GET / HTTP/1.1\r\n\r\n"):
    with socket.create_connection((address, port), timeout=30) as sock:
        sock.sendall(raw)
        return b"".join(iter(lambda: sock.recv(65536), b"")).decode()


def test_over_sockets():
    http, port = HttpServer(), free_port()
    health = ServiceHealth(http, lambda: True)
    plan = Plan(family=V4, services={}, health_checks=Map({WEB: ServiceHealthCheck(port, 3)}))
    six = msgspec.structs.replace(plan, family=V6, health_checks=Map({WEB: ServiceHealthCheck(port, 0)}))
    try:
        health.follow(plan)
        health.follow(six)
        head, _, body = fetch("127.0.0.1", port, b"POST /x HTTP/1.0\r\nContent-Length: 2\r\n\r\nhi").partition(
            "\r\n\r\n"
        )
        assert head.splitlines() == [
            "HTTP/1.1 200 OK",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "X-Content-Type-Options: nosniff",
            "X-Load-Balancing-Endpoint-Weight: 3",
            "Connection: close",
        ]
        assert fetch("::1", port).startswith("HTTP/1.1 503 Service Unavailable\r\n")
        for each in (plan, six):
            health.follow(msgspec.structs.replace(each, health_checks=Map()))
        for address in ("127.0.0.1", "::1"):
            with pytest.raises(ConnectionRefusedError):
                fetch(address, port)
        health.follow(plan)
        assert fetch("127.0.0.1", port).startswith("HTTP/1.1 200 OK\r\n")
    finally:
        http.stop()
    with pytest.raises(ConnectionRefusedError):
        fetch("127.0.0.1", port)


def test_a_port_in_use_over_sockets():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(OSError, match="Address already in use"):
            listen_tcp("127.0.0.1", port)


def test_silent_connections_to_one_port_shut_out_nobody():
    http, ports = HttpServer(), (free_port(), free_port())
    health = ServiceHealth(http, lambda: True)
    checks = Map({WEB: ServiceHealthCheck(ports[0], 1), CART: ServiceHealthCheck(ports[1], 1)})
    try:
        health.follow(Plan(family=V4, services={}, health_checks=checks))
        with contextlib.ExitStack() as silent:
            for _ in range(300):
                silent.enter_context(socket.create_connection(("127.0.0.1", ports[0]), 60))
            for port in ports * 10:
                assert fetch("127.0.0.1", port).startswith("HTTP/1.1 200 OK\r\n")
    finally:
        http.stop()


def test_no_client_hangs_when_a_port_closes_under_load():
    """Each is answered, refused or cut off at once, never left waiting."""
    http, port = HttpServer(), free_port()
    health = ServiceHealth(http, lambda: True)
    full = Plan(family=V4, services={}, health_checks=Map({WEB: ServiceHealthCheck(port, 1)}))
    none = msgspec.structs.replace(full, health_checks=Map())
    outcomes, ended = [], threading.Event()

    def knock():
        while not ended.is_set():
            try:
                outcomes.append(fetch("127.0.0.1", port)[:15] or "cut off")
            except OSError as error:
                outcomes.append(type(error).__name__)

    threads = [threading.Thread(target=knock) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(100):
            answered = outcomes.count("HTTP/1.1 200 OK")
            health.follow(full)
            until(lambda: outcomes.count("HTTP/1.1 200 OK") > answered, "an answer")  # noqa: B023
            health.follow(none)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        http.stop()
    allowed = {"HTTP/1.1 200 OK", "HTTP/1.1 404 No", "cut off", "ConnectionRefusedError", "ConnectionResetError"}
    assert set(outcomes) <= allowed
