"""Names of kube-proxy's chains and sets in mode ipvs (row 24.4), and which of them are ours."""

from __future__ import annotations

from narthex.model import IPFamily
from narthex.model.links import IPVS_LINK
from narthex.netfilter.ipset import MAX_NAME
from narthex.proxy.backends.iptables import names as shared

LINK = IPVS_LINK

SERVICES = shared.SERVICES
POSTROUTING = shared.POSTROUTING
MARK_MASQ = shared.MARK_MASQ
MARK_STRANGERS = shared.MARK_STRANGERS
MARK_NODE = "KUBE-MARK-NODE"
"""Marks packets from this node; kube-proxy has no such chain, because it never masquerades under Local policies."""
LOAD_BALANCER = "KUBE-LOAD-BALANCER"
NODE_PORT = "KUBE-NODE-PORT"
FORWARD = shared.FORWARD
PROXY_FIREWALL = shared.PROXY_FIREWALL
SOURCE_RANGES = "KUBE-SOURCE-RANGES-FIREWALL"
IPVS_FILTER = "KUBE-IPVS-FILTER"
IPVS_OUT_FILTER = "KUBE-IPVS-OUT-FILTER"

LOOP_BACK = "KUBE-LOOP-BACK"
CLUSTER_IP = "KUBE-CLUSTER-IP"
EXTERNAL_IP = "KUBE-EXTERNAL-IP"
EXTERNAL_IP_LOCAL = "KUBE-EXTERNAL-IP-LOCAL"
LOAD_BALANCER_IP = "KUBE-LOAD-BALANCER"
LOAD_BALANCER_IP_LOCAL = "KUBE-LOAD-BALANCER-LOCAL"
LOAD_BALANCER_IP_FW = "KUBE-LOAD-BALANCER-FW"
LOAD_BALANCER_IP_SOURCE_IP = "KUBE-LOAD-BALANCER-SOURCE-IP"
LOAD_BALANCER_IP_SOURCE_CIDR = "KUBE-LOAD-BALANCER-SOURCE-CIDR"
NODE_PORT_TCP = "KUBE-NODE-PORT-TCP"
NODE_PORT_UDP = "KUBE-NODE-PORT-UDP"
NODE_PORT_SCTP = "KUBE-NODE-PORT-SCTP-HASH"
NODE_PORT_LOCAL_TCP = "KUBE-NODE-PORT-LOCAL-TCP"
NODE_PORT_LOCAL_UDP = "KUBE-NODE-PORT-LOCAL-UDP"
NODE_PORT_LOCAL_SCTP = "KUBE-NODE-PORT-LOCAL-SCTP-HASH"
HEALTH_CHECK = "KUBE-HEALTH-CHECK-NODE-PORT"
IPVS_IPS = "KUBE-IPVS-IPS"
DROP_POD = "KUBE-DROP-POD"
"""Addresses and ports at which a Local policy leaves no endpoint for pods. Narthex's own, like the two below:
kube-proxy sends such connections to other nodes (rows 7.10, 8.5, 29.6).
"""
DROP_NODE = "KUBE-DROP-NODE"
DROP_OTHER = "KUBE-DROP-OTHER"

KINDS = {
    LOOP_BACK: "hash:ip,port,ip",
    CLUSTER_IP: "hash:ip,port",
    EXTERNAL_IP: "hash:ip,port",
    EXTERNAL_IP_LOCAL: "hash:ip,port",
    LOAD_BALANCER_IP: "hash:ip,port",
    LOAD_BALANCER_IP_LOCAL: "hash:ip,port",
    LOAD_BALANCER_IP_FW: "hash:ip,port",
    LOAD_BALANCER_IP_SOURCE_IP: "hash:ip,port,ip",
    LOAD_BALANCER_IP_SOURCE_CIDR: "hash:ip,port,net",
    NODE_PORT_TCP: "bitmap:port",
    NODE_PORT_UDP: "bitmap:port",
    NODE_PORT_SCTP: "hash:ip,port",
    NODE_PORT_LOCAL_TCP: "bitmap:port",
    NODE_PORT_LOCAL_UDP: "bitmap:port",
    NODE_PORT_LOCAL_SCTP: "hash:ip,port",
    HEALTH_CHECK: "bitmap:port",
    IPVS_IPS: "hash:ip",
    DROP_POD: "hash:ip,port",
    DROP_NODE: "hash:ip,port",
    DROP_OTHER: "hash:ip,port",
}
"""All sets of the mode, by their IPv4 name. All of them always exist, so that rules may name any of them."""


def set_name(name: str, family: IPFamily) -> str:
    """Return a set's name in the kernel: IPv6 names begin with `KUBE-6-` and are cut if too long."""
    return name if family is IPFamily.IPV4 else ("KUBE-6-" + name.removeprefix("KUBE-"))[:MAX_NAME]


SETS = {family: frozenset(set_name(name, family) for name in KINDS) for family in IPFamily}
"""The names in the kernel."""


def set_family(kind: str, family: IPFamily) -> IPFamily:
    """Return the family that a set of this kind is created with; a bitmap of ports has none and counts as IPv4."""
    return IPFamily.IPV4 if kind == "bitmap:port" else family


IPVS_CHAINS = shared.ChainOwnership(
    {
        "nat": frozenset((SERVICES, POSTROUTING, MARK_MASQ, MARK_STRANGERS, MARK_NODE, LOAD_BALANCER, NODE_PORT)),
        "filter": frozenset((FORWARD, NODE_PORT, PROXY_FIREWALL, SOURCE_RANGES, IPVS_FILTER, IPVS_OUT_FILTER)),
        "mangle": frozenset((PROXY_FIREWALL, SOURCE_RANGES)),
    },
    {
        "nat": frozenset((SERVICES, POSTROUTING)),
        "filter": frozenset((IPVS_FILTER, IPVS_OUT_FILTER, PROXY_FIREWALL, NODE_PORT, FORWARD)),
        "mangle": frozenset((PROXY_FIREWALL,)),
    },
)
