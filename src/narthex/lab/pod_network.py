"""CNI network configurations of a lab's nodes, and the configuration of their overlay."""

from __future__ import annotations

from typing import Any

NONE, VXLAN, HOST_GW = OVERLAYS = ("none", "vxlan", "host-gw")
"""How pods of other nodes are reached: by static routes, or by the nodes' overlay."""
NETWORK = "lab"
"""Name of the network."""

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
