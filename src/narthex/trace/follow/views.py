"""What is known of one network namespace, a node's or a pod's: rules, routes, neighbours, connections and settings.

Every part may be None: not known, which is not the same as empty. Addresses and networks are canonical text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol as Shape

import msgspec

from narthex.model.net import IPFamily, Protocol, contains, family_of, network
from narthex.netfilter.ast import Ruleset
from narthex.netfilter.walk.state import KernelObjects

MAIN, LOCAL, DEFAULT = "main", "local", "default"
"""Names of the kernel's own routing tables."""


class NodeLink(msgspec.Struct, frozen=True, kw_only=True):
    """A network interface."""

    name: str
    index: int = 0
    kind: str = ""
    """`veth`, `bridge`, `vxlan`, `dummy`, …; empty for hardware, and where it is not known."""
    up: bool = True
    mtu: int = 0
    """0: not known."""
    mac: str = ""
    master: str = ""
    """The bridge that it is a port of."""
    peer_index: int = 0
    """A veth's other end, by its number in the namespace there."""
    vxlan_id: int = 0
    vxlan_port: int = 0
    vxlan_local: str = ""
    vxlan_under: str = ""
    """The link that a vxlan's packets leave by; empty: by the routes."""
    bridge_calls_rules: bool = False
    """Of a bridge: its own switch that lets frames pass IP's hooks (`nf_call_iptables`)."""
    hairpin: bool | None = None
    """Of a bridge's port: whether a packet may leave by the port that it came in by. None: not known."""


class LinkAddress(msgspec.Struct, frozen=True):
    """An address on a link."""

    address: str
    prefix: int
    link: str
    scope: str = "global"


class NextHop(msgspec.Struct, frozen=True, kw_only=True):
    """Where a route leads."""

    link: str = ""
    via: str = ""
    weight: int = 1
    """Of several, each gets its part of the flows."""
    onlink: bool = False
    dead: bool = False
    """The link is down, so that the kernel passes over it."""


class NodeRoute(msgspec.Struct, frozen=True, kw_only=True):
    """One route."""

    destination: str
    """A network; `0.0.0.0/0` or `::/0` for the default."""
    table: str = MAIN
    kind: str = "unicast"
    """`unicast`, `local`, `broadcast`, `multicast`, `blackhole`, `unreachable`, `prohibit`, `throw`."""
    hops: tuple[NextHop, ...] = ()
    metric: int = 0
    source: str = ""
    """The address that packets made here get."""
    mtu: int = 0
    protocol: str = ""
    scope: str = ""
    text: str = ""
    """For people: as `ip route` prints it."""


class PolicyRule(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `ip rule`: which table is asked for which packets."""

    family: IPFamily
    priority: int
    table: str = ""
    action: str = ""
    """Empty: look in the table. Else `blackhole`, `unreachable`, `prohibit`, `nop`, `goto N`."""
    source: str = ""
    destination: str = ""
    iif: str = ""
    oif: str = ""
    mark: int | None = None
    mask: int = 0xFFFFFFFF
    negate: bool = False
    suppress_prefix: int = -1
    """A route no longer than this does not count; -1: all count."""
    strange: str = ""
    """A selector that is not understood, so that it is not known whether the rule holds."""
    text: str = ""


class NodeNeighbour(msgspec.Struct, frozen=True):
    """Whose hardware address an address has on a link."""

    address: str
    link: str
    mac: str = ""
    state: str = ""
    """`REACHABLE`, `PERMANENT`, `STALE`, `FAILED`, …"""


class FdbEntry(msgspec.Struct, frozen=True):
    """Where a bridge or a VXLAN sends frames for a hardware address."""

    mac: str
    link: str
    remote: str = ""
    """A VXLAN's far end."""
    master: str = ""
    state: str = ""


class ListeningSocket(msgspec.Struct, frozen=True):
    """A socket that takes connections, or datagrams."""

    protocol: str
    """`tcp` or `udp`."""
    address: str
    """Empty: every one of its families."""
    port: int
    families: tuple[IPFamily, ...]


class TrackedConnection(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `conntrack -L`."""

    protocol: str
    source: str
    destination: str
    source_port: int = 0
    port: int = 0
    reply_source: str
    reply_destination: str
    reply_source_port: int = 0
    reply_port: int = 0
    state: str = ""
    """TCP's, else empty."""
    flags: tuple[str, ...] = ()
    """`UNREPLIED`, `ASSURED`, `OFFLOAD`."""
    mark: int = 0
    zone: int = 0
    seconds: int = 0
    """Until it is forgotten."""
    text: str = ""


class TrackedConnections(Shape):
    """A connection table that is asked and need not be read whole."""

    def to(self, protocol: Protocol, address: str, port: int) -> tuple[TrackedConnection, ...]:
        """The connections whose first packet went there."""
        ...

    def all(self) -> Iterator[TrackedConnection]:
        """Each connection."""
        ...

    def replied_by(self, address: str) -> tuple[TrackedConnection, ...]:
        """The connections that are answered from there."""
        ...


class NodeRules(Shape):
    """All rules of one family on a node."""

    @property
    def ruleset(self) -> Ruleset:
        """Tables of all tools."""
        ...

    @property
    def objects(self) -> KernelObjects:
        """ipsets and virtual servers."""
        ...

    @property
    def unread(self) -> tuple[str, ...]:
        """Lines that could not be read, each with the reason."""
        ...

    def place(self, table: str, chain: str, rule: int, what: str = "") -> tuple[str, str]:
        """Where a rule stood ("nat.txt:214"), counted from 0 in its chain, and its text; empty when that is not known. `what`,
        the rule printed for people, tells it from that of a table of the same name."""
        ...


class NodeView(msgspec.Struct, kw_only=True):
    """What is known of one network namespace. Each part that is None is unknown; `absent` says why, by the part's name."""

    name: str = ""
    """The node's, or `NAMESPACE/NAME` of a pod; empty when not known."""
    origin: str = ""
    """`bundle node-1.tgz`, `live`, `rules nat.txt`: where it was read."""
    rules: Mapping[IPFamily, NodeRules] | None = None
    """Base chains of nft and of both flavours of iptables, beside each other, with ipsets and IPVS."""
    partial: tuple[str, ...] = ()
    """Rules that could not be taken ("rules/nft.txt: …"), each one a reason for doubt."""
    links: tuple[NodeLink, ...] | None = None
    addresses: tuple[LinkAddress, ...] | None = None
    routes: tuple[NodeRoute, ...] | None = None
    policies: tuple[PolicyRule, ...] | None = None
    neighbours: tuple[NodeNeighbour, ...] | None = None
    fdb: tuple[FdbEntry, ...] | None = None
    listeners: tuple[ListeningSocket, ...] | None = None
    connections: TrackedConnections | None = None
    sysctls: Mapping[str, str] | None = None
    """By their names with dots (`net.ipv4.conf.eth0.rp_filter` has the interface's own dots as `/`)."""
    absent: Mapping[str, str] = {}
    """Why a part is None: by the field's name."""
    facts: Mapping[str, str] = {}
    """`kernel`, `iptables`, `nft`, …: versions, for people."""
    pods: Mapping[str, NodeView] = {}
    """The namespaces of pods on this node that could be looked into, by `NAMESPACE/NAME`."""

    def link(self, name: str) -> NodeLink | None:
        """A link by its name."""
        return next((link for link in self.links or () if link.name == name), None)

    def own(self, address: str) -> LinkAddress | None:
        """The node's own address, if it is one."""
        return next((each for each in self.addresses or () if each.address == address), None)

    def sysctl(self, name: str) -> str | None:
        """A setting, None when it is not known."""
        return None if self.sysctls is None else self.sysctls.get(name)


def _no_name(_address: str) -> str:
    return ""


class ClusterMap:
    """Finds the node, link and neighbour of an address."""

    def __init__(
        self,
        views: Sequence[NodeView],
        *,
        name_of: Callable[[str], str] = _no_name,
        node_of: Callable[[str], str] = _no_name,
        node_addresses: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        """`name_of` says what an address is, `node_of` on which node it is; `node_addresses` are those of Node objects."""
        self.views = tuple(views)
        self.name_of = name_of
        self.node_of = node_of
        self._of_objects = dict(node_addresses or {})

    def view(self, name: str) -> NodeView | None:
        """A node's view by the node's name; the only one there is when that has no name."""
        found = next((view for view in self.views if view.name == name), None)
        if found is None and len(self.views) == 1 and not self.views[0].name:
            return self.views[0]
        return found

    def own(self, view: NodeView) -> tuple[str, ...]:
        """A node's addresses: what its kernel says, else what its Node object says. Without loopback."""
        if view.addresses is not None:
            found = (each.address for each in view.addresses)
            return tuple(ip for ip in found if not contains(family_of(ip).loopback, ip))
        return self._of_objects.get(view.name, ())

    def holder(self, address: str, besides: NodeView | None = None) -> NodeView | None:
        """The node that has an address."""
        return next((view for view in self.views if view is not besides and address in self.own(view)), None)

    def node_named(self, address: str) -> str:
        """The name of the node that an address is on or belongs to; empty when nobody knows."""
        held = next((name for name, own in self._of_objects.items() if address in own), "")
        return held or self.node_of(address)

    @staticmethod
    def link_towards(view: NodeView, address: str) -> LinkAddress | None:
        """The node's own address in whose network another one is."""
        fitting = [
            own
            for own in view.addresses or ()
            if family_of(own.address) is family_of(address)
            and own.prefix < family_of(address).host_bits
            and contains(network(f"{own.address}/{own.prefix}"), address)
        ]
        return max(fitting, key=lambda own: own.prefix, default=None)

    @staticmethod
    def neighbour(view: NodeView, address: str, link: str) -> NodeNeighbour | None:
        """Whose hardware address an address has, as the node knows it."""
        return next((each for each in view.neighbours or () if each.address == address and each.link == link), None)

    @staticmethod
    def forwarding(view: NodeView, mac: str, link: str) -> FdbEntry | None:
        """Where a VXLAN sends a hardware address's frames: its own entry, else that for all."""
        held = [each for each in view.fdb or () if each.link == link and each.remote]
        return next((each for each in held if each.mac == mac), None) or next(
            (each for each in held if each.mac == "00:00:00:00:00:00"), None
        )

    @staticmethod
    def port(view: NodeView, mac: str, bridge: str) -> NodeLink | None:
        """The bridge's port behind which a hardware address is."""
        entry = next(
            (e for e in view.fdb or () if e.mac == mac and e.master == bridge and e.state != "permanent"), None
        )
        return view.link(entry.link) if entry is not None else None


def bridge_calls_rules(view: NodeView, bridge: str, ip_version: int = 4) -> bool | None:
    """Whether frames over a bridge pass IP's hooks (br_netfilter); None: not known."""
    if view.sysctls is None:
        return None
    name = "net.bridge.bridge-nf-call-ip" + ("6" if ip_version == 6 else "") + "tables"
    link = view.link(bridge)
    return view.sysctls.get(name) == "1" or bool(link is not None and link.bridge_calls_rules)
