"""What a bridge does with a packet: whether only its frame passes the node, and whether rules see it."""

from __future__ import annotations

from narthex.model import family_of
from narthex.trace.follow.departure import Departure, NodeEntry
from narthex.trace.follow.routing import RouteQuery, look_up
from narthex.trace.follow.steps import is_uplink
from narthex.trace.follow.views import ClusterMap, NodeLink, NodeView, bridge_calls_rules


def entry_from(
    cluster: ClusterMap, view: NodeView, source: str, destination: str, *, straight: bool | None = None
) -> tuple[NodeEntry | None, str]:
    """Return how a packet of a neighbour (a pod, or a machine outside) enters; None and the reason if not known.

    `straight` says whether the neighbour sends it to the destination itself, not to the node as its router. None: not known.
    """
    found = look_up(view, RouteQuery(destination=source, source=source))
    if found.kind == "unicast" and found.hops and found.hops[0][0].link:
        hop = found.hops[0][0]
        if hop.via:
            return NodeEntry(link=hop.link), ""
        return entry_over(cluster, view, source, destination, hop.link, straight=straight), ""
    return None, found.reason or f"the route to {source} is {found.kind}"


def entry_over(
    cluster: ClusterMap, view: NodeView, source: str, destination: str, link: str, *, straight: bool | None = None
) -> NodeEntry:
    """Return how a packet from an address behind `link` enters: only as frames if both ends are on the bridge."""
    held = view.link(link)
    near = cluster.link_towards(view, destination)
    on_it = near is not None and near.link == link and destination not in cluster.own(view)
    on_it = on_it and (not cluster.through_node if straight is None else straight)
    bridged = on_it and held is not None and held.kind == "bridge" and source != destination
    return NodeEntry(link=link, bridged=bridged)


def is_here(cluster: ClusterMap, view: NodeView, link: NodeLink | None, via: str, destination: str) -> bool:
    """Return True if the destination is a pod of the node."""
    if via:
        return False
    if cluster.node_of(destination) == view.name and view.name:
        return True
    return link is not None and link.kind in ("bridge", "veth") and not is_uplink(view, link)


def hairpin_refusal(cluster: ClusterMap, departure: Departure) -> str:
    """Return why a frame can't leave by the bridge port that it came in by; empty if it can."""
    view, link, header = departure.view, departure.link, departure.header
    if link is None or departure.entry.link != link.name or link.kind != "bridge":
        return ""
    family = family_of(header.destination).value
    if header.destination != departure.came.source or not bridge_calls_rules(view, link.name, family):
        return ""
    neighbour = cluster.neighbour(view, header.destination, link.name)
    port = cluster.port(view, neighbour.mac, link.name) if neighbour is not None else None
    if port is None or port.hairpin is not False:
        return ""
    return (
        f"the bridge {link.name} does not send a frame back by the port that it came in by: hairpin is off on "
        f"{port.name}, and br_netfilter makes the bridge do it"
    )
