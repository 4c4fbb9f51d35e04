"""The lab's cluster DNS: the Service that every pod's resolv.conf names, and that resolv.conf.

Each node answers itself (`narthex node --dns`), at the Service's own address where the mode allows it, and at its own
addresses, where the Service leads to from elsewhere. A Service of this name among the user's manifests wins.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from narthex.lab.slices import SERVICE_LABEL
from narthex.lab.topology import LabNode
from narthex.model.names import NamespacedName
from narthex.model.net import FAMILIES, Protocol, family_of
from narthex.model.objects import EndpointPort, EndpointSlice, Service, ServicePort, SliceEndpoint
from narthex.state.slices import Slices
from narthex.state.store import Snapshot

DOMAIN = "cluster.local"
SERVICE = NamespacedName("kube-system", "kube-dns")
ADDRESSES = ("10.96.0.10", "fd00:10:96::a")
"""Where clusters have it by custom: the tenth address of the range."""
DNS_PORT = 53
_PORTS = (("dns", Protocol.UDP), ("dns-tcp", Protocol.TCP))


def with_dns(wanted: Snapshot, nodes: Sequence[LabNode]) -> Snapshot:
    """The user's objects with the DNS Service and its slices beside them, unless they have one."""
    if SERVICE in wanted.services:
        return wanted
    service = Service(
        namespace=SERVICE.namespace,
        name=SERVICE.name,
        cluster_ips=ADDRESSES,
        ip_families=FAMILIES,
        ip_family_policy="PreferDualStack",
        ports=tuple(ServicePort(name=name, protocol=protocol, port=DNS_PORT) for name, protocol in _PORTS),
    )
    slices = [
        EndpointSlice(
            namespace=SERVICE.namespace,
            name=f"{SERVICE.name}-{family.label.lower()}",
            labels=((SERVICE_LABEL, SERVICE.name),),
            service_name=SERVICE.name,
            family=family,
            ports=tuple(EndpointPort(name=name, protocol=protocol, port=DNS_PORT) for name, protocol in _PORTS),
            endpoints=tuple(
                SliceEndpoint(address=address, node_name=node.name)
                for node in nodes
                for address in node.addresses
                if family_of(address) is family
            ),
        )
        for family in FAMILIES
    ]
    return msgspec.structs.replace(
        wanted,
        services=wanted.services.set(SERVICE, service),
        slices=wanted.slices.set(SERVICE, Slices(*sorted(slices, key=lambda each: each.name))),
    )


def own_addresses(mode: str) -> tuple[str, ...]:
    """The Service's addresses that nodes have themselves. In mode ipvs they are on the proxy's own link."""
    return () if mode == "ipvs" else ADDRESSES


def corefile() -> str:
    """What every node answers. Nobody beyond the lab can be asked, so the root is answered here, too: a name that is not
    the cluster's does not exist, and no resolver waits for it."""
    zones = f"{DOMAIN} in-addr.arpa ip6.arpa"
    return (
        f"{zones} {{\n    errors\n    kubernetes {zones} {{\n        pods insecure\n    }}\n"
        "    prometheus :9353\n    loadbalance\n}\n"
        ". {\n    errors\n    kubernetes .\n}\n"
    )


def resolv_conf(namespace: str) -> str:
    """What a kubelet writes for a pod (row S22)."""
    zones = f"{namespace}.svc.{DOMAIN} svc.{DOMAIN} {DOMAIN}"
    return f"search {zones}\nnameserver {ADDRESSES[0]}\noptions ndots:5\n"
