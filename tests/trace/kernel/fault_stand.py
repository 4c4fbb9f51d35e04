"""One node with pods, a client outside and another node's pods, in namespaces, with real rules: to break it, to send
through it, and to have it explained. Many faults share one stand, for each is undone."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from tests.proxy.kernel.small_cluster import (
    BEYOND,
    CALLERS,
    CLIENTS,
    HERE,
    NODE_IPS,
    OUTSIDE,
    POD,
    SERVERS,
    THERE,
    layout,
)

from narthex.linux.namespaces import in_namespace
from narthex.linux.privileges import kernel_release
from narthex.linux.run import run
from narthex.linux.sysctls import apply_sysctls as set_settings
from narthex.model.net import IPFamily, Protocol, join_port
from narthex.model.objects import (
    EndpointPort,
    EndpointSlice,
    LoadBalancerIngress,
    NamespacedName,
    Node,
    Pod,
    PodSpec,
    Service,
    ServicePort,
    SliceEndpoint,
)
from narthex.model.store import Delete, Snapshot, Store, Synced, Upsert
from narthex.proxy.backends import BACKENDS
from narthex.proxy.kernel.dataplanes import dataplane
from narthex.proxy.plan.planner import NodeConfig, plan_once
from narthex.testing.kernel.client import ADDRESS_FAMILY
from narthex.testing.kernel.world import World
from narthex.testing.load import ClientRoute as Call
from narthex.testing.load import EchoEndpoints, OpenConnection
from narthex.trace.causes.catalogue import CauseFinding
from narthex.trace.causes.find import find
from narthex.trace.follow.views import NodeView
from narthex.trace.model import PacketPath
from narthex.trace.program.travel import KnownCluster, TraceRequest, live, travel

NODE, OTHER, THIRD = "worker-a", "worker-b", "worker-c"
OTHER_IP, THIRD_IP = "10.20.0.12", "10.20.0.13"
TARGET = 8080
_MTU_DISCOVER, _DO_NOT_FRAGMENT, _HEADERS = 10, 2, 28
SILENCE = 0.3
"""Seconds without an answer after which a packet that should be lost is."""
PATIENCE = 30.0
NUMBERS = {
    name: number
    for number, name in enumerate(
        ("web", "nobody", "manual", "unready", "portname", "six", "local", "inside", "ranged", "sticky", "dns", "host",
         "twin", "away", "self", "deaf"), 1)
}  # fmt: skip
BALANCER = "203.0.113.10"


def cluster_ip(name: str, version: int = 4) -> str:
    return f"10.110.0.{NUMBERS[name]}" if version == 4 else f"fd6e::{NUMBERS[name]:x}"


def node_port(name: str) -> int:
    return 30080 + NUMBERS[name]


def service(name: str, **fields: Any) -> Service:
    protocol = fields.pop("protocol", Protocol.TCP)
    target = fields.pop("target", TARGET)
    port = ServicePort(name="http", port=80, protocol=protocol, node_port=node_port(name), target_port=target)
    made: dict[str, Any] = {
        "namespace": "shop", "name": name, "type": "NodePort", "ports": (port,), "selector": (("app", name),),
        "cluster_ips": (cluster_ip(name), cluster_ip(name, 6)), "ip_families": (IPFamily.IPV4, IPFamily.IPV6), **fields,
    }  # fmt: skip
    return Service(**made)


def slices(name: str, *addresses: str, port: str = "http", protocol: Protocol = Protocol.TCP, number: int = TARGET,
           ready: bool = True) -> list[EndpointSlice]:  # fmt: skip
    made = []
    for family in IPFamily:
        mine = [ip for ip in addresses if (":" in ip) is (family is IPFamily.IPV6)]
        if mine:
            ends = tuple(
                SliceEndpoint(address=ip, node_name=_node_of(ip), ready=ready, serving=ready, target=f"{name}-{n}")
                for n, ip in enumerate(mine)
            )
            made.append(
                EndpointSlice(
                    namespace="shop", name=f"{name}-{family.value}", service_name=name, family=family,
                    ports=(EndpointPort(name=port, protocol=protocol, port=number),), endpoints=ends,
                )
            )  # fmt: skip
    return made


def _node_of(ip: str) -> str:
    return OTHER if ip in THERE[4] or ip in THERE[6] else NODE


def pod(name: str, *ips: str, node: str = NODE, **labels: str) -> Pod:
    return Pod(namespace="shop", name=name, labels=tuple(sorted(labels.items())), ips=ips, spec=PodSpec(node_name=node),
               ready=True, phase="Running")  # fmt: skip


def objects() -> list[Any]:
    """A cluster in which some Services work and some do not."""

    def both(table: dict[int, list[str]], number: int) -> tuple[str, str]:
        return table[4][number], table[6][number]

    return [
        Node(name=NODE, internal_ips=NODE_IPS, pod_cidrs=("10.64.1.0/24", "fd64:0:0:1::/64")),
        Node(name=OTHER, internal_ips=(OTHER_IP,), pod_cidrs=("10.64.2.0/24", "fd64:0:0:2::/64")),
        Node(name=THIRD, internal_ips=(THIRD_IP,), pod_cidrs=("10.64.3.0/24",)),
        pod("client", *POD.values(), app="client"),
        pod("near", app="nobody-v2", tier="front"),
        service("web"), *slices("web", *both(HERE, 0)),
        service("nobody"),
        service("manual", selector=()),
        service("unready"), *slices("unready", *both(HERE, 1), ready=False),
        service("portname", target="http-web"), *slices("portname", *both(HERE, 1), port="metrics"),
        service("six"), *slices("six", HERE[6][0]),
        service("local", type="LoadBalancer", external_policy_local=True, ingress=(LoadBalancerIngress(ip=BALANCER),),
                health_check_node_port=32000), *slices("local", *both(THERE, 0)),
        service("inside", internal_policy_local=True), *slices("inside", *both(THERE, 0)),
        service("ranged", type="LoadBalancer", ingress=(LoadBalancerIngress(ip="203.0.113.11"),),
                source_ranges=("192.0.2.0/24",)), *slices("ranged", *both(HERE, 0)),
        service("sticky", affinity_seconds=600), *slices("sticky", HERE[4][2], HERE[4][3]),
        service("dns", protocol=Protocol.UDP), *slices("dns", *both(HERE, 4), protocol=Protocol.UDP),
        service("host"), *slices("host", NODE_IPS[0], NODE_IPS[2], number=9000),
        service("away"), *slices("away", *both(THERE, 0)),
        service("deaf", target=81), *slices("deaf", *both(HERE, 0), number=81),
        service("self"), *slices("self", *POD.values()),
    ]  # fmt: skip


def snapshot(*changes: Any) -> Snapshot:
    """The cluster; changes are objects to put in, or keys (class, name) to take out."""
    store = Store()
    for each in objects():
        store.apply(Upsert(each))
    for change in changes:
        if isinstance(change, tuple):
            store.apply(Delete(change[0], NamespacedName("shop", change[1])))
        else:
            store.apply(Upsert(change))
    return store.apply(Synced())


class ClientRoute(msgspec.Struct, frozen=True, kw_only=True):
    """A connection to try and to explain."""

    source: str = POD[4]
    destination: str
    port: int = 80
    protocol: Protocol = Protocol.TCP
    size: int = 0
    source_port: int = 0
    """0: a free one."""


SITES = {POD[4]: CALLERS, POD[6]: CALLERS, OUTSIDE[4]: CLIENTS, OUTSIDE[6]: CLIENTS}


def to_service(name: str, version: int = 4) -> ClientRoute:
    return ClientRoute(source=POD[version], destination=cluster_ip(name, version))


def to_node_port(name: str, version: int = 4, address: str = "") -> ClientRoute:
    to = address or (NODE_IPS[0] if version == 4 else NODE_IPS[2])
    return ClientRoute(source=OUTSIDE[version], destination=to, port=node_port(name))


def from_node(name: str, version: int = 4) -> ClientRoute:
    return ClientRoute(source=NODE_IPS[0] if version == 4 else NODE_IPS[2], destination=cluster_ip(name, version))


class Stand:
    """A world with a mode's rules in it. Use it in a `with` block."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.world = World(layout())
        self.answers = EchoEndpoints()
        self._targets = {family: dataplane(mode).target(family, self.world.node) for family in IPFamily}

    def __enter__(self) -> Stand:
        self.world.__enter__()
        self.answers.__enter__()
        with in_namespace(self.world.node):
            set_settings(dataplane(self.mode).kernel_settings(kernel_release()))
        for version in (4, 6):
            for number in (0, 2, 3):
                self.serve(SERVERS, HERE[version][number])
            self.serve(BEYOND, THERE[version][0])
            self.serve(CALLERS, POD[version])
            self.serve(None, NODE_IPS[0] if version == 4 else NODE_IPS[2], 9000)
        self.serve(None, NODE_IPS[0], 32000)
        self.answers.answer_datagrams(self.site(SERVERS), HERE[4][4], TARGET, HERE[4][4])
        self.load(snapshot())
        return self

    def __exit__(self, *error: object) -> None:
        self.answers.__exit__(None, None, None)
        for target in self._targets.values():
            if hasattr(target, "close"):
                target.close()
        self.world.__exit__(None, None, None)

    def site(self, number: int | None) -> str:
        return self.world.node if number is None else self.world.namespace(number)

    def serve(self, site: int | None, address: str, port: int = TARGET) -> str:
        return self.answers.open(self.site(site), address, port)

    def rules(self, cluster: Snapshot, mode: str = "") -> dict[IPFamily, object]:
        config = NodeConfig(
            node_name=NODE, cluster_cidrs=("10.64.0.0/12", "fd64::/48"), node_addresses=NODE_IPS,
            node_port_addresses=("primary",) if (mode or self.mode) == "nftables" else None,
        )  # fmt: skip
        return {family: BACKENDS[mode or self.mode].render(plan_once(cluster, config, family)) for family in IPFamily}

    def load(self, cluster: Snapshot, mode: str = "") -> None:
        """Put the rules in, instead of those that are there."""
        backend = BACKENDS[mode or self.mode]
        for family, rules in self.rules(cluster, mode).items():
            target = dataplane(mode).target(family, self.world.node) if mode else self._targets[family]
            target.clean()
            target.apply(backend.diff(None, rules))

    def clean(self, mode: str = "") -> None:
        for family in IPFamily:
            (dataplane(mode).target(family, self.world.node) if mode else self._targets[family]).clean()

    def run(self, *commands: str, site: int | None = None) -> None:
        for command in commands:
            run(command.split(), namespace=self.site(site))

    def nft(self, text: str) -> None:
        run(["nft", "-f", "-"], stdin=text, namespace=self.world.node)

    @contextmanager
    def settings(self, *pairs: str) -> Iterator[None]:
        """Settings of the node, `net/… = 1`, for the time of the block."""
        before = []
        with in_namespace(self.world.node):
            for pair in pairs:
                name, _, value = pair.partition("=")
                path = Path("/proc/sys") / name
                before.append((path, path.read_text()))
                path.write_text(value)
        try:
            yield
        finally:
            with in_namespace(self.world.node):
                for path, value in reversed(before):
                    path.write_text(value)

    # ---- packets -----------------------------------------------------------------------------------------------------

    def arrives(self, way: ClientRoute, patience: float) -> str:
        """Who answers a connection, or nothing."""
        if way.protocol is Protocol.UDP:
            return self._datagram(way, patience)
        call = Call(label="", namespace=self.site(SITES.get(way.source)), source=way.source, destination=way.destination,
                    port=way.port)  # fmt: skip
        try:
            line = OpenConnection(call, patience)
        except OSError:
            return ""
        line.close()
        return line.endpoint

    def _datagram(self, way: ClientRoute, patience: float) -> str:
        with in_namespace(self.site(SITES.get(way.source))):
            sock = socket.socket(
                ADDRESS_FAMILY[IPFamily.IPV6 if ":" in way.source else IPFamily.IPV4], socket.SOCK_DGRAM
            )
        with sock:
            sock.bind((way.source, way.source_port))
            sock.settimeout(patience)
            try:
                sock.connect((way.destination, way.port))
                if way.size:
                    sock.setsockopt(socket.IPPROTO_IP, _MTU_DISCOVER, _DO_NOT_FRAGMENT)
                sock.send(b"?" * max(way.size - _HEADERS, 1))
                return sock.recv(100).decode()
            except OSError:
                return ""

    # ---- explaining --------------------------------------------------------------------------------------------------

    def view(self, pods: bool = False) -> NodeView:
        """What is known of the node; `pods`: also of its pods' namespaces."""
        view = live(NODE, self.world.node)
        if pods:
            view.pods = {f"shop/{name}": live(f"shop/{name}", self.site(number))
                         for name, number in (("client", CALLERS), ("servers", SERVERS))}  # fmt: skip
        return view

    def journey(self, way: ClientRoute, cluster: Snapshot, view: NodeView) -> PacketPath:
        # A fault may have turned the route back to a client elsewhere: that is not where it comes in.
        wish = TraceRequest(
            source=way.source, destination=f"{join_port(way.destination, way.port)}/{way.protocol.lower}", node=NODE,
            iif="eth0" if way.source in OUTSIDE.values() else "", source_port=way.source_port, size=way.size,
        )  # fmt: skip
        return travel(KnownCluster(views=(view,), snapshot=cluster, has_objects=True), wish)

    def explain(
        self, way: ClientRoute, cluster: Snapshot | None = None, view: NodeView | None = None, objects: bool = True
    ) -> list[CauseFinding]:
        """`objects`: with those of the cluster, else by the node alone."""
        cluster, view = cluster or snapshot(), view or self.view()
        return find(self.journey(way, cluster, view), {NODE: view}, cluster if objects else None)
