"""All that is known of a cluster's nodes, and of what addresses are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from narthex.model.net import contains, family_of, network
from narthex.trace.follow.views import FdbEntry, LinkAddress, NodeLink, NodeNeighbour, NodeView


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
