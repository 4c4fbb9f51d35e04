"""Socket load balancing on a path: where a connection leads before there is a packet."""

from __future__ import annotations

from fractions import Fraction

import msgspec

from narthex.model import join_port
from narthex.netfilter.describe import one_of
from narthex.proxy.backends.sockets.document import SocketFrontend
from narthex.proxy.plan.balancing import shares_of_two
from narthex.trace.follow.steps import view_step
from narthex.trace.follow.views import NodeView
from narthex.trace.model import Header, PathStep, Stage

_MAPS = "maps of socket load balancing"


class ConnectedHeader(msgspec.Struct, frozen=True, kw_only=True):
    """One destination that a socket may get, with its probability. Without a header, the connection is refused."""

    share: Fraction
    header: Header | None
    step: PathStep


def connect(node: NodeView | None, view: NodeView, header: Header, *, from_node: bool) -> list[ConnectedHeader]:
    """Return what becomes of a socket that connects in `view`; nothing if no program changes its destination.

    `node` is the node that the socket is on, `from_node` is True for sockets of the node itself.
    """
    if node is None:
        return []
    if "sockets" in node.absent:
        what = "connect may choose an endpoint before there is a packet"
        step = msgspec.structs.replace(view_step(view, Stage.SOCKET, what, _MAPS), evidence=(), unknown=_MAPS)
        return [ConnectedHeader(share=Fraction(1), header=header, step=step)]
    table = node.sockets
    hook = "connect6" if ":" in header.destination else "connect4"
    if table is None or not table.runs(hook):
        return []
    frontend = table.frontend(header.destination, header.port, header.protocol)
    if frontend is None:
        return []
    action = frontend.node if from_node else frontend.pods
    if action == "reject":
        what = "connect is refused at once: the Service has no endpoint for this sender"
        step = msgspec.structs.replace(view_step(view, Stage.SOCKET, what, _MAPS), verdict="reject")
        return [ConnectedHeader(share=Fraction(1), header=None, step=step)]
    endpoints = {"cluster": frontend.cluster, "local": frontend.local}.get(action, ())
    shares, how = _selection(frontend, action, len(endpoints))
    ejected = table.ejected_of(frontend) if table is not None else ()
    if ejected:
        how += f"; not {', '.join(join_port(*each) for each in ejected)}, ejected since connections failed"
    found = []
    for (address, port), share in zip(endpoints, shares, strict=True):
        if not share:
            continue
        after = msgspec.structs.replace(header, destination=address, port=port)
        what = f"connect chooses {join_port(address, port)}, {how}"
        step = msgspec.structs.replace(
            view_step(view, Stage.SOCKET, what, _MAPS),
            verdict=f"connect {join_port(address, port)}",
            probability=share,
            before=header,
            after=after,
            unknown="the socket's source address: one that has a source meets the rules"
            if from_node and frontend.unbound_only
            else "",
        )
        found.append(ConnectedHeader(share=share, header=after, step=step))
    return found


def _selection(frontend: SocketFrontend, action: str, count: int) -> tuple[tuple[Fraction, ...], str]:
    """Return the probability of each of `count` endpoints, and how one of them is selected."""
    connections = frontend.cluster_open if action == "cluster" else frontend.local_open
    if frontend.least_connections and count > 1 and len(connections) == count:
        return (
            shares_of_two(connections),
            f"of two of {count} endpoints the one with fewer open connections; probabilities as of now",
        )
    return (Fraction(1, count),) * count if count else (), one_of(count, "endpoint")
