"""Validation of objects: names, Services, EndpointSlices, pods, workloads, and definitions.

Messages are kube-apiserver's (pkg/apis/*/validation).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from narthex.lab.api import field_errors
from narthex.lab.api.errors import FieldError
from narthex.lab.api.kinds import ApiResource

Raw = Mapping[str, Any]
_PROTOCOLS = ("TCP", "UDP", "SCTP")
_TYPES = ("ClusterIP", "NodePort", "LoadBalancer", "ExternalName")
_IMMUTABLE = "field is immutable"


def field_errors_of(kind: ApiResource, held: Raw | None, new: Raw) -> list[FieldError]:
    """Return the validation errors of an object. `held` is the object that it replaces, None if it is created."""
    found = [] if held is not None else list(_name(kind, new["metadata"]))
    found += field_errors.labels("metadata.labels", new["metadata"].get("labels"))
    found += field_errors.notes("metadata.annotations", new["metadata"].get("annotations"))
    if check := _CHECKS.get(kind.name):
        found += check(new)
    if held is not None and (changed := _CHANGES.get(kind.name)):
        found += changed(held, new)
    return found


def _name(kind: ApiResource, meta: Raw) -> Iterator[FieldError]:
    name = meta.get("name")
    if not name or not isinstance(name, str):
        yield field_errors.required("metadata.name", "name or generateName is required")
        return
    check = {"Namespace": field_errors.dns_label, "Service": field_errors.old_label}.get(
        kind.name, field_errors.subdomain
    )
    if kind.name != "IPAddress":
        yield from check("metadata.name", name)


def _service(new: Raw) -> Iterator[FieldError]:
    spec = new.get("spec") or {}
    type, ports = spec.get("type"), spec.get("ports") or []
    if type not in _TYPES:
        yield field_errors.unsupported("spec.type", type, _TYPES)
    headless = spec.get("clusterIP") == "None"
    if not ports and not headless and type != "ExternalName":
        yield field_errors.required("spec.ports")
    if type == "ExternalName":
        name = str(spec.get("externalName") or "").removesuffix(".")
        yield from (
            field_errors.subdomain("spec.externalName", name) if name else [field_errors.required("spec.externalName")]
        )
    for index, each in enumerate(ports):
        yield from _service_port(f"spec.ports[{index}]", each, len(ports) > 1)
    yield from _twice(ports)
    yield from field_errors.labels("spec.selector", spec.get("selector"))
    if spec.get("sessionAffinity") not in ("None", "ClientIP"):
        yield field_errors.unsupported("spec.sessionAffinity", spec.get("sessionAffinity"), ("ClientIP", "None"))
    for index, ip in enumerate(spec.get("clusterIPs") or ([spec["clusterIP"]] if spec.get("clusterIP") else [])):
        if ip != "None":
            yield from field_errors.address(f"spec.clusterIPs[{index}]", ip)
    for index, ip in enumerate(spec.get("externalIPs") or ()):
        yield from field_errors.address(f"spec.externalIPs[{index}]", ip)
    for index, cidr in enumerate(spec.get("loadBalancerSourceRanges") or ()):
        yield from field_errors.network(f"spec.loadBalancerSourceRanges[{index}]", cidr)
    for field in ("externalTrafficPolicy", "internalTrafficPolicy"):
        if spec.get(field) not in (None, "Cluster", "Local"):
            yield field_errors.unsupported(f"spec.{field}", spec[field], ("Cluster", "Local"))
    known = ("SingleStack", "PreferDualStack", "RequireDualStack")
    if spec.get("ipFamilyPolicy") not in (None, *known):
        yield field_errors.unsupported("spec.ipFamilyPolicy", spec["ipFamilyPolicy"], known)
    for index, family in enumerate(spec.get("ipFamilies") or ()):
        if family not in ("IPv4", "IPv6"):
            yield field_errors.unsupported(f"spec.ipFamilies[{index}]", family, ("IPv4", "IPv6"))
    spread = ("PreferClose", "PreferSameZone", "PreferSameNode")
    if spec.get("trafficDistribution") not in (None, *spread):
        yield field_errors.unsupported("spec.trafficDistribution", spec["trafficDistribution"], spread)


def _service_port(at: str, port: Any, named: bool) -> Iterator[FieldError]:
    if not isinstance(port, Mapping):
        yield field_errors.bad(at, port, "must be an object")
        return
    if named and not port.get("name"):
        yield field_errors.required(f"{at}.name")
    elif port.get("name"):
        yield from field_errors.dns_label(f"{at}.name", port["name"])
    yield from field_errors.port_number(f"{at}.port", port.get("port"))
    if port.get("protocol") not in _PROTOCOLS:
        yield field_errors.unsupported(f"{at}.protocol", port.get("protocol"), _PROTOCOLS)
    target = port.get("targetPort")
    if isinstance(target, str):
        yield from field_errors.port_name(f"{at}.targetPort", target)
    elif target != port.get("port"):
        yield from field_errors.port_number(f"{at}.targetPort", target)
    if port.get("nodePort"):
        yield from field_errors.port_number(f"{at}.nodePort", port["nodePort"])


def _twice(ports: list[Any]) -> Iterator[FieldError]:
    names: set[Any] = set()
    pairs: set[Any] = set()
    for index, port in enumerate(each for each in ports if isinstance(each, Mapping)):
        name, pair = port.get("name"), (port.get("protocol"), port.get("port"))
        if name and name in names:
            yield field_errors.duplicate(f"spec.ports[{index}].name", name)
        if pair in pairs:
            yield field_errors.duplicate(f"spec.ports[{index}]", {"protocol": pair[0], "port": pair[1]})
        names.add(name)
        pairs.add(pair)


def _slice(new: Raw) -> Iterator[FieldError]:
    type = new.get("addressType")
    if not type:
        yield field_errors.required("addressType")
    elif type not in ("IPv4", "IPv6", "FQDN"):
        yield field_errors.unsupported("addressType", type, ("FQDN", "IPv4", "IPv6"))
    for index, each in enumerate(new.get("endpoints") or ()):
        addresses = each.get("addresses") or []
        if not addresses:
            yield field_errors.required(f"endpoints[{index}].addresses", "must contain at least 1 address")
        for at, address in enumerate(addresses if type in ("IPv4", "IPv6") else ()):
            yield from field_errors.address(f"endpoints[{index}].addresses[{at}]", address)
    for index, port in enumerate(new.get("ports") or ()):
        if port.get("protocol") not in _PROTOCOLS:
            yield field_errors.unsupported(f"ports[{index}].protocol", port.get("protocol"), _PROTOCOLS)


def _changed_slice(held: Raw, new: Raw) -> Iterator[FieldError]:
    if held.get("addressType") != new.get("addressType"):
        yield field_errors.bad("addressType", new.get("addressType"), _IMMUTABLE)


def _cidrs(new: Raw) -> Iterator[FieldError]:
    found = (new.get("spec") or {}).get("cidrs") or []
    if not found:
        yield field_errors.required("spec.cidrs", "at least one CIDR required")
    for index, each in enumerate(found):
        yield from field_errors.network(f"spec.cidrs[{index}]", each)


def _definition(new: Raw) -> Iterator[FieldError]:
    spec = new.get("spec") or {}
    names, group = spec.get("names") or {}, spec.get("group")
    for field, value in (
        ("spec.group", group),
        ("spec.names.plural", names.get("plural")),
        ("spec.names.kind", names.get("kind")),
    ):
        if not value:
            yield field_errors.required(field)
    if spec.get("scope") not in ("Cluster", "Namespaced"):
        yield field_errors.unsupported("spec.scope", spec.get("scope") or "", ("Cluster", "Namespaced"))
    expected = f"{names.get('plural')}.{group}"
    if new["metadata"].get("name") != expected:
        yield field_errors.bad("metadata.name", new["metadata"].get("name"), 'must be spec.names.plural+"."+spec.group')
    if sum(bool(each.get("storage")) for each in spec.get("versions") or ()) != 1:
        text = "must have exactly one version marked as storage version"
        yield field_errors.bad("spec.versions", [each.get("name") for each in spec.get("versions") or ()], text)


def _fixed_data(held: Raw, new: Raw) -> Iterator[FieldError]:
    if held.get("immutable") and any(held.get(name) != new.get(name) for name in ("data", "binaryData", "immutable")):
        yield field_errors.forbidden("data", f"{_IMMUTABLE} when `immutable` is set")


_RESTARTS = ("Always", "OnFailure", "Never")
_DNS = ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None")
_PERCENT = re.compile(r"[0-9]+%")
_MAY_CHANGE = (
    "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,"
    "`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),"
    "`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"
)


def pod(new: Raw) -> Iterator[FieldError]:
    """Check a Pod."""
    yield from pod_spec("spec", new.get("spec") or {})


def pod_spec(at: str, spec: Raw) -> Iterator[FieldError]:
    """Check the spec of a pod or of a pod template."""
    if not spec.get("containers"):
        yield field_errors.required(f"{at}.containers")
    names: set[str] = set()
    volumes = {each.get("name") for each in spec.get("volumes") or () if isinstance(each, Mapping)}
    for field in ("initContainers", "containers"):
        for index, each in enumerate(spec.get(field) or ()):
            here = f"{at}.{field}[{index}]"
            yield from _container(here, each, volumes)
            if each.get("name") in names:
                yield field_errors.duplicate(f"{here}.name", each["name"])
            names.add(each.get("name", ""))
    if spec.get("restartPolicy") not in _RESTARTS:
        yield field_errors.unsupported(f"{at}.restartPolicy", spec.get("restartPolicy"), _RESTARTS)
    if spec.get("dnsPolicy") not in _DNS:
        yield field_errors.unsupported(f"{at}.dnsPolicy", spec.get("dnsPolicy"), _DNS)
    yield from field_errors.labels(f"{at}.nodeSelector", spec.get("nodeSelector"))
    yield from field_errors.at_least_zero(
        f"{at}.terminationGracePeriodSeconds", spec.get("terminationGracePeriodSeconds")
    )
    if spec.get("nodeName"):
        yield from field_errors.subdomain(f"{at}.nodeName", spec["nodeName"])
    for field in ("hostname", "subdomain"):
        if spec.get(field):
            yield from field_errors.dns_label(f"{at}.{field}", spec[field])


def _container(at: str, given: Raw, volumes: set[Any]) -> Iterator[FieldError]:
    if given.get("name"):
        yield from field_errors.dns_label(f"{at}.name", given["name"])
    else:
        yield field_errors.required(f"{at}.name")
    if not given.get("image"):
        yield field_errors.required(f"{at}.image")
    for index, port in enumerate(given.get("ports") or ()):
        here = f"{at}.ports[{index}]"
        if port.get("name"):
            yield from field_errors.port_name(f"{here}.name", port["name"])
        yield from field_errors.port_number(f"{here}.containerPort", port.get("containerPort"))
        if port.get("hostPort"):
            yield from field_errors.port_number(f"{here}.hostPort", port["hostPort"])
        if port.get("protocol") not in ("TCP", "UDP", "SCTP"):
            yield field_errors.unsupported(f"{here}.protocol", port.get("protocol"), ("TCP", "UDP", "SCTP"))
    for index, each in enumerate(given.get("env") or ()):
        if not each.get("name"):
            yield field_errors.required(f"{at}.env[{index}].name")
    for index, each in enumerate(given.get("volumeMounts") or ()):
        if each.get("name") not in volumes:
            yield FieldError(
                f"{at}.volumeMounts[{index}].name",
                "FieldValueNotFound",
                f"Not found: {field_errors.shown(each.get('name'))}",
            )
        if not each.get("mountPath"):
            yield field_errors.required(f"{at}.volumeMounts[{index}].mountPath")
    for name in ("livenessProbe", "readinessProbe", "startupProbe"):
        if isinstance(given.get(name), Mapping):
            yield from _probe(f"{at}.{name}", given[name])


def _probe(at: str, probe: Raw) -> Iterator[FieldError]:
    handlers = [name for name in ("exec", "httpGet", "tcpSocket", "grpc") if probe.get(name) is not None]
    if not handlers:
        yield field_errors.required(at, "must specify a handler type")
    for name in handlers[1:]:
        yield field_errors.forbidden(f"{at}.{name}", "may not specify more than 1 handler type")
    for field in ("initialDelaySeconds", "timeoutSeconds", "periodSeconds", "successThreshold", "failureThreshold"):
        yield from field_errors.at_least_zero(f"{at}.{field}", probe.get(field))
    for name in ("httpGet", "tcpSocket", "grpc"):
        port = (probe.get(name) or {}).get("port")
        if name in handlers and isinstance(port, str):
            yield from field_errors.port_name(f"{at}.{name}.port", port)
        elif name in handlers:
            yield from field_errors.port_number(f"{at}.{name}.port", port)
    if at.endswith(("livenessProbe", "startupProbe")) and probe.get("successThreshold", 1) != 1:
        yield field_errors.bad(f"{at}.successThreshold", probe["successThreshold"], "must be 1")


def changed_pod(held: Raw, new: Raw) -> Iterator[FieldError]:
    """Check that an update changes only mutable fields of a Pod. A node is assigned once."""
    old, spec = _fixed(held.get("spec") or {}), _fixed(new.get("spec") or {})
    if not old.get("nodeName"):
        old, spec = {**old, "nodeName": None}, {**spec, "nodeName": None}
    if old != spec:
        yield field_errors.forbidden("spec", _MAY_CHANGE)


def _fixed(spec: Raw) -> dict[str, Any]:
    free = ("activeDeadlineSeconds", "tolerations", "terminationGracePeriodSeconds", "containers", "initContainers")
    found = {name: value for name, value in spec.items() if name not in free}
    for name in ("containers", "initContainers"):
        listed = spec.get(name) or ()
        # An absent imagePullPolicy follows from the image.
        found[name] = [{key: each[key] for key in each if key not in ("image", "imagePullPolicy")} for each in listed]
    return found


def deployment(new: Raw) -> Iterator[FieldError]:
    """Check a Deployment."""
    yield from _workload(new)
    spec = new.get("spec") or {}
    strategy = spec.get("strategy") or {}
    if strategy.get("type") not in ("RollingUpdate", "Recreate"):
        yield field_errors.unsupported("spec.strategy.type", strategy.get("type"), ("Recreate", "RollingUpdate"))
    rolling = strategy.get("rollingUpdate")
    if strategy.get("type") == "Recreate" and rolling:
        text = "may not be specified when strategy `type` is 'Recreate'"
        yield field_errors.forbidden("spec.strategy.rollingUpdate", text)
    rolling = rolling if isinstance(rolling, Mapping) else {}
    for field in ("maxUnavailable", "maxSurge"):
        value = rolling.get(field)
        if isinstance(value, str) and not _PERCENT.fullmatch(value):
            text = "a valid percent string must be a numeric string followed by an ending '%' (e.g. '1%',  or '93%', regex used for validation is '[0-9]+%')"
            yield field_errors.bad(f"spec.strategy.rollingUpdate.{field}", value, text)
        yield from field_errors.at_least_zero(f"spec.strategy.rollingUpdate.{field}", value)
    if all(rolling.get(field) in (0, "0%") for field in ("maxUnavailable", "maxSurge")):
        text = "may not be 0 when `maxSurge` is 0"
        yield field_errors.bad("spec.strategy.rollingUpdate.maxUnavailable", rolling["maxUnavailable"], text)


def replica_set(new: Raw) -> Iterator[FieldError]:
    """Check a ReplicaSet."""
    yield from _workload(new)


def _workload(new: Raw) -> Iterator[FieldError]:
    spec = new.get("spec") or {}
    selector, template = spec.get("selector") or {}, spec.get("template") or {}
    labels = (template.get("metadata") or {}).get("labels") or {}
    yield from field_errors.at_least_zero("spec.replicas", spec.get("replicas"))
    yield from field_errors.at_least_zero("spec.minReadySeconds", spec.get("minReadySeconds"))
    if not selector:
        yield field_errors.required("spec.selector")
    elif not selector.get("matchLabels") and not selector.get("matchExpressions"):
        yield field_errors.bad("spec.selector", selector, "empty selector is invalid for deployment")
    expected = selector.get("matchLabels") or {}
    yield from field_errors.labels("spec.selector.matchLabels", expected)
    if any(labels.get(key) != value for key, value in expected.items()):
        yield field_errors.bad("spec.template.metadata.labels", labels, "`selector` does not match template `labels`")
    yield from field_errors.labels("spec.template.labels", labels)
    if not template:
        yield field_errors.required("spec.template")
        return
    yield from pod_spec("spec.template.spec", template.get("spec") or {})
    restart = (template.get("spec") or {}).get("restartPolicy")
    if restart in ("OnFailure", "Never"):
        yield field_errors.unsupported("spec.template.spec.restartPolicy", restart, ("Always",))


def changed_workload(held: Raw, new: Raw) -> Iterator[FieldError]:
    """Check that an update changes only mutable fields of a Deployment or ReplicaSet."""
    old, now = (held.get("spec") or {}).get("selector"), (new.get("spec") or {}).get("selector")
    if old != now:
        yield field_errors.bad("spec.selector", now, "field is immutable")


_CHECKS: Mapping[str, Callable[[Raw], Iterator[FieldError]]] = {
    "Service": _service,
    "EndpointSlice": _slice,
    "Pod": pod,
    "Deployment": deployment,
    "ReplicaSet": replica_set,
    "ServiceCIDR": _cidrs,
    "CustomResourceDefinition": _definition,
}


_CHANGES: Mapping[str, Callable[[Raw, Raw], Iterator[FieldError]]] = {
    "EndpointSlice": _changed_slice,
    "Pod": changed_pod,
    "Deployment": changed_workload,
    "ReplicaSet": changed_workload,
    "ConfigMap": _fixed_data,
    "Secret": _fixed_data,
}
