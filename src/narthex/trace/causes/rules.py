"""Causes of refusals that the rules of a Service proxy name themselves, for a path without the cluster's objects.

kube-proxy writes the Service port into comments (iptables mode) and into chain names and comments of map elements (nftables
mode). The chain that refuses a packet says why.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from narthex.model import join_port
from narthex.netfilter.ast import Goto, Jump
from narthex.trace.causes.catalogue import CauseFinding
from narthex.trace.causes.proxies import PROXY_TABLES, is_proxys
from narthex.trace.causes.scene import DiagnosisContext, finding, rule_text
from narthex.trace.model import Fate, PathLeaf, PathStep
from narthex.trace.names import service_of_chain

_COMMENTS = {"no local endpoints": "local-policy", "no endpoints": "no-endpoints"}
"""Words of the comments of kube-proxy's rules, by the cause that they state. Some tools do not print comments."""
_WITHOUT_ENDPOINTS = ("no-endpoints", "local-policy")
_REFUSING = {
    "KUBE-SERVICES": _WITHOUT_ENDPOINTS,
    "KUBE-EXTERNAL-SERVICES": _WITHOUT_ENDPOINTS,
    "KUBE-NODEPORTS": _WITHOUT_ENDPOINTS,
    "KUBE-PROXY-FIREWALL": ("", "source-range"),
    "service-endpoints-check": _WITHOUT_ENDPOINTS,
    "nodeport-endpoints-check": _WITHOUT_ENDPOINTS,
    "cluster-ips-check": ("port-not-served", "no-such-service"),
}
"""Chains of Service proxies that only refuse, each with the cause that a rejection has, and a drop."""
_OF_SOURCE_RANGES = ("KUBE-FW-", "firewall-")
_LET_IN = re.compile(r"(?:jump|goto) KUBE-(?:EXT|XLB|SVC)-")
_SERVICE_TABLES = ("filter", *PROXY_TABLES)
_SERVED_PORTS = 8
"""Ports in the evidence at most."""


def of_rules(scene: DiagnosisContext) -> Iterator[CauseFinding]:
    """Find why the Service proxy's own rules refuse the packet."""
    for leaf in scene.failing:
        step = scene.last_rule(leaf)
        if step is None or not is_proxys(step.table, step.chain):
            continue
        cause, step = _stated(leaf, step)
        if cause:
            yield _found(scene, cause, step)
            return


def _stated(leaf: PathLeaf, last: PathStep) -> tuple[str, PathStep]:
    """Return the cause that a rule states, and the step of this rule; an empty cause if none does."""
    for step in reversed(leaf.steps):
        if not is_proxys(step.table, step.chain):
            continue
        cause = next((cause for words, cause in _COMMENTS.items() if words in step.why), "")
        if not cause and step.chain.startswith(_OF_SOURCE_RANGES):
            cause = "source-range"
        if not cause and step.chain in _REFUSING and step.table in _SERVICE_TABLES:
            cause = _REFUSING[step.chain][leaf.end.fate is Fate.DROPPED]
            if step.chain == "KUBE-PROXY-FIREWALL" and _let_in(leaf):
                # This chain drops whatever has no endpoint, and comes before the chain that drops it for that reason.
                cause = "local-policy"
        if cause:
            return cause, step
    return "", last


def _let_in(leaf: PathLeaf) -> bool:
    """Return True if the source ranges let the sender in."""
    return any(step.chain.startswith("KUBE-FW-") and _LET_IN.search(step.what) for step in leaf.steps)


def _found(scene: DiagnosisContext, cause: str, step: PathStep) -> CauseFinding:
    packet, rules = scene.packet, f"the rules of {scene.node_words}"
    service = scene.path.service or join_port(packet.destination, packet.port)
    owner, ports = _served(scene)
    owner = f"Service {owner} ({packet.destination})" if owner else packet.destination
    sentences = {
        "no-endpoints": f"{rules} say that {service} has no endpoints",
        "local-policy": f"{rules} say that {service} has no endpoint on it, and its policy is Local",
        "source-range": f"{rules} drop {packet.source} because of {service}'s source ranges",
        "port-not-served": f"{rules} say that {owner} has no port {packet.port}/{packet.protocol}",
        "no-such-service": f"{rules} say that no Service has the address {packet.destination}, which is of the range that "
        "Services get theirs from",
    }
    advice = {
        "source-range": "Add the sender's network to the Service's loadBalancerSourceRanges. The address that counts is the one "
        "that the node sees.",
        "port-not-served": "Ask for one of the Service's ports (its port, not the pods' targetPort), or add this one to it.",
        "no-such-service": "Ask for the Service by its name: a Service that is deleted and created again gets another address.",
    }
    evidence = [rule_text(step)]
    if cause == "port-not-served" and ports:
        evidence.append(f"ports that the rules serve at {packet.destination}: {', '.join(ports[:_SERVED_PORTS])}")
    return finding(
        cause,
        sentences[cause],
        evidence=tuple(evidence),
        advice=advice.get(
            cause,
            "See why with the cluster's objects: give a kubeconfig or manifests, or look at `kubectl get endpointslices` and "
            "the pods' readiness.",
        ),
        certain=_complete(scene),
        node=scene.node,
    )


def _complete(scene: DiagnosisContext) -> bool:
    """Return True if nothing is known to be missing from the rules."""
    rules = scene.rules()
    return rules is not None and not rules.gaps and not rules.unread


def _served(scene: DiagnosisContext) -> tuple[str, list[str]]:
    """Return the Service that has the destination address, by kube-proxy's maps of nftables, and its ports."""
    address = scene.packet.destination
    name, ports = "", set()
    for table in scene.tables():
        for part in ("service-ips", "no-endpoint-services"):
            held = table.sets.get(part)
            for key, data in held.elements.items() if held is not None else ():
                if len(key) == 3 and key[0] == address:
                    chain = data.chain if isinstance(data, (Goto, Jump)) else ""
                    port = service_of_chain(chain) or held.comments.get(key, "") if held is not None else ""
                    name = name or port.partition(":")[0]
                    ports.add((str(key[1]), int(key[2]), port.partition(":")[2]))
    return name, [
        f"{number}/{protocol}" + (f" ({label})" if label else "") for protocol, number, label in sorted(ports)
    ]
