"""Small clusters for the tests of the lab."""

from msgspec.structs import replace

from narthex.lab.controllers import Cluster, reconcile
from narthex.lab.topology import nodes
from narthex.lab.workloads import LabPod
from narthex.model.names import NamespacedName
from narthex.model.objects import Container, ContainerPort, Deployment, PodSpec, Service, ServicePort
from narthex.state.store import Snapshot
from narthex.testing.build import snapshot as snapshot_of

NOW = "2026-01-31T12:00:00Z"
LABELS = (("app", "web"),)
WEB = NamespacedName("shop", "web")
NODES = nodes("t", 2)


def template(port: int = 8080, **fields: object) -> PodSpec:
    container = Container(name="web", ports=(ContainerPort(name="http", port=port),))
    return PodSpec(containers=(container,), **fields)


def deployment(replicas: int = 1, **fields: object) -> Deployment:
    values = {
        "name": "web",
        "namespace": "shop",
        "replicas": replicas,
        "selector": LABELS,
        "template_labels": LABELS,
        "template": template(),
        **fields,
    }
    return Deployment(**values)


def service(name: str = "web", **fields: object) -> Service:
    ports = (ServicePort(name="http", port=80, target_port="http"),)
    return Service(**{"name": name, "namespace": "shop", "selector": LABELS, "ports": ports, **fields})


def snapshot(*objects: object) -> Snapshot:
    return snapshot_of(*objects, with_node=False)


def ready(cluster: Cluster) -> Cluster:
    """All pods that are neither new nor leaving have a network and listen now."""
    pods = list(cluster.pods)
    for index, pod in enumerate(pods):
        if pod.placed and not pod.terminating:
            pods[index] = _listening(pod, {ip for other in pods for ip in other.pod.ips})
    return replace(cluster, pods=tuple(pods))


def _listening(pod: LabPod, taken: set[str]) -> LabPod:
    node = pod.pod.spec.node_name.removeprefix("node-")
    free = next(n for n in range(2, 255) if f"10.244.{node}.{n}" not in taken)
    ips = pod.pod.ips or (f"10.244.{node}.{free}", f"fd00:10:244:{node}::{free:x}")
    return replace(pod, pod=replace(pod.pod, ips=ips, ready=True, phase="Running"))


def step(cluster: Cluster, *objects: object, scales: dict | None = None) -> Cluster:
    """One reconciliation, after which the new pods listen."""
    return ready(reconcile(snapshot(*objects), scales or {}, cluster, NOW))


def start(*objects: object) -> Cluster:
    return step(Cluster(nodes=NODES), *objects)


def on_nodes(cluster: Cluster) -> dict[str, int]:
    """Pods that stay, per node."""
    staying = [pod.pod.spec.node_name for pod in cluster.pods if not pod.terminating]
    return {name: staying.count(name) for name in sorted(set(staying))}
