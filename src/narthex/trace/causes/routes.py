"""Causes in a node's settings, links, routes, and neighbours."""

from __future__ import annotations

from collections.abc import Iterator

from narthex.model import IPFamily, contains, family_of, join_port, network
from narthex.trace.causes.catalogue import CauseFinding
from narthex.trace.causes.scene import CLUSTER_IP, DiagnosisContext, finding, node_words, of_reply, step_words
from narthex.trace.follow.routing import RouteDecision, RouteQuery, forwards, look_up
from narthex.trace.follow.views import ClusterMap, NextHop, NodeLink, NodeView
from narthex.trace.model import Fate, PathLeaf, PathStep, Stage

_VXLAN_OVERHEAD = {IPFamily.IPV4: 50, IPFamily.IPV6: 70}
_FORBIDS = ("blackhole", "unreachable", "prohibit", "policy rule says")
_FAILED = ("FAILED", "INCOMPLETE")


def of_routes(scene: DiagnosisContext) -> Iterator[CauseFinding]:
    """Find why the packet is lost without a rule."""
    lost = next((leaf for leaf in scene.failing if leaf.end.fate is Fate.LOST), None)
    if lost is not None:
        yield from _lost(scene, lost)
    for reply in [leaf for leaf in scene.lost_replies if leaf.end.fate is Fate.LOST][:1]:
        yield from map(of_reply, _lost(scene, reply))
    for leaf in scene.leaves:
        for node, view in scene.routed(leaf):
            to, _ = scene.place_of(leaf)
            found = look_up(view, RouteQuery(destination=to, source=scene.packet.source)) if view.routes else None
            if found is None or found.kind != "unicast":
                continue
            down = _through_down(view, to)
            if down is not None and down.name not in {hop.link for hop, _ in found.hops}:
                reason = f"{to} is in a network on {down.name}, which is down; the packet leaves by another link"
                yield _link_down(reason, (f"{down.name}: not UP", *found.evidence), node)
                continue
            for hop, _ in found.hops:
                yield from _hop(scene, node, view, found, hop, to)
    yield from _sizes(scene)


def _lost(scene: DiagnosisContext, leaf: PathLeaf) -> Iterator[CauseFinding]:
    step = leaf.steps[-1] if leaf.steps else None
    view = (scene.view_at(step) if step is not None else None) or scene.view
    if step is None or view is None:
        return
    to, _ = scene.place_of(leaf)
    where = step_words(step)
    reason = leaf.end.reason
    if step.stage is Stage.RP_FILTER:
        yield finding(
            "rp-filter",
            f"{where} throws the packet away by its reverse path filter: {reason}",
            evidence=step.evidence,
            advice="Set net.ipv4.conf.all.rp_filter and that of the interface to 2 (loose) or 0, or correct the route back to "
            "the sender.",
            node=leaf.end.node,
        )
    elif step.stage is Stage.NEIGHBOUR:
        found = look_up(view, RouteQuery(destination=to)) if view.routes else RouteDecision(kind="unknown")
        hop = found.hops[0][0] if found.hops else NextHop()
        yield _no_neighbour(where, hop.via or to, hop.link, (*found.evidence, *step.evidence), leaf.end.node)
    elif reason.startswith("the link ") and "down" in reason:
        yield _link_down(reason, step.evidence, leaf.end.node)
    elif step.stage is Stage.ROUTING:
        yield from _no_way(scene, leaf, step, view, where, to)


def _no_way(
    scene: DiagnosisContext, leaf: PathLeaf, step: PathStep, view: NodeView, where: str, to: str
) -> Iterator[CauseFinding]:
    iif = scene.packet.iif or (step.before.iif if step.before else "")
    name = "net.ipv4.ip_forward" if scene.family is IPFamily.IPV4 else "net.ipv6.conf.all.forwarding"
    reason = leaf.end.reason
    if "is loopback" in reason:
        yield finding(
            "localhost-node-port",
            f"{where} does not route packets to or from loopback: {reason}",
            evidence=step.evidence,
            advice="Ask an address of the node instead, or set net.ipv4.conf.all.route_localnet as kube-proxy's iptables mode does.",
            node=leaf.end.node,
        )
    elif name in reason or (
        not step.namespace and "no route" not in reason and forwards(view, scene.family, iif) is False
    ):
        yield finding(
            "ip-forward-off",
            f"{where} passes no packets on: {name} is 0",
            evidence=step.evidence or (f"{name} = {view.sysctl(name) or '0'}",),
            advice=f"`sysctl -w {name}=1`, and see what set it to 0 (a file in /etc/sysctl.d, a network manager).",
            node=leaf.end.node,
        )
    elif any(word in reason for word in _FORBIDS):
        yield finding(
            "route-forbids",
            f"a route of {where} forbids {to}: {reason}",
            evidence=step.evidence,
            advice="Find out who added it (`ip route show table all`); an overlay adds one for addresses of its range that no "
            "node has.",
            node=leaf.end.node,
        )
    elif "no route" in reason and step.namespace and "/" not in step.namespace:
        yield _sender_without_route(scene, step)
    elif "no route" in reason:
        down = _through_down(view, to)
        yield (
            _link_down(f"the route to {to} leaves by {down.name}, which is down", step.evidence, leaf.end.node)
            if down is not None
            else _route_missing(scene, leaf, step, where, to)
        )


def _route_missing(scene: DiagnosisContext, leaf: PathLeaf, step: PathStep, where: str, to: str) -> CauseFinding:
    owner = scene.owner_of(to)
    return finding(
        "route-missing",
        f"{where} has no route to {to}",
        evidence=(*step.evidence, leaf.end.reason, f"Node {owner[0].name} has podCIDR {owner[1]}" if owner else ""),
        advice="The pod's network plugin adds its routes, mostly a default one to the node (`ip route` in the pod): let it make "
        "the pod's network anew by deleting the pod."
        if step.namespace
        else "See the part that adds routes to other nodes' pods (flannel, `narthex node --overlay`, the cloud's route "
        "controller), and that the Node has a podCIDR.",
        node=leaf.end.node,
    )


def _sender_without_route(scene: DiagnosisContext, step: PathStep) -> CauseFinding:
    """Name an address of the Service that a sender outside the cluster can reach."""
    to, front = scene.packet.destination, scene.front
    what = f"{step.namespace} has no route to {to}"
    if front is not None and front.kind == CLUSTER_IP:
        what += f", the cluster IP of {front.name}: only nodes and pods know the way to cluster IPs"
    reachable = tuple(_ways_in(scene))
    advice = (
        f"From {step.namespace}, ask {' or '.join(reachable)}."
        if reachable
        else "Ask from a pod or a node, or make the Service one of type NodePort or LoadBalancer."
    )
    return finding("sender-no-route", what, evidence=(*step.evidence, f"routes of {step.namespace}: none holds {to}"),
                   advice=advice)  # fmt: skip


def _ways_in(scene: DiagnosisContext) -> Iterator[str]:
    """Yield addresses at which a Service is reached from outside: of the load balancer, and node ports."""
    front, cluster = scene.front, scene.cluster
    if front is None or cluster is None or front.port is None:
        return
    balancers = (each.ip for each in front.service.ingress if each.ip and family_of(each.ip) is scene.family)
    for address in balancers:
        yield f"{join_port(address, front.port.port)} (load balancer address)"
    ready = sorted((node for node in cluster.nodes.values() if node.ready), key=lambda node: node.name)
    nodes = (node for node in ready if any(family_of(ip) is scene.family for ip in node.internal_ips))
    node = next(nodes, None)
    if node is not None and front.port.node_port:
        address = next(ip for ip in node.internal_ips if family_of(ip) is scene.family)
        yield f"{join_port(address, front.port.node_port)} (node port of {node.name})"


def _through_down(view: NodeView, to: str) -> NodeLink | None:
    """Return a link that is down and whose network, or route, contains the address."""
    for address in view.addresses or ():
        link = view.link(address.link)
        if link is not None and not link.up and contains(network(f"{address.address}/{address.prefix}"), to):
            return link
    for route in view.routes or ():
        if route.kind == "unicast" and contains(route.destination, to) and not route.destination.endswith("/0"):
            for hop in route.hops:
                link = view.link(hop.link)
                if link is not None and (not link.up or hop.dead):
                    return link
    return None


def _link_down(reason: str, evidence: tuple[str, ...], node: str) -> CauseFinding:
    return finding(
        "link-down", reason, evidence=evidence, advice="`ip link set LINK up`, and see what took it down.", node=node
    )


def _no_neighbour(where: str, address: str, link: str, evidence: tuple[str, ...], node: str) -> CauseFinding:
    return finding(
        "neighbour-missing",
        f"no neighbour of {where} responds for {address}" + (f" on {link}" if link else ""),
        evidence=evidence,
        advice="Is the machine or pod with that address there, on that link, and up? On an overlay the entry is written by its "
        "daemon: see whether it runs on both nodes.",
        node=node,
    )


# ---- what the path takes for good ------------------------------------------------------------------------------


def _hop(
    scene: DiagnosisContext, node: str, view: NodeView, found: RouteDecision, hop: NextHop, to: str
) -> Iterator[CauseFinding]:
    where = node_words(node)
    link = view.link(hop.link)
    if link is None:
        return
    if not link.up:
        yield _link_down(f"{where} sends it by {link.name}, which is down", found.evidence, node)
        return
    target = hop.via or to
    known = ClusterMap.neighbour(view, target, hop.link)
    failed = known is not None and known.state in _FAILED
    unknown = known is None and link.kind == "vxlan" and view.fdb is not None
    if unknown:
        unknown = ClusterMap.forwarding(view, "", link.name) is None
    if view.neighbours is not None and (failed or unknown):
        line = f"{target} dev {hop.link} {known.state}" if known else f"no neighbour {target} on {hop.link}"
        yield _no_neighbour(where, target, hop.link, (*found.evidence, line), node)
        return
    if link.kind == "vxlan" and view.fdb is not None and known is not None and known.mac:
        yield from _overlay(scene, node, view, link, known.mac, target, to)
    elif hop.via:
        yield from _wrong_node(scene, node, hop.via, to, found.evidence)


def _overlay(
    scene: DiagnosisContext, node: str, view: NodeView, link: NodeLink, mac: str, via: str, to: str
) -> Iterator[CauseFinding]:
    entry = ClusterMap.forwarding(view, mac, link.name)
    if entry is None:
        yield finding(
            "fdb-missing",
            f"{link.name} does not know behind which node the next hop is: there is no forwarding entry for {mac}, which is {via}",
            evidence=(f"{via} dev {link.name} lladdr {mac}", f"no fdb entry {mac} dev {link.name}"),
            advice=f"The overlay's daemon writes these entries (`bridge fdb show dev {link.name}`): see whether it runs here and "
            "sees the other node.",
            node=node,
        )
    else:
        yield from _wrong_node(scene, node, entry.remote, to, (f"{mac} dev {link.name} dst {entry.remote}",))


def _wrong_node(
    scene: DiagnosisContext, node: str, via: str, to: str, evidence: tuple[str, ...]
) -> Iterator[CauseFinding]:
    """Find a next hop that is not the node that the endpoint is on."""
    cluster = scene.cluster
    if cluster is None:
        return
    home = scene.owner_of(to)
    if home is not None and home[0].name == node:
        yield finding(
            "route-missing",
            f"{node_words(node)} sends {to}, which is in the range of its own pods, to {via}: it has no route to its pods",
            evidence=(*evidence, f"Node {node}: podCIDRs {', '.join(home[0].pod_cidrs)}"),
            advice="The network plugin adds this route with the bridge, or with each pod's link: see its log, and whether the bridge "
            "still has its address.",
            node=node,
            certain=False,
        )
        return
    leads_to = next((each for each in cluster.nodes.values() if via in (*each.internal_ips, *each.external_ips)), None)
    held = scene.owner_of(to)
    if leads_to is None or held is None or held[0].name in (leads_to.name, node):
        return
    owner = held[0]
    addresses = ", ".join(ip for ip in owner.internal_ips if family_of(ip) is scene.family)
    yield finding(
        "wrong-pod-route",
        f"{node_words(node)} sends {to} to node {leads_to.name} ({via}), but {to} is of node {owner.name}'s pods",
        evidence=(*evidence, f"Node {owner.name}: podCIDRs {', '.join(owner.pod_cidrs)}, InternalIP {addresses}"),
        advice="Correct the route, and see what wrote it: a node that was made anew under its old address often has another "
        "podCIDR than before.",
        node=node,
    )


def _sizes(scene: DiagnosisContext) -> Iterator[CauseFinding]:
    for name, view in scene.visited():
        for link in view.links or ():
            under = view.link(link.vxlan_under) if link.kind == "vxlan" and link.vxlan_under else None
            if under is None or not under.mtu or not link.mtu:
                continue
            room = under.mtu - _VXLAN_OVERHEAD[family_of(link.vxlan_local) if link.vxlan_local else IPFamily.IPV4]
            if link.mtu > room:
                yield finding(
                    "mtu",
                    f"{link.name} lets packets of {link.mtu} bytes in, but with VXLAN's header only {room} fit {under.name}",
                    evidence=(f"{link.name}: mtu {link.mtu}", f"{under.name}: mtu {under.mtu}"),
                    advice=f"Set the MTU of {link.name} and of the pods' links to {room}.",
                    node=name,
                    certain=False,
                    explains=not scene.failing,
                )
    for leaf in scene.failing:
        if leaf.steps and leaf.steps[-1].stage is Stage.MTU:
            yield finding(
                "mtu",
                f"the packet is too large for a link on its path: {leaf.end.reason}",
                evidence=leaf.steps[-1].evidence,
                advice="Give the pods' links the smallest MTU of the path.",
                node=leaf.end.node,
            )
            return
