"""What is known of nodes and pods: rules, routes, neighbours, connections, and settings of each network namespace.

Every part may be None: unknown, which is different from empty. Addresses and networks are canonical text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Protocol as Shape

import msgspec

from narthex.model import Host, IPFamily, Protocol, contains, family_of, network
from narthex.netfilter.ast import Ruleset
from narthex.netfilter.dump.dump import DumpGap
from narthex.netfilter.walk.state import KernelObjects
from narthex.proxy.backends.sockets.document import SocketDocument

MAIN, LOCAL, DEFAULT = "main", "local", "default"
"""Names of the kernel's own routing tables."""


class NodeLink(msgspec.Struct, frozen=True, kw_only=True):
    """A network interface."""

    name: str
    kind: str = ""
    """`veth`, `bridge`, `vxlan`, `dummy`, …; empty for hardware, and if not known."""
    up: bool = True
    carrier: bool = True
    """False: it is up, but its other end is down or gone."""
    mtu: int = 0
    """0: not known."""
    master: str = ""
    """The bridge of which it is a port."""
    vxlan_id: int = 0
    vxlan_port: int = 0
    vxlan_local: str = ""
    vxlan_under: str = ""
    """The link that sends the VXLAN's packets; empty: by routes."""
    bridge_calls_rules: bool = False
    """The bridge's own `nf_call_iptables`: its frames pass the hooks of IP."""
    hairpin: bool | None = None
    """A bridge port may send a frame back that came in by it; None: not known."""
    index: int = 0
    """The kernel's number of the link in its namespace; 0: not known."""
    peer: int = 0
    """The number of the other end of a veth pair, in that end's namespace; 0: none, or not known."""


class LinkAddress(msgspec.Struct, frozen=True):
    """An address on a link."""

    address: str
    prefix: int
    link: str
    scope: str = "global"


class NextHop(msgspec.Struct, frozen=True, kw_only=True):
    """A next hop of a route."""

    link: str = ""
    via: str = ""
    weight: int = 1
    """The share of flows among several next hops."""
    onlink: bool = False
    dead: bool = False
    """The link is down, and the kernel skips the hop."""


class NodeRoute(msgspec.Struct, frozen=True, kw_only=True):
    """A route."""

    destination: str
    """A network; `0.0.0.0/0` or `::/0` for the default."""
    table: str = MAIN
    kind: str = "unicast"
    """`unicast`, `local`, `broadcast`, `multicast`, `blackhole`, `unreachable`, `prohibit`, `throw`."""
    hops: tuple[NextHop, ...] = ()
    metric: int = 0
    source: str = ""
    """The source address for packets created here."""
    mtu: int = 0
    text: str = ""
    """The route as `ip route` prints it."""


class PolicyRule(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `ip rule`: which table is used for which packets."""

    family: IPFamily
    priority: int
    table: str = ""
    action: str = ""
    """Empty: use the table. Otherwise `blackhole`, `unreachable`, `prohibit`, `nop`, `goto N`."""
    source: str = ""
    destination: str = ""
    iif: str = ""
    oif: str = ""
    mark: int | None = None
    mask: int = 0xFFFFFFFF
    negate: bool = False
    suppress_prefix: int = -1
    """Routes with a prefix of this length or less are ignored; -1: none."""
    strange: str = ""
    """A selector that isn't understood, so that it is unknown whether the rule matches."""
    text: str = ""


class NodeNeighbour(msgspec.Struct, frozen=True):
    """The link address of an IP address."""

    address: str
    link: str
    mac: str = ""
    state: str = ""
    """`REACHABLE`, `PERMANENT`, `STALE`, `FAILED`, …"""


class FdbEntry(msgspec.Struct, frozen=True):
    """The port or VXLAN endpoint for a hardware address."""

    mac: str
    link: str
    remote: str = ""
    """The other end of a VXLAN."""
    master: str = ""
    state: str = ""


class ListeningSocket(msgspec.Struct, frozen=True):
    """A socket that accepts connections or datagrams."""

    protocol: str
    """`tcp` or `udp`."""
    address: str
    """Empty: every address of its families."""
    port: int
    families: tuple[IPFamily, ...]


class TrackedConnection(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the connection table, as `conntrack -L` prints it."""

    protocol: str
    source: str
    destination: str
    source_port: int = 0
    port: int = 0
    reply_source: str
    reply_destination: str
    reply_source_port: int = 0
    state: str = ""
    """State of TCP, otherwise empty."""
    flags: tuple[str, ...] = ()
    """`UNREPLIED`, `ASSURED`, `OFFLOAD`."""
    mark: int = 0
    seconds: int = 0
    """Time until it expires."""
    text: str = ""


class TrackedConnections(Shape):
    """A connection table that is searched without reading all of it."""

    def to(self, protocol: Protocol, address: str, port: int) -> tuple[TrackedConnection, ...]:
        """Return the connections with this original destination."""

    def all(self) -> Iterator[TrackedConnection]:
        """Yield all connections."""


class NodeRules(Shape):
    """All rules of one IP family on a node."""

    @property
    def ruleset(self) -> Ruleset:
        """Return the tables of all tools."""

    @property
    def assumed(self) -> Ruleset:
        """Return the tables for walks, which complete them as kube-proxy writes them if a person copied the text."""

    @property
    def objects(self) -> KernelObjects:
        """Return the ipsets and IPVS virtual servers."""

    @property
    def comments(self) -> tuple[str, ...]:
        """Return the comment lines, of which some are the table of a userspace relay."""

    @property
    def unread(self) -> tuple[str, ...]:
        """Return lines that could not be read, each with the reason."""

    @property
    def gaps(self) -> tuple[DumpGap, ...]:
        """Return what is missing from the input, as far as the parser can tell."""

    def place(self, table: str, chain: str, rule: int, what: str = "") -> tuple[str, str]:
        """Return position ("nat.txt:214") and text of a rule, both empty if not known.

        `rule` is its number in the chain, from 0. `what`, the rule as text, distinguishes tables with the same name.
        """


class NodeView(msgspec.Struct, kw_only=True):
    """What is known of one network namespace; parts that are None are unknown."""

    name: str = ""
    """Name of the node, or `NAMESPACE/NAME` of a pod; empty if not known."""
    on: str | None = None
    """For a namespace that is no node's: the node that it is on, empty if it is on none. None: it is a node's own."""
    origin: str = ""
    """What it was read from: `bundle node-1.tgz`, `live`, `rules nat.txt`."""
    rules: Mapping[IPFamily, NodeRules] | None = None
    """Base chains of nft and of both variants of iptables, with ipsets and IPVS."""
    partial: tuple[str, ...] = ()
    """Rules that could not be read ("rules/nft.txt: …"); each one makes the result less certain."""
    links: tuple[NodeLink, ...] | None = None
    addresses: tuple[LinkAddress, ...] | None = None
    routes: tuple[NodeRoute, ...] | None = None
    policies: tuple[PolicyRule, ...] | None = None
    neighbours: tuple[NodeNeighbour, ...] | None = None
    fdb: tuple[FdbEntry, ...] | None = None
    listeners: tuple[ListeningSocket, ...] | None = None
    connections: TrackedConnections | None = None
    sysctls: Mapping[str, str] | None = None
    """By dotted name; dots in names of interfaces are written as `/`."""
    absent: Mapping[str, str] = {}
    """Why a part is None, by field name."""
    copied: bool = False
    """A person copied the text, so that lines of each part may be missing."""
    said: tuple[str, ...] = ()
    """Lines in which programs report a fault: a warning of iptables, kube-proxy's log."""
    pods: Mapping[str, NodeView] = {}
    """The network namespaces of pods on this node, as far as they are known, by `NAMESPACE/NAME`."""
    relay: RelayEndpoints | None = None
    """The listeners of a userspace relay on this node."""
    sockets: SocketDocument | None = None
    """The maps of socket load balancing on this node."""

    @property
    def node(self) -> str:
        """The name of the node; empty if the namespace is on none."""
        return self.name if self.on is None else self.on

    @property
    def namespace(self) -> str:
        """The name of the namespace, as in `PathStep.namespace`; empty if it is a node's own."""
        return "" if self.on is None else self.name

    @property
    def words(self) -> str:
        """`node worker-a`, `pod shop/web-1`, `outside`, or `this node`."""
        if self.on is None:
            return f"node {self.name}" if self.name else "this node"
        return f"pod {self.name}" if "/" in self.name else self.name

    def link(self, name: str) -> NodeLink | None:
        """Return a link by name."""
        return next((link for link in self.links or () if link.name == name), None)

    def wired_to(self, end: NodeLink | None) -> NodeLink | None:
        """Return the link of this node that is the other end of a veth pair in another namespace."""
        if end is None or not end.peer:
            return None
        fitting = (link for link in self.links or () if link.kind == end.kind == "veth")
        return next((link for link in fitting if (link.index, link.peer) == (end.peer, end.index)), None)

    def own(self, address: str) -> LinkAddress | None:
        """Return the node's own address, if it is one."""
        return next((each for each in self.addresses or () if each.address == address), None)

    def own_addresses(self, besides: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the addresses that other machines can reach, without those on some links."""
        held = (each for each in self.addresses or () if each.scope != "link" and each.link not in besides)
        return tuple(each.address for each in held if not contains(family_of(each.address).loopback, each.address))

    def sysctl(self, name: str) -> str | None:
        """Return a setting; None if not known."""
        return None if self.sysctls is None else self.sysctls.get(name)


class RelayEndpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Where a userspace relay connects to."""

    endpoints: Mapping[tuple[IPFamily, str, int], tuple[tuple[str, int], ...]]
    """Addresses and ports of endpoints, by IP family, protocol (`tcp`, `udp`), and port of a listener."""
    mark: int = 0
    """The packet mark of its own connections."""


class Impairment(msgspec.Struct, frozen=True, kw_only=True):
    """Something beyond a node's configuration that keeps nodes or pods from working: a fault of a lab, or a dead node."""

    cause: str
    """Id of the cause."""
    places: frozenset[str]
    """Names of nodes, and `NAMESPACE/NAME` of pods."""
    text: str
    """What it is, as its tool shows it: "partition at node-2 (fault 1)"."""
    advice: str = ""
    lost: Fraction = Fraction(0)
    """Share of the packets that are lost at the border of each of the places, in each direction."""
    together: bool = False
    """Packets between two of the places pass."""
    unserved: bool = False
    """Nothing in these places accepts connections."""
    stale: bool = False
    """The nodes' rules do not follow the cluster; empty `places` stand for all nodes."""


def _no_name(_address: str) -> str:
    return ""


class ClusterMap:
    """All views of a cluster; finds the node, link, and neighbour of an address."""

    def __init__(
        self,
        views: Sequence[NodeView],
        *,
        name_of: Callable[[str], str] = _no_name,
        node_of: Callable[[str], str] = _no_name,
        pod_of: Callable[[str], str] = _no_name,
        node_addresses: Mapping[str, tuple[str, ...]] | None = None,
        unlisted: Iterable[str] = (),
        impairments: Sequence[Impairment] = (),
        answering: Mapping[str, Sequence[str]] | None = None,
        complete: bool = False,
        through_node: bool = False,
    ) -> None:
        """Index the views.

        Args:
            views: What is known of nodes, and of other machines on their links.
            name_of: Returns the owner of an address.
            node_of: Returns the node that an address is on.
            pod_of: Returns `NAMESPACE/NAME` of the pod that has an address.
            node_addresses: The addresses of Node objects, or those that the rules of a node name.
            unlisted: Nodes that may have more addresses than `node_addresses` says.
            impairments: What keeps nodes and pods from working.
            answering: Nodes that answer for load balancer addresses.
            complete: All machines on the nodes' links are among the views, and all pods are known.
            through_node: Pods of a node reach each other by its routing, not by frames over its bridge.
        """
        self.views = tuple(views)
        self.name_of = name_of
        self.node_of = node_of
        self.pod_of = pod_of
        self.complete = complete
        self.through_node = through_node
        self._of_objects = dict(node_addresses or {})
        self._unlisted = frozenset(unlisted)
        self._impairments = tuple(impairments)
        self._answering = dict(answering or {})

    def pod_view(self, address: str) -> NodeView | None:
        """Return the view of the pod that has an address, if its namespace is known."""
        held = (pod for view in self.views for pod in view.pods.values() if pod.own(address) is not None)
        return next(held, None)

    def view(self, name: str) -> NodeView | None:
        """Return a view by the node's name; the only view if it has no name."""
        found = next((view for view in self.views if view.name == name), None)
        if found is None and len(self.views) == 1 and not self.views[0].name:
            return self.views[0]
        return found

    def own(self, view: NodeView) -> tuple[str, ...]:
        """Return a node's addresses without loopback: from its kernel if known, otherwise from its Node object."""
        if view.addresses is not None:
            found = (each.address for each in view.addresses)
            return tuple(ip for ip in found if not contains(family_of(ip).loopback, ip))
        return self._of_objects.get(view.name, ())

    def host(self, view: NodeView) -> Host:
        """Return the node as the host of a walk, which may have addresses that are unknown."""
        own = self.own(view)
        return Host(addresses=own, others=view.addresses is None and (view.name in self._unlisted or not own))

    def holder(self, address: str, besides: NodeView | None = None) -> NodeView | None:
        """Return the node that has an address."""
        return next((view for view in self.views if view is not besides and address in self.own(view)), None)

    def receiver(self, address: str, besides: NodeView) -> NodeView | None:
        """Return who gets packets for an address on a link: the node that answers for it, or who has it."""
        if address not in self._answering:
            return self.holder(address, besides)
        named = [view for view in map(self.view, self._answering[address]) if view is not None and view is not besides]
        reached = (view for view in named if not any(share == 1 for _, share in self.losses(besides.name, view.name)))
        return next(reached, named[0] if named else None)

    def losses(self, one: str, other: str) -> list[tuple[Impairment, Fraction]]:
        """Return what loses packets between two neighbouring places, each with the share that it loses."""
        found = []
        # Between a pod and its node, only the pod's own border is crossed.
        border = [place for place in (one, other) if "/" in place] or [one, other]
        for each in self._impairments:
            ends = sum(place in each.places for place in border)
            if each.lost and ends and not (each.together and ends == 2):
                found.append((each, 1 - (1 - each.lost) ** ends))
        return found

    def node_named(self, address: str) -> str:
        """Return the name of the node that an address is on or belongs to; empty if not known."""
        held = next((name for name, own in self._of_objects.items() if address in own), "")
        return held or self.node_of(address)

    @staticmethod
    def link_towards(view: NodeView, address: str) -> LinkAddress | None:
        """Return the node's own address whose network contains another address."""
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
        """Return the node's neighbour entry for an address on a link."""
        return next((each for each in view.neighbours or () if each.address == address and each.link == link), None)

    @staticmethod
    def forwarding(view: NodeView, mac: str, link: str) -> FdbEntry | None:
        """Return the VXLAN's forwarding entry for a hardware address: its own, or the default."""
        held = [each for each in view.fdb or () if each.link == link and each.remote]
        return next((each for each in held if each.mac == mac), None) or next(
            (each for each in held if each.mac == "00:00:00:00:00:00"), None
        )

    @staticmethod
    def port(view: NodeView, mac: str, bridge: str) -> NodeLink | None:
        """Return the bridge port behind which a hardware address is."""
        entry = next(
            (e for e in view.fdb or () if e.mac == mac and e.master == bridge and e.state != "permanent"), None
        )
        return view.link(entry.link) if entry is not None else None


def bridge_calls_rules(view: NodeView, bridge: str, ip_version: int = 4) -> bool | None:
    """Return True if frames over a bridge pass the hooks of IP (br_netfilter); None if not known."""
    if view.sysctls is None:
        return None
    name = "net.bridge.bridge-nf-call-ip" + ("6" if ip_version == 6 else "") + "tables"
    link = view.link(bridge)
    return view.sysctls.get(name) == "1" or bool(link is not None and link.bridge_calls_rules)
