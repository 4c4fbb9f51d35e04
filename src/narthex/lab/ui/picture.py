"""What the page draws, as JSON values: nodes with their pods, Services, and the EndpointSlices that connect them.

Each item has a `key`, which is also its name in a trace: `node-1`, `shop/web-1`, `shop/web`. Names are not escaped: the page
inserts them as text, never as markup.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from narthex.model.names import NamespacedName
from narthex.model.objects import EndpointSlice, Node, Pod, Service
from narthex.model.store import Slices, Snapshot

Picture = dict[str, Any]
"""`nodes`, `pods`, `services`, `slices`: lists of mappings, sorted by name."""

_MOST_ENDPOINTS = 1000
"""Endpoints of a slice, as in Kubernetes."""


def picture(snapshot: Snapshot) -> Picture:
    """Return the picture of a cluster, including pods that only EndpointSlices name."""
    pods = {key: _pod(pod) for key, pod in snapshot.pods.items()}
    for key, made in _told_by_slices(snapshot):
        pods.setdefault(key, made)
    ports = _ports_of_pods(snapshot)
    for key, pod in pods.items():
        pod["ports"] = ports.get(str(key), [])
    node_ports = sorted(
        {f"{port.node_port}/{port.protocol.lower}" for service in snapshot.services.values() for port in service.ports
         if port.node_port}
    )  # fmt: skip
    nodes = {node.name: _node(node, node_ports) for node in snapshot.nodes.values()}
    for pod in pods.values():
        if pod["node"] and pod["node"] not in nodes:
            nodes[pod["node"]] = _node(Node(name=pod["node"]), node_ports)
    return {
        "nodes": [nodes[name] for name in sorted(nodes)],
        "pods": [pods[key] for key in sorted(pods)],
        "services": [_service(service, snapshot.slices.get(key)) for key, service in sorted(snapshot.services.items())],
        "slices": [_slice(each) for _, slices in sorted(snapshot.slices.items()) for _, each in sorted(slices.items())],
    }


def _node(node: Node, ports: list[str]) -> dict[str, Any]:
    return {
        "key": node.name,
        "ready": node.ready,
        "addresses": [*node.internal_ips, *node.external_ips],
        "ports": ports,
    }


def _pod(pod: Pod) -> dict[str, Any]:
    state = "terminating" if pod.deletion_timestamp else "ready" if pod.ready else "not ready"
    return {"key": str(pod.key), "node": pod.spec.node_name, "addresses": list(pod.ips), "state": state}


def _told_by_slices(snapshot: Snapshot) -> Iterable[tuple[NamespacedName, dict[str, Any]]]:
    for slices in snapshot.slices.values():
        for each in slices.values():
            for endpoint in each.endpoints:
                if endpoint.target:
                    key = NamespacedName(each.namespace, endpoint.target)
                    yield (
                        key,
                        {
                            "key": str(key),
                            "node": endpoint.node_name,
                            "addresses": [endpoint.address],
                            "state": "ready"
                            if endpoint.ready
                            else "terminating"
                            if endpoint.terminating
                            else "not ready",
                        },
                    )


def _ports_of_pods(snapshot: Snapshot) -> dict[str, list[str]]:
    """Return the target ports of each pod's Services: `8080/tcp`."""
    found: dict[str, set[str]] = {}
    for slices in snapshot.slices.values():
        for each in slices.values():
            ports = {f"{port.port}/{port.protocol.lower}" for port in each.ports if port.port}
            for endpoint in each.endpoints:
                if endpoint.target:
                    found.setdefault(f"{each.namespace}/{endpoint.target}", set()).update(ports)
    return {key: sorted(ports) for key, ports in found.items()}


def _service(service: Service, slices: Slices | None) -> dict[str, Any]:
    kind = "headless" if service.headless else service.type
    ready = {
        endpoint.target or endpoint.address
        for each in (slices or {}).values()
        for endpoint in each.endpoints
        if endpoint.ready
    }
    return {
        "key": str(service.key),
        "type": kind,
        "addresses": [
            *(ip for ip in service.cluster_ips if ip != "None"),
            *service.external_ips,
            *(entry.ip for entry in service.ingress),
        ],
        "name": service.external_name,
        "ports": [
            {
                "name": port.name,
                "port": f"{port.port}/{port.protocol.lower}",
                "nodePort": port.node_port,
            }
            for port in service.ports
        ],
        "ready": len(ready),
    }


def _slice(each: EndpointSlice) -> dict[str, Any]:
    return {
        "key": str(each.key),
        "service": str(each.service),
        "family": each.family.label if each.family else "FQDN",
        "ports": [f"{port.port}/{port.protocol.lower}" for port in each.ports if port.port],
        "endpoints": [
            {
                "address": endpoint.address,
                "pod": f"{each.namespace}/{endpoint.target}" if endpoint.target else "",
                "node": endpoint.node_name,
                "ready": endpoint.ready,
                "terminating": endpoint.terminating,
            }
            for endpoint in each.endpoints[:_MOST_ENDPOINTS]
        ],
    }
