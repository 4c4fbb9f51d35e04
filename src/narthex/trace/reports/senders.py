"""Senders of the packets that reports compare: a client outside, and a pod, each with the link by which its packets come in."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from narthex.model import IPFamily, contains, family_of, in_any, network, parsed_network
from narthex.proxy.plan.ir import Sender
from narthex.trace.follow.bridges import entry_from
from narthex.trace.follow.views import ClusterMap, NodeView

OUTSIDE = {IPFamily.IPV4: "198.51.100.7", IPFamily.IPV6: "2001:db8:c::7"}
"""Clients far away, from the networks reserved for documentation."""
_BRIDGE, _UPLINK = "cni0", "eth0"
_LOOK_FOR = 64
"""Addresses of a network that are tried to find an unused one."""


class PacketSender(msgspec.Struct, frozen=True):
    """An address, and the link by which its packets come in."""

    address: str
    iif: str


class Senders:
    """Chooses senders for one node and IP family. Packets of an address without a route back would be lost for that reason."""

    def __init__(self, view: NodeView, family: IPFamily, pods: tuple[str, ...], own: tuple[str, ...]) -> None:
        """Prepare; `pods` are the networks of pods, `own` the node's addresses."""
        self._view = view
        self._own = frozenset(own)
        self._family = family
        self._pods = pods
        self._cluster = ClusterMap((view,))
        self._bridge = next((link.name for link in view.links or () if link.kind == "bridge"), _BRIDGE)
        self._neighbours = list(_neighbours(view, family))
        self._known: dict[tuple[object, ...], PacketSender | None] = {}

    def of(self, sender: Sender, allowed: tuple[str, ...] | None, destination: str) -> PacketSender | None:
        """Return a sender of a class whose packets a frontend with these source ranges admits, if there is one."""
        key = sender, allowed
        if key not in self._known:
            found = self._pod(destination) if sender is Sender.POD else self._other(allowed, destination)
            self._known[key] = found
        return self._known[key]

    def _pod(self, destination: str) -> PacketSender:
        """Return an unused address of this node's pods, or of the cluster's if this node has no network of pods."""
        here = (each for each in self._neighbours if in_any(self._pods, each.address))
        own = next((each for each in here if self._has_pods(each.iif)), None)
        if own is not None:
            return own
        return self._arriving(str(parsed_network(self._pods[0])[-2]), destination, self._bridge)

    def _other(self, allowed: tuple[str, ...] | None, destination: str) -> PacketSender | None:
        if allowed is None:
            far = OUTSIDE[self._family]
            if self._view.routes is None or self._link_to(far, destination):
                return self._arriving(far, destination, _UPLINK)
            near = (each for each in self._neighbours if not in_any(self._pods, each.address))
            return next(near, PacketSender(far, _UPLINK))
        for cidr in allowed:
            inside = parsed_network(cidr)
            one = str(inside[1] if inside.num_addresses > 1 else inside[0])
            if one not in self._own and not in_any(self._pods, one):
                return self._arriving(one, destination, _UPLINK)
        return None

    def _arriving(self, source: str, destination: str, guess: str) -> PacketSender:
        return PacketSender(source, self._link_to(source, destination) or guess)

    def _link_to(self, source: str, destination: str) -> str:
        entry, _ = entry_from(self._cluster, self._view, source, destination)
        return (entry.link or "") if entry is not None else ""

    def _has_pods(self, name: str) -> bool:
        link = self._view.link(name)
        return link is not None and link.kind == "bridge"


def pod_networks(view: NodeView, family: IPFamily) -> tuple[str, ...]:
    """Return the networks of the node's own pods: those of its bridges that no default route uses."""
    routers = {
        hop.link for route in view.routes or () if route.destination in ("0.0.0.0/0", "::/0") for hop in route.hops
    }
    bridges = {link.name for link in view.links or () if link.kind == "bridge"} - routers
    held = (each for each in view.addresses or () if each.link in bridges and each.scope != "link")
    found = (network(f"{each.address}/{each.prefix}") for each in held if family_of(each.address) is family)
    return tuple(dict.fromkeys(found))


def _neighbours(view: NodeView, family: IPFamily) -> Iterator[PacketSender]:
    """Yield an unused address of each network that the node is directly connected to."""
    held = {each.address for each in view.addresses or ()} | {each.address for each in view.neighbours or ()}
    for each in view.addresses or ():
        if family_of(each.address) is not family or each.prefix >= family.host_bits - 1 or each.scope == "link":
            continue
        if contains(family.loopback, each.address):
            continue
        net = parsed_network(network(f"{each.address}/{each.prefix}"))
        count = min(_LOOK_FOR, net.num_addresses - 2)
        free = (str(net[-2 - number]) for number in range(count))
        found = next((ip for ip in free if ip not in held), "")
        if found:
            yield PacketSender(found, each.link)
