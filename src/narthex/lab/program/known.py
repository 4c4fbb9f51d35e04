"""What a running lab's nodes have at this moment, for following a packet over them."""

from __future__ import annotations

from narthex.lab.program.labs import Lab, open_lab
from narthex.lab.program.state import LabError
from narthex.lab.program.trace import cluster_of, names_of, pods_of
from narthex.lab.topology import OUTSIDE_ADDRESSES
from narthex.trace.follow.views import NodeView
from narthex.trace.model import PacketPath
from narthex.trace.node.layout import CNI_FILE, PARTS
from narthex.trace.node.view import view_of_bundle
from narthex.trace.program.gather import gather
from narthex.trace.program.known import Known, live
from narthex.trace.program.places import TraceError

_OF_A_POD = ("net/links.json", "net/addresses.json", "net/routes-4.json", "net/routes-6.json", "net/listeners.txt")
_NOT_OF_A_POD = frozenset({CNI_FILE, *(part.path for part in PARTS)} - set(_OF_A_POD))
_MOST_PODS = 8


def known_of(name: str) -> Known:
    """All nodes of a lab. Raises TraceError, InputError."""
    lab = _open(name)
    return Known(
        views=tuple(live(node.name, node.namespace) for node in lab.nodes),
        snapshot=cluster_of(lab).snapshot,
        has_objects=True,
        others=names_of(lab),
        pods=tuple(pods_of(lab)),
        outside=OUTSIDE_ADDRESSES,
    )


def look_into_pods(name: str, known: Known, journey: PacketPath) -> None:
    """Add to the nodes what the pods at the journey's ends tell: their routes, and who listens there."""
    ends = [journey.packet.source, *(leaf.end.address for leaf in journey.leaves())]
    wanted = set(list(dict.fromkeys(ends))[: _MOST_PODS + 1])
    views = {view.name: view for view in known.views}
    for pod in _open(name).pods:
        if wanted & set(pod.addresses) and pod.network_namespace and pod.node in views:
            view = views[pod.node]
            key = f"{pod.namespace}/{pod.name}"
            try:
                view.pods = {**view.pods, key: _pod(key, pod.network_namespace)}
            except FileNotFoundError:
                continue  # it has gone meanwhile


def namespace_of(name: str, what: str) -> str:
    """The network namespace of a node, by its name, or of whoever in the lab has an address. Raises TraceError."""
    lab = _open(name)
    for node in lab.nodes:
        if what == node.name or what in node.addresses:
            return node.namespace
    for pod in lab.pods:
        if what in pod.addresses and pod.network_namespace:
            return pod.network_namespace
    if what in OUTSIDE_ADDRESSES:
        return lab.outside
    raise TraceError(f"the probe: nobody in lab {name} has {what}, so no packet can be sent from there")


def _pod(name: str, namespace: str) -> NodeView:
    gathered = gather(name, namespace, without=_NOT_OF_A_POD)
    return view_of_bundle(gathered.parts, gathered.table, "live")


def _open(name: str) -> Lab:
    try:
        return open_lab(name)
    except LabError as error:
        raise TraceError(str(error)) from error
