"""Validation of objects: names, Services, EndpointSlices, pods, workloads, and definitions.

Messages are kube-apiserver's (pkg/apis/*/validation).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from narthex.lab.api.errors import FieldError
from narthex.lab.api.field_errors import (
    address,
    at_least_zero,
    bad,
    check_each,
    dns_label,
    duplicate,
    forbidden,
    labels,
    network,
    not_found,
    notes,
    one_of,
    port_name,
    port_number,
    required,
    subdomain,
)
from narthex.lab.api.kinds import ApiResource

Raw = Mapping[str, Any]
_PROTOCOLS = ("TCP", "UDP", "SCTP")
_TYPES = ("ClusterIP", "NodePort", "LoadBalancer", "ExternalName")
_FAMILY_POLICIES = ("SingleStack", "PreferDualStack", "RequireDualStack")
_DISTRIBUTIONS = ("PreferClose", "PreferSameZone", "PreferSameNode")
_IMMUTABLE = "field is immutable"


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


def _name(kind: ApiResource, meta: Raw) -> Iterator[FieldError]:
    name = meta.get("name")
    if not name or not isinstance(name, str):
        yield required("metadata.name", "name or generateName is required")
        return
    # Names of Services may begin with a digit (KEP-5311).
    check = dns_label if kind.name in ("Namespace", "Service") else subdomain
    if kind.name != "IPAddress":
        yield from check("metadata.name", name)


def _service(new: Raw) -> Iterator[FieldError]:
    spec = new.get("spec") or {}
    type, ports = spec.get("type"), spec.get("ports") or []
    yield from one_of("spec.type", type, _TYPES)
    headless = spec.get("clusterIP") == "None"
    if not ports and not headless and type != "ExternalName":
        yield required("spec.ports")
    if type == "ExternalName":
        name = str(spec.get("externalName") or "").removesuffix(".")
        yield from subdomain("spec.externalName", name) if name else [required("spec.externalName")]
    for index, each in enumerate(ports):
        yield from _service_port(f"spec.ports[{index}]", each, len(ports) > 1)
    yield from _twice(ports)
    yield from labels("spec.selector", spec.get("selector"))
    yield from one_of("spec.sessionAffinity", spec.get("sessionAffinity"), ("ClientIP", "None"))
    ips = spec.get("clusterIPs") or ([spec["clusterIP"]] if spec.get("clusterIP") else [])
    yield from check_each(_cluster_ip, "spec.clusterIPs", ips)
    yield from check_each(address, "spec.externalIPs", spec.get("externalIPs"))
    yield from check_each(network, "spec.loadBalancerSourceRanges", spec.get("loadBalancerSourceRanges"))
    for field in ("externalTrafficPolicy", "internalTrafficPolicy"):
        yield from one_of(f"spec.{field}", spec.get(field), ("Cluster", "Local"), optional=True)
    yield from one_of("spec.ipFamilyPolicy", spec.get("ipFamilyPolicy"), _FAMILY_POLICIES, optional=True)
    yield from check_each(_family, "spec.ipFamilies", spec.get("ipFamilies"))
    yield from one_of("spec.trafficDistribution", spec.get("trafficDistribution"), _DISTRIBUTIONS, optional=True)


def _cluster_ip(at: str, ip: Any) -> Iterable[FieldError]:
    return () if ip == "None" else address(at, ip)


def _family(at: str, family: Any) -> Iterable[FieldError]:
    return one_of(at, family, ("IPv4", "IPv6"))


def _service_port(at: str, port: Any, named: bool) -> Iterator[FieldError]:
    if not isinstance(port, Mapping):
        yield bad(at, port, "must be an object")
        return
    if named and not port.get("name"):
        yield required(f"{at}.name")
    elif port.get("name"):
        yield from dns_label(f"{at}.name", port["name"])
    yield from port_number(f"{at}.port", port.get("port"))
    yield from one_of(f"{at}.protocol", port.get("protocol"), _PROTOCOLS)
    target = port.get("targetPort")
    if isinstance(target, str):
        yield from port_name(f"{at}.targetPort", target)
    elif target != port.get("port"):
        yield from port_number(f"{at}.targetPort", target)
    if port.get("nodePort"):
        yield from port_number(f"{at}.nodePort", port["nodePort"])


def _twice(ports: list[Any]) -> Iterator[FieldError]:
    names: set[Any] = set()
    pairs: set[Any] = set()
    for index, port in enumerate(each for each in ports if isinstance(each, Mapping)):
        name, pair = port.get("name"), (port.get("protocol"), port.get("port"))
        if name and name in names:
            yield duplicate(f"spec.ports[{index}].name", name)
        if pair in pairs:
            yield duplicate(f"spec.ports[{index}]", {"protocol": pair[0], "port": pair[1]})
        names.add(name)
        pairs.add(pair)


def _slice(new: Raw) -> Iterator[FieldError]:
    type = new.get("addressType")
    if not type:
        yield required("addressType")
    else:
        yield from one_of("addressType", type, ("FQDN", "IPv4", "IPv6"))
    for index, each in enumerate(new.get("endpoints") or ()):
        addresses = each.get("addresses") or []
        if not addresses:
            yield required(f"endpoints[{index}].addresses", "must contain at least 1 address")
        if type in ("IPv4", "IPv6"):
            yield from check_each(address, f"endpoints[{index}].addresses", addresses)
    for index, port in enumerate(new.get("ports") or ()):
        yield from one_of(f"ports[{index}].protocol", port.get("protocol"), _PROTOCOLS)


def _changed_slice(held: Raw, new: Raw) -> Iterator[FieldError]:
    if held.get("addressType") != new.get("addressType"):
        yield bad("addressType", new.get("addressType"), _IMMUTABLE)


def _cidrs(new: Raw) -> Iterator[FieldError]:
    found = (new.get("spec") or {}).get("cidrs") or []
    if not found:
        yield required("spec.cidrs", "at least one CIDR required")
    yield from check_each(network, "spec.cidrs", found)


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
        yield forbidden("data", f"{_IMMUTABLE} when `immutable` is set")


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
        yield from one_of(f"{here}.protocol", port.get("protocol"), _PROTOCOLS)
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


_PATH_TYPES = ("Exact", "ImplementationSpecific", "Prefix")


def _ingress(new: Raw) -> Iterator[FieldError]:
    spec = new.get("spec") or {}
    if not spec.get("rules") and not spec.get("defaultBackend"):
        yield FieldError(
            "spec", "FieldValueInvalid", "Invalid value: either `defaultBackend` or `rules` must be specified"
        )
    for index, rule in enumerate(spec.get("rules") or ()):
        at = f"spec.rules[{index}]"
        if rule.get("host"):
            yield from subdomain(f"{at}.host", str(rule["host"]).removeprefix("*."))
        for number, path in enumerate((rule.get("http") or {}).get("paths") or ()):
            here = f"{at}.http.paths[{number}]"
            if not path.get("pathType"):
                yield required(f"{here}.pathType", "pathType must be specified")
            else:
                yield from one_of(f"{here}.pathType", path["pathType"], _PATH_TYPES)
            if path.get("pathType") in ("Exact", "Prefix") and not str(path.get("path") or "").startswith("/"):
                yield bad(f"{here}.path", path.get("path") or "", "must be an absolute path")


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
    for field in ("maxUnavailable", "maxSurge"):
        value = rolling.get(field)
        if isinstance(value, str) and not _PERCENT.fullmatch(value):
            text = "a valid percent string must be a numeric string followed by an ending '%' (e.g. '1%',  or '93%', regex used for validation is '[0-9]+%')"
            yield bad(f"spec.strategy.rollingUpdate.{field}", value, text)
        yield from at_least_zero("spec.strategy.rollingUpdate", rolling, field)
    if all(rolling.get(field) in (0, "0%") for field in ("maxUnavailable", "maxSurge")):
        text = "may not be 0 when `maxSurge` is 0"
        yield bad("spec.strategy.rollingUpdate.maxUnavailable", rolling["maxUnavailable"], text)


def _workload(new: Raw) -> Iterator[FieldError]:
    spec = new.get("spec") or {}
    selector, template = spec.get("selector") or {}, spec.get("template") or {}
    own = (template.get("metadata") or {}).get("labels") or {}
    yield from at_least_zero("spec", spec, "replicas", "minReadySeconds")
    if not selector:
        yield required("spec.selector")
    elif not selector.get("matchLabels") and not selector.get("matchExpressions"):
        yield bad("spec.selector", selector, "empty selector is invalid for deployment")
    expected = selector.get("matchLabels") or {}
    yield from labels("spec.selector.matchLabels", expected)
    if any(own.get(key) != value for key, value in expected.items()):
        yield bad("spec.template.metadata.labels", own, "`selector` does not match template `labels`")
    yield from labels("spec.template.labels", own)
    if not template:
        yield required("spec.template")
        return
    yield from _pod_spec("spec.template.spec", template.get("spec") or {})
    restart = (template.get("spec") or {}).get("restartPolicy")
    if restart in _RESTARTS:
        yield from one_of("spec.template.spec.restartPolicy", restart, ("Always",))


def _changed_workload(held: Raw, new: Raw) -> Iterator[FieldError]:
    now = (new.get("spec") or {}).get("selector")
    if now != (held.get("spec") or {}).get("selector"):
        yield bad("spec.selector", now, _IMMUTABLE)


_CHECKS: Mapping[str, Callable[[Raw], Iterator[FieldError]]] = {
    "Service": _service,
    "EndpointSlice": _slice,
    "Pod": lambda new: _pod_spec("spec", new.get("spec") or {}),
    "Deployment": _deployment,
    "ReplicaSet": _workload,
    "Ingress": _ingress,
    "ServiceCIDR": _cidrs,
    "CustomResourceDefinition": _definition,
}


_CHANGES: Mapping[str, Callable[[Raw, Raw], Iterator[FieldError]]] = {
    "EndpointSlice": _changed_slice,
    "Pod": _changed_pod,
    "Deployment": _changed_workload,
    "ReplicaSet": _changed_workload,
    "ConfigMap": _fixed_data,
    "Secret": _fixed_data,
}
