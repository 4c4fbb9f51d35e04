"""Hypothesis strategies for clusters of hundreds of Services: odd policies often, yet most packets meet something.

`strategies` draws every detail and shrinks well, but what it draws first is plain and rarely fits together. Here one
seed is drawn and all else follows from it, with chances chosen by hand. Over the address plan of `build`.
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
_STATES = (
    (True, True, False),
    (False, True, True),
    (False, False, False),
    (False, False, True),
    (False, True, False),
)
"""Ready, serving, terminating."""


class Crowd(msgspec.Struct, frozen=True, kw_only=True):
    """Objects of a cluster, and packets that are aimed at them."""

    objects: tuple[AnyObject, ...]
    packets: tuple[Packet, ...]

    def __repr__(self) -> str:
        # Hundreds of objects help nobody; the blob that hypothesis prints makes them again.
        return f"<{len(self.objects)} objects, {len(self.packets)} packets>"


@st.composite
def crowds(draw: st.DrawFn, family: IPFamily, least: int = 100, most: int = 400, packets: int = 20) -> Crowd:
    """So many Services, and first packets of one family."""
    chance = draw(st.randoms(use_true_random=True))
    objects: list[AnyObject] = [node(zone=chance.choice(("", "east")))]
    if _often(chance, 70):
        objects.append(ServiceCIDR(name="kubernetes", cidrs=("10.110.0.0/16", "fd6e::/108")))
    services = [_service(chance, number) for number in range(draw(st.integers(least, most)))]
    aims = [aim for one in services for aim in _aims(one, family)]
    for one in services:
        objects.append(one)
        objects += [made for own in one.ip_families for made in _slices(chance, one, own)]
    aimed = tuple(_packet(chance, family, aims) for _ in range(packets))
    return Crowd(objects=tuple(objects), packets=aimed)


def _often(chance: Random, percent: int) -> bool:
    return chance.randrange(100) < percent


def _service(chance: Random, number: int) -> Service:
    families = chance.choice(((IPFamily.IPV4,), (IPFamily.IPV6,), FAMILIES, FAMILIES))
    kind = chance.choices(("ClusterIP", "NodePort", "LoadBalancer", "ExternalName"), (25, 35, 37, 3))[0]
    ips = {IPFamily.IPV4: f"10.110.{1 + number // 250}.{1 + number % 250}", IPFamily.IPV6: f"fd6e::1:{number:x}"}
    exposed = kind in ("NodePort", "LoadBalancer")
    ports = [
        ServicePort(name=name, protocol=protocol, port=port, node_port=30000 + number * 4 + index if exposed else 0)
        for index, (name, protocol, port, _) in enumerate(chance.sample(_PORTS, chance.randrange(1, 4)))
    ]
    balancers = [chance.choice(EXTERNAL_IPS[family]) for family in families] if kind == "LoadBalancer" else []
    return Service(
        namespace=f"ns-{number % 7}",
        name=f"service-{number}",
        labels=(("service.kubernetes.io/service-proxy-name", "other"),) if _often(chance, 2) else (),
        type=kind,
        cluster_ips=("None",) if _often(chance, 2) else tuple(ips[family] for family in families),
        ip_families=families,
        external_ips=tuple(chance.choice(EXTERNAL_IPS[family]) for family in families if _often(chance, 25)),
        ingress=tuple(LoadBalancerIngress(ip=ip, proxy=_often(chance, 10)) for ip in balancers),
        source_ranges=tuple(chance.sample(RANGES, 2)) if _often(chance, 25) else (),
        ports=tuple(ports),
        external_policy_local=_often(chance, 35),
        internal_policy_local=_often(chance, 25),
        affinity_seconds=chance.choice((10, 10800)) if _often(chance, 10) else None,
    )


def _slices(chance: Random, service: Service, family: IPFamily) -> list[EndpointSlice]:
    weights = chance.choice(((100, 0, 0, 0, 0), (70, 12, 8, 5, 5), (0, 60, 20, 10, 10)))
    hinted = _often(chance, 20)
    endpoints = []
    for address in chance.sample(PODS[family], chance.choices((0, 1, 2, 3, 4), (12, 22, 30, 22, 14))[0]):
        here = address in NODE_IPS or address.startswith(("10.64.1.", "fd64:0:0:1:"))
        ready, serving, terminating = chance.choices(_STATES, weights)[0]
        endpoints.append(
            SliceEndpoint(
                address=address,
                ready=ready,
                serving=serving,
                terminating=terminating,
                node_name=NODE if here else "worker-b",
                for_zones=(chance.choice(("east", "west")),) if hinted else (),
            )
        )
    targets = {name: target for name, _, _, target in _PORTS}
    ports = tuple(
        EndpointPort(name=port.name, protocol=port.protocol, port=targets[port.name])
        for port in service.ports
        if not _often(chance, 4)
    )
    cut = chance.randrange(len(endpoints) + 1) if _often(chance, 30) else len(endpoints)
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
    """Where a Service might be reached."""
    found = []
    addresses = (*service.cluster_ips, *service.external_ips, *(entry.ip for entry in service.ingress))
    for port in service.ports:
        found += [(ip, port.port, port.protocol) for ip in addresses if ip != "None"]
        if port.node_port:
            found += [(ip, port.node_port, port.protocol) for ip in NODE_IPS]
    return [aim for aim in found if (":" in aim[0]) is (family is IPFamily.IPV6)]


def _packet(chance: Random, family: IPFamily, aims: list[tuple[str, int, Protocol]]) -> Packet:
    unused = "10.110.250.250" if family is IPFamily.IPV4 else "fd6e::9999"
    destination, port, protocol = chance.choice(aims) if aims else (unused, 80, Protocol.TCP)
    if _often(chance, 6):
        port += 1000
    elif _often(chance, 3):
        destination = unused
    source = chance.choice(CLIENTS[family] * 2 + PODS[family])
    here = source in NODE_IPS
    pod = source.startswith(("10.64.1.", "fd64:0:0:1:"))
    interface = "" if here else chance.choice(("cni0", "veth1")) if pod else chance.choice(("eth0", "eth0", "cni0"))
    return Packet(source=source, destination=destination, port=port, protocol=protocol, iif=interface, from_host=here)
