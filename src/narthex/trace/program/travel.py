"""What is known of nodes, in any combination of sources, and the path of one packet over them: what `narthex trace` follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from narthex.linux.addresses import own_addresses
from narthex.linux.namespaces import in_namespace
from narthex.model import Problem, Snapshot, Store, Synced, Upsert, contains, family_of
from narthex.model.decode.objects import load
from narthex.netfilter.dump.read import DumpError
from narthex.netfilter.walk.losses import LossSigns, exact_destinations
from narthex.trace.causes.proxies import PROXY_TABLES
from narthex.trace.follow.ask import next_command
from narthex.trace.follow.bridges import entry_from
from narthex.trace.follow.departure import CREATED_HERE, NodeEntry
from narthex.trace.follow.path import PathFollower
from narthex.trace.follow.routing import RouteQuery, look_up
from narthex.trace.follow.sockets import connect
from narthex.trace.follow.steps import view_step
from narthex.trace.follow.unknown_facts import NOTHING, AskedFacts, Assumption, doubt_sender, follow_all
from narthex.trace.follow.views import ClusterMap, Impairment, NodeView
from narthex.trace.model import (
    Fate,
    Header,
    PacketPath,
    Party,
    PathBranch,
    PathEnd,
    PathStep,
    Stage,
    branch_steps,
    branch_tree,
)
from narthex.trace.names import AddressName, AddressNames, service_of_steps
from narthex.trace.node.layout import OBJECTS
from narthex.trace.node.view import NOT_WALKED, UNUSED, view_of_bundle, view_of_files
from narthex.trace.program.bundle import CHANGED, Bundle, BundleError, attached_namespaces, read_bundle
from narthex.trace.program.inputs import ClusterObjects
from narthex.trace.program.issue_files import bundles_of, read_issue
from narthex.trace.program.places import CLUSTER_DOMAIN, OUTSIDE, AddressOwner, OwnerIndex, TraceError, ask, flow_of


class KnownCluster(msgspec.Struct, frozen=True, kw_only=True):
    """Views of nodes and the cluster's objects."""

    views: tuple[NodeView, ...]
    snapshot: Snapshot
    has_objects: bool = False
    problems: tuple[Problem, ...] = ()
    others: dict[str, AddressName] = {}
    """Names of addresses that no object owns."""
    pods: tuple[AddressOwner, ...] = ()
    """Pods without an object."""
    outside: tuple[str, ...] = OUTSIDE
    node_ips: tuple[str, ...] = ()
    """Addresses of the node, if neither its kernel nor an object has them."""
    beyond: tuple[NodeView, ...] = ()
    """Views of machines that are no nodes: a client outside, and the network between the nodes."""
    impairments: tuple[Impairment, ...] = ()
    answering: Mapping[str, tuple[str, ...]] = {}
    """Nodes that answer for load balancer addresses."""
    whole: bool = False
    """All machines and pods are known, and pods reach each other by their node's routing, as in a lab."""
    unseen_sender: str = ""
    """Why the routes of a sender that is a pod are unknown."""

    def places(self) -> OwnerIndex:
        """Return what a user may name as sender or destination."""
        return OwnerIndex(self.snapshot, self.outside, (*self.pods, *self._view_places()))

    def _view_places(self) -> Iterable[AddressOwner]:
        """Yield nodes that only a bundle names."""
        held = {key.name for key in self.snapshot.nodes}
        for view in self.views:
            own = view.own_addresses()
            if view.name and view.name not in held and own:
                yield AddressOwner(kind="node", name=view.name, addresses=own, node=view.name)

    def atlas(self) -> ClusterMap:
        """Return the map for following packets."""
        names = AddressNames(self.snapshot, self.others)
        own = {view.words: view for view in (*self.views, *self.beyond) if view.name}
        of_objects = {key.name: (*node.internal_ips, *node.external_ips) for key, node in self.snapshot.nodes.items()}

        unlisted: list[str] = []
        for view in self.views:
            named = self.node_ips or of_objects.get(view.name, ())
            if view.addresses is None and (named or view.rules is not None):
                unlisted += () if named else (view.name,)
                of_objects[view.name] = tuple(dict.fromkeys((*named, *_own_by_rules(view))))

        def name_of(address: str) -> str:
            """Return the name of an address's object, or of the namespace that owns the address.

            The text is empty for loopback and for unknown addresses.
            """
            name = names.of(address)
            if name:
                return name
            holder = next((name for name, view in own.items() if view.own(address) is not None), "")
            return "" if contains(family_of(address).loopback, address) else holder

        return ClusterMap(
            (*self.views, *self.beyond),
            name_of=name_of,
            node_of=lambda address: _node_of(names, self.snapshot, address),
            pod_of=lambda address: _pod_of(names, address),
            node_addresses=of_objects,
            unlisted=unlisted,
            impairments=self.impairments,
            answering=self.answering,
            complete=self.whole,
            through_node=self.whole,
        )


def _own_by_rules(view: NodeView) -> Iterable[str]:
    """Yield the addresses on which the node's Service proxy opens node ports: the node has them."""
    for rules in view.rules.values() if view.rules is not None else ():
        for table in rules.ruleset.tables:
            held = table.sets.get("nodeport-ips") if table.name in PROXY_TABLES else None
            yield from (str(key[0]) for key in (held.elements if held is not None else ()) if "/" not in str(key[0]))
            services = table.chains.get("KUBE-SERVICES") if table.name == "nat" else None
            for rule in services.rules if services is not None else ():
                if rule.target == "KUBE-NODEPORTS":
                    yield from exact_destinations(rule)


def _node_of(names: AddressNames, snapshot: Snapshot, address: str) -> str:
    named = names.named(address)
    if named is not None:
        return named.node
    return next(
        (node.name for node in snapshot.nodes.values() if any(contains(cidr, address) for cidr in node.pod_cidrs)), ""
    )


def _pod_of(names: AddressNames, address: str) -> str:
    named = names.named(address)
    return named.name if named is not None and named.kind == "pod" else ""


def from_bundles(paths: Sequence[Path]) -> tuple[tuple[NodeView, ...], ClusterObjects | None]:
    """Return the views, and the objects of the first bundle that has any. Raises BundleError."""
    views: list[NodeView] = []
    cluster: ClusterObjects | None = None
    for bundle in (each for path in paths for each in _bundles_in(path)):
        view = view_of_bundle(bundle.parts, bundle.table, f"bundle {bundle.origin}")
        late = (f"{part.path}: {CHANGED}" for part in bundle.table.parts if part.remark == CHANGED)
        view.partial = (*view.partial, *late)
        views.append(view)
        held = {name: bundle.parts[name] for name in OBJECTS if name in bundle.parts}
        if cluster is None and held:
            cluster = objects_of(held, bundle.origin)
    return tuple(views), cluster


def _bundles_in(path: Path) -> tuple[Bundle, ...]:
    """Return the bundle in a file, or those of the issue text in it. Raises BundleError."""
    issue = read_issue(path)
    return (read_bundle(path),) if issue is None else bundles_of(issue, path.name)


def objects_of(texts: dict[str, str], origin: str) -> ClusterObjects:
    """Return the Kubernetes objects of a bundle."""
    store = Store()
    problems: list[Problem] = []
    for name, text in texts.items():
        if name.endswith("networkpolicies.json"):
            continue
        loaded = load(text.encode(), f"{origin}:{name}")
        problems += loaded.problems
        for each in loaded.objects:
            store.apply(Upsert(each))
    store.apply(Synced())
    return ClusterObjects(snapshot=store.snapshot, problems=tuple(problems))


def from_files(paths: Sequence[Path], node: str) -> NodeView:
    """Return the view of files with the output of tools, and of bundles. A file that cannot be used is named in the view.

    Raises DumpError if none of them can be used.
    """
    texts, unused = texts_of(paths)
    if not texts:
        raise DumpError("; ".join(unused))
    view = view_of_files(texts, node)
    view.partial = (*view.partial, *unused)
    return view


def texts_of(paths: Sequence[Path]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return (name, text) pairs of files and of the parts of bundles, and why other files cannot be used."""
    texts: list[tuple[str, str]] = []
    unused: list[str] = []
    for path in paths:
        try:
            if is_bundle(path):
                parts = read_bundle(path).parts.items()
                texts += [(f"{path}:{name}", text) for name, text in parts if _is_output(name, text)]
            else:
                # What a tool printed may hold bytes that are no text, in a comment for instance.
                texts.append((str(path), path.read_text(errors="replace")))
        except (OSError, BundleError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            unused.append(f"{path}: cannot be used: {reason}")
    return texts, unused


def is_bundle(path: Path) -> bool:
    """Return True for a directory and for an archive, by its content or name, which can be bundles only. Raises OSError."""
    if path.is_dir() or path.name.endswith((".tgz", ".tar.gz")):
        return True
    with path.open("rb") as stream:
        begin = stream.read(512)
    return begin.startswith((b"\x1f\x8b", b"\xfd7zXZ", b"BZh")) or begin[257:262] == b"ustar"


def live(node: str, namespace: str | None = None) -> NodeView:
    """Return the current view of this node, or of a named network namespace."""
    from narthex.trace.program.bundle import gather

    gathered = gather(node, namespace, without=UNUSED)
    return view_of_bundle(gathered.parts, gathered.table, "live")


def _is_output(name: str, text: str) -> bool:
    """Return True for a part of a bundle that a trace of single files uses."""
    empty = text.strip() in ("", "[]")
    return name.startswith(("rules/", "net/")) and name not in NOT_WALKED and not empty


def travel_live(known: KnownCluster, request: TraceRequest, namespace: str | None) -> PacketPath:
    """Follow the packet from the network namespace of a sender that is a pod of a live node, and into those of pods there.

    `namespace` is the node's own, None for the current one. Raises TraceError.
    """
    known = _with_sender(known, request, namespace)
    view = _live_view(known)

    def look(addresses: Sequence[str]) -> bool:
        """Read the namespaces of addresses that exactly one namespace has. Return True if there is any."""
        held = {address: _holders(namespace, address) for address in addresses}
        single = {address: names[0] for address, names in held.items() if len(names) == 1}
        for address, name in single.items():
            _add_pod(known, view, name, address)
        return bool(single)

    return travel_into(known, request, look)


def _with_sender(known: KnownCluster, request: TraceRequest, namespace: str | None) -> KnownCluster:
    """Return what is known of a live node, with the network namespace of a sender that is a pod of it."""
    places = known.places()
    source, target, spec = ask(places, request.source, request.destination, request.domain)
    sent_from = flow_of(places, source, target, spec)[0]
    view = _live_view(known)
    if source.kind == "outside" or view.own(sent_from) is not None or request.iif:
        return known
    held = _holders(namespace, sent_from)
    if len(held) != 1:
        count = "no" if not held else f"each of {len(held)}"
        reason = f"{count} network namespace that is linked with this node has {sent_from}"
        return msgspec.structs.replace(known, unseen_sender=reason)
    _add_pod(known, view, held[0], sent_from)
    return known


def _live_view(known: KnownCluster) -> NodeView:
    return next(each for each in known.views if each.origin == "live")


def _add_pod(known: KnownCluster, view: NodeView, namespace: str, address: str) -> None:
    owner = known.places().at(address)
    pod = live(owner.name if owner is not None and owner.kind == "pod" else namespace, namespace)
    pod.on = view.name
    view.pods = {**view.pods, pod.name: pod}


def _holders(namespace: str | None, address: str) -> list[str]:
    """Return the named network namespaces linked with a node's that have an address."""
    return [name for name in attached_namespaces(namespace) if _has(name, address)]


def _has(namespace: str, address: str) -> bool:
    with suppress(OSError), in_namespace(namespace):
        return any(each.address == address for each in own_addresses())
    return False


# ---- the path of one packet -------------------------------------------------------------------------------------------

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


def travel_into(
    known: KnownCluster, request: TraceRequest, look: Callable[[Sequence[str]], bool], most: int = 8
) -> PacketPath:
    """Follow the packet, also through the network namespaces of the pods at its ends. Raises TraceError.

    `look` adds the views of the pods that have some addresses, and returns True if it found one. At most `most` pods are
    looked into: endpoints of one Service seldom differ in their own rules, and each one takes a tenth of a second.
    """
    path = travel(known, request)
    seen = {each.address for view in known.views for pod in view.pods.values() for each in pod.addresses or ()}
    ends = dict.fromkeys(leaf.end.address for leaf in path.leaves() if leaf.end.address)
    unseen = [address for address in ends if address not in seen][:most]
    return travel(known, request) if unseen and look(unseen) else path


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
    view, entry, what = _start(known, atlas, source, header, request)
    sender = _socket_owner(view, source, sent_from, request)

    def run(assumed: Assumption) -> tuple[PathBranch, AskedFacts]:
        """Follow the packet as if the assumption held. Return the branches and the facts that decided them."""
        with_assumption = PathFollower(atlas, request.size, assumed) if assumed != NOTHING else follower
        first = connect(atlas.view(view.node), view, header, from_node=sender == "node") if sender else []
        found = [] if first else with_assumption.follow(view, header, entry, (what,))
        for each in first:
            if each.header is None:
                end = PathEnd(fate=Fate.REJECTED, node=view.node, reason=each.step.what)
                found.append((each.share, (what, each.step), end))
                continue
            onward = with_assumption.follow(view, each.header, entry, (what, each.step))
            found += [(each.share * part, steps, end) for part, steps, end in onward]
        return branch_tree(found), with_assumption.asked

    tree = follow_all(run, header)
    if _may_be_made_here(known, view, source, header, what):
        own = Assumption(own=(header.source,))

        def made(assumed: Assumption) -> tuple[PathBranch, AskedFacts]:
            """Follow the packet as if this node had sent it. Return the branches and the facts that decided them."""
            here = PathFollower(atlas, request.size, assumed)
            first = (_begin(view, header, "made on this node"),)
            return branch_tree(here.follow(view, header, CREATED_HERE, first)), here.asked

        tree = doubt_sender(tree, follow_all(made, header, own), header)
    return PacketPath(
        packet=header,
        source=Party(
            address=header.source, name=atlas.name_of(sent_from) or ("outside" if source.kind == "outside" else "")
        ),
        destination=Party(address=header.destination, name=atlas.name_of(header.destination)),
        start=view.node,
        service=_service(places, known, header) or service_of_steps(branch_steps(tree)),
        tree=tree,
        lookup=target.lookup,
        sources=_origins(known),
        missing=follower.missing,
        next_command=next_command(tree, header.destination, known.views, follower.missing),
    )


def _socket_owner(
    view: NodeView, source: AddressOwner, address: str, request: TraceRequest
) -> Literal["", "node", "pod"]:
    """Return whose socket sends the packet, if BPF programs of the node see it; they see no packets of other machines."""
    if request.iif:
        return ""
    if view.on is None and (source.kind == "node" or view.own(address) is not None):
        return "node"
    return "pod" if source.kind == "pod" or (source.kind == "address" and source.node) else ""


def _origins(known: KnownCluster) -> tuple[str, ...]:
    """Return what the views were read from, each once."""
    named = (f"{each.origin}" + (f" (node {each.name})" if each.name else "") for each in known.views)
    return tuple(dict.fromkeys(named))


def _may_be_made_here(
    known: KnownCluster, view: NodeView, source: AddressOwner, header: Header, start: PathStep
) -> bool:
    """Return True if the input does not say whether the sender's address is one of the node."""
    if not start.unknown or source.kind != "address" or source.node or view.addresses is not None or known.node_ips:
        return False
    rules = view.rules.get(family_of(header.source)) if view.rules is not None else None
    tables = rules.ruleset.tables if rules is not None else ()
    return not any(contains(each, header.source) for table in tables for each in LossSigns(table).pod_networks())


def _service(places: OwnerIndex, known: KnownCluster, header: Header) -> str:
    service = places.of(header.destination)
    port_asked_for = header.protocol, header.port
    if service is not None:
        name = next((each.name for each in service.ports if (each.protocol.lower, each.port) == port_asked_for), "")
        return f"{service.key}" + (f":{name}" if name else "")
    if not any(view.own(header.destination) for view in known.views):
        return ""
    for each in known.snapshot.services.values():
        for port in each.ports:
            if (port.protocol.lower, port.node_port) == port_asked_for:
                return f"{each.key}" + (f":{port.name}" if port.name else "")
    return ""


# ---- where it begins -----------------------------------------------------------------------------------------------


def _start(
    known: KnownCluster, atlas: ClusterMap, source: AddressOwner, header: Header, request: TraceRequest
) -> tuple[NodeView, NodeEntry, PathStep]:
    if request.node and request.iif:
        view = _named(known, atlas, request.node)
        return view, NodeEntry(link=request.iif), _begin(view, header, f"in by {request.iif}")
    loopback = contains(family_of(header.source).loopback, header.source)
    own = atlas.holder(header.source) if not loopback else None
    if own is None and (loopback or source.kind == "node"):
        own = _named(known, atlas, request.node or source.node)
    if own is not None and not request.iif:
        made = "made on this node" if own.on is None else f"made by {own.words}"
        return own, CREATED_HERE, _begin(own, header, made)
    pod = atlas.pod_view(header.source)
    if pod is not None and pod.rules is not None and not request.iif:
        return pod, CREATED_HERE, _begin(pod, header, f"made in {pod.words}")
    here = atlas.node_of(header.source) or source.node
    if here and source.kind != "outside":
        view = _named(known, atlas, here)
        return _from_pod(known, atlas, view, header, request, f"from a pod of node {here}")
    near = next((view for view in known.views if _is_pod_of(view, header.source)), None)
    if near is not None:
        return _from_pod(known, atlas, near, header, request, "from a pod of this node")
    view = _arrival(known, atlas, header, request)
    origin = "from outside" if source.kind == "outside" else f"from {header.source}"
    return _from_neighbour(atlas, view, header, request, _UPLINK, origin)


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


def _from_pod(
    known: KnownCluster, atlas: ClusterMap, view: NodeView, header: Header, request: TraceRequest, how: str
) -> tuple[NodeView, NodeEntry, PathStep]:
    """Begin on the node of a pod whose own routes are unknown."""
    view, entry, step = _from_neighbour(atlas, view, header, request, _BRIDGE, how)
    if known.unseen_sender:
        unseen = f"the pod's own routes and rules: {known.unseen_sender}"
        step = msgspec.structs.replace(step, unknown="; ".join(filter(None, (unseen, step.unknown))))
    return view, entry, step


def _from_neighbour(
    atlas: ClusterMap, view: NodeView, header: Header, request: TraceRequest, guess: str, how: str
) -> tuple[NodeView, NodeEntry, PathStep]:
    if request.iif:
        return view, NodeEntry(link=request.iif), _begin(view, header, f"{how}, in by {request.iif}")
    entry, why = entry_from(atlas, view, header.source, header.destination)
    if entry is not None:
        what = f"{how}, by frames alone over {entry.link}" if entry.bridged else f"{how}, in by {entry.link}"
        return view, entry, _begin(view, header, what)
    unknown = f"which link it comes in by ({why}); assumed to be {guess}, name another interface with --iif"
    return view, NodeEntry(link=guess), _begin(view, header, f"{how}, in by {guess}", unknown)


def _begin(view: NodeView, header: Header, what: str, unknown: str = "") -> PathStep:
    return msgspec.structs.replace(view_step(view, Stage.START, what), before=header, unknown=unknown)
