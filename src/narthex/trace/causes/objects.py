"""Causes in the cluster's objects: names, ports, IP families, readiness, policies."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import SequenceMatcher

from narthex.model import Pod, Service, contains, in_any
from narthex.trace.causes.catalogue import CauseFinding
from narthex.trace.causes.rules import of_rules
from narthex.trace.causes.scene import DiagnosisContext, ServiceEndpoint, TargetService, finding
from narthex.trace.model import PathLeaf

_COMPARED = 200


def of_objects(scene: DiagnosisContext) -> Iterator[CauseFinding]:
    """Find what is wrong with the Service and its endpoints, if the packet doesn't arrive."""
    front = scene.front
    if scene.cluster is None:
        yield from of_rules(scene)
        return
    if front is None:
        yield from _nobodys(scene)
        return
    yield from _duplicate(scene, front)
    refused = [leaf for leaf in scene.leaves if scene.sent_to(leaf) is None]
    if not refused:
        return
    if front.port is None:
        yield _no_port(scene, front)
        return
    found = list(_endpoints(scene, front)) or list(_allowed(scene, front, refused)) or list(_local(scene, front))
    yield from found


def _duplicate(scene: DiagnosisContext, front: TargetService) -> Iterator[CauseFinding]:
    assert scene.cluster is not None
    to = scene.packet.destination
    same = sorted(str(each.key) for each in scene.cluster.services.values() if to in each.cluster_ips)
    if len(same) > 1:
        yield finding(
            "duplicate-cluster-ip",
            f"{to} is the cluster IP of {len(same)} Services: {', '.join(same[:5])}; only one of them can get its packets",
            evidence=tuple(f"Service {name}: clusterIP {to}" for name in same[:5]),
            advice="Delete one of them and make it again without clusterIP, so that it gets a free one.",
            explains=str(front.service.key) == same[0] or bool(scene.failing),
        )


def _nobodys(scene: DiagnosisContext) -> Iterator[CauseFinding]:
    """Find an address in a ServiceCIDR that no Service has."""
    assert scene.cluster is not None
    to = scene.packet.destination
    ranges = [
        (each.name, cidr) for each in scene.cluster.service_cidrs.values() for cidr in each.cidrs if contains(cidr, to)
    ]
    if ranges and any(scene.sent_to(leaf) is None for leaf in scene.leaves):
        name, cidr = ranges[0]
        yield finding(
            "no-such-service",
            f"no Service has the address {to}, though it is in the range of Service addresses",
            evidence=(f"ServiceCIDR {name}: {cidr}",),
            advice="Ask for the Service by its name: a Service that is deleted and created again gets another address. The sender "
            "may have the old one from a configuration or a DNS cache.",
        )


def _no_port(scene: DiagnosisContext, front: TargetService) -> CauseFinding:
    ports = ", ".join(
        f"{each.port}/{each.protocol.lower}" + (f" ({each.name})" if each.name else "") for each in front.service.ports
    )
    packet = scene.packet
    return finding(
        "port-not-served",
        f"{front.name} has no port {packet.port}/{packet.protocol}",
        evidence=(f"{front.name}: ports {ports or 'none'}",),
        advice="Ask for one of the Service's ports (its port, not the pods' targetPort), or add this one to it.",
    )


# ---- endpoints -------------------------------------------------------------------------------------------------------


def _endpoints(scene: DiagnosisContext, front: TargetService) -> Iterator[CauseFinding]:
    if scene.usable or front.port is None:
        return
    every = scene.endpoints
    if not every:
        yield _none_at_all(scene, front)
        return
    here = [each for each in every if each.family is scene.family]
    if not here:
        yield _family(scene, front, every)
        return
    if all(each.port is None for each in here):
        yield _port_name(scene, front, here)
        return
    yield _not_ready(front, here)


def _none_at_all(scene: DiagnosisContext, front: TargetService) -> CauseFinding:
    assert scene.cluster is not None
    service = front.service
    if not service.selector:
        return finding(
            "endpoints-missing",
            f"{front.name} has no selector and no EndpointSlices",
            evidence=(f"{front.name}: no selector", f"no EndpointSlice has kubernetes.io/service-name={service.name}"),
            advice=f"Give it a selector, or make EndpointSlices with the label kubernetes.io/service-name={service.name}.",
        )
    selector = ",".join(f"{key}={value}" for key, value in service.selector)
    chosen = [pod for pod in _pods(scene, service) if set(service.selector) <= set(pod.labels)]
    if chosen:
        names = ", ".join(pod.name for pod in chosen[:3])
        return finding(
            "endpoints-missing",
            f"{len(chosen)} pods match the selector of {front.name}, and yet it has no endpoints",
            evidence=(f"selector {selector}: pods {names}", "no EndpointSlice of the Service"),
            advice="See whether kube-controller-manager runs and what its endpointslice controller logs; a pod without an IP "
            "address is no endpoint either.",
        )
    evidence = [f"{front.name}: selector {selector}"]
    near = _nearest(scene, service)
    if near:
        evidence.append(f"nearest: pod {near.name} has {','.join(f'{key}={value}' for key, value in near.labels)}")
    return finding(
        "selector-matches-nothing",
        f"{front.name} has no endpoints: no pod in namespace {service.namespace} has the labels {selector}",
        evidence=tuple(evidence),
        advice=f"Compare `kubectl -n {service.namespace} get pods --show-labels` with the selector and correct one of them.",
        certain=bool(scene.cluster.pods),
    )


def _pods(scene: DiagnosisContext, service: Service) -> list[Pod]:
    assert scene.cluster is not None
    return [pod for pod in scene.cluster.pods.values() if pod.namespace == service.namespace]


def _nearest(scene: DiagnosisContext, service: Service) -> Pod | None:
    """Return the pod whose labels match the selector best."""
    selector = ",".join(f"{key}={value}" for key, value in service.selector)
    keys = {key for key, _ in service.selector}

    def likeness(pod: Pod) -> float:
        """Return how similar a pod's labels are to the selector, from 0 to 1."""
        return SequenceMatcher(None, selector, ",".join(f"{key}={value}" for key, value in pod.labels)).ratio()

    pods = [pod for pod in _pods(scene, service) if keys & {key for key, _ in pod.labels}]
    return max(sorted(pods, key=lambda pod: pod.name)[:_COMPARED], key=likeness, default=None)


def _family(scene: DiagnosisContext, front: TargetService, every: tuple[ServiceEndpoint, ...]) -> CauseFinding:
    other = every[0].family.label
    return finding(
        "wrong-family",
        f"{front.name} has endpoints of {other} only, and the packet is {scene.family.label}",
        evidence=(
            f"{front.name}: ipFamilies {', '.join(each.label for each in front.service.ip_families) or 'not said'}",
            *(f"EndpointSlice {each.where}: {each.endpoint.address}" for each in every[:3]),
        ),
        advice=f"Ask for its {other} address, or give the pods {scene.family.label} addresses and let the Service have "
        "ipFamilyPolicy PreferDualStack.",
    )


def _port_name(scene: DiagnosisContext, front: TargetService, here: list[ServiceEndpoint]) -> CauseFinding:
    assert front.port is not None
    assert scene.cluster is not None
    offered = sorted(
        {
            f"{port.name or '(no name)'} {port.port}/{port.protocol.lower}"
            for each in scene.cluster.slices.get(front.service.key, {}).values()
            for port in each.ports
        }
    )
    target = front.port.target_port
    return finding(
        "port-name",
        f"{front.name} has {len(here)} endpoints, but none has its port {front.port.name or front.port.port!r}"
        + (f" (targetPort {target})" if target is not None else ""),
        evidence=(
            f"{front.name}: port {front.port.port}, name {front.port.name or '(none)'}, targetPort {target}",
            f"its EndpointSlices have the ports: {', '.join(offered) or 'none'}",
        ),
        advice="A targetPort that is a name must be the name of a containerPort of the pods; EndpointSlices made by hand "
        "must name their ports as the Service does.",
    )


def _not_ready(front: TargetService, here: list[ServiceEndpoint]) -> CauseFinding:
    pods = [each.endpoint.target or each.endpoint.address for each in here]
    leaving = sum(each.endpoint.terminating for each in here)
    evidence = tuple(
        f"EndpointSlice {each.where}: {each.endpoint.address} ready={str(each.endpoint.ready).lower()} "
        f"serving={str(each.endpoint.serving).lower()} terminating={str(each.endpoint.terminating).lower()}"
        for each in here[:5]
    )
    return finding(
        "endpoints-not-ready",
        f"{front.name} has {len(here)} endpoints and none of them is ready"
        + (f" ({leaving} are terminating)" if leaving else ""),
        evidence=evidence,
        advice=f"See why the pods are not ready: `kubectl -n {front.service.namespace} describe pod {pods[0]}`, its "
        "readiness probe above all.",
    )


# ---- policies --------------------------------------------------------------------------------------------------------


def _allowed(scene: DiagnosisContext, front: TargetService, refused: list[PathLeaf]) -> Iterator[CauseFinding]:
    ranges = front.service.source_ranges
    source = scene.packet.source
    # With the gate NarthexStrictSourceRanges they hold for every way in from outside.
    if not front.external or not ranges or in_any(ranges, source):
        return
    if not any(leaf in scene.failing for leaf in refused):
        return
    yield finding(
        "source-range",
        f"{source} is in none of the source ranges that {front.name} lets in",
        evidence=(f"{front.name}: loadBalancerSourceRanges {', '.join(ranges)}",),
        advice="Add the sender's range to loadBalancerSourceRanges. Behind a proxy or a NAT the address that counts is "
        "the one that the node sees.",
    )


def _local(scene: DiagnosisContext, front: TargetService) -> Iterator[CauseFinding]:
    if not front.local or not scene.node or any(each.endpoint.node_name == scene.node for each in scene.usable):
        return
    which = "externalTrafficPolicy" if front.external else "internalTrafficPolicy"
    elsewhere = sorted({each.endpoint.node_name or "?" for each in scene.usable})
    advice = f"Send to a node that has one, run one on every node (a DaemonSet), or set {which}: Cluster."
    if front.service.health_check_node_port:
        advice += f" A load balancer learns it by its health check at port {front.service.health_check_node_port}."
    yield finding(
        "local-policy",
        f"{front.name} has {which}: Local, and none of its {len(scene.usable)} endpoints is on node {scene.node}",
        evidence=(f"{front.name}: {which}: Local", f"endpoints are on {', '.join(elsewhere)}"),
        advice=advice,
        node=scene.node,
    )
