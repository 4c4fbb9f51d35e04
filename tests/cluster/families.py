"""The IP families of a cluster, and what differs between them: addresses, ranges, and the nodes' settings."""

from collections.abc import Sequence

from narthex.lab import topology
from narthex.lab.topology import API_ADDRESS, API_PORT, LabNode

IPV4, DUAL_STACK, IPV6 = "ipv4", "dual-stack", "ipv6"
INDEXES = {IPV4: (0,), DUAL_STACK: (0, 1), IPV6: (1,)}
"""Which addresses of the lab's network a cluster has; the first is that of its Services by default."""
API_ADDRESSES = (API_ADDRESS, "fd00:192:168:49::2")
DNS_ADDRESSES = ("10.96.0.10", "fd00:10:96::a")
SERVER_ADDRESSES = ("10.96.0.1", "fd00:10:96::1")
"""Of the Service `kubernetes`."""
POOLS = ("192.168.49.200-192.168.49.209", "fd00:192:168:49::200-fd00:192:168:49::209")
"""On the nodes' link, so that announcers can answer for them."""
_API_ROUTES = 49
"""Table of the routes to pods, for packets of the API server and no others."""
EXTERNAL_IPS = ("192.168.49.250", "fd00:192:168:49::250")


class Families:
    """The families of one cluster."""

    def __init__(self, name: str) -> None:
        """Choose by name: one of INDEXES."""
        self.name = name
        self.indexes = INDEXES[name]
        self.first = self.indexes[0]

    def of(self, pair: tuple[str, ...]) -> tuple[str, ...]:
        """Return those of an IPv4 and an IPv6 address or range that the cluster has."""
        return tuple(pair[index] for index in self.indexes)

    @property
    def api_server(self) -> str:
        """Return the API server's address and port for nodes."""
        return f"{in_url(API_ADDRESSES[self.first])}:{API_PORT}"

    @property
    def net_conf(self) -> dict[str, object]:
        """Return the fields of the overlay's net-conf.json that are the families'."""
        four, six = topology.CLUSTER_CIDRS
        if self.name == IPV4:
            return {}
        networks = {"Network": four, "IPv6Network": six}
        return {**networks, "EnableIPv4": 0 in self.indexes, "EnableIPv6": True}

    def access(self, nodes: Sequence[LabNode]) -> tuple[str, ...]:
        """Return the commands of `ip` for the IPv6 address of the API server, and its way to pods if it has no other."""
        address = API_ADDRESSES[1]
        added = f"address add {address}/128 dev underlay nodad"
        if self.first == 0:
            # The lab's network has its way by IPv4.
            return (added,)
        routes = [
            f"-6 route add {node.pod_cidrs[1]} via {node.addresses[1]} dev underlay src {address} table {_API_ROUTES}"
            for node in nodes
        ]
        return (added, *routes, f"-6 rule add iif lo table {_API_ROUTES}")

    def without_others(self) -> tuple[str, ...]:
        """Return the commands of `ip` that take from each node what is of no family of the cluster."""
        return ("-4 address flush dev eth0",) if self.name == IPV6 else ()


def in_url(address: str) -> str:
    """Return an address as URLs have it."""
    return f"[{address}]" if ":" in address else address
