"""The lab's network as data: names, addresses, links, and routes.

    outside 192.0.2.2 ──── fabric 192.0.2.1
                           fabric underlay 192.168.49.1, 192.168.49.2 (the API server), 192.168.49.3 (Ingresses)
                             ├── node-1 eth0 192.168.49.11 ── cni0 10.244.1.1 ── pods 10.244.1.2 …
                             └── node-2 eth0 192.168.49.12 ── cni0 10.244.2.1 ── pods 10.244.2.2 …

Each box is a network namespace. CNI plugins create the pods' veth pairs and the bridge `cni0`. Since the
fabric is a namespace too, several labs can use the same addresses. Fabric and `outside` have no routes to pods or Services,
only to the nodes, as in the network around a real cluster. Load balancer addresses are routed to the nodes' link; the fabric
resolves the node that has one as a router does, with ARP or neighbour discovery.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from narthex.model import NamespacedName, family_of

NONE, VXLAN, HOST_GW = OVERLAYS = ("none", "vxlan", "host-gw")
"""How pods of other nodes are reached: by static routes, or by the nodes' overlay."""
NETWORK = "lab"
"""Name of the network."""

MAX_NODES = 200
MAX_PODS_PER_NODE = 250
"""The node's /24 has a few more addresses, since released ones are not reused immediately."""

CLUSTER_CIDRS = ("10.244.0.0/16", "fd00:10:244::/48")
"""Networks of all pods."""
SERVICE_CIDRS = ("10.96.0.0/16", "fd00:10:96::/112")

API_ADDRESS = "192.168.49.2"
"""Address of the API server for nodes and pods. It belongs to the fabric, so it survives the death of any node."""
API_PORT = 6443
INGRESS_ADDRESSES = ("192.168.49.3", "fd00:192:168:49::3")
"""Addresses of the load balancer for Ingresses, on the fabric. They exist from the first Ingress on."""

OUTSIDE = "outside"
OUTSIDE_ADDRESSES = ("192.0.2.2", "fd00:192:0:2::2")
FABRIC = "fabric"
_UNDERLAY = "underlay"
_FABRIC_ADDRESSES = ("192.168.49.1/24", "fd00:192:168:49::1/64")
_UNDERLAY_CIDRS = ("192.168.49.0/24", "fd00:192:168:49::/64")
_OUTSIDE_CIDRS = ("192.0.2.0/24", "fd00:192:0:2::/64")
_OUTSIDE_GATEWAYS = ("192.0.2.1", "fd00:192:0:2::1")
_API_ROUTES = 49
"""Routing table for packets of the API server."""

_LAB_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?", re.ASCII)
_PREFIX = "nx-"


class Wiring(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of one namespace: sysctls, then `ip` commands."""

    namespace: str
    sysctls: dict[str, str]
    commands: tuple[str, ...]


class LabNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node of a lab."""

    name: str
    namespace: str
    """Its network namespace."""
    addresses: tuple[str, ...]
    pod_cidrs: tuple[str, ...]
    gateways: tuple[str, ...]
    """The node's addresses on its pods' bridge."""


def check_name(lab: str) -> None:
    """Raise ValueError if the name of a lab is invalid."""
    if not _LAB_NAME.fullmatch(lab):
        raise ValueError(
            f"{lab!r} is not a valid name of a lab: use at most 20 lowercase letters, digits, and '-' (not first or last)"
        )


def nodes(lab: str, count: int) -> tuple[LabNode, ...]:
    """Return the lab's nodes, `node-1` and so on. Raises ValueError if the number is out of range."""
    if not 1 <= count <= MAX_NODES:
        raise ValueError(f"a lab has 1 to {MAX_NODES} nodes, not {count}")
    return tuple(_node(lab, index) for index in range(1, count + 1))


def _node(lab: str, index: int) -> LabNode:
    return LabNode(
        name=f"node-{index}",
        namespace=f"{_PREFIX}{lab}-node-{index}",
        addresses=(f"192.168.49.{10 + index}", f"fd00:192:168:49::{10 + index:x}"),
        pod_cidrs=(f"10.244.{index}.0/24", f"fd00:10:244:{index:x}::/64"),
        gateways=(f"10.244.{index}.1", f"fd00:10:244:{index:x}::1"),
    )


def fabric_namespace(lab: str) -> str:
    """Return the namespace of the network between the nodes."""
    return f"{_PREFIX}{lab}-{FABRIC}"


def outside_namespace(lab: str) -> str:
    """Return the namespace of the client outside the cluster."""
    return f"{_PREFIX}{lab}-{OUTSIDE}"


def pod_namespace(lab: str, pod: NamespacedName) -> str:
    """Return the network namespace of a pod: readable, and short for any pod name."""
    return _short(f"{_PREFIX}{lab}.{pod.namespace}.{pod.name}")


def container_id(pod: NamespacedName) -> str:
    """Return the CNI container ID of a pod, readable and short."""
    return _short(f"{pod.namespace}.{pod.name}")


def _short(name: str) -> str:
    if len(name) <= 63:
        return name
    return f"{name[:50]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def owns(lab: str, namespace: str) -> bool:
    """Return True if a namespace belongs to the lab.

    The result is unambiguous: pods have a dot after the lab's name, which contains none, and no name of a lab can extend the
    suffixes of the others.
    """
    if namespace.startswith(f"{_PREFIX}{lab}."):
        return True
    part = namespace.removeprefix(f"{_PREFIX}{lab}-")
    return part != namespace and (part in (FABRIC, OUTSIDE) or re.fullmatch(r"node-[1-9]\d*", part) is not None)


def lab_of(namespace: str) -> str | None:
    """Return the lab that a namespace belongs to, None if there is none."""
    match = re.fullmatch(rf"{_PREFIX}([a-z0-9-]+?)(\..+|-{FABRIC}|-{OUTSIDE}|-node-[1-9]\d*)", namespace)
    return match[1] if match and owns(match[1], namespace) else None


_QUIET = {
    # All addresses are static: no router advertisements, and no delay for duplicate address detection.
    "net/ipv6/conf/default/accept_ra": "0",
    "net/ipv6/conf/default/accept_dad": "0",
    "net/ipv6/conf/default/accept_redirects": "0",
    "net/ipv4/conf/all/accept_redirects": "0",
    "net/ipv4/conf/default/accept_redirects": "0",
}
_ROUTER = {
    **_QUIET,
    "net/ipv4/ip_forward": "1",
    "net/ipv6/conf/all/forwarding": "1",
    # Traffic between pods of a node enters and leaves through the same bridge, which would cause redirects.
    "net/ipv4/conf/all/send_redirects": "0",
    "net/ipv4/conf/default/send_redirects": "0",
    "net/ipv4/conf/all/rp_filter": "0",
    "net/ipv4/conf/default/rp_filter": "0",
    # With br_netfilter the bridge would apply NAT itself and then drop a pod's packets to itself.
    "net/bridge/bridge-nf-call-iptables": "0",
    "net/bridge/bridge-nf-call-ip6tables": "0",
}


def _address_link(addresses: Sequence[str], link: str) -> tuple[str, ...]:
    """Return the commands that give a link its IPv4 and IPv6 address, and set it up."""
    four, six = addresses
    return f"address add {four}/24 dev {link}", f"address add {six}/64 dev {link} nodad", f"link set {link} up"


def wire_fabric(lab: str, members: tuple[LabNode, ...]) -> tuple[Wiring, ...]:
    """Return the wiring of the fabric and `outside`: a bridge, and veth pairs to all nodes and `outside`.

    The namespaces exist already. Packets of the API server, and no others, are routed to pods.
    """
    to_pods = [
        f"route add {node.pod_cidrs[0]} via {node.addresses[0]} dev {_UNDERLAY} src {API_ADDRESS} table {_API_ROUTES}"
        for node in members
    ]
    veth_pairs = [
        command
        for node in members
        for command in (
            f"link add {node.name} type veth peer name eth0 netns {node.namespace}",
            f"link set {node.name} master {_UNDERLAY} up",
        )
    ]
    fabric = Wiring(
        namespace=fabric_namespace(lab),
        sysctls=_ROUTER,
        commands=(
            f"link add {_UNDERLAY} type bridge mcast_snooping 0",
            *(f"address add {address} dev {_UNDERLAY} nodad" for address in _FABRIC_ADDRESSES),
            f"address add {API_ADDRESS}/32 dev {_UNDERLAY}",
            f"link set {_UNDERLAY} up",
            f"rule add iif lo table {_API_ROUTES}",
            *to_pods,
            *veth_pairs,
            f"link add {OUTSIDE} type veth peer name eth0 netns {outside_namespace(lab)}",
            *_address_link(_OUTSIDE_GATEWAYS, OUTSIDE),
        ),
    )
    outside = Wiring(
        namespace=outside_namespace(lab),
        sysctls=_QUIET,
        commands=(
            *_address_link(OUTSIDE_ADDRESSES, "eth0"),
            *(
                f"route add {cidr} via {gateway}"
                for cidr, gateway in zip(_UNDERLAY_CIDRS, _OUTSIDE_GATEWAYS, strict=True)
            ),
        ),
    )
    return fabric, outside


def wire_node(node: LabNode, members: tuple[LabNode, ...], overlay: str = NONE) -> Wiring:
    """Return the wiring of a node: its address and, without an overlay, routes to pods of other nodes."""
    routes = [
        f"route add {cidr} via {address}"
        for other in members
        if other.name != node.name and overlay == NONE
        for cidr, address in zip(other.pod_cidrs, other.addresses, strict=True)
    ]
    return Wiring(
        namespace=node.namespace,
        sysctls=_ROUTER,
        commands=(
            *_address_link(node.addresses, "eth0"),
            "route add default via 192.168.49.1",
            "route add default via fd00:192:168:49::1",
            *routes,
        ),
    )


def taken_networks() -> dict[str, str]:
    """Return networks that load balancer pools must not overlap, with their use."""
    return {
        **dict.fromkeys(CLUSTER_CIDRS, "where the lab's pods are"),
        **dict.fromkeys(SERVICE_CIDRS, "where the lab's cluster IPs are"),
        **dict.fromkeys(_OUTSIDE_CIDRS, "where `outside` is"),
    }


def taken_addresses(members: Sequence[LabNode]) -> dict[str, str]:
    """Return single addresses in use, with their owners."""
    routers = {address.partition("/")[0]: "the router's" for address in _FABRIC_ADDRESSES}
    routers[API_ADDRESS] = "the API server's"
    routers |= dict.fromkeys(INGRESS_ADDRESSES, "the load balancer's for Ingresses")
    return {**routers, **{ip: f"an address of {node.name}" for node in members for ip in node.addresses}}


def wire_ingress(lab: str) -> Wiring:
    """Return the change that gives the fabric the addresses for Ingresses."""
    four, six = INGRESS_ADDRESSES
    commands = (f"address replace {four}/32 dev {_UNDERLAY}", f"address replace {six}/128 dev {_UNDERLAY} nodad")
    return Wiring(namespace=fabric_namespace(lab), sysctls={}, commands=commands)


def wire_balancers(lab: str, gone: Iterable[str], new: Iterable[str]) -> tuple[Wiring, ...]:
    """Return the changes for other load balancer networks: routes on the fabric to the nodes' link, and from `outside`."""
    words = [("del", cidr) for cidr in gone] + [("replace", cidr) for cidr in new]
    gateway = {family_of(address): address for address in _OUTSIDE_GATEWAYS}
    ways = [f"route {word} {cidr} via {gateway[family_of(cidr.partition('/')[0])]}" for word, cidr in words]
    return (
        Wiring(
            namespace=fabric_namespace(lab),
            sysctls={},
            commands=tuple(f"route {word} {cidr} dev {_UNDERLAY}" for word, cidr in words),
        ),
        Wiring(namespace=outside_namespace(lab), sysctls={}, commands=tuple(ways)),
    )


def wire_dead(lab: str, node: LabNode) -> Wiring:
    """Return the change that disconnects a dead node: its port on the fabric goes down."""
    return Wiring(namespace=fabric_namespace(lab), sysctls={}, commands=(f"link set {node.name} down",))


_BRIDGE = {
    "type": "bridge",
    "bridge": "cni0",
    "isDefaultGateway": True,
    "hairpinMode": True,
    # Replies between pods of a node must pass connection tracking, which reverses the proxy's NAT. Real nodes load
    # br_netfilter for this, which affects the whole machine.
    "throughNode": True,
}


def net_conf(overlay: str, cluster_cidrs: tuple[str, ...]) -> dict[str, Any]:
    """Return the overlay's `net-conf.json`. `cluster_cidrs` has one network for IPv4 and one for IPv6."""
    four, six = cluster_cidrs
    # The nodes' proxies use nftables by default.
    common = {"EnableIPv4": True, "EnableIPv6": True, "EnableNFTables": True}
    return {**common, "Network": four, "IPv6Network": six, "Backend": {"Type": overlay}}


def bridge_network(pod_cidrs: tuple[str, ...], reservations: str) -> dict[str, Any]:
    """Return the configuration of a node with fixed pod ranges. `reservations` is the directory of host-local's reservations."""
    ranges = [[{"subnet": cidr}] for cidr in pod_cidrs]
    return _chain({**_BRIDGE, "ipam": {"type": "host-local", "ranges": ranges, "dataDir": reservations}})


def overlay_network(subnet_file: str, kept: str, reservations: str) -> dict[str, Any]:
    """Return the configuration of a node whose overlay provides ranges and MTU in `subnet_file`.

    `kept` is the directory of delegated configurations, `reservations` that of host-local.
    """
    plugin = {"type": "flannel", "subnetFile": subnet_file, "dataDir": kept, "delegate": _BRIDGE}
    return _chain({**plugin, "ipam": {"dataDir": reservations}})


def _chain(first: dict[str, Any]) -> dict[str, Any]:
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "1.0.0", "name": NETWORK, "plugins": [first, ports]}
