"""What a plugin wants of the node, as values: links, addresses, routes, settings, elements of the rules' sets.

A plugin's pure part gives a list of these; `host/` puts them into force, everything for one namespace in one batch.
"""

from __future__ import annotations

from narthex.linux.values import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from narthex.linux.packed_addresses import Network


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


class Setting(Value):
    """A kernel setting, by its path below /proc/sys."""

    path: str
    value: str
    required: bool = False
    """Whether the plugin fails where the kernel does not have it or refuses."""


Wish = (
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


class Element(Value):
    """An element of a set of our rules, in the kernel's bytes: parts one behind the other, each padded to four."""

    set: str
    key: bytes
    data: bytes = b""
    """For maps: what the key leads to."""
    end: bytes = b""
    """For sets of ranges: the key's upper bound."""
    exclusive: bool = False
    """Whether an element with this key may belong to one attachment only."""


class Wishes(Value):
    """All that a plugin wants for an attachment."""

    node_settings: tuple[Setting, ...] = ()
    node: tuple[Wish, ...] = ()
    pod_settings: tuple[Setting, ...] = ()
    pod: tuple[Wish, ...] = ()
    announce: tuple[Wish, ...] = ()
    """In the pod, as soon as the bridge passes its packets: what tells the neighbours of the addresses' new holder."""
    late_settings: tuple[Setting, ...] = ()
    """Of the node, for links that are not there before."""
