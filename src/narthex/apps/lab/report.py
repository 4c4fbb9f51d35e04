"""The cluster of a lab in the words of its state file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import msgspec

from narthex.apps.lab.state import FrontendRecord, LabState, PodRecord, ScaleRecord, ServiceRecord
from narthex.lab.controllers import Cluster, shown_pods
from narthex.lab.slices import slices_of
from narthex.lab.workloads import LabPod, Scales, describe_nodes
from narthex.model.names import NamespacedName
from narthex.model.net import family_of
from narthex.model.objects import EndpointSlice, Service
from narthex.model.problem import Problem
from narthex.state.store import Snapshot


def describe(
    state: LabState,
    wanted: Snapshot,
    cluster: Cluster,
    scales: Scales,
    *,
    problems: Iterable[Problem],
    pod_problems: Mapping[NamespacedName, str],
    network_namespace: Callable[[LabPod], str],
) -> LabState:
    """The state with everything that changes brought up to date."""
    pods = tuple(
        PodRecord(
            namespace=pod.pod.namespace,
            name=pod.pod.name,
            node=pod.pod.spec.node_name if pod.placed else "",
            network_namespace=network_namespace(pod) if pod.placed else "",
            addresses=pod.pod.ips,
            ready=pod.pod.ready and not pod.terminating,
            terminating=pod.terminating,
            problem=pod_problems.get(pod.key, "" if pod.placed else "no node takes it"),
        )
        for pod in sorted(shown_pods(cluster), key=lambda pod: pod.key)
    )
    in_force = tuple(
        ScaleRecord(namespace=key.namespace, name=key.name, replicas=scale.replicas)
        for key, scale in sorted(scales.items())
        if key in wanted.deployments and wanted.deployments[key].replicas == scale.manifest
    )
    return msgspec.structs.replace(
        state, pods=pods, services=_services(wanted, cluster), scales=in_force, problems=tuple(problems)
    )


def _services(wanted: Snapshot, cluster: Cluster) -> tuple[ServiceRecord, ...]:
    labels = {node.name: node.labels for node in describe_nodes(wanted, cluster.nodes)}
    made: dict[NamespacedName, list[EndpointSlice]] = {}
    for slice_ in slices_of(cluster.services.values(), shown_pods(cluster), labels):
        made.setdefault(slice_.service, []).append(slice_)
    return tuple(
        _service(service, cluster, made.get(key, list(wanted.slices.get(key, {}).values())))
        for key, service in sorted(cluster.services.items())
    )


def _service(service: Service, cluster: Cluster, slices: list[EndpointSlice]) -> ServiceRecord:
    ready = [endpoint for slice_ in slices for endpoint in slice_.endpoints if endpoint.ready]
    return ServiceRecord(
        namespace=service.namespace,
        name=service.name,
        type="headless" if service.headless else service.type,
        frontends=tuple(_frontends(service, cluster)),
        endpoints=max(Counter(map(family_of, {endpoint.address for endpoint in ready})).values(), default=0),
        pods=tuple(dict.fromkeys(endpoint.target for endpoint in ready if endpoint.target)),
    )


def _frontends(service: Service, cluster: Cluster) -> Iterable[FrontendRecord]:
    if service.headless or service.type == "ExternalName":
        return
    families = set(service.ip_families)
    for port in service.ports:
        places = [("cluster IP", address, port.port) for address in service.cluster_ips]
        places += [("external IP", address, port.port) for address in service.external_ips]
        places += [("load balancer IP", entry.ip, port.port) for entry in service.ingress]
        if port.node_port:
            places += [
                ("node port", address, port.node_port)
                for node in cluster.nodes
                for address in node.addresses
                if family_of(address) in families
            ]
        for kind, address, number in places:
            yield FrontendRecord(
                kind=kind, address=address, port=number, protocol=port.protocol.value, port_name=port.name
            )
