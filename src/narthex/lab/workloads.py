"""Which pods there must be, and where: Deployments become pods, pods get a node and addresses."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import msgspec

from narthex.lab.topology import MAX_PODS_PER_NODE, LabNode
from narthex.model.names import NamespacedName
from narthex.model.objects import Deployment, Labels, Node, Pod
from narthex.model.problem import Problem
from narthex.state.store import Snapshot

_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
"""Letters that form no words, as in Kubernetes' generated names."""


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """A number of replicas asked for by `lab scale`. It holds until the manifest asks for another number itself."""

    replicas: int
    manifest: int
    """What the manifest said at that moment."""


Scales = Mapping[NamespacedName, Scale]
"""By Deployment."""


class LabPod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod of the lab. `pod.spec.node_name` holds once it is placed, `pod.ips` is empty until its node has made its network,
    `pod.ready` false until it listens, `pod.deletion_timestamp` set while it goes away (it answers until it is gone)."""

    pod: Pod
    owner: str = ""
    """Name of the Deployment in the pod's namespace; empty for a pod with a manifest of its own."""
    revision: str = ""
    """Hash of what the pod was made from; a pod of another revision is replaced."""
    placed: bool = False
    """It has a node."""

    @property
    def key(self) -> NamespacedName:
        """Namespace and name."""
        return self.pod.key

    @property
    def terminating(self) -> bool:
        """It goes away."""
        return bool(self.pod.deletion_timestamp)


def reconcile_pods(
    wanted: Snapshot, scales: Scales, present: tuple[LabPod, ...], nodes: tuple[LabNode, ...], now: str
) -> tuple[tuple[LabPod, ...], tuple[Problem, ...]]:
    """The pods as they must be next, in the order of their making: those that stay, new ones (not ready yet), and
    those that go, marked with `now` (RFC 3339). Pods already going stay as they are; who takes them away decides."""
    problems: list[Problem] = []
    keep: dict[NamespacedName, LabPod] = {}
    create: list[LabPod] = []
    by_key = {pod.key: pod for pod in present}
    taken = set(by_key)

    for key, manifest in sorted(wanted.pods.items()):
        revision = _hash(msgspec.structs.replace(manifest, origin="", ips=(), ready=False, phase=""))
        current = by_key.get(key)
        if current is None:
            create.append(_new_pod(key, manifest, "", revision))
        elif not current.terminating and current.revision == revision:
            keep[key] = current
        taken.add(key)
    for _, deployment in sorted(wanted.deployments.items()):
        if fault := _selector_fault(deployment):
            problems.append(fault)
            continue
        stay, new = _deployment_pods(deployment, replicas_of(deployment, scales), present, taken)
        keep.update({pod.key: pod for pod in stay})
        create.extend(new)

    marked = [
        pod if pod.key in keep or pod.terminating else _replace_pod(pod, deletion_timestamp=now) for pod in present
    ]
    labels = _node_labels(wanted.nodes.values(), nodes)
    placed = [pod for pod in marked if pod.placed]
    for pod in (*(pod for pod in marked if not pod.placed and not pod.terminating), *create):
        scheduled, fault = _schedule(pod, placed, nodes, labels)
        placed.append(scheduled)
        if fault:
            problems.append(fault)
    return tuple(placed), tuple(problems)


def replicas_of(deployment: Deployment, scales: Scales) -> int:
    """How many pods the Deployment must have now."""
    scale = scales.get(deployment.key)
    return scale.replicas if scale and scale.manifest == deployment.replicas else deployment.replicas


def _selector_fault(deployment: Deployment) -> Problem | None:
    if deployment.selector and set(deployment.selector) <= set(deployment.template_labels):
        return None
    return Problem(
        origin=deployment.origin,
        object=f"Deployment {deployment.key}",
        field="spec.selector",
        message="does not match the labels of its own template, so it could never find its pods; make them equal",
        severity="error",
    )


def _deployment_pods(
    deployment: Deployment, replicas: int, present: tuple[LabPod, ...], taken: set[NamespacedName]
) -> tuple[list[LabPod], list[LabPod]]:
    """Those of its pods that stay and the new ones; names of new ones go into `taken`."""
    revision = _hash((deployment.template_labels, deployment.template))
    mine = [
        pod
        for pod in present
        if pod.owner == deployment.name
        and pod.pod.namespace == deployment.namespace
        and pod.revision == revision
        and not pod.terminating
    ]
    while len(mine) > replicas:
        mine.remove(_first_to_go(mine))
    new: list[LabPod] = []
    number = 0
    while len(mine) + len(new) < replicas:
        number += 1
        suffix = _letters(f"{deployment.key}/{revision}/{number}", 5)
        key = NamespacedName(deployment.namespace, f"{deployment.name[:200]}-{revision}-{suffix}")
        if key not in taken:
            taken.add(key)
            template = Pod(
                name=key.name,
                namespace=key.namespace,
                labels=tuple(sorted({**dict(deployment.template_labels), "pod-template-hash": revision}.items())),
                spec=deployment.template,
                origin=deployment.origin,
            )
            new.append(_new_pod(key, template, deployment.name, revision))
    return mine, new


def _first_to_go(pods: list[LabPod]) -> LabPod:
    """Unready before ready, then from the node that has most of them, then the youngest."""
    per_node = Counter(pod.pod.spec.node_name for pod in pods)
    ranked = [(not pod.pod.ready, per_node[pod.pod.spec.node_name], age) for age, pod in enumerate(pods)]
    return pods[ranked.index(max(ranked))]


def _new_pod(key: NamespacedName, manifest: Pod, owner: str, revision: str) -> LabPod:
    uid = hashlib.sha256(f"{key}/{revision}".encode()).hexdigest()
    pod = msgspec.structs.replace(manifest, uid=uid[:32], ips=(), ready=False, phase="Pending", deletion_timestamp="")
    return LabPod(pod=pod, owner=owner, revision=revision)


def _schedule(
    pod: LabPod, placed: list[LabPod], nodes: tuple[LabNode, ...], labels: Mapping[str, Labels]
) -> tuple[LabPod, Problem | None]:
    """Give the pod a node and addresses: the node with the fewest of its siblings, then with the fewest pods."""
    spec = pod.pod.spec
    fitting = [
        node
        for node in nodes
        if spec.node_name in ("", node.name) and set(spec.node_selector) <= set(labels[node.name])
    ]
    if not fitting:
        asked = f"the node {spec.node_name!r}" if spec.node_name else "a node with the labels of its nodeSelector"
        return pod, _placing_fault(pod, f"asks for {asked}, which this lab does not have")
    load = Counter(other.pod.spec.node_name for other in placed)
    siblings = Counter(
        other.pod.spec.node_name
        for other in placed
        if pod.owner and (other.owner, other.pod.namespace) == (pod.owner, pod.pod.namespace) and not other.terminating
    )
    for node in sorted(fitting, key=lambda node: (siblings[node.name], load[node.name], nodes.index(node))):
        if spec.host_network:
            return _placed(pod, node, node.addresses), None
        if load[node.name] < MAX_PODS_PER_NODE:
            return _placed(pod, node), None
    return pod, _placing_fault(pod, f"finds no room: every node has {MAX_PODS_PER_NODE} pods")


def _placed(pod: LabPod, node: LabNode, addresses: tuple[str, ...] = ()) -> LabPod:
    spec = msgspec.structs.replace(pod.pod.spec, node_name=node.name)
    return msgspec.structs.replace(_replace_pod(pod, spec=spec, ips=addresses), placed=True)


def _placing_fault(pod: LabPod, message: str) -> Problem:
    return Problem(origin=pod.pod.origin, object=f"Pod {pod.key}", field="spec", message=message, severity="error")


def _node_labels(manifests: Iterable[Node], nodes: tuple[LabNode, ...]) -> dict[str, Labels]:
    given = {node.name: node.labels for node in manifests}
    return {
        node.name: tuple(sorted({**dict(given.get(node.name, ())), "kubernetes.io/hostname": node.name}.items()))
        for node in nodes
    }


def describe_nodes(
    wanted: Snapshot, nodes: tuple[LabNode, ...], lost: Collection[str] = frozenset()
) -> tuple[Node, ...]:
    """The lab's nodes as Kubernetes describes them, with the labels of a Node manifest of the same name. Those that are
    `lost` are not Ready."""
    labels = _node_labels(wanted.nodes.values(), nodes)
    return tuple(
        Node(
            name=node.name,
            labels=labels[node.name],
            pod_cidrs=node.pod_cidrs,
            internal_ips=node.addresses,
            ready=node.name not in lost,
        )
        for node in nodes
    )


def _replace_pod(pod: LabPod, **values: object) -> LabPod:
    return msgspec.structs.replace(pod, pod=msgspec.structs.replace(pod.pod, **values))


def _hash(value: object) -> str:
    return _letters(msgspec.json.encode(value).decode(), 10)


def _letters(text: str, length: int) -> str:
    number = int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")
    letters = []
    for _ in range(length):
        number, rest = divmod(number, len(_ALPHABET))
        letters.append(_ALPHABET[rest])
    return "".join(letters)
