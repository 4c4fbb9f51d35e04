"""Traces of packets in a running lab, by the current rules and routes of its nodes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import msgspec

from narthex.lab.faults import TABLE
from narthex.lab.program import labs
from narthex.lab.program.announcers import answering, states
from narthex.lab.program.impairments import impairments
from narthex.lab.program.labs import open_lab
from narthex.lab.program.shared_registry import snapshot_of
from narthex.lab.program.state import LabError, LabState, PodRecord, StateDirectory
from narthex.lab.topology import (
    API_ADDRESS,
    FABRIC,
    INGRESS_ADDRESSES,
    OUTSIDE,
    OUTSIDE_ADDRESSES,
    LabNode,
    fabric_namespace,
)
from narthex.lb.program.inspection import announcers
from narthex.linux.addresses import own_addresses
from narthex.linux.namespaces import in_namespace
from narthex.linux.processes import is_alive
from narthex.linux.run import CommandError, run
from narthex.model import FAMILIES, Host, IPFamily, address, contains, family_of
from narthex.trace.causes.find import find
from narthex.trace.follow.views import NodeView, RelayEndpoints
from narthex.trace.names import AddressName, AddressNames
from narthex.trace.node.layout import CNI_FILE, PARTS
from narthex.trace.node.view import view_of_bundle
from narthex.trace.program.bundle import gather
from narthex.trace.program.inputs import ClusterObjects, NodeInputs, NodeOptions, node_inputs
from narthex.trace.program.places import AddressOwner, OwnerIndex, TraceError, ask, question
from narthex.trace.program.rules_trace import TracedPath, answer
from narthex.trace.program.travel import KnownCluster, TraceRequest, live, travel_into


class LabTrace(TracedPath, frozen=True, kw_only=True):
    """A packet's path in a lab, and why it fails."""

    node: str
    """The node whose plan is compared with its rules, and whose kernel a probe watches."""


def trace_lab(name: str, request: TraceRequest) -> LabTrace:
    """Follow a packet through a running lab from its sender on, by live rules and routes. Raises TraceError, InputError."""
    lab = running_lab(name)
    cluster = cluster_of(lab)
    places = OwnerIndex(cluster.snapshot, OUTSIDE_ADDRESSES, pods_of(lab))
    sender, target, spec = ask(places, request.source, request.destination, request.domain)
    statuses = states(lab) if lab.balancing else {}
    answers = answering(statuses)
    broken = impairments(lab, running_nodes(lab), time.time())
    holder = next((node for ip in target.addresses for node in answers.get(ip, ())), "")
    node = _node(lab, request.node or sender.node or target.node or holder)
    known = msgspec.structs.replace(
        _known(lab, cluster, sender), beyond=tuple(_beyond(lab)), impairments=broken, answering=answers, whole=True
    )
    path = travel_into(
        known,
        msgspec.structs.replace(request, node=node.name),
        lambda addresses: _look_into_pods(lab, known, addresses),
    )
    inputs, host = _plan_inputs(lab, cluster, node)
    names = AddressNames(cluster.snapshot, known.others)
    path = answer(
        question(places, sender, target, spec, inputs, host, request.iif or None),
        inputs,
        host,
        others=known.others,
        live_rules=lambda family: _rules(lab.mode, family, node.namespace),
        live_route=lambda ip: route_text(next_hop(ip, node.namespace), names),
        announcers=announcers(cluster.snapshot, statuses) if lab.balancing else None,
        path=path,
    )
    views = {view.name: view for view in (*known.views, *known.beyond)}
    return LabTrace(path=path, findings=find(path, views, known.snapshot, broken), node=node.name)


def faults_of(name: str) -> tuple[str, ...]:
    """Return what is broken in a lab, each in one line. Raises TraceError."""
    lab = running_lab(name)
    return tuple(dict.fromkeys(each.text for each in impairments(lab, running_nodes(lab), time.time())))


def running_nodes(lab: LabState) -> frozenset[str]:
    """Return the names of the nodes whose process runs."""
    return frozenset(each.node for each in lab.processes if is_alive(each.process))


def _plan_inputs(lab: LabState, cluster: ClusterObjects, node: LabNode) -> tuple[NodeInputs, Host]:
    inputs = node_inputs(cluster, node_options_of(lab.name, node.name))
    with in_namespace(node.namespace):
        own = tuple(each.address for each in own_addresses())
    return inputs, Host(addresses=tuple(ip for ip in own if not contains(family_of(ip).loopback, ip)))


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
    """Return the lab's current objects, also while its API server is away. Raises TraceError."""
    try:
        found = labs.request(lab.name, {"objects": True})
    except LabError as error:
        raise TraceError(str(error)) from error
    return ClusterObjects(snapshot=snapshot_of(found["objects"]))


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
    names[API_ADDRESS] = AddressName("API server", "")
    names |= dict.fromkeys(INGRESS_ADDRESSES, AddressName("load balancer for Ingresses", ""))
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


_OF_A_POD = (
    "net/links.json", "net/addresses.json", "net/routes-4.json", "net/routes-6.json", "net/listeners.txt",
    "rules/iptables-nft.txt", "rules/ip6tables-nft.txt", "rules/nft.txt", "net/policies-4.json", "net/policies-6.json",
    "net/sysctls.txt",
)  # fmt: skip
_NOT_OF_A_POD = frozenset({CNI_FILE, *(part.path for part in PARTS)} - set(_OF_A_POD))
_AT_ONCE = 4
"""Nodes and pods that are read in parallel; most of the time is spent in programs."""


def known_of(name: str) -> KnownCluster:
    """Return the views of all nodes of a lab, and its objects. Raises TraceError."""
    lab = running_lab(name)
    return _known(lab, cluster_of(lab))


def _known(lab: LabState, cluster: ClusterObjects, sender: AddressOwner | None = None) -> KnownCluster:
    return KnownCluster(
        views=_views_of(lab, sender),
        snapshot=cluster.snapshot,
        has_objects=True,
        others=names_of(lab),
        pods=tuple(pods_of(lab)),
        outside=OUTSIDE_ADDRESSES,
    )


def _views_of(lab: LabState, sender: AddressOwner | None) -> tuple[NodeView, ...]:
    """Return the views of all nodes, that of the sender with the sender's own namespace."""
    from narthex.proxy.kernel.dataplanes import DATAPLANES

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        views = {view.name: view for view in pool.map(lambda node: live(node.name, node.namespace), lab.nodes)}
    if DATAPLANES[lab.mode].relays_connections:
        for node in lab.nodes:
            views[node.name].relay = _relay(node.namespace)
    if sender is not None and sender.kind != "node":
        _add_pods(lab, views, sender.addresses)
    return tuple(views.values())


def node_options_of(name: str, node: str) -> NodeOptions:
    """Return the mode and the configuration of a node of a lab. Raises TraceError."""
    lab = running_lab(name)
    file = StateDirectory(lab.name).node(node).configuration
    return NodeOptions(node=node, mode=lab.mode, config_file=file if file.exists() else None)


def _beyond(lab: LabState) -> Iterator[NodeView]:
    """Yield the views of the client outside and of the network between the nodes."""
    yield _view_beyond(OUTSIDE, "", lab.outside)
    yield _view_beyond(FABRIC, "", fabric_namespace(lab.name))


def _view_beyond(name: str, node: str, namespace: str) -> NodeView:
    """Return the view of a namespace that is no node's, without the rules of faults: these are known as impairments."""
    gathered = gather(name, namespace, without=_NOT_OF_A_POD)
    rules = gathered.parts.get("rules/nft.txt", "")
    parts = {**gathered.parts, "rules/nft.txt": _FAULT_RULES.sub("", rules)}
    view = view_of_bundle(parts, gathered.table, "live")
    view.on = node
    return view


_FAULT_RULES = re.compile(rf"^table inet {TABLE} \{{$.*?^\}}$", re.MULTILINE | re.DOTALL)


def _relay(namespace: str) -> RelayEndpoints:
    """Return the table of the relay in a node's namespace."""
    endpoints: dict[tuple[IPFamily, str, int], tuple[tuple[str, int], ...]] = {}
    mark = 0
    for family in FAMILIES:
        rules = _rules("userspace", family, namespace)
        if rules is not None:
            mark = rules.mark
            for (protocol, port), listener in rules.listeners.items():
                endpoints[family, protocol.lower, port] = listener.endpoints
    return RelayEndpoints(endpoints=endpoints, mark=mark)


def _look_into_pods(lab: LabState, known: KnownCluster, addresses: Sequence[str]) -> bool:
    """Add the namespaces of the pods with these addresses to the views of their nodes; return True if there is one."""
    return _add_pods(lab, {view.name: view for view in known.views}, addresses)


def _add_pods(lab: LabState, views: Mapping[str, NodeView], addresses: Sequence[str]) -> bool:
    """Add the views of pods to those of their nodes. A pod that shares its node's namespace has none of its own."""
    added = [
        pod
        for pod in lab.pods
        if set(addresses) & set(pod.addresses)
        and pod.network_namespace
        and pod.node in views
        and not set(pod.addresses) & set(views[pod.node].own_addresses())
    ]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for pod, seen in zip(added, pool.map(_view_of_pod, added), strict=True):
            if seen is not None:
                views[pod.node].pods = {**views[pod.node].pods, seen.name: seen}
    return bool(added)


def _view_of_pod(pod: PodRecord) -> NodeView | None:
    """Return the view of a pod; None if it was deleted in the meantime."""
    with suppress(FileNotFoundError):
        return _view_beyond(f"{pod.namespace}/{pod.name}", pod.node, pod.network_namespace)
    return None


def namespace_of_node(name: str, node: str) -> str:
    """Return the network namespace of a node, or of the only one if no name is given. Raises TraceError."""
    lab = running_lab(name)
    if not node and len(lab.nodes) > 1:
        raise TraceError(f"which node of lab {name}? Choose one with --node: {', '.join(n.name for n in lab.nodes)}")
    return _node(lab, node).namespace


def namespace_of(name: str, what: str) -> str:
    """Return the network namespace of a node by its name, or of the owner of an address. Raises TraceError."""
    lab = running_lab(name)
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


def running_lab(name: str) -> LabState:
    """Return the state of a running lab. Raises TraceError if there is none."""
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
