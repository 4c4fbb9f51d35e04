"""The lab's controllers in one step: what the user wants and what there is become the whole cluster.

Everything here is a function of its arguments. The lab process calls `reconcile` whenever a manifest, a scale or a
pod has changed, makes the pods that are new, and calls `objects` for what its proxies are to read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from narthex.lab.services import allocate
from narthex.lab.slices import slices_of, without_selector
from narthex.lab.topology import SERVICE_CIDRS, LabNode
from narthex.lab.workloads import LabPod, Scales, describe_nodes, reconcile_pods
from narthex.model.names import NamespacedName
from narthex.model.objects import AnyObject, IPAddressPool, Service, ServiceCIDR
from narthex.model.problem import Problem
from narthex.state.store import Snapshot


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """The present of a lab."""

    nodes: tuple[LabNode, ...]
    pods: tuple[LabPod, ...] = ()
    services: Mapping[NamespacedName, Service] = {}
    """With everything allocated."""
    problems: tuple[Problem, ...] = ()
    """What of the user's manifests cannot be had."""
    lost: frozenset[str] = frozenset()
    """Names of the nodes that the cluster knows to be dead."""


def with_pools(wanted: Snapshot, pools: Iterable[IPAddressPool]) -> Snapshot:
    """The user's objects with these pools beside them."""
    held = wanted.address_pools
    for pool in pools:
        held = held.set(pool.key, pool)
    return msgspec.structs.replace(wanted, address_pools=held)


def reconcile(wanted: Snapshot, scales: Scales, present: Cluster, now: str) -> Cluster:
    """The cluster as it must be next; `now` is RFC 3339. New pods are not ready, pods to remove are marked."""
    services, service_problems = allocate(wanted.services, present.services)
    living = tuple(node for node in present.nodes if node.name not in present.lost)
    pods, pod_problems = reconcile_pods(wanted, scales, present.pods, living, now)
    problems = (*service_problems, *pod_problems, *_ignored(wanted, present.nodes))
    return Cluster(nodes=present.nodes, pods=pods, services=services, problems=problems, lost=present.lost)


def with_pod(cluster: Cluster, pod: LabPod) -> Cluster:
    """The cluster with a pod in another state."""
    pods = tuple(pod if other.key == pod.key else other for other in cluster.pods)
    return msgspec.structs.replace(cluster, pods=pods)


def without_pods(cluster: Cluster, gone: frozenset[NamespacedName]) -> Cluster:
    """The cluster after these pods are gone."""
    return msgspec.structs.replace(cluster, pods=tuple(pod for pod in cluster.pods if pod.key not in gone))


def shown_pods(cluster: Cluster) -> tuple[LabPod, ...]:
    """The pods as the cluster knows them: those of a lost node are not ready, whatever they are."""
    return tuple(_unready(pod) if pod.pod.spec.node_name in cluster.lost else pod for pod in cluster.pods)


def _unready(pod: LabPod) -> LabPod:
    return msgspec.structs.replace(pod, pod=msgspec.structs.replace(pod.pod, ready=False))


def objects(wanted: Snapshot, cluster: Cluster) -> tuple[AnyObject, ...]:
    """Everything that the API of a real cluster would hold for a proxy, in a steady order."""
    nodes = describe_nodes(wanted, cluster.nodes, cluster.lost)
    ranges = [ServiceCIDR(name="kubernetes", cidrs=SERVICE_CIDRS)]
    ranges += [own for _, own in sorted(wanted.service_cidrs.items()) if own.name != "kubernetes"]
    by_hand = [
        slice_
        for _, slices in sorted(wanted.slices.items())
        for _, slice_ in sorted(slices.items())
        if without_selector(cluster.services, slice_)
    ]
    services = [service for _, service in sorted(cluster.services.items())]
    shown = shown_pods(cluster)
    made = slices_of(services, shown, {node.name: node.labels for node in nodes})
    pods = [pod.pod for pod in sorted(shown, key=lambda pod: pod.key)]
    given = [pool for _, pool in sorted(wanted.address_pools.items())]
    announced = [advertisement for _, advertisement in sorted(wanted.l2_advertisements.items())]
    return (*nodes, *ranges, *services, *made, *by_hand, *pods, *given, *announced)


def _ignored(wanted: Snapshot, nodes: tuple[LabNode, ...]) -> list[Problem]:
    """Manifests that a lab has no use for."""
    names = {node.name for node in nodes}
    return [
        Problem(
            origin=node.origin,
            object=f"Node {node.name}",
            message=f"is not one of this lab's nodes ({nodes[0].name} to {nodes[-1].name}), so it is left out",
            severity="warning",
        )
        for _, node in sorted(wanted.nodes.items())
        if node.name not in names
    ]
