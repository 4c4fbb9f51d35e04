"""One cluster with a case for each row of the DNS list, and a way to ask it that reads like dig."""

from typing import Any

import dns.message
import dns.rcode
import dns.rdatatype

from narthex.dns.corefile.settings import KubernetesSettings
from narthex.dns.plugins.kubernetes import KubernetesPlugin
from narthex.dns.server.dispatcher import BlockPlugins, Dispatcher, LocalAnswer, RejectedPacket
from narthex.dns.zone.changes import ZoneTracker
from narthex.dns.zone.zone import Zone
from narthex.model.net import IPFamily, Protocol
from narthex.model.objects import EndpointPort, Namespace, Pod, ServicePort
from narthex.model.store import Store, Synced, Upsert
from narthex.testing.build import endpoint, endpoint_slice, service

ZONES = ("cluster.local.", "in-addr.arpa.", "ip6.arpa.")
V6 = IPFamily.IPV6


def slice_v6(text: str, *endpoints: Any, **fields: Any) -> Any:
    return endpoint_slice(text, *endpoints, suffix="6", family=V6, **fields)


OBJECTS = (
    Namespace(name="empty", labels=(("team", "a"),)),
    Namespace(name="shop", labels=(("team", "a"),)),
    service("shop/web", "10.110.0.1"),
    endpoint_slice("shop/web", endpoint("10.64.1.1"), endpoint("10.64.1.2", hostname="web-b")),
    service("shop/both", "10.110.0.2", "fd6e::2"),
    service("shop/nodes", "10.110.0.3", type="LoadBalancer", node_port=30080, external_ips=("198.51.100.7",)),
    service(
        "shop/ports",
        "10.110.0.4",
        ports=(
            ServicePort(name="http", port=80),
            ServicePort(name="dns", port=53, protocol=Protocol.UDP),
            ServicePort(port=99),
        ),
    ),
    service("shop/unready", "10.110.0.5"),
    endpoint_slice("shop/unready", endpoint("10.64.1.9", ready=False, serving=True, terminating=True)),
    service("shop/heads", "None", selector=(("app", "heads"),)),
    endpoint_slice(
        "shop/heads",
        endpoint("10.64.1.10", target="heads-0"),
        endpoint("10.64.1.11", hostname="one"),
        endpoint("10.64.1.12", ready=False, serving=True),
        port=8080,
    ),
    endpoint_slice("shop/heads", endpoint("10.64.1.11", hostname="one"), suffix="2", port=8080),
    slice_v6("shop/heads", endpoint("fd64:0:0:1::", target="heads-0"), port=8080),
    service("shop/twins", "None"),
    endpoint_slice("shop/twins", endpoint("10.64.1.20", hostname="t"), endpoint("10.64.1.21", hostname="t")),
    service("shop/noports", "None", ports=()),
    endpoint_slice("shop/noports", endpoint("10.64.1.30"), ports=()),
    service("shop/silent", "None"),
    endpoint_slice("shop/silent", endpoint("10.64.1.31", ready=False)),
    service("shop/gone", "None"),
    service("shop/moved", "None", ports=(ServicePort(name="http", port=80, target_port=81),)),
    endpoint_slice("shop/moved", endpoint("10.64.1.40"), ports=(EndpointPort(name="http", port=81),)),
    endpoint_slice("shop/moved", endpoint("10.64.1.41"), ports=(EndpointPort(name="http", port=82),), suffix="2"),
    service("shop/outside", type="ExternalName", external_name="www.example.org"),
    service("shop/inside", type="ExternalName", external_name="web.shop.svc.cluster.local"),
    service("shop/chain", type="ExternalName", external_name="INSIDE.shop.svc.cluster.local"),
    service("shop/ring", type="ExternalName", external_name="ring.shop.svc.cluster.local"),
    service("shop/nowhere", type="ExternalName", external_name="nope.shop.svc.cluster.local"),
    service("shop/number", type="ExternalName", external_name="192.0.2.1"),
    service("kube-system/kube-dns", "10.110.0.10"),
    endpoint_slice("kube-system/kube-dns", endpoint("10.20.0.11")),
    Pod(name="heads-0", namespace="shop", phase="Running", ips=("10.64.1.10", "fd64:0:0:1::")),
    Pod(name="done", namespace="shop", phase="Succeeded", ips=("10.64.1.50",)),
    Pod(name="late", namespace="shop", phase="Running", ips=("10.64.1.51",), deletion_timestamp="2026-01-01T00:00:00Z"),
)
NOW = 1_767_225_600


class Served:
    """A store, a recorder, a zone and a desk in one process."""

    def __init__(
        self,
        *objects: Any,
        own: tuple[str, ...] = ("10.20.0.11",),
        rotate: Any = True,
        resolver: Any = None,
        synced: bool = True,
        zones: Any = ZONES,
        **settings: Any,
    ) -> None:
        self.settings = KubernetesSettings(zones=zones, **settings)
        self.store = Store()
        self.recorder = ZoneTracker(self.settings)
        self.zone = Zone(self.settings.pods, zonal=self.settings.zonal)
        cluster = KubernetesPlugin(self.settings, self.zone, own, rotate=rotate)
        self.dispatcher = Dispatcher([BlockPlugins((".",) if resolver else zones, cluster, resolver)])
        for obj in objects:
            self.store.apply(Upsert(obj))
        if synced:
            self.store.apply(Synced())
        self.update()

    def update(self, now: int = NOW) -> Any:
        store = self.store
        change = self.recorder.update(store.snapshot, store.take_changed(), store.take_changed_pods(), now)
        self.zone.apply(change)
        self.dispatcher.nxdomain.clear()
        return change

    def ask(self, name: str, type_: str = "A", transport: Any = "udp", **options: Any) -> Any:
        """dnspython's view of the response; also checks that the short way says the same."""
        query = dns.message.make_query(name, type_, **options)
        packet = query.to_wire()
        made = self.dispatcher.handle(packet, transport)
        assert isinstance(made, LocalAnswer | RejectedPacket), made
        data = made.message if isinstance(made, RejectedPacket) else packet[:2] + made.response.tail
        if isinstance(made, LocalAnswer) and transport == "udp":
            self.dispatcher.learn(packet[2:], made, [0])
            short = self.dispatcher.nxdomain.lookup(packet[2:])
            assert short is None or short[0] == made.response.tail
        return dns.message.from_wire(data)


def texts(section: Any) -> list[str]:
    """Records as `TYPE data`, names without case."""
    return [f"{dns.rdatatype.to_text(rrset.rdtype)} {rdata.to_text()}" for rrset in section for rdata in rrset]


def code(message: Any) -> str:
    return dns.rcode.to_text(message.rcode())
