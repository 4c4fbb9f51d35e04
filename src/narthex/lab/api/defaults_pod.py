"""Defaults of pods and of the templates of pods (pkg/apis/core/v1/defaults.go; the admission plugins that are always on)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Raw = dict[str, Any]
_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
_MODED = ("configMap", "secret", "downwardAPI", "projected")
_TOLERATED = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def pod_spec(given: Mapping[str, Any]) -> Raw:
    """A pod's spec, completed."""
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
    """A pod that is made: what admission adds to its spec, and the status that it begins with."""
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
    """What is limited and not requested is requested as much. Quantities are texts."""
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
    # A volume of which nothing is said is an empty folder.
    nothing: Raw = {"emptyDir": {}} if set(given) == {"name"} else {}
    return {**given, **sources, **nothing}


def _quality(spec: Raw) -> str:
    """The class of quality of service (pkg/apis/core/v1/helper/qos)."""
    containers = [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]
    wants = [each.get("resources") or {} for each in containers]
    if not any(each.get("limits") or each.get("requests") for each in wants):
        return "BestEffort"
    same = all(
        {"cpu", "memory"} <= set(each.get("limits") or ()) and each.get("requests") == each["limits"] for each in wants
    )
    return "Guaranteed" if same else "Burstable"
