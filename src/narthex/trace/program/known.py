"""The sources of a trace over nodes: views and objects, in any combination."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from narthex.model.decode.objects import load
from narthex.model.net import contains, family_of
from narthex.model.problem import Problem
from narthex.model.store import Snapshot, Store, Synced, Upsert
from narthex.trace.follow.views import ClusterMap, NodeView
from narthex.trace.names import AddressName, AddressNames
from narthex.trace.node.layout import OBJECTS
from narthex.trace.node.view import view_of_bundle, view_of_files
from narthex.trace.program.bundle import read_bundle
from narthex.trace.program.inputs import ClusterObjects
from narthex.trace.program.places import OUTSIDE, AddressOwner, OwnerIndex


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

    def places(self) -> OwnerIndex:
        """Return what a user may name as sender or destination."""
        return OwnerIndex(self.snapshot, self.outside, (*self.pods, *self._view_places()))

    def _view_places(self) -> Iterable[AddressOwner]:
        """Yield nodes that only a bundle names."""
        held = {key.name for key in self.snapshot.nodes}
        for view in self.views:
            own = [each.address for each in view.addresses or () if each.scope != "link"]
            own = [ip for ip in own if not contains(family_of(ip).loopback, ip)]
            if view.name and view.name not in held and own:
                yield AddressOwner(kind="node", name=view.name, addresses=tuple(own), node=view.name)

    def atlas(self) -> ClusterMap:
        """Return the map for following packets."""
        names = AddressNames(self.snapshot, self.others)
        own = {view.name: view for view in self.views if view.name}
        of_objects = {key.name: (*node.internal_ips, *node.external_ips) for key, node in self.snapshot.nodes.items()}

        if self.node_ips:
            of_objects |= {view.name: self.node_ips for view in self.views if view.addresses is None}

        def name_of(address: str) -> str:
            name = names.of(address)
            if name:
                return name
            holder = next((name for name, view in own.items() if view.own(address) is not None), "")
            return f"node {holder}" if holder and not contains(family_of(address).loopback, address) else ""

        return ClusterMap(
            self.views,
            name_of=name_of,
            node_of=lambda address: _node_of(names, self.snapshot, address),
            node_addresses=of_objects,
        )


def _node_of(names: AddressNames, snapshot: Snapshot, address: str) -> str:
    named = names.named(address)
    if named is not None:
        return named.node
    return next(
        (node.name for node in snapshot.nodes.values() if any(contains(cidr, address) for cidr in node.pod_cidrs)), ""
    )


def from_bundles(paths: Sequence[Path]) -> tuple[tuple[NodeView, ...], ClusterObjects | None]:
    """Return the views, and the objects of the first bundle that has any. Raises BundleError."""
    views: list[NodeView] = []
    cluster: ClusterObjects | None = None
    for path in paths:
        bundle = read_bundle(path)
        views.append(view_of_bundle(bundle.parts, bundle.table, f"bundle {bundle.origin}"))
        held = {name: bundle.parts[name] for name in OBJECTS if name in bundle.parts}
        if cluster is None and held:
            cluster = objects_of(held, bundle.origin)
    return tuple(views), cluster


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
    """Return the view of single dumps. Raises DumpError."""
    # What a tool printed may hold bytes that are no text, in a comment for instance.
    return view_of_files([(str(path), path.read_text(errors="replace")) for path in paths], node)


def live(node: str, namespace: str | None = None) -> NodeView:
    """Return the current view of this node, or of a named network namespace."""
    from narthex.trace.program.bundle import gather

    gathered = gather(node, namespace, without=frozenset(("rules/nft.json", "rules/ipvs-stats.txt", "about/cni.txt")))
    return view_of_bundle(gathered.parts, gathered.table, "live")
