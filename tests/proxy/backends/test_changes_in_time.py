"""Services that change while the proxy runs: rules are patched from turn to turn, and each time mean what is wanted."""

import pytest

from narthex.model.net import IPFamily
from narthex.model.objects import EndpointPort, ServicePort
from narthex.model.packet import Disposition
from narthex.model.store import Delete, Store, Synced, Upsert
from narthex.proxy.backends import BACKENDS
from narthex.proxy.plan.planner import Planner
from narthex.testing.build import CONFIG, HOST, endpoint, endpoint_slice, node, packet, service

IP, NODE_IP, CLIENT = "10.110.0.5", "10.20.0.11", "10.64.1.200"
DELIVERED, LEFT_ALONE = Disposition.DELIVERED, Disposition.NOT_OURS

each_backend = pytest.mark.parametrize("mode", BACKENDS)


class Running:
    """A proxy without a kernel: what it holds is only ever changed by differences."""

    def __init__(self, mode):
        self._backend, self._store, self._planner = BACKENDS[mode], Store(), Planner(CONFIG, IPFamily.IPV4)
        self._store.apply(Upsert(node()))
        self._store.apply(Synced())
        self._rules = None

    def turn(self, *events):
        """One sync. Answers how packets to some destinations end, by destination."""
        for event in events:
            self._store.apply(event)
        want, changes = self._backend.advance(
            self._rules, self._planner.plan(self._store.snapshot, self._store.take_changed())
        )
        held = self._rules and self._backend.patch(self._rules, changes)
        assert held is None or held == want
        self._rules = want
        return self

    def ends(self, destination):
        trace = self._backend.walk(self._rules, packet(CLIENT, destination), HOST)
        return {(outcome.disposition, outcome.endpoint) for outcome in trace.outcomes}

    def sent(self, destination):
        """The endpoints that a connection may get; () when it gets none."""
        return tuple(sorted(end for what, end in self.ends(destination) if what is DELIVERED))


def web(*ports, **fields):
    return service("shop/web", IP, ports=ports or (ServicePort(name="http", port=80, node_port=30080),), **fields)


def backed(*ports):
    ports = ports or (EndpointPort(name="http", port=8080),)
    return endpoint_slice("shop/web", endpoint("10.64.1.10"), ports=ports)


@each_backend
@pytest.mark.row("1.14")
def test_a_type_takes_its_frontends_along(mode):
    running = Running(mode).turn(Upsert(web(type="NodePort")), Upsert(backed()))
    assert running.sent(f"{IP}:80") == running.sent(f"{NODE_IP}:30080") == (("10.64.1.10", 8080),)

    running.turn(Upsert(web(ServicePort(name="http", port=80), type="ClusterIP")))
    assert running.sent(f"{IP}:80") == (("10.64.1.10", 8080),)
    assert {what for what, _ in running.ends(f"{NODE_IP}:30080")} == {LEFT_ALONE}

    for gone in (web(type="ExternalName"), service("shop/web", "None")):
        running.turn(Upsert(web(type="NodePort")))
        assert running.sent(f"{IP}:80")
        running.turn(Upsert(gone))
        assert {what for what, _ in running.ends(f"{IP}:80")} == {LEFT_ALONE}
        assert {what for what, _ in running.ends(f"{NODE_IP}:30080")} == {LEFT_ALONE}


@each_backend
@pytest.mark.row("1.18")
def test_ports_come_and_go_and_change_their_names(mode):
    first, second = ServicePort(name="http", port=80), ServicePort(name="admin", port=81)
    ends = EndpointPort(name="http", port=8080), EndpointPort(name="admin", port=9090)
    running = Running(mode).turn(Upsert(web(first)), Upsert(backed(*ends)))
    assert not running.sent(f"{IP}:81")

    running.turn(Upsert(web(first, second)))
    assert running.sent(f"{IP}:80") == (("10.64.1.10", 8080),)
    assert running.sent(f"{IP}:81") == (("10.64.1.10", 9090),)

    # A new name without endpoints of that name; then the slice follows.
    running.turn(Upsert(web(first, ServicePort(name="control", port=81))))
    assert {what for what, _ in running.ends(f"{IP}:81")} == {Disposition.REJECTED}
    running.turn(Upsert(backed(ends[0], EndpointPort(name="control", port=9091))))
    assert running.sent(f"{IP}:81") == (("10.64.1.10", 9091),)

    running.turn(Upsert(web(first)))
    assert running.sent(f"{IP}:80") == (("10.64.1.10", 8080),)
    assert not running.sent(f"{IP}:81")


@each_backend
@pytest.mark.row("1.18", "2.15")
def test_a_service_deleted_and_made_anew(mode):
    running = Running(mode).turn(Upsert(web()), Upsert(backed()))
    running.turn(Delete("Service", web().key))
    assert {what for what, _ in running.ends(f"{IP}:80")} == {LEFT_ALONE}
    # In one turn gone and back, with another address.
    anew = service("shop/web", "10.110.0.6")
    running.turn(Upsert(web()), Delete("Service", web().key), Upsert(anew))
    assert running.sent("10.110.0.6:80") == (("10.64.1.10", 8080),)
    assert {what for what, _ in running.ends(f"{IP}:80")} == {LEFT_ALONE}
    running.turn(Delete("EndpointSlice", backed().key))
    assert {what for what, _ in running.ends("10.110.0.6:80")} == {Disposition.REJECTED}
