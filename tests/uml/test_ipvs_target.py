"""The ipvs Target on a kernel: what it writes and reads, what it leaves alone, and how it lets real servers go."""

import contextlib
import os
import socket
import struct

import pytest

from narthex.linux import genetlink, run
from narthex.linux.links import ip_batch
from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.linux.privileges import kernel_release
from narthex.linux.run import run as command
from narthex.linux.sysctls import apply_sysctls
from narthex.model.net import IPFamily
from narthex.model.objects import ServicePort
from narthex.netfilter.ipvs import parse_ipvsadm
from narthex.proxy.backends.ipvs.backend import IpvsBackend
from narthex.proxy.backends.ipvs.names import LINK, SETS
from narthex.proxy.kernel import ipvs_link
from narthex.proxy.kernel.ipset import read_ipsets
from narthex.proxy.kernel.ipvs import IpvsTarget, ipvs_settings
from narthex.testing import build
from narthex.testing.load import ClientRoute, EchoEndpoints, OpenConnection, until

V4, V6 = IPFamily.IPV4, IPFamily.IPV6
ENDPOINTS = [f"10.64.1.{number}" for number in range(10, 14)]
TWINS = [f"fd64:0:0:1::{number:x}" for number in range(10, 14)]


@pytest.fixture
def space():
    name = f"nx-ipvs-{os.getpid()}"
    create_namespace(name)
    ip_batch(name, ["link add name pods type dummy", "link set dev pods up"])
    ip_batch(name, [f"address add {each} dev pods" for each in (*(f"{a}/32" for a in ENDPOINTS), "10.20.0.11/32")])
    with in_namespace(name):
        outcomes = apply_sysctls([*ipvs_settings(kernel_release())])
    assert not [each for each in outcomes if each.error]
    yield name
    delete_namespace(name)


def plan(endpoints=ENDPOINTS, twins=TWINS, family=V4, node_port=30080, **more):
    """One Service with these endpoints, in both families."""
    web = build.service("shop/web", "10.110.0.1", "fd6e::1", node_port=node_port, type="NodePort", **more)
    slices = [
        build.endpoint_slice("shop/web", *map(build.endpoint, addresses), port=8080, suffix=str(number))
        for number, addresses in enumerate((endpoints, twins))
        if addresses
    ]
    return build.plan(web, *slices, family=family)


def servers(space):
    return parse_ipvsadm(command(["ipvsadm", "-S", "-n"], namespace=space)).servers


def reals(space, address="10.110.0.1"):
    """Address to weight of each real server of port 80."""
    listed = next((each for key, each in servers(space).items() if key[0] == address), None)
    return {real.address: real.weight for real in listed.reals} if listed else {}


class Writes:
    """What goes to the kernel while it watches."""

    def __init__(self, monkeypatch):
        self.messages, self.programs = [], []
        write, start = genetlink.Genetlink.write, run.subprocess.run

        def counted(link, requests):
            self.messages += [number for number, _ in requests]
            return write(link, requests)

        def started(argv, **more):
            self.programs.append(argv)
            return start(argv, **more)

        monkeypatch.setattr(genetlink.Genetlink, "write", counted)
        monkeypatch.setattr(run.subprocess, "run", started)


def test_all_parts_are_there_and_gone_again(space):
    for family in (V4, V6):
        backend, target = IpvsBackend(), IpvsTarget(family, space)
        want = backend.render(plan(family=family))
        assert target.read() is None
        target.apply(backend.diff(None, want))
        assert target.read() == want
        assert not backend.diff(target.read(), want)
    assert ipvs_link.addresses(None, space) == {"10.110.0.1", "fd6e::1"}
    assert set(read_ipsets(lambda _: True, space)) == SETS[V4] | SETS[V6]
    IpvsTarget(V4, space).clean()
    assert ipvs_link.addresses(None, space) == {"fd6e::1"}, "the other family's stay"
    assert IpvsTarget(V6, space).read() == IpvsBackend().render(plan(family=V6))
    IpvsTarget(V6, space).clean()
    assert not ipvs_link.exists(space)
    assert read_ipsets(lambda _: True, space) == {} and servers(space) == {}
    assert "KUBE" not in command(["iptables-save"], namespace=space) + command(["ip6tables-save"], namespace=space)


@pytest.mark.row("24.2")
def test_the_link_is_a_dummy_that_is_down(space):
    backend, target = IpvsBackend(), IpvsTarget(V4, space)
    target.apply(backend.diff(None, backend.render(plan())))
    shown = command(["ip", "-d", "link", "show", "dev", LINK], namespace=space)
    assert "NOARP" in shown and "state DOWN" in shown and " dummy " in shown
    assert "10.20.0.11" not in ipvs_link.addresses(V4, space), "a node port's address is the node's own"


def test_only_what_differs_is_written(space, monkeypatch):
    """An endpoint that comes is one message; nothing else is started or sent."""
    backend, target = IpvsBackend(), IpvsTarget(V4, space)
    few, more = ENDPOINTS[:3], ENDPOINTS
    have = backend.render(plan(few, node_port=0))
    target.apply(backend.diff(None, have))
    want, changes = backend.advance(have, plan(more, node_port=0))
    writes = Writes(monkeypatch)
    assert not changes.tables and not changes.bind
    target.apply(changes)
    # This node's own endpoint joins KUBE-LOOP-BACK, too.
    assert writes.messages == [5]
    assert writes.programs == [["ipset", "-exist", "restore"]]
    assert target.read() == want


def test_a_new_process_writes_nothing_where_all_is_right(space, monkeypatch):
    backend = IpvsBackend()
    want = backend.render(plan())
    IpvsTarget(V4, space).apply(backend.diff(None, want))
    target = IpvsTarget(V4, space)
    writes = Writes(monkeypatch)
    assert not backend.diff(target.read(), want)
    target.apply(backend.diff(None, want))
    assert writes.messages == []


@pytest.mark.row("24.9")
def test_weights_are_corrected_on_start(space):
    """A crash has left one real server with weight 0 that is wanted, and one that is not."""
    backend = IpvsBackend()
    want = backend.render(plan(ENDPOINTS[:2], node_port=0))
    IpvsTarget(V4, space).apply(backend.diff(None, want))
    command(["ipvsadm", "-e", "-t", "10.110.0.1:80", "-r", "10.64.1.10:8080", "-m", "-w", "0"], namespace=space)
    command(["ipvsadm", "-a", "-t", "10.110.0.1:80", "-r", "10.64.1.13:8080", "-m", "-w", "0"], namespace=space)
    target = IpvsTarget(V4, space)
    target.apply(backend.diff(target.read(), want))
    assert reals(space) == {"10.64.1.10": 1, "10.64.1.11": 1, "10.64.1.13": 0}
    assert target.tend() is None
    assert reals(space) == {"10.64.1.10": 1, "10.64.1.11": 1}


@pytest.mark.row("24.10")
def test_excluded_networks_are_neither_read_nor_touched(space):
    backend, target = IpvsBackend(), IpvsTarget(V4, space, excluded=("10.110.0.96/28",))
    target.apply(backend.diff(None, backend.render(plan())))
    ipvs_link.bind(["10.110.0.50", "10.110.0.99"], space)
    for address in ("10.110.0.50", "10.110.0.99", "192.0.2.1"):
        command(["ipvsadm", "-A", "-t", f"{address}:80", "-s", "lc"], namespace=space)
    held = target.read()
    assert {key[0] for key in held.servers} == {"10.110.0.1", "10.110.0.50", "10.20.0.11"}
    target.apply(backend.diff(held, backend.render(plan())))
    left = {key[0] for key in servers(space)}
    assert {"10.110.0.99", "192.0.2.1"} <= left and "10.110.0.50" not in left
    target.clean()
    assert {key[0] for key in servers(space)} == {"10.110.0.99", "192.0.2.1"}


def test_a_set_of_another_kind_is_made_anew(space):
    backend, target = IpvsBackend(), IpvsTarget(V4, space)
    want = backend.render(plan())
    target.apply(backend.diff(None, want))
    target.clean()
    command(["ipset", "create", "KUBE-CLUSTER-IP", "hash:ip"], namespace=space)
    command(["iptables", "-t", "nat", "-N", "KUBE-SERVICES"], namespace=space)
    names_it = ["-m", "set", "--match-set", "KUBE-CLUSTER-IP", "dst", "-j", "ACCEPT"]
    command(["iptables", "-t", "nat", "-A", "KUBE-SERVICES", *names_it], namespace=space)
    target.apply(backend.diff(target.read(), want))
    assert target.read() == want


def test_the_service_of_a_cluster_in_use(space):
    """Four real servers of `ipvsadm -l`, as a cluster of Kubernetes 1.22 showed them."""
    backend, target = IpvsBackend(), IpvsTarget(V4, space)
    ports = tuple(ServicePort(name=f"p{port}", port=port) for port in (8080, 80, 50051))
    service = build.service("shop/grpc", "172.31.12.98", ports=ports)
    addresses = ("172.30.0.12", "172.30.0.16", "172.30.3.12", "172.30.3.13")
    slices = [
        build.endpoint_slice(
            "shop/grpc",
            *map(build.endpoint, addresses),
            ports=tuple(build.EndpointPort(name=p.name, port=p.port) for p in ports),
        )
    ]
    target.apply(backend.diff(None, backend.render(build.plan(service, *slices))))
    shown = command(["ipvsadm", "-L", "-n", "-t", "172.31.12.98:50051"], namespace=space).splitlines()[2:]
    assert shown[0].split() == ["TCP", "172.31.12.98:50051", "rr"]
    assert sorted(line.split() for line in shown[1:]) == [
        ["->", f"{address}:50051", "Masq", "1", "0", "0"] for address in addresses
    ]


class Clients:
    """Connections from the node to the Service, and endpoints that answer them."""

    def __init__(self, space, stack):
        self.space, self.lines = space, []
        self.answers = stack.enter_context(EchoEndpoints())
        for address in ENDPOINTS:
            self.answers.open(space, address, 8080)

    def call(self):
        way = ClientRoute(label="node", namespace=self.space, source="10.20.0.11", destination="10.110.0.1", port=80)
        self.lines.append(OpenConnection(way))
        return self.lines[-1].endpoint.partition(":")[0]


@pytest.fixture
def clients(space):
    with contextlib.ExitStack() as stack:
        made = Clients(space, stack)
        yield made
        for line in made.lines:
            line.close()


@pytest.mark.row("24.6")
def test_least_connection_prefers_the_idle_server(space, clients):
    backend, target = IpvsBackend("lc"), IpvsTarget(V4, space)
    have = backend.render(plan(ENDPOINTS[:1]))
    target.apply(backend.diff(None, have))
    assert {clients.call() for _ in range(6)} == {ENDPOINTS[0]}
    target.apply(backend.diff(have, backend.render(plan(ENDPOINTS[:2]))))
    assert [clients.call() for _ in range(6)] == [ENDPOINTS[1]] * 6, "the one with six connections had another"
    assert {clients.call() for _ in range(8)} == set(ENDPOINTS[:2])


@pytest.mark.row("24.6", "24.14")
def test_round_robin_takes_turns(space, clients):
    backend, target = IpvsBackend("rr"), IpvsTarget(V4, space)
    target.apply(backend.diff(None, backend.render(plan())))
    first, again = [clients.call() for _ in range(4)], [clients.call() for _ in range(4)]
    assert sorted(first) == ENDPOINTS and first == again


@pytest.mark.row("24.8")
def test_a_removed_backend_keeps_its_connection_and_gets_no_new_one(space, clients):
    backend, target = IpvsBackend(), IpvsTarget(V4, space, patience=0.1)
    have = backend.render(plan(ENDPOINTS[:2]))
    target.apply(backend.diff(None, have))
    held = {clients.call(): clients.lines[-1] for _ in range(2)}
    leaving, staying = ENDPOINTS[:2]
    assert target.tend() is None
    want = backend.render(plan([staying]))
    target.apply(backend.diff(have, want))
    assert reals(space) == {leaving: 0, staying: 1}
    assert target.read() == want, "what leaves is not there for anybody but its connections"
    assert {clients.call() for _ in range(4)} == {staying}
    assert target.tend() is not None
    for line in held.values():
        line.exchange()
    assert reals(space) == {leaving: 0, staying: 1}, "it was removed under its connection"
    _reset(held[leaving])
    until(lambda: target.tend() is None, "the end of the last connection")
    assert reals(space) == {staying: 1}
    held[staying].exchange()


@pytest.mark.row("24.8", "24.9")
def test_one_that_comes_back_while_it_leaves(space, clients):
    backend, target = IpvsBackend(), IpvsTarget(V4, space, patience=0.0)
    both, one = backend.render(plan(ENDPOINTS[:2])), backend.render(plan(ENDPOINTS[1:2]))
    target.apply(backend.diff(None, both))
    held = {clients.call(): clients.lines[-1] for _ in range(2)}
    target.apply(backend.diff(both, one))
    assert reals(space)[ENDPOINTS[0]] == 0
    target.apply(backend.diff(one, both))
    assert reals(space) == dict.fromkeys(ENDPOINTS[:2], 1)
    assert target.tend() is None
    held[ENDPOINTS[0]].exchange()


@pytest.mark.row("24.8")
def test_an_idle_one_and_one_of_udp_go_at_once(space):
    backend, target = IpvsBackend(), IpvsTarget(V4, space)
    ports = (ServicePort(name="http", port=80), ServicePort(name="dns", port=53, protocol=build.Protocol.UDP))
    kinds = tuple(build.EndpointPort(name=p.name, port=p.port, protocol=p.protocol) for p in ports)

    def rules(addresses):
        web = build.service("shop/web", "10.110.0.1", ports=ports)
        return backend.render(
            build.plan(web, build.endpoint_slice("shop/web", *map(build.endpoint, addresses), ports=kinds))
        )

    have, want = rules(ENDPOINTS[:2]), rules(ENDPOINTS[:1])
    target.apply(backend.diff(None, have))
    with in_namespace(space):
        caller = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with caller:
        for _ in range(2):
            caller.sendto(b"?", ("10.110.0.1", 53))
        target.apply(backend.diff(have, want))
        assert [len(each.reals) for each in servers(space).values()] == [1, 1]
    assert target.tend() is None


def _reset(line):
    """End a connection so that nobody remembers it for minutes."""
    line._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    line.close()
