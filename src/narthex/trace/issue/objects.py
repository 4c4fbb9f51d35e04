"""The cluster's objects that a flow touches, with the fields that a trace reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from narthex.model import NamespacedName, Snapshot
from narthex.trace.issue.facts import json_lines
from narthex.trace.issue.flow import IssueFlow, named

_LABEL = "kubernetes.io/service-name"
_FEW_PODS = 30
"""Pods of a Service that are kept although the flow does not name them: a cause may be that none of them is ready."""
_PROXY_NAME = "service.kubernetes.io/service-proxy-name"
_HEADLESS = "service.kubernetes.io/headless"
_ANNOTATIONS = (
    "service.kubernetes.io/",
    "flannel.alpha.coreos.com/",
    "metallb.io/",
    "metallb.universe.tf/",
    "narthex.io/",
)
_SPEC = (
    "type", "clusterIP", "clusterIPs", "externalIPs", "ipFamilies", "ipFamilyPolicy", "loadBalancerSourceRanges", "ports", "selector",
    "sessionAffinity", "sessionAffinityConfig", "externalTrafficPolicy", "internalTrafficPolicy", "healthCheckNodePort",
    "publishNotReadyAddresses", "trafficDistribution", "loadBalancerIP", "externalName",
)  # fmt: skip
_POD_SPEC = ("nodeName", "hostNetwork", "hostname", "subdomain", "readinessGates", "containers")
_POD_STATUS = ("phase", "podIP", "podIPs", "hostIP", "conditions", "containerStatuses")
_ZONES = ("topology.kubernetes.io/zone", "kubernetes.io/hostname")


def reduced_objects(
    parts: Mapping[str, str], snapshot: Snapshot, flow: IssueFlow, ends: Iterable[str], nodes: Iterable[str]
) -> dict[str, str]:
    """Return the lists of objects without those that the flow does not touch.

    Args:
        parts: Texts of a bundle by path; those below `objects/` are read. They have only the fields that bundles keep.
        snapshot: The same objects, decoded.
        flow: The headers of the packet and its replies.
        ends: `NAMESPACE/NAME` of what the question names.
        nodes: Names of the nodes on the packet's way.
    """
    services = {key for key, each in snapshot.services.items() if _is_touched(key, each, flow, ends)}
    chosen = {key: dict(snapshot.services[key].selector) for key in services}
    pods = _pods(_items(parts, "objects/pods.json"), flow, set(ends), chosen)
    on = {str((pod.get("spec") or {}).get("nodeName", "")) for pod in pods}
    found = {}
    if "objects/services.json" in parts:
        items = (one for one in _items(parts, "objects/services.json") if _key(one) in services)
        found["objects/services.json"] = [_service(one) for one in items]
    if "objects/endpointslices.json" in parts:
        items = (one for one in _items(parts, "objects/endpointslices.json") if _service_of(one) in services)
        found["objects/endpointslices.json"] = [_slice(one) for one in items]
    if "objects/nodes.json" in parts:
        held = (one for one in _items(parts, "objects/nodes.json") if _node_kept(one, flow, {*nodes, *on}))
        found["objects/nodes.json"] = [_node(one) for one in held]
    if "objects/pods.json" in parts:
        selected = {key for each in chosen.values() for key in each}
        found["objects/pods.json"] = [_pod(one, selected) for one in pods]
    return {
        path: '{"apiVersion":"v1","kind":"List","items":\n' + json_lines(items).rstrip("\n") + "}\n"
        for path, items in found.items()
    }


def _items(parts: Mapping[str, str], path: str) -> list[dict[str, Any]]:
    try:
        data = json.loads(parts.get(path) or "{}")
    except (ValueError, RecursionError):
        return []
    items = data.get("items") or () if isinstance(data, dict) else ()
    return [item for item in items if isinstance(item, dict) and isinstance(item.get("metadata"), dict)]


def _key(item: Mapping[str, Any]) -> NamespacedName:
    return NamespacedName(str(item["metadata"].get("namespace", "")), str(item["metadata"].get("name", "")))


def _service_of(item: Mapping[str, Any]) -> NamespacedName:
    labels = item["metadata"].get("labels") or {}
    return NamespacedName(str(item["metadata"].get("namespace", "")), str(labels.get(_LABEL, "")))


def _is_touched(key: NamespacedName, service: Any, flow: IssueFlow, ends: Iterable[str]) -> bool:
    own = (*service.cluster_ips, *service.external_ips, *(entry.ip for entry in service.ingress))
    opened = {port.node_port for port in service.ports if port.node_port} | {service.health_check_node_port}
    return str(key) in ends or not flow.addresses.isdisjoint(own) or not flow.ports.isdisjoint(opened - {0})


def _pods(
    pods: Iterable[dict[str, Any]],
    flow: IssueFlow,
    ends: set[str],
    selectors: Mapping[NamespacedName, Mapping[str, str]],
) -> list[dict[str, Any]]:
    """Return the pods with an address of the flow, those that are named, and a few that the Services select, or nearly do."""
    held, found, near = list(pods), [], []
    for pod in held:
        status = pod.get("status") or {}
        own = {str(one.get("ip", "")) for one in status.get("podIPs") or ()} | {str(status.get("podIP", ""))}
        labels = pod["metadata"].get("labels") or {}
        namespace = pod["metadata"].get("namespace", "")
        if own & flow.addresses or str(_key(pod)) in ends:
            found.append(pod)
        elif any(key.namespace == namespace and set(one) & set(labels) for key, one in selectors.items()):
            near.append(pod)
    # Without any pod, a trace would take the pods for unknown.
    return found + near[: max(0, _FEW_PODS - len(found))] or held[:1]


def _node_kept(item: Mapping[str, Any], flow: IssueFlow, names: set[str]) -> bool:
    spec, status = item.get("spec") or {}, item.get("status") or {}
    cidrs = spec.get("podCIDRs") or ([spec["podCIDR"]] if spec.get("podCIDR") else [])
    own = {str(one.get("address", "")) for one in status.get("addresses") or () if isinstance(one, dict)}
    return (
        str(item["metadata"].get("name", "")) in names
        or bool(own & flow.addresses)
        or any(named(str(each), flow.addresses) for each in cidrs)
    )


# ---- fields ----------------------------------------------------------------------------------------------------------


def _meta(item: Mapping[str, Any], labels: Iterable[str] = ()) -> dict[str, Any]:
    meta = item["metadata"]
    kept: dict[str, Any] = {key: meta[key] for key in ("namespace", "name", "deletionTimestamp") if meta.get(key)}
    held = {key: value for key, value in (meta.get("labels") or {}).items() if key in labels}
    noted = {key: value for key, value in (meta.get("annotations") or {}).items() if key.startswith(_ANNOTATIONS)}
    return {**kept, **({"labels": held} if held else {}), **({"annotations": noted} if noted else {})}


def _object(item: Mapping[str, Any], meta: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"apiVersion": item.get("apiVersion", "v1"), "kind": item.get("kind", ""), "metadata": meta, **fields}


def _service(item: Mapping[str, Any]) -> dict[str, Any]:
    spec = {key: item["spec"][key] for key in _SPEC if key in (item.get("spec") or {})}
    ingress = ((item.get("status") or {}).get("loadBalancer") or {}).get("ingress")
    status = {"status": {"loadBalancer": {"ingress": ingress}}} if ingress else {}
    return _object(item, _meta(item, (_PROXY_NAME, _HEADLESS)), spec=spec, **status)


def _slice(item: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("addresses", "conditions", "hostname", "nodeName", "zone", "hints")
    endpoints = []
    for each in item.get("endpoints") or ():
        target = each.get("targetRef")
        one = {key: each[key] for key in kept if key in each}
        if isinstance(target, dict):
            one["targetRef"] = {key: target[key] for key in ("kind", "namespace", "name") if key in target}
        endpoints.append(one)
    fields = {"addressType": item.get("addressType"), "endpoints": endpoints, "ports": item.get("ports")}
    return _object(item, _meta(item, (_LABEL, _PROXY_NAME, _HEADLESS)), **fields)


def _node(item: Mapping[str, Any]) -> dict[str, Any]:
    spec = {key: value for key, value in (item.get("spec") or {}).items() if key in ("podCIDR", "podCIDRs")}
    status = item.get("status") or {}
    held = [
        {key: one[key] for key in ("type", "status", "reason") if key in one}
        for one in status.get("conditions") or ()
        if one.get("type") in ("Ready", "NetworkUnavailable")
    ]
    return _object(
        item, _meta(item, _ZONES), spec=spec, status={"addresses": status.get("addresses"), "conditions": held}
    )


def _pod(item: Mapping[str, Any], labels: set[str]) -> dict[str, Any]:
    spec, status = item.get("spec") or {}, item.get("status") or {}
    return _object(
        item,
        _meta(item, labels),
        spec={key: spec[key] for key in _POD_SPEC if key in spec},
        status={key: status[key] for key in _POD_STATUS if key in status},
    )
