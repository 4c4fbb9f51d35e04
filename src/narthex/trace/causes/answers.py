"""Causes at the destination: nothing listens, or replies don't return as they must."""

from __future__ import annotations

from collections.abc import Iterator

from narthex.model import contains, family_of, network
from narthex.trace.causes.catalogue import CauseFinding
from narthex.trace.causes.scene import DiagnosisContext, finding, node_words
from narthex.trace.follow.routing import RouteQuery, look_up
from narthex.trace.follow.steps import NOT_UNDONE
from narthex.trace.follow.views import NodeView
from narthex.trace.model import Fate, PathLeaf, tree_leaves

_CALL = "net.bridge.bridge-nf-call-iptables"


def of_answers(scene: DiagnosisContext) -> Iterator[CauseFinding]:
    """Find why a delivered packet gets no reply.

    Yields at most one finding for each cause. Alternatives that are known to get no reply come first.
    """
    seen: set[str] = set()
    for leaf in (*scene.unanswered, *scene.leaves):
        if leaf.end.fate not in (Fate.DELIVERED, Fate.LEAVES) and leaf not in scene.unanswered:
            continue
        for found in (*_deaf(scene, leaf), *_hairpin(scene, leaf), *_bridge(scene, leaf), *_unmasked(scene, leaf)):
            if found.cause.id not in seen:
                seen.add(found.cause.id)
                yield found
            break


def _deaf(scene: DiagnosisContext, leaf: PathLeaf) -> Iterator[CauseFinding]:
    """No socket listens where the packet is delivered, as far as sockets are known there."""
    packet = scene.packet
    if leaf.end.fate is not Fate.DELIVERED or packet.protocol not in ("tcp", "udp"):
        return
    address, port = leaf.end.address, leaf.end.port
    places = [(f"pod {pod.name}", pod) for view in scene.views.values() for pod in view.pods.values()]
    places += [(view.words if view.name else node_words(name), view) for name, view in scene.views.items()]
    if contains(scene.family.loopback, address):
        # Every network namespace has it.
        here = scene.view_at(leaf.steps[-1]) if leaf.steps else None
        places = [each for each in places if each[1] is here]
    held = next(((words, view) for words, view in places if view.own(address) is not None), None)
    if held is None or held[1].listeners is None:
        return
    words, view = held
    same = [each for each in view.listeners or () if each.protocol == packet.protocol and each.port == port]
    if any(each.address in ("", address) and scene.family in each.families for each in same):
        return
    elsewhere = ", ".join(sorted({each.address or "another family" for each in same}))
    ports = sorted({(each.port, each.address) for each in view.listeners or () if each.protocol == packet.protocol})
    only = f", only at {elsewhere}" if elsewhere else ""
    yield finding(
        "not-listening",
        f"the packet arrives at {words}, but no socket listens there on {packet.protocol} port {port}{only}",
        evidence=(
            f"listening {packet.protocol} ports there: {', '.join(_socket_words(*each) for each in ports[:12]) or 'none'}",
        ),
        advice="Let the process listen on that port, at 0.0.0.0 or :: instead of 127.0.0.1, and let the Service's targetPort be "
        "its port.",
        node=leaf.end.node,
    )


def _socket_words(port: int, address: str) -> str:
    return f"{port} (only at {address})" if address else str(port)


def _hairpin(scene: DiagnosisContext, leaf: PathLeaf) -> Iterator[CauseFinding]:
    to, _ = scene.place_of(leaf)
    if leaf.end.masqueraded or scene.sent_to(leaf) is None or to != scene.packet.source or scene.is_own(to):
        return
    elsewhere = _elsewhere(scene, to)
    if elsewhere:
        # The packet of a pod on another node doesn't pass here.
        return
    yield finding(
        "missing-hairpin",
        f"the endpoint is the sender itself ({to}), and {scene.node_words} does not masquerade the packet: the pod would get it "
        "from its own address, and throws it away",
        evidence=(f"source {scene.packet.source}, destination after rewriting {to}, not masqueraded",),
        advice="The proxy masquerades such packets by itself. See whether a rule accepts them in postrouting before the "
        "proxy's, or clears the mark.",
        node=scene.node,
        certain=elsewhere is False,
    )


def _bridge(scene: DiagnosisContext, leaf: PathLeaf) -> Iterator[CauseFinding]:
    """Sender and endpoint are on one bridge, so that the reply doesn't pass the hooks of IP."""
    view = scene.view
    to, _ = scene.place_of(leaf)
    source = scene.packet.source
    if view is None or leaf.end.masqueraded or scene.sent_to(leaf) is None or to == source:
        return
    bridge = _shared_bridge(view, source, to)
    setting = _CALL if family_of(to).value == 4 else _CALL.replace("iptables", "ip6tables")
    if bridge is None or view.sysctl(setting) == "1" or (view.sysctl(setting) is None and view.sysctls is None):
        return
    pod = _pod_with(view, to)
    straight = _goes_straight(pod, source) if pod is not None else None
    if straight is False or (leaf not in scene.unanswered and straight is not True):
        return
    value = view.sysctl(setting)
    yield finding(
        "br-netfilter-off",
        f"{source} and the endpoint {to} are both on {bridge}: the answer goes straight over the bridge, where nothing rewrites "
        "its source back, and the sender does not know it",
        evidence=(
            f"{setting} = {value}" if value is not None else f"{setting} is not there: br_netfilter is not loaded",
            f"{source} and {to} are in one network on {bridge}",
        ),
        advice=f"`modprobe br_netfilter` and `sysctl -w {setting}=1`, also at boot; or let pods reach each other by the node's "
        "routing (throughNode of Narthex's bridge plugin).",
        node=scene.node,
        certain=straight is True,
    )


def _shared_bridge(view: NodeView, one: str, other: str) -> str | None:
    bridges = {link.name for link in view.links or () if link.kind == "bridge"}
    for address in view.addresses or ():
        if address.link in bridges:
            held = network(f"{address.address}/{address.prefix}")
            if contains(held, one) and contains(held, other):
                return address.link
    return None


def _pod_with(view: NodeView, address: str) -> NodeView | None:
    return next((pod for pod in view.pods.values() if pod.own(address) is not None), None)


def _goes_straight(pod: NodeView, to: str) -> bool | None:
    if pod.routes is None:
        return None
    found = look_up(pod, RouteQuery(destination=to))
    return found.kind == "unicast" and not any(hop.via for hop, _ in found.hops)


def _unmasked(scene: DiagnosisContext, leaf: PathLeaf) -> Iterator[CauseFinding]:
    """Find a rewritten packet with its source kept whose reply takes a direct route, not by the node that rewrote it."""
    to = scene.sent_to(leaf)
    if leaf.end.masqueraded or to is None:
        return
    by = scene.rewritten(leaf)
    node = by.node if by is not None else scene.node
    if scene.from_cluster:
        advice = (
            f"Ask the Service's cluster IP, or a node port of the sender's own node. To make {node_words(node)} work too, let the "
            "pods' nodes masquerade what pods send to addresses that are not pods' (ipMasq of the bridge plugin, or ip-masq-agent)."
        )
        found = _avoided(leaf, node)
    else:
        advice = (
            "See whether KUBE-POSTROUTING, or the postrouting chain of the proxy's table, still masquerades what is marked, and "
            "whether a rule before it accepts the packet."
        )
        front = scene.front
        found = front is None or (front.external and not front.local) or leaf in scene.unanswered
        found = found and not scene.is_own(to[0]) and _elsewhere(scene, to[0]) is True
    if found:
        yield finding(
            "missing-masquerade",
            f"{to[0]} sees {scene.packet.source} as the source: it answers without {node_words(node)}, from an address that the "
            "sender has never asked",
            evidence=(f"destination rewritten to {to[0]}, source {scene.packet.source} kept",),
            advice=advice,
            node=node,
        )


def _avoided(leaf: PathLeaf, node: str) -> bool:
    """Return True if the sender does not recognize the reply, which never passes the node."""
    replies = tree_leaves(leaf.end.reply) if leaf.end.reply is not None else ()
    return any(NOT_UNDONE in each.end.reason and all(step.node != node for step in each.steps) for each in replies)


def _elsewhere(scene: DiagnosisContext, address: str) -> bool | None:
    """Return True if an endpoint is on another node than the packet; None if not known."""
    for held in scene.endpoints:
        if held.endpoint.address == address and held.endpoint.node_name:
            return held.endpoint.node_name != scene.node
    owner = scene.owner_of(address)
    return owner[0].name != scene.node if owner else None
