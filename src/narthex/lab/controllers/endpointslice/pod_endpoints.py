"""Which endpoints a Service has: one for each pod that it selects, with the ports that the pod gives it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from narthex.lab.controllers.cluster_state import ClusterState
from narthex.lab.controllers.interfaces import Object, ObjectKey
from narthex.lab.controllers.objects import (
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
"""Ports, and the endpoints that have exactly these."""


class _Made(NamedTuple):
    """What became of one pod, and what of."""

    pod: Object
    node: Object | None
    ports: tuple[Object, ...]
    same: str
    """Equal for equal ports."""
    endpoint: Object | None


def families_of(service: Object) -> tuple[str, ...]:
    """Address types of its slices, the first family first."""
    spec = spec_of(service)
    given = spec.get("ipFamilies")
    if not given:
        given = ["IPv6" if ":" in address else "IPv4" for address in spec.get("clusterIPs") or () if address != "None"]
    return tuple(dict.fromkeys(given)) or ("IPv4",)


class PodEndpoints:
    """The endpoints of Services. What follows from a pod is remembered until the pod, its node or the Service is another."""

    def __init__(self) -> None:
        self._made: dict[tuple[ObjectKey, str], tuple[Object, dict[str, _Made]]] = {}

    def of(self, service: Object, pods: Iterable[Object], family: str, present: ClusterState) -> list[PortGroup]:
        """The endpoints of a family by their ports, in order of pods. Pods may give one named port different numbers, so
        each set of ports needs slices of its own."""
        place = (key_of(service), family)
        held, before = self._made.get(place, (None, {}))
        if held is not service:
            before = {}
        made: dict[str, _Made] = {}
        groups: dict[str, PortGroup] = {}
        for pod in pods:
            name, node = pod["metadata"]["name"], present.get("Node", ObjectKey("", spec_of(pod).get("nodeName") or ""))
            found = before.get(name)
            if found is None or found.pod is not pod or found.node is not node:
                found = _make(service, pod, node, family)
            made[name] = found
            if found.endpoint is not None:
                groups.setdefault(found.same, (found.ports, []))[1].append(found.endpoint)
        self._made[place] = (service, made)
        return list(groups.values())

    def forget(self, service: ObjectKey) -> None:
        """It is gone."""
        for family in FAMILIES:
            self._made.pop((service, family), None)


def _make(service: Object, pod: Object, node: Object | None, family: str) -> _Made:
    address = next((each for each in pod_addresses(pod) if (":" in each) == (family == "IPv6")), None)
    if address is None or is_pod_finished(pod):
        return _Made(pod, node, (), "", None)
    ports = _ports(service, pod)
    return _Made(pod, node, ports, repr(ports), _endpoint(service, pod, address, node))


def _ports(service: Object, pod: Object) -> tuple[Object, ...]:
    found = []
    for port in spec_of(service).get("ports") or ():
        number = target_port(port, pod)
        if number is not None:
            application = {"appProtocol": port["appProtocol"]} if port.get("appProtocol") else {}
            found.append(
                {
                    "name": port.get("name") or "",
                    "protocol": port.get("protocol") or "TCP",
                    "port": number,
                    **application,
                }
            )
    return tuple(found)


def target_port(port: Object, pod: Object) -> int | None:
    """The number of a Service's port in this pod; None when its targetPort is a name that the pod does not have."""
    target = port.get("targetPort") or port.get("port")
    if isinstance(target, int):
        return target
    protocol = port.get("protocol") or "TCP"
    for container in _containers(pod):
        for each in container.get("ports") or ():
            if each.get("name") == target and (each.get("protocol") or "TCP") == protocol:
                number: int = each["containerPort"]
                return number
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
        "conditions": {
            "ready": published or (ready and not terminating),
            "serving": ready,
            "terminating": terminating,
        },
        "targetRef": {"kind": "Pod", "namespace": key.namespace, "name": key.name, "uid": uid_of(pod)},
    }
    if spec.get("nodeName"):
        endpoint["nodeName"] = spec["nodeName"]
        zone = labels_of(node).get(ZONE) if node is not None else None
        if zone:
            endpoint["zone"] = zone
    # A name of its own below a headless Service (KEP: pod hostname and subdomain).
    if spec.get("hostname") and spec.get("subdomain") == service["metadata"]["name"]:
        endpoint["hostname"] = spec["hostname"]
    return endpoint
