"""Steps and ends that a path is made of, without following it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from narthex.model import family_of, join_port
from narthex.trace.follow.routing import RouteQuery, look_up
from narthex.trace.follow.views import Impairment, NodeLink, NodeView
from narthex.trace.model import Alternative, Fate, Header, PathEnd, PathStep, Stage, branch_ends


def view_step(view: NodeView, stage: Stage, what: str, *evidence: str) -> PathStep:
    """Return a step in a namespace."""
    return PathStep(stage=stage, node=view.node, namespace=view.namespace, what=what, evidence=evidence)


def fault_step(view: NodeView, impairment: Impairment) -> PathStep:
    """Return the step in which an impairment loses a packet."""
    return msgspec.structs.replace(view_step(view, Stage.FAULT, impairment.text), verdict="lost")


def is_uplink(view: NodeView, link: NodeLink) -> bool:
    """Return True if routers are behind the link: then its neighbours are machines, not pods."""
    routes = view.routes or ()
    default = ("0.0.0.0/0", "::/0")
    return any(
        hop.link == link.name and (hop.via or (route.destination in default and route.kind == "unicast"))
        for route in routes
        for hop in route.hops
    )


def fails(ends: Iterable[PathEnd]) -> bool:
    """Return True if no packet arrives."""
    return all(end.fate in (Fate.LOST, Fate.DROPPED, Fate.REJECTED) for end in ends)


def final_ends(alternatives: Iterable[Alternative]) -> Iterator[PathEnd]:
    """Yield the ends of alternatives; those that are delivered are represented by the ends of their replies."""
    for _, _, end in alternatives:
        yield from branch_ends(end.reply) if end.fate is Fate.DELIVERED and end.reply is not None else (end,)


def relayed_packets(view: NodeView, header: Header) -> list[Header]:
    """Return the first packet of each connection that a userspace relay may open for a packet; none if it is not the relay's."""
    table = view.relay
    if table is None:
        return []
    endpoints = table.endpoints.get((family_of(header.destination), header.protocol, header.port), ())
    return [_opened(view, header, to, table.mark) for to in endpoints]


def _opened(view: NodeView, header: Header, to: tuple[str, int], mark: int) -> Header:
    """Return the first packet of a relay's own connection."""
    address, port = to
    found = look_up(view, RouteQuery(destination=address, mark=mark))
    links = [hop.link for hop, _ in found.hops]
    held = (each for each in view.addresses or () if each.link in links and each.scope != "link")
    same = (each.address for each in held if family_of(each.address) is family_of(address))
    source = found.source or (address if found.kind == "local" else next(same, ""))
    return Header(source=source, destination=address, protocol=header.protocol, port=port, mark=mark, masqueraded=True)


def rewritten(before: Header, after: Header) -> bool:
    """Return True if an address or the port changed."""
    return (before.source, before.destination, before.port) != (after.source, after.destination, after.port)


NOT_UNDONE = "the rewriting is not undone on the path of the reply"


def accepted_reply(end: PathEnd, header: Header, asked: Header) -> PathEnd:
    """Return the end of a reply: lost unless the sender recognizes it as the reply to its packet."""
    if header.destination == asked.source and header.source == asked.destination:
        return end
    expected = join_port(asked.destination, asked.port) if asked.port else asked.destination
    reason = f"the sender asked {expected} and is answered by {header.source}: {NOT_UNDONE}"
    return msgspec.structs.replace(end, fate=Fate.LOST, reason=reason)
