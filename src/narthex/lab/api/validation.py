"""Validation of objects: names, pods, workloads, and definitions; `network_validation.py` has Services and their kin.

Messages are kube-apiserver's (pkg/apis/*/validation).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from narthex.lab.api import network_validation
from narthex.lab.api.errors import FieldError
from narthex.lab.api.field_errors import (
    IMMUTABLE,
    at_least_zero,
    bad,
    dns_label,
    duplicate,
    forbidden,
    labels,
    not_found,
    notes,
    one_of,
    port_name,
    port_number,
    required,
    subdomain,
)
from narthex.lab.api.kinds import ApiResource
from narthex.lab.api.schedules import schedule_error, zone_error

Raw = Mapping[str, Any]


def field_errors_of(kind: ApiResource, held: Raw | None, new: Raw) -> list[FieldError]:
    """Return the validation errors of an object. `held` is the object that it replaces, None if it is created."""
    found = [] if held is not None else list(_name(kind, new["metadata"]))
    found += labels("metadata.labels", new["metadata"].get("labels"))
    found += notes("metadata.annotations", new["metadata"].get("annotations"))
    if check := _CHECKS.get(kind.name):
        found += check(new)
    if held is not None and (changed := _CHANGES.get(kind.name)):
        found += changed(held, new)
    return found


def warnings_of(kind: ApiResource, new: Raw) -> tuple[str, ...]:
    """Return warnings about what the lab accepts and does differently."""
    claims = (new.get("spec") or {}).get("volumeClaimTemplates") if kind.name == "StatefulSet" else None
    return (_CLAIMS,) if claims else ()


_CLAIMS = "spec.volumeClaimTemplates: a lab has no persistent volumes; each pod gets an empty directory for each claim"


def _name(kind: ApiResource, meta: Raw) -> Iterator[FieldError]:
    name = meta.get("name")
    if not name or not isinstance(name, str):
        yield required("metadata.name", "name or generateName is required")
        return
    # Names of Services may begin with a digit (KEP-5311).
    check = dns_label if kind.name in ("Namespace", "Service") else subdomain
    if kind.name != "IPAddress":
        yield from check("metadata.name", name)


def _definition(new: Raw) -> Iterator[FieldError]:
    spec = new.get("spec") or {}
    names, group = spec.get("names") or {}, spec.get("group")
    given = {"spec.group": group, "spec.names.plural": names.get("plural"), "spec.names.kind": names.get("kind")}
    yield from (required(field) for field, value in given.items() if not value)
    yield from one_of("spec.scope", spec.get("scope") or "", ("Cluster", "Namespaced"))
    expected = f"{names.get('plural')}.{group}"
    if new["metadata"].get("name") != expected:
        yield bad("metadata.name", new["metadata"].get("name"), 'must be spec.names.plural+"."+spec.group')
    if sum(bool(each.get("storage")) for each in spec.get("versions") or ()) != 1:
        text = "must have exactly one version marked as storage version"
        yield bad("spec.versions", [each.get("name") for each in spec.get("versions") or ()], text)


def _fixed_data(held: Raw, new: Raw) -> Iterator[FieldError]:
    if held.get("immutable") and any(held.get(name) != new.get(name) for name in ("data", "binaryData", "immutable")):
        yield forbidden("data", f"{IMMUTABLE} when `immutable` is set")


_RESTARTS = ("Always", "OnFailure", "Never")
_PROBE_NUMBERS = ("initialDelaySeconds", "timeoutSeconds", "periodSeconds", "successThreshold", "failureThreshold")
_DNS = ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None")
_PERCENT = re.compile(r"[0-9]+%")
_MAY_CHANGE = (
    "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,"
    "`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),"
    "`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"
)


def _pod_spec(at: str, spec: Raw) -> Iterator[FieldError]:
    if not spec.get("containers"):
        yield required(f"{at}.containers")
    names: set[str] = set()
    volumes = {each.get("name") for each in spec.get("volumes") or () if isinstance(each, Mapping)}
    for field in ("initContainers", "containers", "ephemeralContainers"):
        for index, each in enumerate(spec.get(field) or ()):
            here = f"{at}.{field}[{index}]"
            yield from _container(here, each, volumes)
            if each.get("name") in names:
                yield duplicate(f"{here}.name", each["name"])
            names.add(each.get("name", ""))
    yield from one_of(f"{at}.restartPolicy", spec.get("restartPolicy"), _RESTARTS)
    yield from one_of(f"{at}.dnsPolicy", spec.get("dnsPolicy"), _DNS)
    yield from labels(f"{at}.nodeSelector", spec.get("nodeSelector"))
    yield from at_least_zero(at, spec, "terminationGracePeriodSeconds")
    if spec.get("nodeName"):
        yield from subdomain(f"{at}.nodeName", spec["nodeName"])
    for field in ("hostname", "subdomain"):
        if spec.get(field):
            yield from dns_label(f"{at}.{field}", spec[field])
    if override := spec.get("hostnameOverride"):
        field = f"{at}.hostnameOverride"
        yield from subdomain(field, override)
        if len(str(override)) > _MOST_HOSTNAME:
            yield bad(field, override, f"must be no more than {_MOST_HOSTNAME} characters")
        if spec.get("hostNetwork") or spec.get("setHostnameAsFQDN"):
            yield forbidden(field, "may not be set with hostNetwork or setHostnameAsFQDN")


_MOST_HOSTNAME = 64
"""Longest host name of Linux."""


def _container(at: str, given: Raw, volumes: set[Any]) -> Iterator[FieldError]:
    if given.get("name"):
        yield from dns_label(f"{at}.name", given["name"])
    else:
        yield required(f"{at}.name")
    if not given.get("image"):
        yield required(f"{at}.image")
    for index, port in enumerate(given.get("ports") or ()):
        here = f"{at}.ports[{index}]"
        if port.get("name"):
            yield from port_name(f"{here}.name", port["name"])
        yield from port_number(f"{here}.containerPort", port.get("containerPort"))
        if port.get("hostPort"):
            yield from port_number(f"{here}.hostPort", port["hostPort"])
        yield from one_of(f"{here}.protocol", port.get("protocol"), network_validation.PROTOCOLS)
    for index, each in enumerate(given.get("env") or ()):
        if not each.get("name"):
            yield required(f"{at}.env[{index}].name")
    for index, each in enumerate(given.get("volumeMounts") or ()):
        if each.get("name") not in volumes:
            yield not_found(f"{at}.volumeMounts[{index}].name", each.get("name"))
        if not each.get("mountPath"):
            yield required(f"{at}.volumeMounts[{index}].mountPath")
    for name in ("livenessProbe", "readinessProbe", "startupProbe"):
        if isinstance(given.get(name), Mapping):
            yield from _probe(f"{at}.{name}", given[name])


def _probe(at: str, probe: Raw) -> Iterator[FieldError]:
    handlers = [name for name in ("exec", "httpGet", "tcpSocket", "grpc") if probe.get(name) is not None]
    if not handlers:
        yield required(at, "must specify a handler type")
    for name in handlers[1:]:
        yield forbidden(f"{at}.{name}", "may not specify more than 1 handler type")
    yield from at_least_zero(at, probe, *_PROBE_NUMBERS)
    for name in ("httpGet", "tcpSocket", "grpc"):
        port = (probe.get(name) or {}).get("port")
        if name in handlers and isinstance(port, str):
            yield from port_name(f"{at}.{name}.port", port)
        elif name in handlers:
            yield from port_number(f"{at}.{name}.port", port)
    if at.endswith(("livenessProbe", "startupProbe")) and probe.get("successThreshold", 1) != 1:
        yield bad(f"{at}.successThreshold", probe["successThreshold"], "must be 1")


def _changed_pod(held: Raw, new: Raw) -> Iterator[FieldError]:
    """Check that an update changes only mutable fields of a Pod. A node is assigned once."""
    old, spec = _fixed(held.get("spec") or {}), _fixed(new.get("spec") or {})
    if not old.get("nodeName"):
        old, spec = {**old, "nodeName": None}, {**spec, "nodeName": None}
    if old != spec:
        yield forbidden("spec", _MAY_CHANGE)
    before, after = ((each.get("spec") or {}).get("ephemeralContainers") or [] for each in (held, new))
    if before != [each for each in after if each.get("name") in {other.get("name") for other in before}]:
        text = "existing ephemeral containers may not be changed or removed"
        yield forbidden("spec.ephemeralContainers", text)


def _fixed(spec: Raw) -> dict[str, Any]:
    free = (
        *("activeDeadlineSeconds", "tolerations", "terminationGracePeriodSeconds"),
        *("containers", "initContainers", "ephemeralContainers"),
    )
    found = {name: value for name, value in spec.items() if name not in free}
    for name in ("containers", "initContainers"):
        listed = spec.get(name) or ()
        # An absent imagePullPolicy follows from the image.
        found[name] = [{key: each[key] for key in each if key not in ("image", "imagePullPolicy")} for each in listed]
    return found


def _deployment(new: Raw) -> Iterator[FieldError]:
    yield from _workload(new)
    spec = new.get("spec") or {}
    strategy = spec.get("strategy") or {}
    yield from one_of("spec.strategy.type", strategy.get("type"), ("Recreate", "RollingUpdate"))
    rolling = strategy.get("rollingUpdate")
    if strategy.get("type") == "Recreate" and rolling:
        text = "may not be specified when strategy `type` is 'Recreate'"
        yield forbidden("spec.strategy.rollingUpdate", text)
    rolling = rolling if isinstance(rolling, Mapping) else {}
    yield from _update_limits("spec.strategy.rollingUpdate", rolling)
    if all(rolling.get(field) in (0, "0%") for field in _LIMITS):
        text = "may not be 0 when `maxSurge` is 0"
        yield bad("spec.strategy.rollingUpdate.maxUnavailable", rolling["maxUnavailable"], text)


_LIMITS = ("maxUnavailable", "maxSurge")


def _update_limits(at: str, rolling: Raw) -> Iterator[FieldError]:
    for field in _LIMITS:
        value = rolling.get(field)
        if isinstance(value, str) and not _PERCENT.fullmatch(value):
            text = "a valid percent string must be a numeric string followed by an ending '%' (e.g. '1%',  or '93%', regex used for validation is '[0-9]+%')"
            yield bad(f"{at}.{field}", value, text)
        yield from at_least_zero(at, rolling, field)


def _daemon_set(new: Raw) -> Iterator[FieldError]:
    yield from _workload(new)
    spec = new.get("spec") or {}
    if ((spec.get("template") or {}).get("spec") or {}).get("activeDeadlineSeconds") is not None:
        text = "activeDeadlineSeconds in DaemonSet is not Supported"
        yield forbidden("spec.template.spec.activeDeadlineSeconds", text)
    strategy, at = spec.get("updateStrategy") or {}, "spec.updateStrategy.rollingUpdate"
    yield from one_of("spec.updateStrategy.type", strategy.get("type"), ("OnDelete", "RollingUpdate"))
    rolling = strategy.get("rollingUpdate") or {}
    yield from _update_limits(at, rolling)
    unavailable, surge = (rolling.get(field) not in (0, "0%", None) for field in _LIMITS)
    if unavailable and surge:
        yield bad(f"{at}.maxSurge", rolling["maxSurge"], "may not be set when maxUnavailable is non-zero")
    elif strategy.get("type") == "RollingUpdate" and not unavailable and not surge:
        yield required(f"{at}.maxUnavailable", "cannot be 0 when maxSurge is 0")


def _stateful_set(new: Raw) -> Iterator[FieldError]:
    yield from _workload(new)
    spec = new.get("spec") or {}
    if spec.get("podManagementPolicy") not in ("OrderedReady", "Parallel"):
        text = "must be 'OrderedReady' or 'Parallel'"
        yield bad("spec.podManagementPolicy", spec.get("podManagementPolicy"), text)
    strategy, at = spec.get("updateStrategy") or {}, "spec.updateStrategy"
    if strategy.get("type") not in ("RollingUpdate", "OnDelete"):
        yield bad(at, strategy, "must be 'RollingUpdate' or 'OnDelete'")
    rolling = strategy.get("rollingUpdate") or {}
    if strategy.get("type") == "OnDelete" and rolling:
        yield bad(f"{at}.rollingUpdate", rolling, "only allowed for updateStrategy 'RollingUpdate'")
    yield from at_least_zero(f"{at}.rollingUpdate", rolling, "partition")
    yield from at_least_zero("spec.ordinals", spec.get("ordinals") or {}, "start")


_STATEFUL_MAY_CHANGE = (
    *("replicas", "ordinals", "template", "updateStrategy", "revisionHistoryLimit"),
    *("persistentVolumeClaimRetentionPolicy", "minReadySeconds"),
)


def _changed_stateful_set(held: Raw, new: Raw) -> Iterator[FieldError]:
    before, after = (
        {name: value for name, value in each["spec"].items() if name not in _STATEFUL_MAY_CHANGE}
        for each in (held, new)
    )
    if before != after:
        *names, last = (f"'{name}'" for name in _STATEFUL_MAY_CHANGE)
        text = f"updates to statefulset spec for fields other than {', '.join(names)} and {last} are forbidden"
        yield forbidden("spec", text)


def _workload(new: Raw) -> Iterator[FieldError]:
    """Check what controllers of pods that run forever have in common."""
    spec = new.get("spec") or {}
    yield from at_least_zero("spec", spec, "replicas", "minReadySeconds", "revisionHistoryLimit")
    yield from _template("spec", new["kind"], spec)
    if template := spec.get("template"):
        restart = (template.get("spec") or {}).get("restartPolicy")
        if restart in _RESTARTS:
            yield from one_of("spec.template.spec.restartPolicy", restart, ("Always",))


def _template(at: str, kind: str, spec: Raw) -> Iterator[FieldError]:
    """Check the selector and the template of pods."""
    selector, template = spec.get("selector") or {}, spec.get("template") or {}
    own = (template.get("metadata") or {}).get("labels") or {}
    if not selector:
        yield required(f"{at}.selector")
    elif not selector.get("matchLabels") and not selector.get("matchExpressions"):
        named = "deployment" if kind == "ReplicaSet" else kind.lower()
        yield bad(f"{at}.selector", selector, f"empty selector is invalid for {named}")
    expected = selector.get("matchLabels") or {}
    yield from labels(f"{at}.selector.matchLabels", expected)
    if any(own.get(key) != value for key, value in expected.items()):
        yield bad(f"{at}.template.metadata.labels", own, "`selector` does not match template `labels`")
    yield from labels(f"{at}.template.labels", own)
    if not template:
        yield required(f"{at}.template")
        return
    pod = template.get("spec") or {}
    claims = [{"name": (each.get("metadata") or {}).get("name")} for each in spec.get("volumeClaimTemplates") or ()]
    yield from _pod_spec(f"{at}.template.spec", {**pod, "volumes": [*(pod.get("volumes") or ()), *claims]})


def _changed_workload(held: Raw, new: Raw) -> Iterator[FieldError]:
    now = (new.get("spec") or {}).get("selector")
    if now != (held.get("spec") or {}).get("selector"):
        yield bad("spec.selector", now, IMMUTABLE)


MOST_INDEXES = 100_000
"""Indexes of a Job, so that a status that lists them all stays small (upstream's limit for Jobs with many pods at a time)."""
_JOB_NUMBERS = ("parallelism", "completions", "activeDeadlineSeconds", "backoffLimit", "ttlSecondsAfterFinished")


def _job(new: Raw) -> Iterator[FieldError]:
    spec = new.get("spec") or {}
    yield from _template("spec", "Job", spec)
    yield from _job_spec("spec", spec)


def _job_spec(at: str, spec: Raw) -> Iterator[FieldError]:
    yield from at_least_zero(at, spec, *_JOB_NUMBERS)
    modes = ("NonIndexed", "Indexed")
    yield from one_of(f"{at}.completionMode", spec.get("completionMode"), modes, optional=True)
    completions = spec.get("completions")
    if spec.get("completionMode") == "Indexed":
        if completions is None:
            yield required(f"{at}.completions", "when completion mode is Indexed")
        elif completions > MOST_INDEXES:
            yield bad(f"{at}.completions", completions, f"must be less than or equal to {MOST_INDEXES}")
    restart = ((spec.get("template") or {}).get("spec") or {}).get("restartPolicy")
    if restart in ("Always", "", None):
        yield required(f"{at}.template.spec.restartPolicy", 'valid values: "OnFailure", "Never"')


def _changed_job(held: Raw, new: Raw) -> Iterator[FieldError]:
    before, after = held["spec"], new["spec"]
    for name in ("completions", "selector", "template", "completionMode"):
        if before.get(name) != after.get(name):
            yield bad(f"spec.{name}", after.get(name), IMMUTABLE)


def _cron_job(new: Raw) -> Iterator[FieldError]:
    spec, template = new.get("spec") or {}, ((new.get("spec") or {}).get("jobTemplate") or {}).get("spec") or {}
    if len(str(new["metadata"].get("name") or "")) > _MOST_CRON_NAME:
        yield bad("metadata.name", new["metadata"]["name"], f"must be no more than {_MOST_CRON_NAME} characters")
    schedule, zone = str(spec.get("schedule") or ""), spec.get("timeZone")
    if not schedule:
        yield required("spec.schedule")
    elif "TZ" in schedule:
        text = "cannot use TZ or CRON_TZ in schedule, use timeZone field instead"
        yield bad("spec.schedule", schedule, text)
    elif why := schedule_error(schedule):
        yield bad("spec.schedule", schedule, why)
    if zone is not None and (why := zone_error(zone)):
        yield bad("spec.timeZone", zone, why)
    policies = ("Allow", "Forbid", "Replace")
    yield from one_of("spec.concurrencyPolicy", spec.get("concurrencyPolicy"), policies)
    numbers = ("startingDeadlineSeconds", "successfulJobsHistoryLimit", "failedJobsHistoryLimit")
    yield from at_least_zero("spec", spec, *numbers)
    at = "spec.jobTemplate.spec"
    yield from _job_spec(at, template)
    yield from _pod_spec(f"{at}.template.spec", (template.get("template") or {}).get("spec") or {})


_MOST_CRON_NAME = 52
"""Names of Jobs add the minute of the schedule, 11 characters, and are names of hosts."""


_CHECKS: Mapping[str, Callable[[Raw], Iterator[FieldError]]] = {
    "Service": network_validation.service,
    "EndpointSlice": network_validation.endpoint_slice,
    "Pod": lambda new: _pod_spec("spec", new.get("spec") or {}),
    "Deployment": _deployment,
    "ReplicaSet": _workload,
    "DaemonSet": _daemon_set,
    "StatefulSet": _stateful_set,
    "Job": _job,
    "CronJob": _cron_job,
    "Ingress": network_validation.ingress,
    "IngressClass": network_validation.ingress_class,
    "NetworkPolicy": network_validation.network_policy,
    "ServiceCIDR": network_validation.service_cidr,
    "CustomResourceDefinition": _definition,
}


_CHANGES: Mapping[str, Callable[[Raw, Raw], Iterator[FieldError]]] = {
    "EndpointSlice": network_validation.changed_slice,
    "Pod": _changed_pod,
    "Deployment": _changed_workload,
    "ReplicaSet": _changed_workload,
    "DaemonSet": _changed_workload,
    "StatefulSet": _changed_stateful_set,
    "Job": _changed_job,
    "IngressClass": network_validation.changed_ingress_class,
    "ConfigMap": _fixed_data,
    "Secret": _fixed_data,
}
