"""Hypothesis strategies for clusters of hundreds of Services, with unusual policies and packets that mostly meet a frontend.

`strategies` draws every detail and shrinks well, but its first examples are plain and rarely fit together. Here, Hypothesis draws
one seed, and everything else follows from it with probabilities chosen by hand, over the address plan of `build`.
"""

from __future__ import annotations

from random import Random

import msgspec
from hypothesis import strategies as st

from narthex.model.net import FAMILIES, IPFamily, Protocol
from narthex.model.objects import (
    AnyObject,
    EndpointPort,
    EndpointSlice,
    LoadBalancerIngress,
    Service,
    ServiceCIDR,
    ServicePort,
    SliceEndpoint,
)
from narthex.model.packet import Packet
from narthex.testing.build import NODE, NODE_IPS, node
from narthex.testing.strategies import CLIENTS, EXTERNAL_IPS, PODS, RANGES

_PORTS = (
    ("http", Protocol.TCP, 80, 8080),
    ("dns", Protocol.UDP, 53, 53),
    ("admin", Protocol.TCP, 81, 9090),
    ("signal", Protocol.SCTP, 82, 8282),
)
_STATES = ((True, True, False), (False, True, True), (False, False, False), (False, False, True), (False, True, False))
"""Ready, serving, terminating."""


class Crowd(msgspec.Struct, frozen=True, kw_only=True):
    """Objects of a cluster, and packets that are aimed at them."""

    objects: tuple[AnyObject, ...]
    packets: tuple[Packet, ...]

    def __repr__(self) -> str:
        # Hundreds of objects are unreadable; the blob that Hypothesis prints recreates them.
        return f"<{len(self.objects)} objects, {len(self.packets)} packets>"


@st.composite
def crowds(draw: st.DrawFn, family: IPFamily, least: int = 100, most: int = 400, packets: int = 20) -> Crowd:
    """Return a strategy for clusters with this many Services, and first packets of one family."""
    random = draw(st.randoms(use_true_random=True))
    objects: list[AnyObject] = [node(zone=random.choice(("", "east")))]
    if _often(random, 70):
        objects.append(ServiceCIDR(name="kubernetes", cidrs=("10.110.0.0/16", "fd6e::/108")))
    services = [_service(random, number) for number in range(draw(st.integers(least, most)))]
    aims = [aim for one in services for aim in _aims(one, family)]
    for one in services:
        objects.append(one)
        objects += [made for own in one.ip_families for made in _slices(random, one, own)]
    aimed = tuple(_packet(random, family, aims) for _ in range(packets))
    return Crowd(objects=tuple(objects), packets=aimed)


def _often(random: Random, percent: int) -> bool:
    return random.randrange(100) < percent


def _service(random: Random, number: int) -> Service:
    families = random.choice(((IPFamily.IPV4,), (IPFamily.IPV6,), FAMILIES, FAMILIES))
    kind = random.choices(("ClusterIP", "NodePort", "LoadBalancer", "ExternalName"), (25, 35, 37, 3))[0]
    ips = {IPFamily.IPV4: f"10.110.{1 + number // 250}.{1 + number % 250}", IPFamily.IPV6: f"fd6e::1:{number:x}"}
    exposed = kind in ("NodePort", "LoadBalancer")
    ports = [
        ServicePort(name=name, protocol=protocol, port=port, node_port=30000 + number * 4 + index if exposed else 0)
        for index, (name, protocol, port, _) in enumerate(random.sample(_PORTS, random.randrange(1, 4)))
    ]
    balancers = [random.choice(EXTERNAL_IPS[family]) for family in families] if kind == "LoadBalancer" else []
    return Service(
        namespace=f"ns-{number % 7}",
        name=f"service-{number}",
        labels=(("service.kubernetes.io/service-proxy-name", "other"),) if _often(random, 2) else (),
        type=kind,
        cluster_ips=("None",) if _often(random, 2) else tuple(ips[family] for family in families),
        ip_families=families,
        external_ips=tuple(random.choice(EXTERNAL_IPS[family]) for family in families if _often(random, 25)),
        ingress=tuple(LoadBalancerIngress(ip=ip, proxy=_often(random, 10)) for ip in balancers),
        source_ranges=tuple(random.sample(RANGES, 2)) if _often(random, 25) else (),
        ports=tuple(ports),
        external_policy_local=_often(random, 35),
        internal_policy_local=_often(random, 25),
        affinity_seconds=random.choice((10, 10800)) if _often(random, 10) else None,
    )


def _slices(random: Random, service: Service, family: IPFamily) -> list[EndpointSlice]:
    weights = random.choice(((100, 0, 0, 0, 0), (70, 12, 8, 5, 5), (0, 60, 20, 10, 10)))
    hinted = _often(random, 20)
    endpoints = []
    for address in random.sample(PODS[family], random.choices((0, 1, 2, 3, 4), (12, 22, 30, 22, 14))[0]):
        here = address in NODE_IPS or address.startswith(("10.64.1.", "fd64:0:0:1:"))
        ready, serving, terminating = random.choices(_STATES, weights)[0]
        endpoints.append(
            SliceEndpoint(
                address=address,
                ready=ready,
                serving=serving,
                terminating=terminating,
                node_name=NODE if here else "worker-b",
                for_zones=(random.choice(("east", "west")),) if hinted else (),
            )
        )
    targets = {name: target for name, _, _, target in _PORTS}
    ports = tuple(
        EndpointPort(name=port.name, protocol=port.protocol, port=targets[port.name])
        for port in service.ports
        if not _often(random, 4)
    )
    cut = random.randrange(len(endpoints) + 1) if _often(random, 30) else len(endpoints)
    return [
        EndpointSlice(
            namespace=service.namespace,
            name=f"{service.name}-{family.value}-{index}",
            service_name=service.name,
            family=family,
            ports=ports,
            endpoints=tuple(part),
        )
        for index, part in enumerate((endpoints[:cut], endpoints[cut:]))
        if part or not index
    ]


def _aims(service: Service, family: IPFamily) -> list[tuple[str, int, Protocol]]:
    """Return the addresses and ports at which a Service might be reached."""
    found = []
    addresses = (*service.cluster_ips, *service.external_ips, *(entry.ip for entry in service.ingress))
    for port in service.ports:
        found += [(ip, port.port, port.protocol) for ip in addresses if ip != "None"]
        if port.node_port:
            found += [(ip, port.node_port, port.protocol) for ip in NODE_IPS]
    return [aim for aim in found if (":" in aim[0]) is (family is IPFamily.IPV6)]


def _packet(random: Random, family: IPFamily, aims: list[tuple[str, int, Protocol]]) -> Packet:
    unused = "10.110.250.250" if family is IPFamily.IPV4 else "fd6e::9999"
    destination, port, protocol = random.choice(aims) if aims else (unused, 80, Protocol.TCP)
    if _often(random, 6):
        port += 1000
    elif _often(random, 3):
        destination = unused
    source = random.choice(CLIENTS[family] * 2 + PODS[family])
    here = source in NODE_IPS
    pod = source.startswith(("10.64.1.", "fd64:0:0:1:"))
    interface = "" if here else random.choice(("cni0", "veth1")) if pod else random.choice(("eth0", "eth0", "cni0"))
    return Packet(source=source, destination=destination, port=port, protocol=protocol, iif=interface, from_host=here)
