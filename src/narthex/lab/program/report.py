"""The cluster of a lab in the words of its state file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from narthex.lab.kubelet.program.pod import PodLifecycle
from narthex.lab.program.state import FrontendRecord, LabState, PodRecord, ScaleRecord, ServiceRecord
from narthex.lab.topology import LabNode
from narthex.model.names import NamespacedName
from narthex.model.net import family_of
from narthex.model.objects import EndpointSlice, Pod, Service
from narthex.model.problem import Problem
from narthex.model.store import Snapshot


def describe_state(
    state: LabState,
    snapshot: Snapshot,
    *,
    scales: Iterable[ScaleRecord],
    problems: Iterable[Problem],
    network_namespace: Callable[[Pod], str],
    lives: Iterable[PodLifecycle],
    waiting: Mapping[NamespacedName, str],
) -> LabState:
    """The state with everything that changes brought up to date. `network_namespace` is asked for pods that have a node;
    `waiting`: why others have none."""
    alive = {life.key: life for life in lives}
    pods = tuple(
        _pod(pod, alive.get(key), network_namespace, waiting.get(key, "no node takes it"))
        for key, pod in sorted(snapshot.pods.items())
    )
    services = tuple(
        _service(service, state.nodes, tuple(snapshot.slices.get(key, {}).values()))
        for key, service in sorted(snapshot.services.items())
        if key != _API
    )
    return msgspec.structs.replace(state, pods=pods, services=services, scales=tuple(scales), problems=tuple(problems))


_API = NamespacedName("default", "kubernetes")
"""The Service of the API server, which every lab has."""


def _pod(pod: Pod, life: PodLifecycle | None, network_namespace: Callable[[Pod], str], waiting: str) -> PodRecord:
    node = pod.spec.node_name if life is not None else ""
    terminating = bool(pod.deletion_timestamp)
    runs = tuple(life.runs.items()) if life is not None else ()
    problem = life.problem if life is not None else waiting
    if life is None and pod.phase in ("Succeeded", "Failed"):
        node, problem = pod.spec.node_name, ""
    return PodRecord(
        namespace=pod.namespace,
        name=pod.name,
        node=node,
        network_namespace=network_namespace(pod) if node and life is not None else "",
        addresses=pod.ips,
        ready=pod.ready and not terminating,
        terminating=terminating,
        uid=pod.uid,
        hostname="" if pod.spec.host_network else hostname_of(pod),
        containers={name: run.container.pid if run.container is not None else 0 for name, run in runs},
        problem=problem,
    )


def hostname_of(pod: Pod) -> str:
    """The pod's host name."""
    return (pod.spec.hostname or pod.name)[:63].rstrip("-.")


def _service(service: Service, nodes: Sequence[LabNode], slices: Sequence[EndpointSlice]) -> ServiceRecord:
    ready = [endpoint for slice_ in slices for endpoint in slice_.endpoints if endpoint.ready]
    return ServiceRecord(
        namespace=service.namespace,
        name=service.name,
        type="headless" if service.headless else service.type,
        frontends=tuple(_frontends(service, nodes)),
        endpoints=max(Counter(map(family_of, {endpoint.address for endpoint in ready})).values(), default=0),
        pods=tuple(dict.fromkeys(endpoint.target for endpoint in ready if endpoint.target)),
    )


def _frontends(service: Service, nodes: Sequence[LabNode]) -> Iterable[FrontendRecord]:
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
                for node in nodes
                for address in node.addresses
                if family_of(address) in families
            ]
        for kind, address, number in places:
            yield FrontendRecord(
                kind=kind, address=address, port=number, protocol=port.protocol.value, port_name=port.name
            )
