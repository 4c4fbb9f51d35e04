"""Report a lab's present state in the form of its state file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from narthex.lab.cluster import API_SERVICE
from narthex.lab.faults import InjectedFault
from narthex.lab.kubelet.program.pod import PodLifecycle
from narthex.lab.program.components import LabComponents
from narthex.lab.program.state import LabState, PodRecord, ScaleRecord, ServiceAddress, ServiceRecord
from narthex.lab.topology import LabNode
from narthex.model import EndpointSlice, NamespacedName, Pod, Problem, Service, Snapshot, family_of


def describe_state(
    state: LabState,
    parts: LabComponents,
    snapshot: Snapshot,
    problems: Iterable[Problem],
    faults: tuple[InjectedFault, ...],
) -> LabState:
    """Return the state with everything that changes brought up to date."""
    running = {pod.key: pod for pod in parts.kubelet.pods()}
    unscheduled, own = _scheduling_problems(parts), parts.static_pods.keys
    pods = tuple(
        _pod(pod, running.get(key), parts, unscheduled.get(key, "no node takes it"))
        for key, pod in sorted(snapshot.pods.items())
        if key not in own
    )
    services = tuple(
        _service(service, state.nodes, tuple(snapshot.slices.get(key, {}).values()))
        for key, service in sorted(snapshot.services.items())
        if key != API_SERVICE
    )
    return msgspec.structs.replace(
        state,
        not_ready=tuple(sorted(node.name for node in snapshot.nodes.values() if not node.ready)),
        pods=pods,
        services=services,
        scales=tuple(_scales(parts, snapshot)),
        problems=tuple(problems),
        faults=faults,
    )


def _scheduling_problems(parts: LabComponents) -> Mapping[NamespacedName, str]:
    """Return the scheduler's messages about pods without a node."""
    with parts.registry.held() as registry:
        return {
            NamespacedName(pod["metadata"]["namespace"], pod["metadata"]["name"]): str(each.get("message") or "")
            for pod in registry.list("Pod")
            if not pod["spec"].get("nodeName")
            for each in (pod.get("status") or {}).get("conditions") or ()
            if each["type"] == "PodScheduled" and each.get("status") == "False"
        }


def _scales(parts: LabComponents, snapshot: Snapshot) -> Iterator[ScaleRecord]:
    """Yield the Deployments whose number of replicas differs from the user's manifests."""
    for key, deployment in sorted(snapshot.deployments.items()):
        manifest = parts.manifests.desired("Deployment", key)
        desired = (manifest.raw.get("spec") or {}).get("replicas", 1) if manifest is not None else deployment.replicas
        if desired != deployment.replicas:
            yield ScaleRecord(namespace=key.namespace, name=key.name, replicas=deployment.replicas)


def _pod(pod: Pod, running: PodLifecycle | None, parts: LabComponents, unscheduled: str) -> PodRecord:
    finished = running is None and pod.phase in ("Succeeded", "Failed")
    terminating = bool(pod.deletion_timestamp)
    containers = tuple(running.runs.items()) if running is not None else ()
    namespace = ""
    if running is not None and pod.spec.node_name:
        namespace = parts.pods.network.namespace(running.pod)
    return PodRecord(
        namespace=pod.namespace,
        name=pod.name,
        node=pod.spec.node_name if running is not None or finished else "",
        network_namespace=namespace,
        addresses=pod.ips,
        ready=pod.ready and not terminating,
        completed=pod.phase == "Succeeded",
        terminating=terminating,
        uid=pod.uid,
        hostname=""
        if pod.spec.host_network
        else (pod.spec.hostname_override or pod.spec.hostname or pod.name)[:63].rstrip("-."),
        containers={name: run.container.pid if run.container is not None else 0 for name, run in containers},
        problem=running.problem if running is not None else "" if finished else unscheduled,
    )


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


def _frontends(service: Service, nodes: Sequence[LabNode]) -> Iterable[ServiceAddress]:
    if service.headless or service.type == "ExternalName":
        return
    families = set(service.ip_families)
    for port in service.ports:
        frontends = [("cluster IP", address, port.port) for address in service.cluster_ips]
        frontends += [("external IP", address, port.port) for address in service.external_ips]
        frontends += [("load balancer IP", entry.ip, port.port) for entry in service.ingress]
        if port.node_port:
            frontends += [
                ("node port", address, port.node_port)
                for node in nodes
                for address in node.addresses
                if family_of(address) in families
            ]
        for kind, address, number in frontends:
            yield ServiceAddress(
                kind=kind, address=address, port=number, protocol=port.protocol.value, port_name=port.name
            )
