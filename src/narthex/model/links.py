"""Changes to links, addresses, routes, and neighbors, as values that netlink carries out."""

from __future__ import annotations

from narthex.model.values import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from narthex.model.packed_addresses import Network

IPVS_LINK = "kube-ipvs0"
"""The dummy link of IPVS mode that holds the addresses of Services."""
NODE_LOCAL_DNS_LINK = "nodelocaldns"
"""The link that holds the addresses of node-local DNS."""


class AddBridge(Value):
    """A bridge, up. Does nothing where one of the name is."""

    name: str
    mac: bytes
    """Given from the beginning, so that it does not follow the ports' addresses."""
    mtu: int | None = None


class Promiscuous(Value):
    """A link that takes all packets."""

    link: str


class AddVeth(Value):
    """A pair: one end here, up, the other, down, in the pod."""

    name: str
    mac: bytes
    peer: str
    peer_mac: bytes
    mtu: int | None = None
    bridge: str = ""
    """Whose port this end is; empty for none."""


class PortFlags(Value):
    """Settings of a bridge's port."""

    link: str
    hairpin: bool = False
    isolated: bool = False


class SetUp(Value):
    """A link that is to be up."""

    link: str


class SetDown(Value):
    """A link that is to be down."""

    link: str


class SetHardwareAddress(Value):
    """A link's hardware address. Even where it is so already, the kernel tells the neighbours of all addresses."""

    link: str
    mac: bytes


class DeleteLink(Value):
    """A link that is to go; it may be gone."""

    link: str


class AddAddress(Value):
    """An address on a link, in force at once: no duplicate address detection. It may be there."""

    link: str
    network: Network
    connected: bool = True
    """Whether the address's network is reached by the link."""
    detect: bool = False
    """Look for duplicates all the same."""


class DeleteAddress(Value):
    """An address that is to leave a link."""

    link: str
    network: Network


class AddRoute(Value):
    """A route by a link; replaces one for the same destination."""

    link: str
    destination: Network
    gateway: bytes = b""
    source: bytes = b""
    numbers: tuple[tuple[str, int], ...] = ()
    """mtu, advmss, priority, table, scope."""
    replace: bool = False
    """Whether a route of the same destination may be there."""


class ForgetNeighbour(Value):
    """A neighbour whose hardware address is of the past."""

    link: str
    address: bytes


LinkChange = (
    AddBridge
    | Promiscuous
    | AddVeth
    | PortFlags
    | SetUp
    | SetDown
    | SetHardwareAddress
    | DeleteLink
    | AddAddress
    | DeleteAddress
    | AddRoute
    | ForgetNeighbour
)
