"""Causes in the state that the node keeps: connections, and clients with session affinity."""

from __future__ import annotations

from collections.abc import Iterator

from narthex.model import Protocol, join_port
from narthex.trace.causes.catalogue import CauseFinding
from narthex.trace.causes.scene import DiagnosisContext, finding, node_words
from narthex.trace.follow.views import NodeView, TrackedConnection

_COUNT, _MOST = "net.netfilter.nf_conntrack_count", "net.netfilter.nf_conntrack_max"
_NEARLY = 0.95


def of_memory(scene: DiagnosisContext) -> Iterator[CauseFinding]:
    """Find state of earlier packets that decides about this one."""
    for name, view in scene.visited():
        yield from _full(name, view)
        yield from _old(scene, name, view)
    yield from _pinned(scene)


def _full(name: str, view: NodeView) -> Iterator[CauseFinding]:
    count, most = view.sysctl(_COUNT), view.sysctl(_MOST) or view.sysctl("net.nf_conntrack_max")
    if not count or not most or not count.isdigit() or not most.isdigit() or int(most) == 0:
        return
    if int(count) < int(most) * _NEARLY:
        return
    full = int(count) >= int(most)
    yield finding(
        "conntrack-full",
        f"the connection table of {node_words(name)} is {'full' if full else 'nearly full'}: "
        f"{count} of {most} entries; what is new is dropped",
        evidence=(f"{_COUNT} = {count}", f"{_MOST} = {most}"),
        advice=f"Raise {_MOST} (kube-proxy's conntrack.maxPerCore sets it), and see who opens so many: `conntrack -L | "
        "awk '{print $5}' | sort | uniq -c | sort -n | tail`.",
        node=name,
        certain=full,
        explains=full,
    )


def _old(scene: DiagnosisContext, name: str, view: NodeView) -> Iterator[CauseFinding]:
    """Datagrams of a known flow follow its conntrack entry, whatever the rules say now."""
    packet = scene.packet
    if view.connections is None or scene.protocol is not Protocol.UDP:
        return
    alive = {(each.endpoint.address, each.port.port) for each in scene.endpoints if each.port is not None}
    asked = packet.destination, packet.port
    is_new = packet.source_port is None
    if is_new or scene.front is None:
        # Where the rules send a new flow, an entry of another one is not old.
        alive |= {to for leaf in scene.leaves if (to := scene.sent_to(leaf)) is not None}
    if not alive:
        return
    if is_new and all(name != step.node for leaf in scene.leaves if (step := scene.rewritten(leaf)) is not None):
        # This node only passes the packet on.
        alive.add(asked)
    for entry in scene.known_connections(view):
        if packet.source_port not in (None, entry.source_port):
            continue
        to = entry.reply_source, entry.reply_source_port
        if to in alive:
            continue
        yield _stale(scene, name, entry, to)
        return


def _stale(scene: DiagnosisContext, name: str, entry: TrackedConnection, to: tuple[str, int]) -> CauseFinding:
    kept = to == (scene.packet.destination, scene.packet.port)
    where = (
        "it is sent on unchanged, from before there were rules for it" if kept else f"{join_port(*to)}, which is gone"
    )
    return finding(
        "conntrack-stale",
        f"{node_words(name)} remembers the flow from {entry.source} port {entry.source_port}: {where}. "
        "As long as datagrams keep coming, no rule is asked",
        evidence=(entry.text or f"udp {entry.source}:{entry.source_port} -> {entry.destination}:{entry.port}",),
        advice=f"`conntrack -D -p udp --orig-dst {entry.destination}`, and see why the proxy did not remove the entry.",
        node=name,
        certain=bool(scene.packet.source_port is not None or "UNREPLIED" in entry.flags),
    )


def _pinned(scene: DiagnosisContext) -> Iterator[CauseFinding]:
    """Session affinity keeps the client at a dead endpoint while others are healthy.

    No dump has complete affinity lists; the client's connections show the endpoint.
    """
    front, view = scene.front, scene.view
    if front is None or not front.service.affinity_seconds or view is None or view.connections is None:
        return
    alive = {each.endpoint.address for each in scene.usable}
    lost = {scene.sent_to(leaf) for leaf in scene.failing}
    well = [leaf for leaf in scene.leaves if leaf not in scene.failing and scene.place_of(leaf)[0] in alive]
    known = scene.known_connections(view)
    places = {(each.reply_source, each.reply_source_port) for each in known}
    if len(places) != 1 or not well:
        return
    to = places.pop()
    if to[0] in alive and to not in lost:
        return
    yield finding(
        "affinity-dead-pod",
        f"{front.name} has session affinity: {scene.node_words} keeps {scene.packet.source} at {join_port(*to)}, which is dead, "
        f"for {front.service.affinity_seconds} s after each try",
        evidence=(
            f"{front.name}: sessionAffinity ClientIP, {front.service.affinity_seconds} s",
            *(each.text for each in known[:3]),
        ),
        advice="Delete the dead pod, or let its readiness probe find out sooner: the proxy forgets clients of an endpoint that "
        "is no longer ready.",
        node=scene.node,
    )
