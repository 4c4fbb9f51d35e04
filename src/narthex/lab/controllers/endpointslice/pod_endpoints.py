"""Endpoints of a Service: one for each selected pod, grouped by the pod's port numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from narthex.lab.controllers.cluster_state import ClusterState
from narthex.lab.controllers.objects import (
    Object,
    ObjectKey,
    is_pod_finished,
    is_pod_ready,
    is_terminating,
    key_of,
    labels_of,
    pod_addresses,
    spec_of,
    uid_of,
)

ZONE = "topology.kubernetes.io/zone"
FAMILIES = ("IPv4", "IPv6")

PortGroup = tuple[tuple[Object, ...], list[Object]]
"""A list of ports, and the endpoints that have exactly these."""


class _PodEndpoint(NamedTuple):
    """The endpoint of one pod, and the objects it was computed from."""

    pod: Object
    node: Object | None
    ports: tuple[Object, ...]
    port_key: str
    """Equal for equal ports."""
    endpoint: Object | None


def families_of(service: Object) -> tuple[str, ...]:
    """Return the address types of the Service's slices, primary family first."""
    spec = spec_of(service)
    given = spec.get("ipFamilies")
    if not given:
        given = ["IPv6" if ":" in address else "IPv4" for address in spec.get("clusterIPs") or () if address != "None"]
    return tuple(dict.fromkeys(given)) or ("IPv4",)


class PodEndpoints:
    """Computes endpoints, and caches each until its pod, node, or Service changes."""

    def __init__(self) -> None:
        self._cache: dict[tuple[ObjectKey, str], tuple[Object, dict[str, _PodEndpoint]]] = {}

    def of(self, service: Object, pods: Iterable[Object], family: str, state: ClusterState) -> list[PortGroup]:
        """Return the endpoints of one family grouped by ports, in the order of `pods`.

        Pods may map one named port to different numbers, so each list of ports needs its own slices.
        """
        cache_key = (key_of(service), family)
        cached_service, previous = self._cache.get(cache_key, (None, {}))
        if cached_service is not service:
            previous = {}
        current: dict[str, _PodEndpoint] = {}
        groups: dict[str, PortGroup] = {}
        for pod in pods:
            name, node = pod["metadata"]["name"], state.get("Node", ObjectKey("", spec_of(pod).get("nodeName") or ""))
            found = previous.get(name)
            if found is None or found.pod is not pod or found.node is not node:
                found = _build(service, pod, node, family)
            current[name] = found
            if found.endpoint is not None:
                groups.setdefault(found.port_key, (found.ports, []))[1].append(found.endpoint)
        self._cache[cache_key] = (service, current)
        return list(groups.values())

    def forget(self, service: ObjectKey) -> None:
        """Drop the cache of a deleted Service."""
        for family in FAMILIES:
            self._cache.pop((service, family), None)


def _build(service: Object, pod: Object, node: Object | None, family: str) -> _PodEndpoint:
    address = next((each for each in pod_addresses(pod) if (":" in each) == (family == "IPv6")), None)
    if address is None or is_pod_finished(pod):
        return _PodEndpoint(pod, node, (), "", None)
    ports = _ports(service, pod)
    return _PodEndpoint(pod, node, ports, repr(ports), _endpoint(service, pod, address, node))


def _ports(service: Object, pod: Object) -> tuple[Object, ...]:
    numbered = ((port, target_port(port, pod)) for port in spec_of(service).get("ports") or ())
    return tuple(endpoint_port(port, number) for port, number in numbered if number is not None)


def endpoint_port(port: Object, number: int) -> Object:
    """Return the port of a slice for a port of a Service or of Endpoints."""
    application = {"appProtocol": port["appProtocol"]} if port.get("appProtocol") else {}
    return {"name": port.get("name") or "", "protocol": port.get("protocol") or "TCP", "port": number, **application}


def target_port(port: Object, pod: Object) -> int | None:
    """Return the number of a Service port in this pod; None if the pod has no port of that name."""
    target = port.get("targetPort") or port.get("port")
    if isinstance(target, int):
        return target
    protocol = port.get("protocol") or "TCP"
    for container in _containers(pod):
        for each in container.get("ports") or ():
            if each.get("name") == target and (each.get("protocol") or "TCP") == protocol:
                return int(each["containerPort"])
    return None


def _containers(pod: Object) -> Sequence[Object]:
    spec = spec_of(pod)
    sidecars = [each for each in spec.get("initContainers") or () if each.get("restartPolicy") == "Always"]
    return [*(spec.get("containers") or ()), *sidecars]


def _endpoint(service: Object, pod: Object, address: str, node: Object | None) -> Object:
    spec, key = spec_of(pod), key_of(pod)
    ready, terminating = is_pod_ready(pod), is_terminating(pod)
    published = bool(spec_of(service).get("publishNotReadyAddresses"))
    endpoint: Object = {
        "addresses": [address],
        "conditions": {"ready": published or (ready and not terminating), "serving": ready, "terminating": terminating},
        "targetRef": {"kind": "Pod", "namespace": key.namespace, "name": key.name, "uid": uid_of(pod)},
    }
    if spec.get("nodeName"):
        endpoint["nodeName"] = spec["nodeName"]
        zone = labels_of(node).get(ZONE) if node is not None else None
        if zone:
            endpoint["zone"] = zone
    # The pod gets a DNS name of its own below a headless Service.
    if spec.get("hostname") and spec.get("subdomain") == service["metadata"]["name"]:
        endpoint["hostname"] = spec["hostname"]
    return endpoint
