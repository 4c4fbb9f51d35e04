"""Defaults that the API server sets (pkg/apis/*/v1/defaults.go, and admission)."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from narthex.lab.api.kinds import ApiResource, resource_of_definition
from narthex.lab.api.types import FieldType, field_type, named, names, object_type, structs_below

Raw = dict[str, Any]

_MODE = {"defaultMode": 420}
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "apps_v1.DaemonSet": {"spec": {}},
    "apps_v1.DaemonSetSpec": {"revisionHistoryLimit": 10, "updateStrategy": {}},
    "apps_v1.DaemonSetUpdateStrategy": {"type": "RollingUpdate"},
    "apps_v1.Deployment": {"spec": {}},
    "apps_v1.DeploymentSpec": {
        "replicas": 1,
        "revisionHistoryLimit": 10,
        "progressDeadlineSeconds": 600,
        "strategy": {},
    },
    "apps_v1.DeploymentStrategy": {"type": "RollingUpdate"},
    "apps_v1.ReplicaSet": {"spec": {}},
    "apps_v1.ReplicaSetSpec": {"replicas": 1},
    "apps_v1.StatefulSet": {"spec": {}},
    "apps_v1.StatefulSetPersistentVolumeClaimRetentionPolicy": {"whenDeleted": "Retain", "whenScaled": "Retain"},
    "apps_v1.StatefulSetSpec": {
        "replicas": 1,
        "podManagementPolicy": "OrderedReady",
        "revisionHistoryLimit": 10,
        "updateStrategy": {},
        "persistentVolumeClaimRetentionPolicy": {},
    },
    "apps_v1.StatefulSetUpdateStrategy": {"type": "RollingUpdate"},
    "batch_v1.CronJob": {"spec": {}},
    "batch_v1.CronJobSpec": {
        "concurrencyPolicy": "Allow",
        "suspend": False,
        "successfulJobsHistoryLimit": 3,
        "failedJobsHistoryLimit": 1,
    },
    "batch_v1.Job": {"spec": {}},
    "core_v1.ConfigMapVolumeSource": _MODE,
    "core_v1.Container": {
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        "resources": {},
    },
    "core_v1.EphemeralContainer": {
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        "resources": {},
    },
    "core_v1.ContainerPort": {"protocol": "TCP"},
    "core_v1.DownwardAPIVolumeSource": _MODE,
    "core_v1.EndpointPort": {"protocol": "TCP"},
    "core_v1.HTTPGetAction": {"path": "/", "scheme": "HTTP"},
    "core_v1.HostPathVolumeSource": {"type": ""},
    "core_v1.Namespace": {"spec": {}},
    "core_v1.NamespaceSpec": {"finalizers": ["kubernetes"]},
    "core_v1.ObjectFieldSelector": {"apiVersion": "v1"},
    "core_v1.Pod": {"spec": {}},
    "core_v1.PodSpec": {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 30,
        "dnsPolicy": "ClusterFirst",
        "schedulerName": "default-scheduler",
        "securityContext": {},
    },
    "core_v1.PodTemplateSpec": {"spec": {}},
    "core_v1.Probe": {"timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3},
    "core_v1.ProjectedVolumeSource": _MODE,
    "core_v1.SecretVolumeSource": _MODE,
    "core_v1.Service": {"spec": {}},
    "core_v1.ServicePort": {"protocol": "TCP"},
    "core_v1.ServiceSpec": {"type": "ClusterIP", "sessionAffinity": "None"},
    "discovery_v1.EndpointPort": {"name": "", "protocol": "TCP"},
    "networking_v1.IngressClassParametersReference": {"scope": "Cluster"},
    "networking_v1.NetworkPolicyPort": {"protocol": "TCP"},
}
"""Defaults of fields, by the type that has them."""
_NULLS_ARE_ABSENT = frozenset(
    {"apps_v1.DeploymentSpec", "apps_v1.DeploymentStrategy", "apps_v1.ReplicaSetSpec", "core_v1.EndpointPort"}
    | {"apps_v1.DaemonSetSpec", "apps_v1.StatefulSetSpec", "batch_v1.CronJobSpec", "batch_v1.JobSpec"}
    | {"core_v1.PodSpec", "core_v1.ServicePort", "core_v1.ServiceSpec", "discovery_v1.EndpointPort"}
)
"""Types of which null fields are dropped. Elsewhere, null is a value, except in place of an object."""


def apply_defaults(kind: ApiResource, raw: Raw) -> Raw:
    """Return an object with the defaults of its kind."""
    return _completed(raw, object_type(kind))  # type: ignore[no-any-return]


def initialize(kind: str, raw: Raw, now: str) -> Raw:
    """Return a new object with what is set at creation only, such as its status."""
    begin = _BEGIN.get(kind)
    return raw if begin is None else begin(dict(raw), now)


def _completed(value: Any, of: FieldType) -> Any:
    """Return a value of a type with the defaults of its fields, and of those below."""
    if of.sort == "list" and isinstance(value, list):
        return [_completed(each, of.item) for each in value]
    if of.name not in _types_with_defaults() or not isinstance(value, Mapping):
        return value
    given = _without_nulls(value) if of.name in _NULLS_ARE_ABSENT else dict(value)
    for name, default in _FIELDS.get(of.name, {}).items():
        if name not in given or (given[name] is None and default == {}):
            given[name] = default
    found = {name: _completed(each, field_type(of, name)) for name, each in given.items()}
    compute = _COMPUTED.get(of.name)
    return found if compute is None else compute(found)


@cache
def _types_with_defaults() -> frozenset[str]:
    """Return the types that have defaults, and those that contain such types."""
    found: set[str] = {*_FIELDS, *_COMPUTED}
    while more := {name for name in names() if name not in found and not found.isdisjoint(structs_below(named(name)))}:
        found |= more
    return frozenset(found)


def _without_nulls(given: Mapping[str, Any]) -> Raw:
    return {name: value for name, value in given.items() if value is not None}


def _service_spec(spec: Raw) -> Raw:
    if spec["sessionAffinity"] == "None":
        spec.pop("sessionAffinityConfig", None)
    elif ((spec.get("sessionAffinityConfig") or {}).get("clientIP") or {}).get("timeoutSeconds") is None:
        spec["sessionAffinityConfig"] = {"clientIP": {"timeoutSeconds": 10800}}
    if not spec.get("ports"):
        spec.pop("ports", None)
    outside = spec["type"] in ("NodePort", "LoadBalancer") or (spec["type"] == "ClusterIP" and spec.get("externalIPs"))
    if outside and not spec.get("externalTrafficPolicy"):
        spec["externalTrafficPolicy"] = "Cluster"
    if spec["type"] == "LoadBalancer":
        spec.setdefault("allocateLoadBalancerNodePorts", True)
    if spec["type"] != "ExternalName":
        spec.setdefault("internalTrafficPolicy", "Cluster")
    return spec


def _service_port(port: Raw) -> Raw:
    if port.get("targetPort") in (None, "", 0) and "port" in port:
        port["targetPort"] = port["port"]
    return port


def _strategy(**defaults: Any) -> Callable[[Raw], Raw]:
    """Return a function that completes an update strategy with these defaults of `rollingUpdate`."""

    def complete(strategy: Raw) -> Raw:
        """Return the strategy with the defaults of its `rollingUpdate`; other types have none."""
        if strategy["type"] != "RollingUpdate":
            return strategy
        return {**strategy, "rollingUpdate": {**defaults, **_without_nulls(strategy.get("rollingUpdate") or {})}}

    return complete


def _job(raw: Raw) -> Raw:
    """Return a Job with its defaults, which the template in a CronJob does not have."""
    spec: Raw = {**raw["spec"]}
    if spec.get("completions") is None and spec.get("parallelism") is None:
        spec["completions"] = 1
    replaced = "Failed" if spec.get("podFailurePolicy") else "TerminatingOrFailed"
    unset = {"parallelism": 1, "backoffLimit": 6, "completionMode": "NonIndexed", "suspend": False}
    spec = {**unset, "podReplacementPolicy": replaced, "manualSelector": False, **spec}
    labels = ((spec.get("template") or {}).get("metadata") or {}).get("labels")
    meta = raw["metadata"] if raw["metadata"].get("labels") or not labels else {**raw["metadata"], "labels": labels}
    return {**raw, "metadata": meta, "spec": spec}


JOB_UID, JOB_NAME = "batch.kubernetes.io/controller-uid", "batch.kubernetes.io/job-name"
"""Labels of a Job's pods. They have them without the prefix, too."""


def _begin_job(raw: Raw, _: str) -> Raw:
    """Return a new Job with the selector and the labels that identify its pods."""
    spec, meta = raw["spec"], raw["metadata"]
    if not spec.get("manualSelector"):
        names = {JOB_UID: meta["uid"], "controller-uid": meta["uid"]}
        names |= {JOB_NAME: meta.get("name", ""), "job-name": meta.get("name", "")}
        template = spec.get("template") or {}
        inner = template.get("metadata") or {}
        template = {**template, "metadata": {**inner, "labels": {**(inner.get("labels") or {}), **names}}}
        labels = {**((spec.get("selector") or {}).get("matchLabels") or {}), JOB_UID: meta["uid"]}
        spec = {**spec, "selector": {**(spec.get("selector") or {}), "matchLabels": labels}, "template": template}
        own = (inner.get("labels") or {}).items()
        if (meta.get("labels") or {}).items() == own:
            # A Job without labels has those of its pods.
            meta = {**meta, "labels": template["metadata"]["labels"]}
    return {**raw, "metadata": meta, "spec": spec, "status": {}}


def _namespace(raw: Raw) -> Raw:
    meta = raw["metadata"]
    labels = {**(meta.get("labels") or {}), "kubernetes.io/metadata.name": meta.get("name", "")}
    return {**raw, "metadata": {**meta, "labels": labels}}


def _secret(raw: Raw) -> Raw:
    given = raw.pop("stringData", None) or {}
    data = {
        **(raw.get("data") or {}),
        **{key: base64.b64encode(str(value).encode()).decode() for key, value in given.items()},
    }
    return {"type": "Opaque", **raw, **({"data": data} if data else {})}


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


def _pod_spec(spec: Raw) -> Raw:
    if account := spec.get("serviceAccountName") or spec.get("serviceAccount"):
        spec |= {"serviceAccountName": account, "serviceAccount": account}
    for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
        for port in container.get("ports") or () if spec.get("hostNetwork") else ():
            if not port.get("hostPort") and port.get("containerPort"):
                port["hostPort"] = port["containerPort"]
    return spec


_TOLERATED = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


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


def _container(container: Raw) -> Raw:
    image = str(container.get("image") or "")
    tag = image.rpartition("/")[2].partition("@")[0].partition(":")[2]
    always = "@" not in image and tag in ("", "latest")
    container.setdefault("imagePullPolicy", "Always" if always else "IfNotPresent")
    resources = dict(container["resources"])
    for name in ("limits", "requests"):
        if resources.get(name):
            resources[name] = {key: str(value) for key, value in resources[name].items()}
    if resources.get("limits"):
        # A limit without a request is requested, too.
        resources["requests"] = {**resources["limits"], **(resources.get("requests") or {})}
    return {**container, "resources": resources}


def _network_policy_spec(spec: Raw) -> Raw:
    """Return the specification of a NetworkPolicy, which applies to all pods and their ingress unless it says otherwise."""
    types = ["Ingress", "Egress"] if spec.get("egress") else ["Ingress"]
    return {**spec, "podSelector": spec.get("podSelector") or {}, "policyTypes": spec.get("policyTypes") or types}


def _volume(volume: Raw) -> Raw:
    """Return a volume, which is an emptyDir if it has no source."""
    return {**volume, "emptyDir": {}} if set(volume) == {"name"} else volume


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


_COMPUTED: Mapping[str, Callable[[Raw], Raw]] = {
    "apiextensions_v1.CustomResourceDefinition": _definition,
    "apps_v1.DaemonSetUpdateStrategy": _strategy(maxUnavailable=1, maxSurge=0),
    "apps_v1.DeploymentStrategy": _strategy(maxUnavailable="25%", maxSurge="25%"),
    "apps_v1.StatefulSetUpdateStrategy": _strategy(partition=0),
    "batch_v1.Job": _job,
    "core_v1.Container": _container,
    "core_v1.EphemeralContainer": _container,
    "core_v1.Namespace": _namespace,
    "core_v1.PodSpec": _pod_spec,
    "core_v1.Secret": _secret,
    "core_v1.ServicePort": _service_port,
    "core_v1.ServiceSpec": _service_spec,
    "core_v1.Volume": _volume,
    "networking_v1.NetworkPolicySpec": _network_policy_spec,
}
"""Defaults that depend on other fields, by type. The functions may modify what they get."""


_DAEMON_NUMBERS = ("currentNumberScheduled", "desiredNumberScheduled", "numberMisscheduled", "numberReady")
"""Numbers in a DaemonSet's status that are present if they are 0."""
_BEGIN: Mapping[str, Callable[[Raw, str], Raw]] = {
    "Service": lambda raw, _: {**raw, "status": {"loadBalancer": {}}},
    "Deployment": lambda raw, _: {**raw, "status": {}},
    "DaemonSet": lambda raw, _: {**raw, "status": dict.fromkeys(_DAEMON_NUMBERS, 0)},
    "StatefulSet": lambda raw, _: {**raw, "status": {"replicas": 0, "availableReplicas": 0}},
    "Job": _begin_job,
    "CronJob": lambda raw, _: {**raw, "status": {}},
    "Ingress": lambda raw, _: {**raw, "status": {"loadBalancer": {}}},
    "ReplicaSet": lambda raw, _: {**raw, "status": {"replicas": 0}},
    "Pod": lambda raw, _: admitted_pod(raw),
    "Namespace": lambda raw, _: {**raw, "status": {"phase": "Active"}},
    "CustomResourceDefinition": _begin_definition,
}
"""As upstream, the server sets the status of a new object of these kinds; a new Node, for one, keeps its status."""
