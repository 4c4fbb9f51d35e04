"""The pods' network as CNI plugins are told of it: one configuration for each node."""

from __future__ import annotations

from typing import Any

NONE, VXLAN, HOST_GW = OVERLAYS = ("none", "vxlan", "host-gw")
"""How pods of other nodes are reached: by routes that the lab makes itself, or by the nodes' overlay."""
NETWORK = "lab"
"""Its name."""

_BRIDGE = {
    "type": "bridge",
    "bridge": "cni0",
    "isDefaultGateway": True,
    "hairpinMode": True,
    # The answer of a neighbour would go over the bridge and pass by the connection tracking that must undo what the proxy
    # rewrote. Real nodes load br_netfilter for this, which concerns the whole machine.
    "throughNode": True,
}


def net_conf(overlay: str, cluster_cidrs: tuple[str, ...]) -> dict[str, Any]:
    """What a cluster's overlay is told of: its `net-conf.json`. `cluster_cidrs`: of IPv4 and of IPv6."""
    four, six = cluster_cidrs
    # Rules of iptables would be of another tool than those of the nodes' proxies by default.
    common = {"EnableIPv4": True, "EnableIPv6": True, "EnableNFTables": True}
    return {**common, "Network": four, "IPv6Network": six, "Backend": {"Type": overlay}}


def bridge_network(pod_cidrs: tuple[str, ...], reservations: str) -> dict[str, Any]:
    """Pods of a node with these ranges, one for each family. `reservations`: path of the folder of taken addresses."""
    ranges = [[{"subnet": cidr}] for cidr in pod_cidrs]
    return _chain({**_BRIDGE, "ipam": {"type": "host-local", "ranges": ranges, "dataDir": reservations}})


def overlay_network(subnet_file: str, kept: str, reservations: str) -> dict[str, Any]:
    """Pods of a node that gets its ranges, and its packets' size, of the overlay by `subnet_file`. `kept`: path of the folder
    of what was delegated."""
    plugin = {"type": "flannel", "subnetFile": subnet_file, "dataDir": kept, "delegate": _BRIDGE}
    return _chain({**plugin, "ipam": {"dataDir": reservations}})


def _chain(first: dict[str, Any]) -> dict[str, Any]:
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "1.0.0", "name": NETWORK, "plugins": [first, ports]}
