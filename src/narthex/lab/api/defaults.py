"""Defaults that the API server sets (pkg/apis/*/v1/defaults.go, and admission).

Each function gets a shallow copy, which it may modify.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

from narthex.lab.api.kinds import resource_of_definition

Raw = dict[str, Any]
_HOUR3 = 10800


def apply_defaults(kind: str, raw: Raw) -> Raw:
    """Return an object with the defaults of its kind."""
    complete = _BY_KIND.get(kind)
    return raw if complete is None else complete(dict(raw))


def initialize(kind: str, raw: Raw, now: str) -> Raw:
    """Return a new object with what is set at creation only, such as its status."""
    begin = _BEGIN.get(kind)
    return raw if begin is None else begin(dict(raw), now)


def _service(raw: Raw) -> Raw:
    spec = {"type": "ClusterIP", "sessionAffinity": "None", **_without_nulls(raw.get("spec"))}
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
    found = {"protocol": "TCP", **_without_nulls(port)}
    if found.get("targetPort") in (None, "", 0) and "port" in found:
        found["targetPort"] = found["port"]
    return found


def _deployment(raw: Raw) -> Raw:
    spec = {
        "replicas": 1,
        "revisionHistoryLimit": 10,
        "progressDeadlineSeconds": 600,
        **_without_nulls(raw.get("spec")),
    }
    strategy = {"type": "RollingUpdate", **_without_nulls(spec.get("strategy"))}
    if strategy["type"] == "RollingUpdate":
        strategy["rollingUpdate"] = {
            "maxUnavailable": "25%",
            "maxSurge": "25%",
            **_without_nulls(strategy.get("rollingUpdate")),
        }
    return {**raw, "spec": {**_templated(spec), "strategy": strategy}}


def _replica_set(raw: Raw) -> Raw:
    return {**raw, "spec": _templated({"replicas": 1, **_without_nulls(raw.get("spec"))})}


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
    ports = [{"name": "", "protocol": "TCP", **_without_nulls(each)} for each in raw.get("ports") or ()]
    return {**raw, "ports": ports} if ports else raw


def _endpoints(raw: Raw) -> Raw:
    subsets = [
        {**each, "ports": [{"protocol": "TCP", **_without_nulls(port)} for port in each["ports"]]}
        if each.get("ports")
        else each
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
    if (kind := resource_of_definition(raw)) is None:
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


def _without_nulls(given: Any) -> Raw:
    """Return a mapping without nulls."""
    return (
        {name: value for name, value in (given or {}).items() if value is not None}
        if isinstance(given, Mapping)
        else {}
    )


_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
_MODED = ("configMap", "secret", "downwardAPI", "projected")
_TOLERATED = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def pod_spec(given: Mapping[str, Any]) -> Raw:
    """Return a pod's spec with its defaults."""
    spec: Raw = {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 30,
        "dnsPolicy": "ClusterFirst",
        "schedulerName": "default-scheduler",
        "securityContext": {},
        **{name: value for name, value in given.items() if value is not None},
    }
    for name in ("containers", "initContainers"):
        if spec.get(name):
            spec[name] = [_container(each, bool(spec.get("hostNetwork"))) for each in spec[name]]
    if spec.get("volumes"):
        spec["volumes"] = [_volume(each) for each in spec["volumes"]]
    account = spec.get("serviceAccountName") or spec.get("serviceAccount")
    if account:
        spec |= {"serviceAccountName": account, "serviceAccount": account}
    return spec


def admitted_pod(raw: Raw) -> Raw:
    """Return a new pod with what admission adds to its spec, and its first status."""
    given = raw["spec"]
    spec: Raw = {
        "enableServiceLinks": True,
        "preemptionPolicy": "PreemptLowerPriority",
        "priority": 0,
        "serviceAccountName": "default",
        "serviceAccount": "default",
        **given,
    }
    tolerations = list(spec.get("tolerations") or ())
    for key in _TOLERATED:
        if not any(
            each.get("key") in (key, None, "") and each.get("effect") in ("NoExecute", None, "") for each in tolerations
        ):
            tolerations.append({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300})
    return {
        **raw,
        "spec": {**spec, "tolerations": tolerations},
        "status": {"phase": "Pending", "qosClass": _quality(spec)},
    }


def _container(given: Any, host_network: bool) -> Any:
    if not isinstance(given, Mapping):
        return given
    image = str(given.get("image") or "")
    tag = image.rpartition("/")[2].partition("@")[0].partition(":")[2]
    always = "@" not in image and tag in ("", "latest")
    found: Raw = {
        "imagePullPolicy": "Always" if always else "IfNotPresent",
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        **given,
    }
    found["resources"] = _resources(given.get("resources") or {})
    if found.get("ports"):
        found["ports"] = [_port(each, host_network) for each in found["ports"]]
    for name in _PROBES:
        if isinstance(found.get(name), Mapping):
            found[name] = _probe(found[name])
    if found.get("env"):
        found["env"] = [_variable(each) for each in found["env"]]
    return found


def _resources(given: Mapping[str, Any]) -> Raw:
    """Return resources in which each limit without a request is requested, too."""
    found: Raw = dict(given)
    for name in ("limits", "requests"):
        if found.get(name):
            found[name] = {key: str(value) for key, value in found[name].items()}
    if found.get("limits"):
        found["requests"] = {**found["limits"], **(found.get("requests") or {})}
    return found


def _port(given: Any, host_network: bool) -> Any:
    if not isinstance(given, Mapping):
        return given
    found = {"protocol": "TCP", **given}
    if host_network and not found.get("hostPort") and found.get("containerPort"):
        found["hostPort"] = found["containerPort"]
    return found


def _probe(given: Mapping[str, Any]) -> Raw:
    found = {"timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3, **given}
    if isinstance(found.get("httpGet"), Mapping):
        found["httpGet"] = {"path": "/", "scheme": "HTTP", **found["httpGet"]}
    return found


def _variable(given: Any) -> Any:
    source = given.get("valueFrom") if isinstance(given, Mapping) else None
    if not isinstance(source, Mapping) or not isinstance(source.get("fieldRef"), Mapping):
        return given
    return {**given, "valueFrom": {**source, "fieldRef": {"apiVersion": "v1", **source["fieldRef"]}}}


def _volume(given: Any) -> Any:
    if not isinstance(given, Mapping):
        return given
    sources = {name: {"defaultMode": 420, **given[name]} for name in _MODED if isinstance(given.get(name), Mapping)}
    if isinstance(given.get("hostPath"), Mapping):
        sources["hostPath"] = {"type": "", **given["hostPath"]}
    # A volume without a source is an emptyDir.
    nothing: Raw = {"emptyDir": {}} if set(given) == {"name"} else {}
    return {**given, **sources, **nothing}


def _quality(spec: Raw) -> str:
    """Return the QoS class of a pod (pkg/apis/core/v1/helper/qos)."""
    containers = [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]
    wants = [each.get("resources") or {} for each in containers]
    if not any(each.get("limits") or each.get("requests") for each in wants):
        return "BestEffort"
    same = all(
        {"cpu", "memory"} <= set(each.get("limits") or ()) and each.get("requests") == each["limits"] for each in wants
    )
    return "Guaranteed" if same else "Burstable"


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
"""As upstream, the server sets the status of a new object of these kinds; a new Node, for one, keeps its status."""
