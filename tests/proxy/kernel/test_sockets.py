"""Socket load balancing in the kernel: real sockets in a cgroup, with no rules at all, so that only programs can balance."""

import errno
import itertools
import os
import selectors
import socket
import threading
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress

import pytest
from tests.cgroup_client import cgroup_client, own_cgroup

from narthex.linux.bpf import mount_bpf_file_system, pinned_names, unmount
from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.linux.run import run
from narthex.model import EndpointPort, IPFamily, Protocol, ServicePort
from narthex.proxy.backends.sockets.document import socket_document
from narthex.proxy.kernel.sockets import SocketsUnavailableError, cgroup_path, pinned_sockets, remove_pins
from narthex.proxy.plan.stale import StaleReason, StaleSearch
from narthex.proxy.program.sockets import SocketAccelerator
from narthex.testing.build import endpoint, endpoint_slice, plan, service
from narthex.trace.follow.views import NodeView
from narthex.trace.reports.check import CheckReport
from narthex.trace.reports.socket_check import with_sockets

pytestmark = pytest.mark.kernel

PODS = {
    IPFamily.IPV4: ("10.64.1.1", "10.64.1.2", "10.64.1.3"),
    IPFamily.IPV6: ("fd64:0:0:1::1", "fd64:0:0:1::2", "fd64:0:0:1::3"),
}
SERVICE = {IPFamily.IPV4: "10.96.0.1", IPFamily.IPV6: "fd96::1"}
PORTS = (EndpointPort(name="http", port=8080), EndpointPort(name="dns", port=8053, protocol=Protocol.UDP))
_numbers = itertools.count()
each_family = pytest.mark.parametrize("family", list(IPFamily), ids=lambda family: family.label)


def plan_of(family, addresses, **config):
    ports = (ServicePort(name="http", port=80), ServicePort(name="dns", port=53, protocol=Protocol.UDP))
    slices = [endpoint_slice("shop/web", *map(endpoint, addresses), ports=PORTS)] if addresses else []
    return plan(service("shop/web", SERVICE[family], ports=ports), *slices, family=family, **config)


class SocketWorld:
    """A node's namespace, a pod's namespace with servers at all addresses, and a client in the pod."""

    def __init__(self, cgroup, pins, node, pod):
        self.cgroup, self.pins, self.node, self.pod = cgroup, pins, node, pod
        self.accelerators = []

    def accelerator(self, node=None):
        with in_namespace(node or self.node):
            made = SocketAccelerator(str(self.cgroup), self.pins)
        self.accelerators.append(made)
        return made

    def follow(self, accelerator, family, addresses, **config):
        with in_namespace(self.node):
            accelerator.follow(plan_of(family, addresses, **config))
        assert accelerator.reason == ""

    def pinned(self):
        return frozenset().union(*(pinned_names(each) for each in self.pins.iterdir() if each.is_dir()))


def serve(kind, address, stop, port=None):
    """Answer with the address, at a TCP or UDP port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, kind)
    sock.bind((address, port or (8080 if kind == socket.SOCK_STREAM else 8053)))
    if kind == socket.SOCK_STREAM:
        sock.listen(64)
    selector = selectors.DefaultSelector()
    selector.register(sock, selectors.EVENT_READ)

    def receive():
        if kind == socket.SOCK_DGRAM:
            sock.sendto(address.encode(), sock.recvfrom(100)[1])
            return
        peer = sock.accept()[0]
        peer.sendall(address.encode())
        selector.register(peer, selectors.EVENT_READ)

    def echo(peer):
        data = b""
        with suppress(ConnectionError):
            data = peer.recv(100)
            peer.sendall(data)
        if not data:
            selector.unregister(peer)
            peer.close()

    def loop():
        while not stop.is_set():
            for key, _ in selector.select(0.2):
                if key.fileobj is sock:
                    receive()
                else:
                    echo(key.fileobj)
        for key in list(selector.get_map().values()):
            key.fileobj.close()
        selector.close()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    return thread


@contextmanager
def serve_places(namespace, addresses, ports):
    """Answer at more addresses of a namespace, by TCP and UDP."""
    stop, threads = threading.Event(), []
    for address in addresses:
        flags = ["nodad"] if ":" in address else []
        run(["ip", "address", "add", address, "dev", "lo", *flags], namespace=namespace)
    with in_namespace(namespace):
        for address, port in itertools.product(addresses, ports):
            threads += [serve(kind, address, stop, port) for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM)]
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@contextmanager
def socket_world(tmp_path):
    names = [f"nxt-{os.getpid()}-{next(_numbers)}-{part}" for part in ("node", "pod")]
    stop = threading.Event()
    threads = []
    mount_bpf_file_system(tmp_path / "bpf")
    try:
        with own_cgroup() as cgroup:
            for name in names:
                create_namespace(name)
            for address in itertools.chain(*PODS.values()):
                flags = ["nodad"] if ":" in address else []
                run(["ip", "address", "add", address, "dev", "lo", *flags], namespace=names[1])
            with in_namespace(names[1]):
                for address in itertools.chain(*PODS.values()):
                    threads += [serve(kind, address, stop) for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM)]
            world = SocketWorld(cgroup, tmp_path / "bpf" / "narthex", *names)
            try:
                yield world
            finally:
                for accelerator in world.accelerators:
                    accelerator.close()
                for name in names:
                    with in_namespace(name):
                        for family in IPFamily:
                            remove_pins(family, world.pins)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for name in names:
            delete_namespace(name)
        unmount(tmp_path / "bpf")


@pytest.fixture
def world(tmp_path):
    with socket_world(tmp_path) as made:
        yield made


@pytest.fixture
def client(world):
    with cgroup_client(world.cgroup, world.pod) as made:
        yield made


@each_family
def test_connections_are_balanced(world, client, family):
    world.follow(world.accelerator(), family, PODS[family])

    answers = [client.ask("tcp", SERVICE[family], 80) for _ in range(60)]
    assert Counter(answer["data"] for answer in answers).keys() == set(PODS[family])
    assert {tuple(answer["peer"]) for answer in answers} == {(SERVICE[family], 80)}


@each_family
def test_connected_datagrams(world, client, family):
    world.follow(world.accelerator(), family, PODS[family])

    answers = [client.ask("udp", SERVICE[family], 53) for _ in range(60)]
    assert {answer["data"] for answer in answers} == set(PODS[family])
    assert {tuple(answer["peer"]) for answer in answers} == {(SERVICE[family], 53)}
    assert {tuple(answer["sender"]) for answer in answers} == {(SERVICE[family], 53)}


@each_family
def test_datagrams_of_a_socket_that_is_not_connected_stay_with_their_endpoint(world, client, family):
    world.follow(world.accelerator(), family, PODS[family])

    answers = [client.ask("sendto", SERVICE[family], 53, datagrams=5) for _ in range(40)]
    assert all(len(set(answer["data"])) == 1 for answer in answers)
    assert {answer["data"][0] for answer in answers} == set(PODS[family])
    assert {tuple(answer["sender"]) for answer in answers} == {(SERVICE[family], 53)}


@pytest.mark.parametrize("kind", ["tcp", "udp", "sendto"])
def test_ipv4_mapped_addresses_of_a_dual_stack_socket(world, client, kind):
    world.follow(world.accelerator(), IPFamily.IPV4, PODS[IPFamily.IPV4])
    port = 80 if kind == "tcp" else 53

    answer = client.ask(kind, SERVICE[IPFamily.IPV4], port, mapped=True)
    assert answer["data"] in PODS[IPFamily.IPV4] or answer["data"][0] in PODS[IPFamily.IPV4]
    shown = answer.get("peer") or answer["sender"]
    assert shown == [f"::ffff:{SERVICE[IPFamily.IPV4]}", port]


@each_family
@pytest.mark.parametrize("kind", ["tcp", "udp", "sendto"])
def test_a_service_without_endpoints_refuses_at_once(world, client, family, kind):
    world.follow(world.accelerator(), family, ())

    assert client.ask(kind, SERVICE[family], 80 if kind == "tcp" else 53) == {"errno": errno.ECONNREFUSED}


def test_what_is_left_to_rules_is_not_touched(world, client):
    """Without rules, the address of the Service has no route."""
    accelerator = world.accelerator()
    world.follow(accelerator, IPFamily.IPV4, PODS[IPFamily.IPV4], masquerade_all=True)

    assert client.ask("tcp", SERVICE[IPFamily.IPV4], 80) == {"errno": errno.ENETUNREACH}
    assert client.ask("tcp", SERVICE[IPFamily.IPV4], 81) == {"errno": errno.ENETUNREACH}


def test_the_node_masquerades_only_sockets_with_a_source(world):
    """A socket of the node without a source gets one from the kernel, for the endpoint."""
    accelerator = world.accelerator()
    world.follow(accelerator, IPFamily.IPV4, PODS[IPFamily.IPV4])
    run(["ip", "address", "add", PODS[IPFamily.IPV4][0], "dev", "lo"], namespace=world.node)
    with cgroup_client(world.cgroup, world.node) as client:
        # Nobody listens there, so a refusal shows that the program chose an endpoint.
        reached = {client.ask("tcp", SERVICE[IPFamily.IPV4], 80)["errno"] for _ in range(40)}
        bound = {client.ask("tcp", SERVICE[IPFamily.IPV4], 80, source="10.64.1.1")["errno"] for _ in range(5)}

    assert errno.ECONNREFUSED in reached
    assert bound == {errno.ENETUNREACH}


def test_counters_of_endpoints_and_service_ports(world, client):
    accelerator = world.accelerator()
    world.follow(accelerator, IPFamily.IPV4, PODS[IPFamily.IPV4])
    for _ in range(10):
        client.ask("tcp", SERVICE[IPFamily.IPV4], 80)
    client.ask("sendto", SERVICE[IPFamily.IPV4], 53, datagrams=5)

    counts = list(accelerator.counters(plan_of(IPFamily.IPV4, PODS[IPFamily.IPV4])))
    by_port = Counter()
    by_endpoint = Counter()
    for count in counts:
        (by_port if count.endpoint is None else by_endpoint)[count.name.port] += count.connections
    assert by_port == by_endpoint == {"http": 10, "dns": 1}
    assert {count.endpoint for count in counts} <= {
        None,
        *((address, port.port) for address in PODS[IPFamily.IPV4] for port in PORTS),
    }


def test_counters_of_an_endpoint_that_left_are_read_once_more_and_deleted(world, client):
    family, (stays, *left) = IPFamily.IPV4, PODS[IPFamily.IPV4]
    accelerator = world.accelerator()
    world.follow(accelerator, family, [stays, *left])
    for _ in range(20):
        client.ask("tcp", SERVICE[family], 80)
    world.follow(accelerator, family, [stays])
    reads = []
    for _ in range(2):
        counts = accelerator.counters(plan_of(family, [stays]))
        reads.append({count.endpoint[0]: count.connections for count in counts if count.endpoint})
    assert sum(reads[0].values()) == 20
    assert reads[0].keys() > {stays} == reads[1].keys()
    assert reads[1][stays] == reads[0][stays]


def test_a_process_takes_over_without_a_write(world, client):
    first = world.accelerator()
    world.follow(first, IPFamily.IPV4, PODS[IPFamily.IPV4])
    pinned = world.pinned()
    first.close()
    assert client.ask("tcp", SERVICE[IPFamily.IPV4], 80)["data"] in PODS[IPFamily.IPV4]

    second = world.accelerator()
    world.follow(second, IPFamily.IPV4, PODS[IPFamily.IPV4])
    assert second.status["writes"] == 0 and world.pinned() == pinned
    world.follow(second, IPFamily.IPV4, PODS[IPFamily.IPV4][:1])
    assert {client.ask("tcp", SERVICE[IPFamily.IPV4], 80)["data"] for _ in range(20)} == {PODS[IPFamily.IPV4][0]}


def test_larger_maps_replace_smaller_ones(world, client):
    """Programs and maps are exchanged at one moment, so that no connection is left to rules that are not there."""
    accelerator = world.accelerator()
    world.follow(accelerator, IPFamily.IPV4, PODS[IPFamily.IPV4])
    before = world.pinned()
    many = [service(f"shop/other-{number}", f"10.97.{number >> 8}.{number & 255}") for number in range(9000)]
    pool = endpoint_slice("shop/web", *map(endpoint, PODS[IPFamily.IPV4][:2]), ports=PORTS)
    web = service("shop/web", SERVICE[IPFamily.IPV4], ports=(ServicePort(name="http", port=80),))
    large = plan(web, pool, *many)
    stop, answers = threading.Event(), []

    def ask():
        while not stop.is_set():
            answers.append(client.ask("tcp", SERVICE[IPFamily.IPV4], 80))

    asking = threading.Thread(target=ask)
    asking.start()
    with in_namespace(world.node):
        accelerator.follow(large)
    stop.set()
    asking.join()

    assert accelerator.reason == "" and all("data" in answer for answer in answers) and answers
    assert {client.ask("tcp", SERVICE[IPFamily.IPV4], 80)["data"] for _ in range(30)} == set(PODS[IPFamily.IPV4][:2])
    assert client.ask("tcp", "10.97.35.39", 80) == {"errno": errno.ECONNREFUSED}
    after = world.pinned()
    assert len(after) == len(before) and after != before


def test_pins_are_removed(world, client):
    world.follow(world.accelerator(), IPFamily.IPV4, PODS[IPFamily.IPV4])
    with in_namespace(world.node):
        removed = [name for family in IPFamily for name in remove_pins(family, world.pins)]

    assert len([name for name in removed if name.endswith("-link")]) == 8 and world.pinned() == frozenset()
    assert client.ask("tcp", SERVICE[IPFamily.IPV4], 80) == {"errno": errno.ENETUNREACH}


def test_a_path_that_is_no_cgroup_keeps_it_off(world, tmp_path, caplog):
    with in_namespace(world.node):
        accelerator = SocketAccelerator(str(tmp_path), world.pins)
        accelerator.follow(plan_of(IPFamily.IPV4, PODS[IPFamily.IPV4]))

    assert accelerator.reason == f"{tmp_path} is no cgroup: create it, or correct socketLoadBalancingCgroup"
    assert "socket load balancing stays off" in caplog.text and "the rules serve all connections" in caplog.text
    with pytest.raises(SocketsUnavailableError):
        cgroup_path(str(tmp_path))


@pytest.mark.parametrize(("family", "mapped"), [(IPFamily.IPV4, False), (IPFamily.IPV4, True), (IPFamily.IPV6, False)])
def test_udp_sockets_of_an_endpoint_that_left_are_closed(world, family, mapped):
    gone, *left = PODS[family]
    accelerator = world.accelerator()
    world.follow(accelerator, family, [gone])
    with ExitStack() as stack:
        pod = stack.enter_context(cgroup_client(world.cgroup, world.pod))
        assert pod.ask("udp", SERVICE[family], 53, held=True, mapped=mapped)["data"] == gone
        # This one asked for the endpoint itself, which still serves there.
        direct = stack.enter_context(cgroup_client(world.cgroup, world.pod))
        assert direct.ask("udp", gone, 8053, held=True)["data"] == gone
        before = plan_of(family, [gone])
        world.follow(accelerator, family, [gone, *left])
        while True:
            other = stack.enter_context(cgroup_client(world.cgroup, world.pod))
            if other.ask("udp", SERVICE[family], 53, held=True)["data"] != gone:
                break

        world.follow(accelerator, family, left)
        now = plan_of(family, left)
        search = StaleSearch(now, before, now.services)
        assert search.left == {(gone, 8053)}
        with in_namespace(world.node):
            closed = accelerator.close_stale(family, search.left, lambda flow: search.reason(flow, ()))
        assert closed[StaleReason.ENDPOINT_GONE] >= 1
        # To send is the first thing that it does; to receive would be ECONNABORTED.
        assert pod.ask("alive") == {"errno": errno.EDESTADDRREQ}
        assert pod.ask("udp", SERVICE[family], 53, mapped=mapped)["data"] in left
        assert direct.ask("alive") == other.ask("alive") == {"alive": 0}


def test_without_programs_no_socket_is_closed(world):
    with in_namespace(world.node):
        assert world.accelerator().close_stale(IPFamily.IPV4, None, lambda _: StaleReason.ENDPOINT_GONE) == Counter()


@each_family
def test_pinned_maps_are_read_without_a_process(world, family):
    accelerator = world.accelerator()
    with in_namespace(world.node):
        assert not pinned_sockets(world.pins)
    world.follow(accelerator, family, PODS[family])
    accelerator.close()
    with in_namespace(world.node):
        found = socket_document(pinned_sockets(world.pins)).frontend(SERVICE[family], 80, "TCP")
    assert found is not None
    assert (found.pods, found.cluster) == ("cluster", tuple(sorted((pod, 8080) for pod in PODS[family])))


@each_family
def test_check_finds_what_is_wrong_with_maps_and_programs(world, client, family):
    """The maps as they are in the kernel, against the plan."""
    accelerator, made = world.accelerator(), plan_of(family, PODS[family])
    world.follow(accelerator, family, PODS[family])
    client.ask("tcp", SERVICE[family], 80)

    def found():
        with in_namespace(world.node):
            held = socket_document(pinned_sockets(world.pins))
        report = CheckReport(node="", family=family.label, frontends=0, endpoints=0)
        return held, [each.kind.value for each in with_sockets(report, made, NodeView(sockets=held)).findings]

    held, kinds = found()
    assert kinds == [] and sum(each.connections for each in held.connections) == 1
    assert len(held.hooks) == 8

    maps = accelerator._target._family(family)
    slots = accelerator._target._maps[maps.slots.name]
    key, value = next(iter(slots.items()))
    slots.delete(key)
    assert set(found()[1]) == {"missing", "wrong share"}
    slots.update(key, bytes(len(value)))
    assert set(found()[1]) == {"missing", "stale"}
    slots.update(key, value)
    assert found()[1] == []

    for link in world.pins.glob(f"*/nx_connect{family.label[-1]}-link"):
        link.unlink()
    held, kinds = found()
    assert kinds == ["missing"] and f"connect{family.label[-1]}" not in held.hooks
