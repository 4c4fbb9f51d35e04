"""Traces of packets in a running lab, by the current rules and routes of its nodes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from narthex.lab.program.labs import open_lab
from narthex.lab.program.state import LabError, LabState, StateDirectory
from narthex.lab.topology import OUTSIDE_ADDRESSES, LabNode
from narthex.linux.addresses import own_addresses
from narthex.linux.namespaces import in_namespace
from narthex.linux.run import CommandError, run
from narthex.model.net import IPFamily, address, contains, family_of
from narthex.model.packet import Host
from narthex.model.store import Snapshot
from narthex.trace.follow.views import NodeView
from narthex.trace.model import PacketPath
from narthex.trace.names import AddressName, AddressNames
from narthex.trace.node.layout import CNI_FILE, PARTS
from narthex.trace.node.view import view_of_bundle
from narthex.trace.program.bundle import gather
from narthex.trace.program.inputs import ClusterObjects, NodeOptions, node_inputs, read_server
from narthex.trace.program.places import AddressOwner, OwnerIndex, TraceError
from narthex.trace.program.rules_trace import answer, ask, question
from narthex.trace.program.travel import KnownCluster, live

if TYPE_CHECKING:
    from narthex.lb.announce import NodeAnnouncerState


def trace_lab(
    name: str,
    source: str,
    destination: str,
    node_name: str = "",
    iif: str | None = None,
    follow: Callable[[str], PacketPath] | None = None,
) -> PacketPath:
    """Explain a packet of a running lab by its live rules and the plan. Raises TraceError, InputError.

    `follow` returns the packet's path over all nodes from the named one on; without it, only that node's rules are walked.
    """
    try:
        lab = open_lab(name)
    except LabError as error:
        raise TraceError(str(error)) from error
    cluster = cluster_of(lab)
    places = OwnerIndex(cluster.snapshot, OUTSIDE_ADDRESSES, pods_of(lab))
    sender, target, spec = ask(places, source, destination)
    announcement = _announcing(lab, cluster.snapshot, target) if lab.balancing and not sender.node else None
    node = _node(lab, node_name or sender.node or target.node or (announcement.holder if announcement else ""))
    inputs = node_inputs(cluster, node_options_of(name, node.name))
    with in_namespace(node.namespace):
        own = tuple(each.address for each in own_addresses())
    host = Host(addresses=tuple(ip for ip in own if not contains(family_of(ip).loopback, ip)))
    others = names_of(lab)
    names = AddressNames(cluster.snapshot, others)
    return answer(
        question(places, sender, target, spec, inputs, host, iif),
        inputs,
        host,
        others=others,
        live_rules=lambda family: _rules(lab.mode, family, node.namespace),
        live_route=lambda ip: route_text(next_hop(ip, node.namespace), names),
        announcers=announcement.known if announcement else None,
        path=follow(node.name) if follow is not None else None,
    )


class _Announcing(NamedTuple):
    """The announcers of load balancer addresses."""

    holder: str
    """The node that answers for the packet's destination; empty if none does."""
    known: dict[str, NodeAnnouncerState]


def _announcing(lab: LabState, snapshot: Snapshot, target: AddressOwner) -> _Announcing:
    from narthex.lab.program.announcers import holder, states
    from narthex.lb.program.inspection import announcers

    statuses = states(lab)
    found = next(filter(None, (holder(statuses, ip) for ip in target.addresses)), "")
    return _Announcing(found, announcers(snapshot, statuses))


def _rules(mode: str, family: IPFamily, namespace: str) -> Any:
    from narthex.proxy.kernel.dataplanes import dataplane

    return dataplane(mode).rules_in_force(family, namespace)


def _node(lab: LabState, name: str) -> LabNode:
    """Return the named node, or the first one without a name. Raises TraceError."""
    found = next((node for node in lab.nodes if node.name == name), None)
    if name and found is None:
        raise TraceError(f"lab {lab.name} has no node {name}; it has {', '.join(node.name for node in lab.nodes)}")
    return found or lab.nodes[0]


def cluster_of(lab: LabState) -> ClusterObjects:
    """Return the lab's current objects. Raises InputError."""
    return read_server(str(lab.kubeconfig), "", pods=True)


def pods_of(lab: LabState) -> list[AddressOwner]:
    """Return the lab's pods that have addresses."""
    return [
        AddressOwner(kind="pod", name=f"{pod.namespace}/{pod.name}", addresses=pod.addresses, node=pod.node)
        for pod in lab.pods
        if pod.addresses
    ]


def names_of(lab: LabState) -> dict[str, AddressName]:
    """Return the owners of the lab's addresses."""
    names = {ip: AddressName("outside", "") for ip in OUTSIDE_ADDRESSES}
    for pod in lab.pods:
        names.update({ip: AddressName("pod", f"{pod.namespace}/{pod.name}", pod.node) for ip in pod.addresses})
    for node in lab.nodes:
        names.update({ip: AddressName("node", node.name) for ip in (*node.addresses, *node.gateways)})
    return names


def route_text(hop: RouteHop, names: AddressNames) -> str:
    """Describe a next hop."""
    if hop.problem:
        return f"none: {hop.problem}"
    if hop.local:
        return "stays on this node"
    if not hop.via:
        return f"over {hop.device}, straight to it"
    who = names.of(hop.via)
    return f"over {hop.device} by way of {hop.via}" + (f" ({who})" if who else "")


_OF_A_POD = ("net/links.json", "net/addresses.json", "net/routes-4.json", "net/routes-6.json", "net/listeners.txt")
_NOT_OF_A_POD = frozenset({CNI_FILE, *(part.path for part in PARTS)} - set(_OF_A_POD))
_MOST_PODS = 8


def known_of(name: str) -> KnownCluster:
    """Return the views of all nodes of a lab. Raises TraceError or InputError."""
    lab = _open(name)
    return KnownCluster(
        views=tuple(live(node.name, node.namespace) for node in lab.nodes),
        snapshot=cluster_of(lab).snapshot,
        has_objects=True,
        others=names_of(lab),
        pods=tuple(pods_of(lab)),
        outside=OUTSIDE_ADDRESSES,
    )


def node_options_of(name: str, node: str) -> NodeOptions:
    """Return the mode and the configuration of a node of a lab. Raises TraceError."""
    lab = _open(name)
    file = StateDirectory(lab.name).node(node).configuration
    return NodeOptions(node=node, mode=lab.mode, config_file=file if file.exists() else None)


def look_into_pods(name: str, known: KnownCluster, path: PacketPath) -> None:
    """Add routes and listeners of the pods at the ends of the path to the views of their nodes."""
    ends = [path.packet.source, *(leaf.end.address for leaf in path.leaves())]
    spec = set(list(dict.fromkeys(ends))[: _MOST_PODS + 1])
    views = {view.name: view for view in known.views}
    for pod in _open(name).pods:
        if spec & set(pod.addresses) and pod.network_namespace and pod.node in views:
            view = views[pod.node]
            key = f"{pod.namespace}/{pod.name}"
            try:
                view.pods = {**view.pods, key: _pod(key, pod.network_namespace)}
            except FileNotFoundError:
                continue  # the pod was deleted in the meantime


def namespace_of_node(name: str, node: str) -> str:
    """Return the network namespace of a node, or of the only one if no name is given. Raises TraceError."""
    lab = _open(name)
    if not node and len(lab.nodes) > 1:
        raise TraceError(f"which node of lab {name}? Choose one with --node: {', '.join(n.name for n in lab.nodes)}")
    return _node(lab, node).namespace


def namespace_of(name: str, what: str) -> str:
    """Return the network namespace of a node by its name, or of the owner of an address. Raises TraceError."""
    lab = _open(name)
    for node in lab.nodes:
        if what == node.name or what in node.addresses:
            return node.namespace
    for pod in lab.pods:
        if what in pod.addresses and pod.network_namespace:
            return pod.network_namespace
    if what in OUTSIDE_ADDRESSES:
        return lab.outside
    raise TraceError(
        f"the probe: no node or pod in lab {name} has the address {what}, so no packet can be sent from it"
    )


def _pod(name: str, namespace: str) -> NodeView:
    gathered = gather(name, namespace, without=_NOT_OF_A_POD)
    return view_of_bundle(gathered.parts, gathered.table, "live")


def _open(name: str) -> LabState:
    try:
        return open_lab(name)
    except LabError as error:
        raise TraceError(str(error)) from error


class RouteHop(msgspec.Struct, frozen=True, kw_only=True):
    """The first hop towards an address."""

    device: str = ""
    """Outgoing interface."""
    via: str = ""
    """Next router; empty when the address is on the link."""
    local: bool = False
    """The address is this node's own."""
    problem: str = ""
    """The kernel's reason for the absence of a route."""


def next_hop(destination: str, namespace: str | None = None) -> RouteHop:
    """Return the kernel's route to a canonical address. Raises ValueError for any other text.

    Raises FileNotFoundError without the program `ip` or without the namespace.
    """
    if address(destination) != destination:
        raise ValueError(f"{destination!r} is not a canonical address")
    try:
        answer = run(["ip", "-j", "route", "get", destination], namespace=namespace, timeout=10)
    except CommandError as error:
        return RouteHop(problem=error.said.strip().removeprefix("RTNETLINK answers: ") or "no route")
    return read_answer(answer)


def read_answer(answer: str) -> RouteHop:
    """Decode the JSON of `ip -j route get`."""
    found = json.loads(answer)[0]
    if found.get("type") in ("unreachable", "blackhole", "prohibit"):
        return RouteHop(problem=found["type"])
    via = found.get("gateway") or found.get("via", {}).get("host", "")
    return RouteHop(device=found.get("dev", ""), via=via, local=found.get("type") == "local")
