"""Causes in the Service proxies of a node: none, two, outdated rules, or rules of other programs before theirs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from fractions import Fraction

from narthex.model import Disposition, Host, Packet, contains, family_of, join_port
from narthex.netfilter.ast import Table
from narthex.netfilter.walk.walk import walk
from narthex.proxy.plan.ir import Match
from narthex.trace.causes.catalogue import CauseFinding
from narthex.trace.causes.scene import EXTERNAL_IP, NODE_PORT, DiagnosisContext, TargetService, finding, rule_text
from narthex.trace.follow.views import NodeView
from narthex.trace.model import Fate, PathLeaf, Stage
from narthex.trace.names import service_of_chain
from narthex.trace.reports.frontend_walk import frontends

OUR_TABLE, KUBE_PROXY_TABLE = "narthex", "kube-proxy"
PROXY_TABLES = (OUR_TABLE, KUBE_PROXY_TABLE)
XTABLES = ("raw", "mangle", "nat", "filter", "security")
MASQUERADE_BIT = 0x4000
_MARKS = re.compile(r"\bset mark (?:bits (?P<bits>0x[0-9a-f]+)|& (?P<mask>0x[0-9a-f]+) to (?P<value>0x[0-9a-f]+))")
"""A statement that writes the mark."""
_PROXY_CHAINS = ("KUBE-", "narthex")


def of_proxies(scene: DiagnosisContext) -> Iterator[CauseFinding]:
    """Find what is wrong with the Service rules themselves."""
    yield from _two_proxies(scene)
    yield from _two_iptables(scene)
    yield from _in_the_way(scene)
    yield from _marks(scene)
    yield from _gone(scene)
    yield from _not_served(scene)


def proxies(scene: DiagnosisContext, view: NodeView) -> dict[str, str]:
    """Return the Service proxies that have programmed a node, each with its evidence."""
    found: dict[str, str] = {}
    for table in scene.tables(view):
        # A fragment may be of another node, or an example of a document.
        if table.name == "nat" and not table.partial and any(name.startswith("KUBE-SVC-") for name in table.chains):
            number = sum(name.startswith("KUBE-SVC-") for name in table.chains)
            found["iptables mode"] = f"table nat has chain KUBE-SERVICES and {number} chains KUBE-SVC-…"
        if table.name == "nat" and any(table.chains[name].rules for name in table.chains if "KUBE-PORTALS" in name):
            found["userspace mode"] = "table nat has rules in KUBE-PORTALS-…"
        if table.name in PROXY_TABLES and any(each.elements for each in table.sets.values() if each.data):
            who = "kube-proxy in nftables mode" if table.name == KUBE_PROXY_TABLE else "Narthex in nftables mode"
            found[who] = f"table {table.name} has a map of Services"
    rules = scene.rules(view)
    if rules is not None and rules.objects.servers:
        found["IPVS mode"] = f"IPVS has {len(rules.objects.servers)} virtual servers"
    return found


def _two_proxies(scene: DiagnosisContext) -> Iterator[CauseFinding]:
    for name, view in scene.visited():
        found = proxies(scene, view)
        if len(found) > 1:
            yield finding(
                "two-proxies",
                f"{len(found)} Service proxies have rules on node {name or '(this one)'}: {', '.join(found)}; the one whose "
                "hook runs first decides, and its rules may be outdated",
                evidence=tuple(found.values()),
                advice="Keep one. Remove the rules of the others with `narthex cleanup --proxy-mode MODE` or "
                "`kube-proxy --cleanup`.",
                node=name,
                certain=bool(scene.failing or _to_gone(scene)),
                explains=bool(scene.failing or _to_gone(scene)),
            )


def _two_iptables(scene: DiagnosisContext) -> Iterator[CauseFinding]:
    for name, view in scene.visited():
        held = Counter(table.name for table in scene.tables(view) if table.name in XTABLES and _holds_rules(table))
        twice = sorted(table for table, count in held.items() if count > 1)
        if twice:
            yield finding(
                "two-iptables",
                f"iptables-legacy and iptables-nft both have rules on node {name or '(this one)'}; neither shows the "
                "rules of the other, and a packet has to pass both",
                evidence=tuple(f"table {table} has rules in both" for table in twice),
                advice="See both: `iptables-legacy-save` and `iptables-nft-save`. Let all programs of the node use one "
                "(`update-alternatives --set iptables …`), and remove what is left in the other.",
                node=name,
                certain=bool(scene.failing),
                explains=bool(scene.failing),
            )


def _holds_rules(table: Table) -> bool:
    return any(
        chain.rules or (chain.hook is not None and chain.hook.policy == "drop") for chain in table.chains.values()
    )


# ---- others' rules in front ----------------------------------------------------------------------------------------


def is_proxys(table: str, chain: str) -> bool:
    """Return True if the chain belongs to a Service proxy."""
    return table in PROXY_TABLES or chain.startswith(_PROXY_CHAINS)


def _in_the_way(scene: DiagnosisContext) -> Iterator[CauseFinding]:
    front = scene.front
    for leaf in scene.leaves:
        step = scene.rewritten(leaf)
        if step is None or is_proxys(step.table, step.chain) or not step.chain:
            continue
        service = str(front.service.key) if front else scene.path.service or _shadowed(scene)
        if not service:
            return
        yield finding(
            "rule-in-the-way",
            f"a rule of chain {step.chain} rewrites the packet ({step.verdict}) before the rules of Service {service} see it",
            evidence=(rule_text(step),),
            advice="Find out which program made the rule (usually its comment or chain shows that), and narrow it, so that it leaves the "
            "Services' addresses alone.",
            node=step.node,
            explains=front is not None or scene.undecided,
        )
        return


def _shadowed(scene: DiagnosisContext) -> str:
    """Return the Service whose frontend the rules have at the packet's destination, by its chain; empty if there is none."""
    rules, view = scene.rules(), scene.view
    if rules is None or view is None:
        return ""
    packet = scene.packet
    own = view.own_addresses()
    found = frontends(rules, scene.family, own)
    keys: list[Match] = [(packet.destination, scene.protocol, packet.port)]
    if packet.destination in own or view.addresses is None:
        keys.append((None, scene.protocol, packet.port))
    origin = next((found[key][0] for key in keys if key in found), None)
    return (service_of_chain(origin.leads) or origin.leads) if origin is not None else ""


def _marks(scene: DiagnosisContext) -> Iterator[CauseFinding]:
    for leaf in scene.leaves:
        by_proxy = False
        for step in leaf.steps:
            written = _masquerade_bit(f"{step.what} {step.verdict}") if step.chain else None
            if written is None:
                continue
            if is_proxys(step.table, step.chain):
                by_proxy = written
                continue
            if written is by_proxy or (written and not leaf.end.masqueraded):
                continue
            # Without the proxy's mark, the reply takes another path; a mark too many only hides the sender.
            cleared = by_proxy and not leaf.end.masqueraded
            yield finding(
                "mark-clash",
                f"chain {step.chain} writes bit {MASQUERADE_BIT:#x} of the packet mark, by which the Service proxy remembers "
                "what it has to masquerade",
                evidence=(rule_text(step),),
                advice="Give that program other bits, or the proxy another one (iptables.masqueradeBit of its configuration).",
                node=step.node,
                certain=cleared or scene.undecided,
                explains=cleared or scene.undecided,
            )
            return
    yield from _mark_routes(scene)


def _masquerade_bit(text: str) -> bool | None:
    """Return the value that a statement gives the bit by which the proxy masquerades; None if it leaves the bit alone."""
    match = _MARKS.search(text)
    if match is None:
        return None
    value = int(match["bits"] or match["value"], 16)
    mask = value if match["bits"] else int(match["mask"], 16)
    return bool(value & MASQUERADE_BIT) if mask & MASQUERADE_BIT else None


def _mark_routes(scene: DiagnosisContext) -> Iterator[CauseFinding]:
    for name, view in scene.visited():
        for policy in view.policies or ():
            # A packet that only the proxy has marked has this bit alone.
            if policy.family is not scene.family or not policy.mark or MASQUERADE_BIT & policy.mask != policy.mark:
                continue
            yield finding(
                "mark-clash",
                f"a policy rule of node {name or '(this one)'} routes packets with mark {policy.mark:#x}, and the Service proxy "
                f"marks with {MASQUERADE_BIT:#x} what it will masquerade",
                evidence=(policy.text or f"{policy.priority}: fwmark {policy.mark:#x}/{policy.mask:#x}",),
                advice="Give that rule a mask without the proxy's bit, or the proxy another bit.",
                node=name,
                certain=bool(scene.failing),
                explains=bool(scene.failing),
            )
            return


# ---- rules behind the cluster --------------------------------------------------------------------------------------


def _to_gone(scene: DiagnosisContext) -> list[tuple[str, int]]:
    """Return destinations of the rules that are no longer endpoints of the Service."""
    front = scene.front
    if front is None or front.port is None or not scene.endpoints:
        return []
    known = {(each.endpoint.address, each.port.port) for each in scene.endpoints if each.port is not None}
    gone: dict[tuple[str, int], None] = {}
    for leaf in scene.leaves:
        step = scene.rewritten(leaf)
        to = scene.sent_to(leaf)
        # The relay of userspace mode is the node's own, and so is not among the endpoints.
        if to is None or to in known or any(view.own(to[0]) for view in scene.views.values()):
            continue
        if step is not None and is_proxys(step.table, step.chain):
            gone[to] = None
    return list(gone)


def _gone(scene: DiagnosisContext) -> Iterator[CauseFinding]:
    gone = _to_gone(scene)
    front = scene.front
    if not gone or front is None:
        return
    share = sum((leaf.probability for leaf in scene.leaves if scene.sent_to(leaf) in gone), Fraction(0))
    names = ", ".join(join_port(*to) for to in gone[:3])
    yield finding(
        "stale-endpoint",
        f"the rules of {scene.node_words} send {float(share):.0%} of the connections for {front.name} to {names}, which "
        "it has no longer",
        evidence=(
            f"endpoints now: {', '.join(sorted(each.endpoint.address for each in scene.endpoints)[:6]) or 'none'}",
        ),
        advice="See whether the node's proxy runs and reaches the API server, and what it logs: its rules are behind.",
        node=scene.node,
    )


def _not_served(scene: DiagnosisContext) -> Iterator[CauseFinding]:
    """Find out why the node's rules send the packet to no endpoint although the Service has some."""
    front, view = scene.front, scene.view
    if front is None or view is None or not _is_unserved(scene, front, view):
        return
    found = proxies(scene, view)
    if not found:
        yield from _no_proxy(scene)
    elif front.kind == NODE_PORT:
        yield from _node_port(scene)
    else:
        yield from _stale_rules(scene, front, found)


def _is_unserved(scene: DiagnosisContext, front: TargetService, view: NodeView) -> bool:
    """Return True if usable endpoints exist, and no rule of the node rewrites the packet."""
    if front.port is None or not scene.usable or scene.explained or not scene.tables(view):
        return False
    if any(scene.rewritten(leaf) is not None or _by_ipvs(leaf) for leaf in scene.leaves):
        return False
    if front.local and not any(each.endpoint.node_name == scene.node for each in scene.usable):
        return False
    if any(leaf.end.fate is Fate.UNKNOWN for leaf in scene.leaves):
        return False
    # A DNS cache on the node has its Service's address itself, and no rule is involved.
    return not (front.kind != NODE_PORT and view.own(scene.packet.destination) and not scene.failing)


def _no_proxy(scene: DiagnosisContext) -> Iterator[CauseFinding]:
    if any(leaf.end.fate is not Fate.LOST for leaf in scene.failing):
        return
    yield finding(
        "no-proxy",
        f"{scene.node_words} has no rules for Services at all",
        evidence=("no KUBE-SVC-… chain, no table kube-proxy or narthex, no IPVS virtual server",),
        advice="Start the node's proxy (kube-proxy, or `narthex node`), or see why it ended.",
        node=scene.node,
    )


def _stale_rules(scene: DiagnosisContext, front: TargetService, found: Mapping[str, str]) -> Iterator[CauseFinding]:
    rejected = [leaf for leaf in scene.failing if _refused_by_proxy(scene, leaf)]
    if scene.failing and not rejected:
        # Another program drops the packet.
        return
    effect = "refuse it" if rejected else "do not know it"
    step = scene.last_rule(rejected[0]) if rejected else None
    yield finding(
        "stale-rules",
        f"{front.name} has {len(scene.usable)} endpoints that are ready, and yet the rules of {scene.node_words} {effect}",
        evidence=(*((rule_text(step),) if step else ()), *(f"{who}: {what}" for who, what in found.items())),
        advice="See whether the node's proxy runs and reaches the API server, and what it logs. It writes all rules again "
        "when it is started anew.",
        node=scene.node,
        # Its feature gates may have it leave external IPs alone.
        certain=front.kind != EXTERNAL_IP,
    )


def _by_ipvs(leaf: PathLeaf) -> bool:
    return any(step.stage is Stage.IPVS for step in leaf.steps)


def _refused_by_proxy(scene: DiagnosisContext, leaf: PathLeaf) -> bool:
    if leaf.steps and leaf.steps[-1].stage is Stage.IPVS:
        return True
    step = scene.last_rule(leaf)
    return step is not None and is_proxys(step.table, step.chain)


def _node_port(scene: DiagnosisContext) -> Iterator[CauseFinding]:
    front, view = scene.front, scene.view
    assert front is not None
    assert view is not None
    if scene.failing and not any(_refused_by_proxy(scene, leaf) for leaf in scene.failing):
        return
    packet = scene.packet
    if contains(scene.family.loopback, packet.destination):
        localnet = "net.ipv4.conf.all.route_localnet"
        yield finding(
            "localhost-node-port",
            f"node port {packet.port} of {front.name} is not open on {packet.destination}",
            evidence=(f"{localnet} = {view.sysctl(localnet)}",) if view.sysctl(localnet) is not None else (),
            advice="Ask an address of the node instead. Only kube-proxy's iptables mode, and Narthex's, can open node ports "
            "on localhost with rules, for IPv4 (iptables.localhostNodePorts); in nftables mode, a relay does so, behind "
            "the gate KubeProxyNFTablesLocalhostNodePorts (1.37).",
            node=scene.node,
        )
        return
    served = _served_at(scene, view)
    if served:
        yield finding(
            "node-port-address",
            f"node port {packet.port} of {front.name} is open on {', '.join(served)} and not on {packet.destination}",
            evidence=(f"addresses of {scene.node_words}: {', '.join(_own(scene, view))}",),
            advice="Ask one of the addresses that are open, or widen nodePortAddresses of the proxy's configuration "
            "(nftables mode opens the node's primary address alone by default).",
            node=scene.node,
        )
        return
    yield finding(
        "stale-rules",
        f"{front.name} has endpoints that are ready, and yet its node port {packet.port} is open nowhere on {scene.node_words}",
        evidence=tuple(f"{who}: {what}" for who, what in proxies(scene, view).items()),
        advice="See whether the node's proxy runs and reaches the API server, and what it logs.",
        node=scene.node,
    )


def _own(scene: DiagnosisContext, view: NodeView) -> list[str]:
    own = (each.address for each in view.addresses or () if family_of(each.address) is scene.family)
    return [address for address in own if not contains(scene.family.loopback, address)]


def _served_at(scene: DiagnosisContext, view: NodeView) -> list[str]:
    """Return other addresses of the node on which its rules accept the same port."""
    rules = scene.rules(view)
    own = _own(scene, view)
    if rules is None:
        return []
    served = []
    asked = scene.packet
    for address in own:
        packet = Packet(
            source=asked.source, destination=address, port=asked.port, protocol=scene.protocol, iif=asked.iif
        )
        ends = walk(rules.assumed, packet, Host(addresses=tuple(own)), objects=rules.objects).outcomes
        if address != scene.packet.destination and any(end.disposition is Disposition.DELIVERED for end in ends):
            served.append(address)
    return served
