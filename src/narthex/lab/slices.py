"""Selectors become EndpointSlices, as the slice controller of Kubernetes makes them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from narthex.lab.workloads import LabPod
from narthex.model.names import NamespacedName
from narthex.model.net import IPFamily, family_of
from narthex.model.objects import EndpointPort, EndpointSlice, Labels, Pod, Service, ServicePort, SliceEndpoint

MAX_ENDPOINTS = 100
"""Endpoints in one slice, as in Kubernetes."""

SERVICE_LABEL = "kubernetes.io/service-name"
_MANAGED = ("endpointslice.kubernetes.io/managed-by", "endpointslice-controller.narthex.lab")
_HEADLESS = ("service.kubernetes.io/headless", "")
_ZONE = "topology.kubernetes.io/zone"


def slices_of(
    services: Iterable[Service], pods: Sequence[LabPod], node_labels: Mapping[str, Labels]
) -> tuple[EndpointSlice, ...]:
    """The slices of all Services that have a selector, in order of names."""
    by_namespace: dict[str, list[LabPod]] = {}
    for pod in pods:
        if pod.placed:
            by_namespace.setdefault(pod.pod.namespace, []).append(pod)
    zones = {name: dict(labels).get(_ZONE, "") for name, labels in node_labels.items()}
    return tuple(
        slice_
        for service in sorted(services, key=lambda service: service.key)
        if service.selector and service.type != "ExternalName"
        for slice_ in _service_slices(service, by_namespace.get(service.namespace, []), zones)
    )


def _service_slices(service: Service, pods: Sequence[LabPod], zones: Mapping[str, str]) -> Iterable[EndpointSlice]:
    selector = set(service.selector)
    selected = [pod for pod in pods if selector <= set(pod.pod.labels)]
    for family in service.ip_families or (IPFamily.IPV4,):
        # Pods may give one named port different numbers; each set of numbers needs a slice of its own (row 2.5).
        groups: dict[tuple[EndpointPort, ...], list[SliceEndpoint]] = {}
        for pod in selected:
            address = next((ip for ip in pod.pod.ips if family_of(ip) is family), None)
            if address is not None:
                ports = tuple(found for port in service.ports for found in _resolve(port, pod.pod))
                groups.setdefault(ports, []).append(_endpoint(service, pod, address, zones))
        for ports, endpoints in groups.items():
            for first in range(0, len(endpoints), MAX_ENDPOINTS):
                yield _slice(service, family, ports, tuple(endpoints[first : first + MAX_ENDPOINTS]), first)


def _resolve(port: ServicePort, pod: Pod) -> tuple[EndpointPort, ...]:
    """The port in this pod; nothing when its targetPort is a name that the pod does not have."""
    number: int | None
    if isinstance(port.target_port, str):
        number = next(
            (
                candidate.port
                for container in pod.spec.containers
                for candidate in container.ports
                if (candidate.name, candidate.protocol) == (port.target_port, port.protocol)
            ),
            None,
        )
    else:
        number = port.target_port or port.port
    return (EndpointPort(name=port.name, protocol=port.protocol, port=number),) if number else ()


def _endpoint(service: Service, pod: LabPod, address: str, zones: Mapping[str, str]) -> SliceEndpoint:
    node = pod.pod.spec.node_name
    zone = zones.get(node, "")
    distribution = service.traffic_distribution
    return SliceEndpoint(
        address=address,
        ready=service.publish_not_ready or (pod.pod.ready and not pod.terminating),
        serving=service.publish_not_ready or pod.pod.ready,
        terminating=pod.terminating,
        node_name=node,
        zone=zone,
        target=pod.pod.name,
        for_zones=(zone,) if zone and distribution in ("PreferClose", "PreferSameZone", "PreferSameNode") else (),
        for_nodes=(node,) if distribution == "PreferSameNode" else (),
    )


def _slice(
    service: Service,
    family: IPFamily,
    ports: tuple[EndpointPort, ...],
    endpoints: tuple[SliceEndpoint, ...],
    first: int,
) -> EndpointSlice:
    identity = f"{service.key} {family.label} {[(p.name, p.protocol.value, p.port) for p in ports]} {first}"
    labels = [(SERVICE_LABEL, service.name), _MANAGED, *([_HEADLESS] if service.headless else [])]
    return EndpointSlice(
        name=f"{service.name[:240]}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}",
        namespace=service.namespace,
        labels=tuple(sorted(labels)),
        service_name=service.name,
        family=family,
        ports=ports,
        endpoints=endpoints,
    )


def without_selector(services: Mapping[NamespacedName, Service], slice_: EndpointSlice) -> bool:
    """Whether a slice from a manifest counts: its Service has no selector (row 2.10)."""
    owner = services.get(slice_.service)
    return owner is not None and not owner.selector
