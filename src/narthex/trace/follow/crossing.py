"""Where a packet goes that leaves a namespace by a link: each check decides, or returns None for the next one."""

from __future__ import annotations

from narthex.trace.follow.bridges import entry_from, entry_over
from narthex.trace.follow.departure import Crossing, Departure, NodeEntry, Onward, Stop
from narthex.trace.follow.overlay import over_vxlan
from narthex.trace.follow.views import ClusterMap, LinkAddress, NodeView
from narthex.trace.model import Fate, Stage


def cross(cluster: ClusterMap, departure: Departure, size: int) -> Crossing | None:
    """Return what the link and its neighbours do with a packet of `size` bytes; None if the destination may be on the link."""
    return (
        _blocked_by_link(departure, size)
        or _out_of_pod(cluster, departure)
        or over_vxlan(cluster, departure)
        or _without_neighbour(cluster, departure)
        or _to_next_node(cluster, departure)
        or _to_no_machine(cluster, departure)
    )


def leaving(cluster: ClusterMap, departure: Departure) -> Stop:
    """Return the end of a packet that leaves for a place of which nothing is known."""
    to, name = departure.to, departure.view.name
    node = cluster.node_named(to) or cluster.node_named(departure.header.destination)
    where = f"continues on node {node}: give its bundle" if node and node != name else "nothing more is known"
    return Stop(fate=Fate.LEAVES, reason=f"leaves by {departure.hop.link} to {to}; {where}")


def _blocked_by_link(departure: Departure, size: int) -> Crossing | None:
    link = departure.link
    if link is None:
        return None
    if not link.up:
        return Stop(reason=f"the link {link.name} is down")
    if not link.carrier and link.kind != "bridge":
        return Stop(reason=f"the link {link.name} has no carrier: its other end is down")
    if 0 < link.mtu < size:
        step = departure.step(Stage.MTU, f"{size} bytes do not fit through {link.name}")
        reason = f"{size} bytes with DF set do not fit through {link.name} (mtu {link.mtu})"
        return Stop(reason=reason, steps=(step,))
    return None


def _out_of_pod(cluster: ClusterMap, departure: Departure) -> Crossing | None:
    """Continue on the node of a pod."""
    view, destination = departure.view, departure.header.destination
    node = cluster.view(view.on) if view.on else None
    if node is None:
        return None
    source, straight = departure.came.source, not departure.hop.via
    wired = node.wired_to(departure.link)
    # Of a link of another kind the other end is unknown: then it is where the node would answer.
    entry, why = (
        (entry_over(cluster, node, source, destination, wired.master or wired.name, straight=straight), "")
        if wired is not None
        else entry_from(cluster, node, source, destination, straight=straight)
    )
    if entry is None:
        return Stop(fate=Fate.UNKNOWN, reason=f"the link of {node.words} to {view.words} is unknown: {why}")
    step = departure.step(Stage.POD_LINK, f"over {departure.hop.link} to {node.words}, in by {entry.link}")
    return Onward(view=node, entry=entry, steps=(step,))


def _without_neighbour(cluster: ClusterMap, departure: Departure) -> Crossing | None:
    to, link = departure.to, departure.hop.link
    if cluster.complete:
        # Who is there is known, and the kernel asks again for a neighbour that has failed.
        return None
    neighbour = cluster.neighbour(departure.view, to, link)
    if neighbour is None or neighbour.state not in ("FAILED", "INCOMPLETE"):
        return None
    what = f"no neighbour responds for {to} on {link}"
    step = departure.step(Stage.NEIGHBOUR, what, f"{to} {neighbour.state}")
    return Stop(reason=f"{what} (neighbour {neighbour.state})", steps=(step,))


def _to_next_node(cluster: ClusterMap, departure: Departure) -> Crossing | None:
    view = cluster.receiver(departure.to, departure.view)
    if view is None:
        return None
    own = view.own(departure.to) or _facing(cluster, departure, view)
    has = "has" if view.own(departure.to) is not None or own is None else "answers for"
    what = f"over {departure.hop.link} to {view.words}, which {has} {departure.to}"
    steps = (departure.step(Stage.NEXT_NODE, what),)
    if own is None:
        return Stop(fate=Fate.LEAVES, reason=f"continues on {view.words}, whose links are unknown", steps=steps)
    return Onward(view=view, entry=NodeEntry(link=own.link), steps=steps)


def _facing(cluster: ClusterMap, departure: Departure, view: NodeView) -> LinkAddress | None:
    """Return the address of another node in the network of the link that the packet leaves by."""
    held = (each for each in departure.view.addresses or () if each.link == departure.hop.link)
    found = (cluster.link_towards(view, each.address) for each in held)
    return next((each for each in found if each is not None), None)


def _to_no_machine(cluster: ClusterMap, departure: Departure) -> Crossing | None:
    """Lose a packet for an address that is known to be free."""
    to, link = departure.to, departure.hop.link
    if not cluster.complete or cluster.pod_of(to):
        return None
    what = f"no machine on {link} has {to}"
    return Stop(reason=what, steps=(departure.step(Stage.NEIGHBOUR, what),))
