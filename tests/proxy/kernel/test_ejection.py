"""Passive ejection with real sockets: a black hole and a refusing endpoint among ten, and their return."""

import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import ExitStack, contextmanager, suppress

import pytest
import yaml
from tests.cgroup_client import cgroup_client, own_cgroup

from narthex.linux.bpf import mount_bpf_file_system, pinned_names, unmount
from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.linux.run import run
from narthex.model import IPFamily
from narthex.proxy.backends.sockets.document import socket_document
from narthex.proxy.kernel.sockets import pinned_sockets, remove_pins
from narthex.proxy.plan.ejection import EjectionPolicy
from narthex.proxy.program.ejection import EjectionReporter, PassiveEjection
from narthex.proxy.program.sockets import SocketAccelerator
from narthex.testing.build import endpoint, endpoint_slice, plan, service, snapshot

pytestmark = pytest.mark.kernel

VIP = {IPFamily.IPV4: "10.110.0.5", IPFamily.IPV6: "fd6e::5"}
LIVE = {
    IPFamily.IPV4: [f"10.64.1.{number}" for number in range(10, 19)],
    IPFamily.IPV6: [f"fd64:0:0:1::{number}" for number in range(10, 19)],
}
HOLE = {IPFamily.IPV4: "10.65.0.1", IPFamily.IPV6: "fd65::1"}
POLICY = EjectionPolicy(ejected_seconds=1.0, longest_seconds=2.0)
PORT = 8080
FLAGS = {IPFamily.IPV4: [], IPFamily.IPV6: ["nodad"]}
each_family = pytest.mark.parametrize("family", list(IPFamily), ids=lambda family: family.label)


class EjectionWorld:
    """A node, and clients in namespaces of their own. In each one the nine live endpoints answer, and one swallows packets."""

    def __init__(self, family, cgroup, pins, node, clients, stack):
        self.family, self.node, self.pins = family, node, pins
        self.names, self.clients = list(clients), list(clients.values())
        self._stack = stack
        self.events = []
        with in_namespace(node):
            self.accelerator = SocketAccelerator(str(cgroup), pins)
        shop = service("shop/web", VIP[family], uid="1234")
        ends = endpoint_slice("shop/web", *map(endpoint, [*LIVE[family], HOLE[family]]), port=PORT)
        self.plan = plan(shop, ends, family=family)
        reporter = EjectionReporter(self.events.append, lambda: snapshot(shop, ends))
        self.accelerator.ejection = PassiveEjection(reporter, lambda _: None, POLICY)
        self.follow(self.plan)

    @property
    def ejection(self):
        return self.accelerator.ejection

    def follow(self, made):
        with in_namespace(self.node):
            self.accelerator.follow(made)
        assert self.accelerator.reason == ""

    @property
    def out(self):
        return {endpoint[0] for out in self.ejection.out.get(self.family, {}).values() for endpoint in out}

    def burst(self, count=30, seconds=1.5):
        """Let all clients connect at once, while the loop takes its turns; return the sums of the outcomes."""
        answers = []
        threads = [
            threading.Thread(
                target=lambda client=client: answers.append(
                    client.ask("burst", VIP[self.family], 80, count=count, seconds=seconds)
                )
            )
            for client in self.clients
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            self.accelerator.tend(time.monotonic())
            time.sleep(0.005)
        self.accelerator.tend(time.monotonic())
        return {key: sum(answer[key] for answer in answers) for key in answers[0]}

    def revive(self):
        """Let the black hole answer."""
        for name in self.names:
            run(["ip", "address", "add", HOLE[self.family], "dev", "lo", *FLAGS[self.family]], namespace=name)
            with in_namespace(name):
                self._stack.enter_context(serving([HOLE[self.family]]))

    def until(self, condition, **burst):
        limit = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < limit, self.accelerator.status
            self.burst(**burst)


@contextmanager
def ejection_world(family, tmp_path, clients=2):
    names = [f"nxe-{os.getpid()}-{number}" for number in range(clients + 1)]
    mount_bpf_file_system(tmp_path / "bpf")
    pins = tmp_path / "bpf" / "narthex"
    with ExitStack() as stack:
        stack.callback(unmount, tmp_path / "bpf")
        cgroup = stack.enter_context(own_cgroup())
        for name in names:
            create_namespace(name)
            stack.callback(delete_namespace, name)
        asked = {}
        for name in names[1:]:
            for address in LIVE[family]:
                run(["ip", "address", "add", address, "dev", "lo", *FLAGS[family]], namespace=name)
            # Nobody has this address at the other end, so that all packets are lost.
            run(["ip", "link", "add", "hole", "type", "veth", "peer", "name", "nowhere"], namespace=name)
            for link in ("hole", "nowhere"):
                run(["ip", "link", "set", link, "up"], namespace=name)
            run(["ip", "route", "add", HOLE[family], "dev", "hole"], namespace=name)
            neighbour = [HOLE[family], "lladdr", "02:00:00:00:00:01", "dev", "hole", "nud", "permanent"]
            run(["ip", "neighbour", "add", *neighbour], namespace=name)
            with in_namespace(name):
                stack.enter_context(serving(LIVE[family]))
            asked[name] = stack.enter_context(cgroup_client(cgroup, name))
        made = EjectionWorld(family, cgroup, pins, names[0], asked, stack)

        def end():
            made.accelerator.close()
            with in_namespace(names[0]):
                for each in IPFamily:
                    remove_pins(each, pins)

        stack.callback(end)
        yield made


@contextmanager
def serving(addresses):
    """Servers that accept by themselves: the kernel completes handshakes up to the backlog, and resets the rest at the end."""
    with ExitStack() as stack:
        for address in addresses:
            kind = socket.AF_INET6 if ":" in address else socket.AF_INET
            stack.enter_context(socket.create_server((address, PORT), family=kind, backlog=4096))
        yield


@pytest.fixture(params=list(IPFamily), ids=lambda family: family.label)
def world(request, tmp_path):
    with ejection_world(request.param, tmp_path) as made:
        yield made


def test_a_black_hole_is_ejected_and_returns_when_it_answers(world):
    assert world.ejection.reason == ""
    writes = []
    apply = world.accelerator._target.apply

    def counted(family, changes):
        start = world.accelerator.status["writes"]
        apply(family, changes)
        writes.append(world.accelerator.status["writes"] - start)

    world.accelerator._target.apply = counted
    before = world.burst()
    assert before["made"] > before["slow"] > 0
    world.until(lambda: world.out == {HOLE[world.family]})
    assert writes and max(writes) <= 2, "one endpoint out is one slot and the count"
    with in_namespace(world.node):
        shown = socket_document(pinned_sockets(world.pins))
    assert shown.ejected == ((HOLE[world.family], PORT),)
    assert (HOLE[world.family], PORT) not in shown.frontend(VIP[world.family], 80, "TCP").cluster
    (event,) = world.events
    assert (event.reason, event.uid, event.warning) == ("EndpointEjected", "1234", True)

    total = 0
    while total < 300:
        found = world.burst(count=25, seconds=0.3)
        # A trial is one connection, or as many as begin before the loop has seen the first one.
        assert found["slow"] <= 10
        total += found["made"]
    assert [event.reason for event in world.events] == ["EndpointEjected"], "a trial that fails is no news"

    world.revive()
    world.until(lambda: not world.out and world.ejection._ejectors[world.family].suspects == (), count=20)
    assert world.events[-1].reason == "EndpointReturned" and not world.events[-1].warning
    assert world.burst(count=100) == {"made": 200, "refused": 0, "slow": 0}
    with in_namespace(world.node):
        assert socket_document(pinned_sockets(world.pins)).ejected == ()


def test_refusals_eject_too_and_half_of_the_pool_stays(world):
    """No endpoint answers at this port any more."""
    ends = endpoint_slice("shop/web", *map(endpoint, LIVE[world.family][:4]), port=9)
    world.follow(plan(service("shop/web", VIP[world.family], uid="1234"), ends, family=world.family))
    world.until(lambda: len(world.out) == 2, count=20, seconds=0.2)
    found = world.burst(count=20, seconds=0.2)
    assert found["refused"] == 40 and len(world.out) <= 2


def test_failures_of_one_client_eject_nobody(tmp_path):
    with ejection_world(IPFamily.IPV4, tmp_path, clients=1) as world:
        found = world.burst(count=120)
        assert found["slow"] >= 3, found
        for _ in range(3):
            world.burst(count=120, seconds=1.2)
        assert world.out == set() and world.events == []


def test_the_observer_ends_with_its_process(world):
    """Nobody else would read its reports: no pin is left, and the programs that balance stay."""
    names = frozenset().union(*(pinned_names(each) for each in world.pins.iterdir() if each.is_dir()))
    assert "nx_connect4-link" in names and not any("observe" in name for name in names)
    attached = world.accelerator._target.attached()
    world.accelerator.close()
    assert world.accelerator._target.attached() == attached - 1


def manifests(addresses):
    port = {"name": "http", "port": 80, "targetPort": PORT}
    spec = {
        "clusterIP": VIP[IPFamily.IPV4],
        "clusterIPs": [VIP[IPFamily.IPV4]],
        "ipFamilies": ["IPv4"],
        "ports": [port],
    }
    shop = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web", "namespace": "shop"}, "spec": spec}
    ends = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "web-1", "namespace": "shop", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": PORT, "protocol": "TCP"}],
        "endpoints": [{"addresses": [each], "conditions": {"ready": True}} for each in addresses],
    }
    return yaml.dump_all([shop, ends])


@contextmanager
def proxy_process(world, cgroup, folder):
    """A real proxy in the node's namespace, with objects from files."""
    (folder / "objects.yaml").write_text(manifests([*LIVE[IPFamily.IPV4], HOLE[IPFamily.IPV4]]))
    kind = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clusterCIDR": "10.64.0.0/12",
    }
    own = {"apiVersion": "narthex/v1alpha1", "kind": "NarthexConfiguration", "socketLoadBalancing": True}
    own |= {"socketLoadBalancingCgroup": str(cgroup), "endpointEjection": True}
    (folder / "proxy.yaml").write_text(yaml.dump_all([kind, own]))
    run(["ip", "link", "set", "lo", "up"], namespace=world.node)
    argv = [
        "-m",
        "narthex",
        "proxy",
        "--manifests",
        str(folder / "objects.yaml"),
        "--config",
        str(folder / "proxy.yaml"),
    ]
    with in_namespace(world.node), (folder / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, *argv], stdout=log, stderr=log)
    try:
        yield folder / "log"
    finally:
        process.terminate()
        process.wait()
        with in_namespace(world.node):
            for each in IPFamily:
                remove_pins(each)


def ask(world, port, path):
    with (
        in_namespace(world.node),
        suppress(OSError),
        urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer,
    ):
        return answer.read().decode()
    return ""


def test_a_proxy_ejects_by_itself(tmp_path):
    """The loop wakes up when something is observed; status and metrics show what is out."""
    with ejection_world(IPFamily.IPV4, tmp_path) as world:
        cgroup = world.accelerator._target.cgroup
        world.accelerator.close()
        world.accelerator.ejection = None
        with in_namespace(world.node):
            for each in IPFamily:
                remove_pins(each, world.pins)
        (tmp_path / "proxy").mkdir()
        with proxy_process(world, cgroup, tmp_path / "proxy") as log:
            limit = time.monotonic() + 120
            while "passive ejection of endpoints is on" not in log.read_text():
                assert time.monotonic() < limit, log.read_text()
                time.sleep(0.1)
            world.until(lambda: f"{HOLE[IPFamily.IPV4]}:{PORT}" in ask(world, 10256, "/sockets"))
            assert (
                f"endpoint {HOLE[IPFamily.IPV4]}:{PORT} of port shop/web:http gets no new connections"
                in log.read_text()
            )
            metrics = ask(world, 10249, "/metrics")
            assert 'narthex_endpoint_ejections_total{ip_family="IPv4"}' in metrics
            assert 'narthex_endpoint_ejections_total{ip_family="IPv4"} 0.0' not in metrics
