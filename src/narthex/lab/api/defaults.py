"""What the API server writes into objects where nothing is said (pkg/apis/*/v1/defaults.go, and admission).

Each function gets a copy that it may change, but for what is nested in it.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

from narthex.lab.api.defaults_pod import admitted_pod, pod_spec
from narthex.lab.api.kinds import of_definition

Raw = dict[str, Any]
_HOUR3 = 10800


def defaulted(kind: str, raw: Raw) -> Raw:
    """An object of a kind, completed."""
    complete = _BY_KIND.get(kind)
    return raw if complete is None else complete(dict(raw))


def begun(kind: str, raw: Raw, now: str) -> Raw:
    """An object that is made for the first time: what only then is set, its status among it."""
    begin = _BEGIN.get(kind)
    return raw if begin is None else begin(dict(raw), now)


def _service(raw: Raw) -> Raw:
    spec = {"type": "ClusterIP", "sessionAffinity": "None", **_said(raw.get("spec"))}
    if spec["sessionAffinity"] == "ClientIP" and not spec.get("sessionAffinityConfig"):
        spec["sessionAffinityConfig"] = {"clientIP": {"timeoutSeconds": _HOUR3}}
    spec["ports"] = [_service_port(each) for each in spec.get("ports") or ()]
    if not spec["ports"]:
        del spec["ports"]
    if spec["type"] in ("NodePort", "LoadBalancer"):
        spec.setdefault("externalTrafficPolicy", "Cluster")
    if spec["type"] == "LoadBalancer":
        spec.setdefault("allocateLoadBalancerNodePorts", True)
    if spec["type"] != "ExternalName":
        spec.setdefault("internalTrafficPolicy", "Cluster")
    return {**raw, "spec": spec}


def _service_port(port: Any) -> Any:
    if not isinstance(port, Mapping):
        return port
    found = {"protocol": "TCP", **_said(port)}
    if found.get("targetPort") in (None, "", 0) and "port" in found:
        found["targetPort"] = found["port"]
    return found


def _deployment(raw: Raw) -> Raw:
    spec = {"replicas": 1, "revisionHistoryLimit": 10, "progressDeadlineSeconds": 600, **_said(raw.get("spec"))}
    strategy = {"type": "RollingUpdate", **_said(spec.get("strategy"))}
    if strategy["type"] == "RollingUpdate":
        strategy["rollingUpdate"] = {"maxUnavailable": "25%", "maxSurge": "25%", **_said(strategy.get("rollingUpdate"))}
    return {**raw, "spec": {**_templated(spec), "strategy": strategy}}


def _replica_set(raw: Raw) -> Raw:
    return {**raw, "spec": _templated({"replicas": 1, **_said(raw.get("spec"))})}


def _templated(spec: Raw) -> Raw:
    template = spec.get("template")
    if not isinstance(template, Mapping):
        return spec
    return {**spec, "template": {**template, "spec": pod_spec(template.get("spec") or {})}}


def _pod(raw: Raw) -> Raw:
    return {**raw, "spec": pod_spec(raw.get("spec") or {})}


def _namespace(raw: Raw) -> Raw:
    meta = raw["metadata"]
    labels = {**(meta.get("labels") or {}), "kubernetes.io/metadata.name": meta.get("name", "")}
    return {
        **raw,
        "metadata": {**meta, "labels": labels},
        "spec": {"finalizers": ["kubernetes"], **(raw.get("spec") or {})},
    }


def _secret(raw: Raw) -> Raw:
    given = raw.pop("stringData", None) or {}
    data = {
        **(raw.get("data") or {}),
        **{key: base64.b64encode(str(value).encode()).decode() for key, value in given.items()},
    }
    return {"type": "Opaque", **raw, **({"data": data} if data else {})}


def _slice(raw: Raw) -> Raw:
    ports = [{"name": "", "protocol": "TCP", **_said(each)} for each in raw.get("ports") or ()]
    return {**raw, "ports": ports} if ports else raw


def _endpoints(raw: Raw) -> Raw:
    subsets = [
        {**each, "ports": [{"protocol": "TCP", **_said(port)} for port in each["ports"]]} if each.get("ports") else each
        for each in raw.get("subsets") or ()
    ]
    return {**raw, "subsets": subsets} if subsets else raw


def _definition(raw: Raw) -> Raw:
    spec = dict(raw.get("spec") or {})
    names = dict(spec.get("names") or {})
    if names.get("kind"):
        names = {"singular": names["kind"].lower(), "listKind": f"{names['kind']}List", **names}
    return {**raw, "spec": {"conversion": {"strategy": "None"}, **spec, "names": names}}


def _begin_definition(raw: Raw, now: str) -> Raw:
    if (kind := of_definition(raw)) is None:
        return raw
    made = {"status": "True", "lastTransitionTime": now}
    conditions = [
        {"type": "NamesAccepted", **made, "reason": "NoConflicts", "message": "no conflicts found"},
        {
            "type": "Established",
            **made,
            "reason": "InitialNamesAccepted",
            "message": "the initial names have been accepted",
        },
    ]
    return {
        **raw,
        "status": {"conditions": conditions, "acceptedNames": raw["spec"]["names"], "storedVersions": [kind.version]},
    }


def _said(given: Any) -> Raw:
    """What is really said: null is not."""
    return (
        {name: value for name, value in (given or {}).items() if value is not None}
        if isinstance(given, Mapping)
        else {}
    )


_BY_KIND: Mapping[str, Callable[[Raw], Raw]] = {
    "Service": _service,
    "Deployment": _deployment,
    "ReplicaSet": _replica_set,
    "Pod": _pod,
    "Namespace": _namespace,
    "Secret": _secret,
    "EndpointSlice": _slice,
    "Endpoints": _endpoints,
    "CustomResourceDefinition": _definition,
}
_BEGIN: Mapping[str, Callable[[Raw, str], Raw]] = {
    "Service": lambda raw, _: {**raw, "status": {"loadBalancer": {}}},
    "Deployment": lambda raw, _: {**raw, "status": {}},
    "ReplicaSet": lambda raw, _: {**raw, "status": {"replicas": 0}},
    "Pod": lambda raw, _: admitted_pod(raw),
    "Namespace": lambda raw, _: {**raw, "status": {"phase": "Active"}},
    "CustomResourceDefinition": _begin_definition,
}
"""As upstream, a new object's status is the server's; of a Node and others it is kept."""
