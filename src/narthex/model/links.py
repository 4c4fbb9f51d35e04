"""Changes to links, addresses, routes, and neighbors as values; `linux/rtnetlink.py` applies them."""

from __future__ import annotations

from narthex.model.values import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from narthex.model.values import Network

IPVS_LINK = "kube-ipvs0"
"""Dummy link of IPVS mode that holds the Service addresses."""
NODE_LOCAL_DNS_LINK = "nodelocaldns"
"""Link that holds the addresses of node-local DNS."""


class AddBridge(Value):
    """Add a bridge and set it up. Does nothing if one of this name exists."""

    name: str
    mac: bytes
    """Set explicitly, so that it does not follow the ports' addresses."""
    mtu: int | None = None
    filtering: bool = False
    """Filter VLANs."""


class Promiscuous(Value):
    """Put a link into promiscuous mode."""

    link: str


class AddVeth(Value):
    """Add a veth pair: one end on the node, up, the other in the pod, down.

    With `shared`, the other end is on the node as well, and a pair of these names may exist.
    """

    name: str
    mac: bytes
    peer: str
    peer_mac: bytes
    mtu: int | None = None
    bridge: str = ""
    """Bridge to attach the node's end to, or empty."""
    shared: bool = False


class PortFlags(Value):
    """Set the flags of a bridge port."""

    link: str
    hairpin: bool = False
    isolated: bool = False


class PortVlan(Value):
    """A VLAN that a bridge port is a member of."""

    number: int
    native: bool = False
    """The VLAN of untagged packets, in both directions."""


class DeletePortVlan(Value):
    """Remove a bridge port from a VLAN."""

    link: str
    number: int


class AddPortVlans(Value):
    """Make a bridge port a member of VLANs, in order: the last entry for a number counts."""

    link: str
    vlans: tuple[PortVlan, ...]


class SetUp(Value):
    """Set a link up."""

    link: str


class SetDown(Value):
    """Set a link down."""

    link: str


class SetHardwareAddress(Value):
    """Set a link's hardware address. The kernel then announces all addresses of the link (gratuitous ARP, unsolicited NA).

    This happens even if the address is unchanged.
    """

    link: str
    mac: bytes


class DeleteLink(Value):
    """Delete a link. Does nothing if it does not exist."""

    link: str


class AddAddress(Value):
    """Add an address to a link, usable immediately: without duplicate address detection. Does nothing if it exists."""

    link: str
    network: Network
    connected: bool = True
    """Add the connected route of the address's network."""
    detect: bool = False
    """Perform duplicate address detection."""


class DeleteAddress(Value):
    """Remove an address from a link."""

    link: str
    network: Network


class AddRoute(Value):
    """Add a route through a link."""

    link: str
    destination: Network
    gateway: bytes = b""
    source: bytes = b""
    numbers: tuple[tuple[str, int], ...] = ()
    """The attributes mtu, advmss, priority, table, and scope that are set."""
    replace: bool = False
    """Replace an existing route to the same destination."""


class DeleteRoute(Value):
    """Remove the route to a network through a link from the main table."""

    link: str
    destination: Network


class ForgetNeighbour(Value):
    """Delete a stale neighbor entry."""

    link: str
    address: bytes


LinkChange = (
    AddBridge
    | Promiscuous
    | AddVeth
    | PortFlags
    | AddPortVlans
    | DeletePortVlan
    | SetUp
    | SetDown
    | SetHardwareAddress
    | DeleteLink
    | AddAddress
    | DeleteAddress
    | AddRoute
    | DeleteRoute
    | ForgetNeighbour
)
