"""A packet through a VXLAN: put into an outer packet, over the nodes' network, and out of it on the other node."""

from __future__ import annotations

from narthex.trace.follow.departure import Crossing, Departure, NodeEntry, Onward, Stop
from narthex.trace.follow.steps import view_step
from narthex.trace.follow.traversal import NodeTraversal
from narthex.trace.follow.views import ClusterMap, NodeLink, NodeView
from narthex.trace.model import Fate, Header, PathEnd, PathStep, Stage

_DEFAULT_VXLAN_PORT = 8472


def over_vxlan(cluster: ClusterMap, departure: Departure) -> Crossing | None:
    """Encapsulate, send the outer packet to the other node, and decapsulate there; None if the link is no VXLAN."""
    view, link, to = departure.view, departure.link, departure.to
    if link is None or link.kind != "vxlan":
        return None
    if view.neighbours is None or view.fdb is None:
        node = cluster.node_named(to) or cluster.node_named(departure.header.destination)
        where = f"node {node}" if node else "the node behind it"
        return Stop(
            fate=Fate.LEAVES,
            reason=f"by {link.name} to {to}; continues on {where}: give its bundle",
            missing="neighbours" if view.neighbours is None else "fdb",
        )
    neighbour = cluster.neighbour(view, to, link.name)
    entry = cluster.forwarding(view, neighbour.mac if neighbour is not None else "", link.name)
    if entry is None:
        return Stop(reason=f"{link.name} does not know where {to} is: no neighbour and no forwarding entry")
    outer = Header(
        source=link.vxlan_local,
        destination=entry.remote,
        protocol="udp",
        port=link.vxlan_port or _DEFAULT_VXLAN_PORT,
        mark=departure.header.mark,
    )
    mac = neighbour.mac if neighbour is not None else entry.mac
    into = f"put into a packet to {entry.remote} (VXLAN {link.vxlan_id}, udp port {outer.port})"
    steps = (
        departure.step(Stage.NEIGHBOUR, f"{to} is {mac}", f"{to} dev {link.name} lladdr {mac}"),
        departure.step(Stage.OVERLAY, into, f"{entry.mac} dev {link.name} dst {entry.remote}"),
    )
    fault = _outer_fault(cluster, view, outer, None, departure.is_reply)
    if fault is not None:
        return Stop(fate=fault.fate, reason=f"the overlay's own packet: {fault.reason}", steps=steps)
    return _out_of_vxlan(cluster, departure, link, outer, steps)


def _out_of_vxlan(
    cluster: ClusterMap, departure: Departure, link: NodeLink, outer: Header, steps: tuple[PathStep, ...]
) -> Crossing:
    remote = outer.destination
    view = cluster.holder(remote, departure.view)
    if view is None:
        node = cluster.node_named(remote)
        where = f"node {node} ({remote})" if node else f"the node {remote}"
        return Stop(fate=Fate.LEAVES, reason=f"continues on {where}: give its bundle", steps=steps)
    own = view.own(remote)
    fault = _outer_fault(cluster, view, outer, own.link if own is not None else "", departure.is_reply)
    if fault is not None:
        reason = f"the overlay's own packet, on node {view.name}: {fault.reason}"
        return Stop(fate=fault.fate, reason=reason, steps=steps)
    far = next((each for each in view.links or () if each.vxlan_id == link.vxlan_id and each.kind == "vxlan"), None)
    if far is None:
        return Stop(reason=f"node {view.name} has no VXLAN {link.vxlan_id}", steps=steps)
    out = view_step(view, Stage.OVERLAY, f"taken out of it, in by {far.name}")
    return Onward(view=view, entry=NodeEntry(link=far.name), steps=steps, inside=(out,))


def _outer_fault(
    cluster: ClusterMap, view: NodeView, outer: Header, link: str | None, is_reply: bool
) -> PathEnd | None:
    """Return how the outer packet ends on a node if it doesn't get through; `link` is None where it is created."""
    traversal = NodeTraversal(view, outer, cluster.name_of, host=cluster.host(view), is_reply=is_reply)
    exits = traversal.created() if link is None else traversal.received(link)
    return next((each.end for each in exits if each.end is not None and each.end.fate is not Fate.DELIVERED), None)
