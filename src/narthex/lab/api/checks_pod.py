"""Which pods and workloads may be held, in the API server's words (pkg/apis/core/validation, pkg/apis/apps/validation)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from narthex.lab.api import field_errors as wrongs
from narthex.lab.api.errors import Wrong

Raw = Mapping[str, Any]
_RESTARTS = ("Always", "OnFailure", "Never")
_DNS = ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None")
_PERCENT = re.compile(r"[0-9]+%")
_MAY_CHANGE = (
    "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,"
    "`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),"
    "`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"
)


def pod(new: Raw) -> Iterator[Wrong]:
    """A Pod."""
    yield from pod_spec("spec", new.get("spec") or {})


def pod_spec(at: str, spec: Raw) -> Iterator[Wrong]:
    """A pod's spec, or a template's."""
    if not spec.get("containers"):
        yield wrongs.required(f"{at}.containers")
    names: set[str] = set()
    volumes = {each.get("name") for each in spec.get("volumes") or () if isinstance(each, Mapping)}
    for field in ("initContainers", "containers"):
        for index, each in enumerate(spec.get(field) or ()):
            here = f"{at}.{field}[{index}]"
            yield from _container(here, each, volumes)
            if each.get("name") in names:
                yield wrongs.duplicate(f"{here}.name", each["name"])
            names.add(each.get("name", ""))
    if spec.get("restartPolicy") not in _RESTARTS:
        yield wrongs.unsupported(f"{at}.restartPolicy", spec.get("restartPolicy"), _RESTARTS)
    if spec.get("dnsPolicy") not in _DNS:
        yield wrongs.unsupported(f"{at}.dnsPolicy", spec.get("dnsPolicy"), _DNS)
    yield from wrongs.labels(f"{at}.nodeSelector", spec.get("nodeSelector"))
    yield from wrongs.at_least_zero(f"{at}.terminationGracePeriodSeconds", spec.get("terminationGracePeriodSeconds"))
    if spec.get("nodeName"):
        yield from wrongs.subdomain(f"{at}.nodeName", spec["nodeName"])
    for field in ("hostname", "subdomain"):
        if spec.get(field):
            yield from wrongs.dns_label(f"{at}.{field}", spec[field])


def _container(at: str, given: Raw, volumes: set[Any]) -> Iterator[Wrong]:
    if given.get("name"):
        yield from wrongs.dns_label(f"{at}.name", given["name"])
    else:
        yield wrongs.required(f"{at}.name")
    if not given.get("image"):
        yield wrongs.required(f"{at}.image")
    for index, port in enumerate(given.get("ports") or ()):
        here = f"{at}.ports[{index}]"
        if port.get("name"):
            yield from wrongs.port_name(f"{here}.name", port["name"])
        yield from wrongs.port_number(f"{here}.containerPort", port.get("containerPort"))
        if port.get("hostPort"):
            yield from wrongs.port_number(f"{here}.hostPort", port["hostPort"])
        if port.get("protocol") not in ("TCP", "UDP", "SCTP"):
            yield wrongs.unsupported(f"{here}.protocol", port.get("protocol"), ("TCP", "UDP", "SCTP"))
    for index, each in enumerate(given.get("env") or ()):
        if not each.get("name"):
            yield wrongs.required(f"{at}.env[{index}].name")
    for index, each in enumerate(given.get("volumeMounts") or ()):
        if each.get("name") not in volumes:
            yield Wrong(
                f"{at}.volumeMounts[{index}].name", "FieldValueNotFound", f"Not found: {wrongs.shown(each.get('name'))}"
            )
        if not each.get("mountPath"):
            yield wrongs.required(f"{at}.volumeMounts[{index}].mountPath")
    for name in ("livenessProbe", "readinessProbe", "startupProbe"):
        if isinstance(given.get(name), Mapping):
            yield from _probe(f"{at}.{name}", given[name])


def _probe(at: str, probe: Raw) -> Iterator[Wrong]:
    handlers = [name for name in ("exec", "httpGet", "tcpSocket", "grpc") if probe.get(name) is not None]
    if not handlers:
        yield wrongs.required(at, "must specify a handler type")
    for name in handlers[1:]:
        yield wrongs.forbidden(f"{at}.{name}", "may not specify more than 1 handler type")
    for field in ("initialDelaySeconds", "timeoutSeconds", "periodSeconds", "successThreshold", "failureThreshold"):
        yield from wrongs.at_least_zero(f"{at}.{field}", probe.get(field))
    for name in ("httpGet", "tcpSocket", "grpc"):
        port = (probe.get(name) or {}).get("port")
        if name in handlers and isinstance(port, str):
            yield from wrongs.port_name(f"{at}.{name}.port", port)
        elif name in handlers:
            yield from wrongs.port_number(f"{at}.{name}.port", port)
    if at.endswith(("livenessProbe", "startupProbe")) and probe.get("successThreshold", 1) != 1:
        yield wrongs.bad(f"{at}.successThreshold", probe["successThreshold"], "must be 1")


def changed_pod(held: Raw, new: Raw) -> Iterator[Wrong]:
    """What of a Pod's spec may become another. A node is given once."""
    old, spec = _fixed(held.get("spec") or {}), _fixed(new.get("spec") or {})
    if not old.get("nodeName"):
        old, spec = {**old, "nodeName": None}, {**spec, "nodeName": None}
    if old != spec:
        yield wrongs.forbidden("spec", _MAY_CHANGE)


def _fixed(spec: Raw) -> dict[str, Any]:
    free = ("activeDeadlineSeconds", "tolerations", "terminationGracePeriodSeconds", "containers", "initContainers")
    found = {name: value for name, value in spec.items() if name not in free}
    for name in ("containers", "initContainers"):
        listed = spec.get(name) or ()
        # The policy of pulling follows the image when it is not given.
        found[name] = [{key: each[key] for key in each if key not in ("image", "imagePullPolicy")} for each in listed]
    return found


def deployment(new: Raw) -> Iterator[Wrong]:
    """A Deployment."""
    yield from _workload(new)
    spec = new.get("spec") or {}
    strategy = spec.get("strategy") or {}
    if strategy.get("type") not in ("RollingUpdate", "Recreate"):
        yield wrongs.unsupported("spec.strategy.type", strategy.get("type"), ("Recreate", "RollingUpdate"))
    rolling = strategy.get("rollingUpdate")
    if strategy.get("type") == "Recreate" and rolling:
        text = "may not be specified when strategy `type` is 'Recreate'"
        yield wrongs.forbidden("spec.strategy.rollingUpdate", text)
    rolling = rolling if isinstance(rolling, Mapping) else {}
    for field in ("maxUnavailable", "maxSurge"):
        value = rolling.get(field)
        if isinstance(value, str) and not _PERCENT.fullmatch(value):
            text = "a valid percent string must be a numeric string followed by an ending '%' (e.g. '1%',  or '93%', regex used for validation is '[0-9]+%')"
            yield wrongs.bad(f"spec.strategy.rollingUpdate.{field}", value, text)
        yield from wrongs.at_least_zero(f"spec.strategy.rollingUpdate.{field}", value)
    if all(rolling.get(field) in (0, "0%") for field in ("maxUnavailable", "maxSurge")):
        text = "may not be 0 when `maxSurge` is 0"
        yield wrongs.bad("spec.strategy.rollingUpdate.maxUnavailable", rolling["maxUnavailable"], text)


def replica_set(new: Raw) -> Iterator[Wrong]:
    """A ReplicaSet."""
    yield from _workload(new)


def _workload(new: Raw) -> Iterator[Wrong]:
    spec = new.get("spec") or {}
    selector, template = spec.get("selector") or {}, spec.get("template") or {}
    labels = (template.get("metadata") or {}).get("labels") or {}
    yield from wrongs.at_least_zero("spec.replicas", spec.get("replicas"))
    yield from wrongs.at_least_zero("spec.minReadySeconds", spec.get("minReadySeconds"))
    if not selector:
        yield wrongs.required("spec.selector")
    elif not selector.get("matchLabels") and not selector.get("matchExpressions"):
        yield wrongs.bad("spec.selector", selector, "empty selector is invalid for deployment")
    wanted = selector.get("matchLabels") or {}
    yield from wrongs.labels("spec.selector.matchLabels", wanted)
    if any(labels.get(key) != value for key, value in wanted.items()):
        yield wrongs.bad("spec.template.metadata.labels", labels, "`selector` does not match template `labels`")
    yield from wrongs.labels("spec.template.labels", labels)
    if not template:
        yield wrongs.required("spec.template")
        return
    yield from pod_spec("spec.template.spec", template.get("spec") or {})
    restart = (template.get("spec") or {}).get("restartPolicy")
    if restart in ("OnFailure", "Never"):
        yield wrongs.unsupported("spec.template.spec.restartPolicy", restart, ("Always",))


def changed_workload(held: Raw, new: Raw) -> Iterator[Wrong]:
    """What of a Deployment or ReplicaSet may not become another."""
    old, now = (held.get("spec") or {}).get("selector"), (new.get("spec") or {}).get("selector")
    if old != now:
        yield wrongs.bad("spec.selector", now, "field is immutable")
