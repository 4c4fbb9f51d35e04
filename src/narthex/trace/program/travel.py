"""The path of one packet over nodes, from what a person typed to a `PacketPath`."""

from __future__ import annotations

import re

import msgspec

from narthex.model.net import contains, family_of
from narthex.trace.follow.path import CREATED_HERE, NodeEntry, PathFollower
from narthex.trace.follow.routing import RouteQuery, look_up
from narthex.trace.follow.views import ClusterMap, NodeView
from narthex.trace.model import Header, PacketPath, Party, PathBranch, PathStep, Stage, branch_steps, branch_tree
from narthex.trace.program.known import KnownCluster
from narthex.trace.program.places import AddressOwner, OwnerIndex, TraceError
from narthex.trace.program.rules_trace import CLUSTER_DOMAIN, ask, flow_of

_BRIDGE, _UPLINK = "cni0", "eth0"


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a user asked."""

    source: str
    destination: str
    """`DST[:PORT][/PROTO]`."""
    node: str = ""
    """The node where a packet from outside enters."""
    iif: str = ""
    source_port: int = 0
    size: int = 0
    domain: str = CLUSTER_DOMAIN


def travel(known: KnownCluster, request: TraceRequest) -> PacketPath:
    """Follow the packet. Raises TraceError if the request can't be traced."""
    places = known.places()
    source, target, spec = ask(places, request.source, request.destination, request.domain)
    sent_from, to, port, protocol = flow_of(places, source, target, spec)
    header = Header(
        source=sent_from, destination=to, protocol=protocol.lower, port=port, source_port=request.source_port or None
    )
    atlas = known.atlas()
    follower = PathFollower(atlas, request.size)
    view, entry, what = _start(known, atlas, follower, source, header, request)
    tree = branch_tree(follower.follow(view, header, entry, (what,)))
    return PacketPath(
        packet=header,
        source=Party(
            address=header.source, name=atlas.name_of(sent_from) or ("outside" if source.kind == "outside" else "")
        ),
        destination=Party(address=header.destination, name=atlas.name_of(header.destination)),
        start=view.name,
        service=_service(places, known, header) or _service_by_comments(tree),
        tree=tree,
        lookup=target.lookup,
        sources=tuple(
            dict.fromkeys(f"{each.origin}" + (f" (node {each.name})" if each.name else "") for each in known.views)
        ),
        missing=follower.missing,
    )


def _service(places: OwnerIndex, known: KnownCluster, header: Header) -> str:
    service = places.of(header.destination)
    wanted = header.protocol, header.port
    if service is not None:
        name = next((each.name for each in service.ports if (each.protocol.lower, each.port) == wanted), "")
        return f"{service.key}" + (f":{name}" if name else "")
    if not any(view.own(header.destination) for view in known.views):
        return ""
    for each in known.snapshot.services.values():
        for port in each.ports:
            if (port.protocol.lower, port.node_port) == wanted:
                return f"{each.key}" + (f":{port.name}" if port.name else "")
    return ""


_COMMENT = re.compile(r"([a-z0-9-]+/[a-z0-9.-]+(?::[a-z0-9-]*)?)(?: (?:cluster IP|external IP|loadbalancer IP))?$")


def _service_by_comments(tree: PathBranch) -> str:
    """Return the Service port in the comments of kube-proxy's rules."""
    chains = ("KUBE-SERVICES", "KUBE-NODEPORTS")
    found = (_COMMENT.match(step.why) for step in branch_steps(tree) if step.chain in chains)
    return next((match[1].rstrip(":") for match in found if match), "")


# ---- where it begins -----------------------------------------------------------------------------------------------


def _start(
    known: KnownCluster,
    atlas: ClusterMap,
    follower: PathFollower,
    source: AddressOwner,
    header: Header,
    request: TraceRequest,
) -> tuple[NodeView, NodeEntry, PathStep]:
    if request.node and request.iif:
        view = _named(known, atlas, request.node)
        return view, NodeEntry(link=request.iif), _begin(view, header, f"in by {request.iif}")
    loopback = contains(family_of(header.source).loopback, header.source)
    own = atlas.holder(header.source) if not loopback else None
    if own is None and (loopback or source.kind == "node"):
        own = _named(known, atlas, request.node or source.node)
    if own is not None and not request.iif:
        return own, CREATED_HERE, _begin(own, header, "made on this node")
    here = atlas.node_of(header.source) or source.node
    if here and source.kind != "outside":
        view = _named(known, atlas, here)
        return _from_neighbour(view, follower, header, request, _BRIDGE, f"from a pod of node {here}")
    near = next((view for view in known.views if _is_pod_of(view, header.source)), None)
    if near is not None:
        return _from_neighbour(near, follower, header, request, _BRIDGE, "from a pod of this node")
    view = _arrival(known, atlas, header, request)
    return _from_neighbour(view, follower, header, request, _UPLINK, "from outside")


def _is_pod_of(view: NodeView, address: str) -> bool:
    """Return True if the node reaches the address over a bridge or a veth, without a router."""
    found = look_up(view, RouteQuery(destination=address))
    if found.kind != "unicast" or found.hops[0][0].via:
        return False
    link = view.link(found.hops[0][0].link)
    default = look_up(view, RouteQuery(destination="2001:db8::1" if ":" in address else "192.0.2.1"))
    uplinks = {hop.link for hop, _ in default.hops}
    return link is not None and link.kind in ("bridge", "veth") and link.name not in uplinks


def _arrival(known: KnownCluster, atlas: ClusterMap, header: Header, request: TraceRequest) -> NodeView:
    """Return where a packet from outside enters: the named node, the node with the destination, or the first."""
    if request.node:
        return _named(known, atlas, request.node)
    holder = atlas.holder(header.destination)
    if holder is not None:
        return holder
    node = atlas.node_named(header.destination)
    return (atlas.view(node) if node else None) or known.views[0]


def _named(known: KnownCluster, atlas: ClusterMap, name: str) -> NodeView:
    found = atlas.view(name) if name else None
    if found is not None:
        return found
    if len(known.views) == 1 and (not known.views[0].name or not name):
        return known.views[0]
    have = ", ".join(view.name or view.origin for view in known.views)
    if not name:
        raise TraceError(f"which node? Name one with --node: {have}")
    raise TraceError(f"it begins on node {name}, of which nothing is known here: give its bundle; there is {have}")


def _from_neighbour(
    view: NodeView, follower: PathFollower, header: Header, request: TraceRequest, guess: str, how: str
) -> tuple[NodeView, NodeEntry, PathStep]:
    if request.iif:
        return view, NodeEntry(link=request.iif), _begin(view, header, f"{how}, in by {request.iif}")
    entry, why = follower.entry_of(view, header.source, header.destination)
    if entry is not None:
        what = f"{how}, by frames alone over {entry.link}" if entry.bridged else f"{how}, in by {entry.link}"
        return view, entry, _begin(view, header, what)
    unknown = f"which link it comes in by ({why}); taken to be {guess}, name another interface with --iif"
    return view, NodeEntry(link=guess), _begin(view, header, f"{how}, in by {guess}", unknown)


def _begin(view: NodeView, header: Header, what: str, unknown: str = "") -> PathStep:
    return PathStep(stage=Stage.START, node=view.name, what=what, before=header, unknown=unknown)
