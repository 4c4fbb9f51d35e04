"""Which objects may be held: the checks of names, and of Services, EndpointSlices and those that need little.

Words are kube-apiserver's (pkg/apis/*/validation); checks of pods and workloads are in `checks_pod`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from narthex.lab.api import field_errors as wrongs
from narthex.lab.api.checks_pod import changed_pod, changed_workload, deployment, pod, replica_set
from narthex.lab.api.errors import Wrong
from narthex.lab.api.kinds import Kind

Raw = Mapping[str, Any]
_PROTOCOLS = ("TCP", "UDP", "SCTP")
_TYPES = ("ClusterIP", "NodePort", "LoadBalancer", "ExternalName")
_IMMUTABLE = "field is immutable"


def object_wrongs(kind: Kind, held: Raw | None, new: Raw) -> list[Wrong]:
    """What is wrong with an object; `held` is what it replaces, None when it is made."""
    found = [] if held is not None else list(_name(kind, new["metadata"]))
    found += wrongs.labels("metadata.labels", new["metadata"].get("labels"))
    found += wrongs.notes("metadata.annotations", new["metadata"].get("annotations"))
    if check := _CHECKS.get(kind.name):
        found += check(new)
    if held is not None and (changed := _CHANGES.get(kind.name)):
        found += changed(held, new)
    return found


def _name(kind: Kind, meta: Raw) -> Iterator[Wrong]:
    name = meta.get("name")
    if not name or not isinstance(name, str):
        yield wrongs.required("metadata.name", "name or generateName is required")
        return
    check = {"Namespace": wrongs.dns_label, "Service": wrongs.old_label}.get(kind.name, wrongs.subdomain)
    if kind.name != "IPAddress":
        yield from check("metadata.name", name)


def _service(new: Raw) -> Iterator[Wrong]:
    spec = new.get("spec") or {}
    type, ports = spec.get("type"), spec.get("ports") or []
    if type not in _TYPES:
        yield wrongs.unsupported("spec.type", type, _TYPES)
    headless = spec.get("clusterIP") == "None"
    if not ports and not headless and type != "ExternalName":
        yield wrongs.required("spec.ports")
    if type == "ExternalName":
        name = str(spec.get("externalName") or "").removesuffix(".")
        yield from wrongs.subdomain("spec.externalName", name) if name else [wrongs.required("spec.externalName")]
    for index, each in enumerate(ports):
        yield from _service_port(f"spec.ports[{index}]", each, len(ports) > 1)
    yield from _twice(ports)
    yield from wrongs.labels("spec.selector", spec.get("selector"))
    if spec.get("sessionAffinity") not in ("None", "ClientIP"):
        yield wrongs.unsupported("spec.sessionAffinity", spec.get("sessionAffinity"), ("ClientIP", "None"))
    for index, ip in enumerate(spec.get("clusterIPs") or ([spec["clusterIP"]] if spec.get("clusterIP") else [])):
        if ip != "None":
            yield from wrongs.address(f"spec.clusterIPs[{index}]", ip)
    for index, ip in enumerate(spec.get("externalIPs") or ()):
        yield from wrongs.address(f"spec.externalIPs[{index}]", ip)
    for index, cidr in enumerate(spec.get("loadBalancerSourceRanges") or ()):
        yield from wrongs.network(f"spec.loadBalancerSourceRanges[{index}]", cidr)
    for field in ("externalTrafficPolicy", "internalTrafficPolicy"):
        if spec.get(field) not in (None, "Cluster", "Local"):
            yield wrongs.unsupported(f"spec.{field}", spec[field], ("Cluster", "Local"))
    known = ("SingleStack", "PreferDualStack", "RequireDualStack")
    if spec.get("ipFamilyPolicy") not in (None, *known):
        yield wrongs.unsupported("spec.ipFamilyPolicy", spec["ipFamilyPolicy"], known)
    for index, family in enumerate(spec.get("ipFamilies") or ()):
        if family not in ("IPv4", "IPv6"):
            yield wrongs.unsupported(f"spec.ipFamilies[{index}]", family, ("IPv4", "IPv6"))
    spread = ("PreferClose", "PreferSameZone", "PreferSameNode")
    if spec.get("trafficDistribution") not in (None, *spread):
        yield wrongs.unsupported("spec.trafficDistribution", spec["trafficDistribution"], spread)


def _service_port(at: str, port: Any, named: bool) -> Iterator[Wrong]:
    if not isinstance(port, Mapping):
        yield wrongs.bad(at, port, "must be an object")
        return
    if named and not port.get("name"):
        yield wrongs.required(f"{at}.name")
    elif port.get("name"):
        yield from wrongs.dns_label(f"{at}.name", port["name"])
    yield from wrongs.port_number(f"{at}.port", port.get("port"))
    if port.get("protocol") not in _PROTOCOLS:
        yield wrongs.unsupported(f"{at}.protocol", port.get("protocol"), _PROTOCOLS)
    target = port.get("targetPort")
    if isinstance(target, str):
        yield from wrongs.port_name(f"{at}.targetPort", target)
    elif target != port.get("port"):
        yield from wrongs.port_number(f"{at}.targetPort", target)
    if port.get("nodePort"):
        yield from wrongs.port_number(f"{at}.nodePort", port["nodePort"])


def _twice(ports: list[Any]) -> Iterator[Wrong]:
    names: set[Any] = set()
    pairs: set[Any] = set()
    for index, port in enumerate(each for each in ports if isinstance(each, Mapping)):
        name, pair = port.get("name"), (port.get("protocol"), port.get("port"))
        if name and name in names:
            yield wrongs.duplicate(f"spec.ports[{index}].name", name)
        if pair in pairs:
            yield wrongs.duplicate(f"spec.ports[{index}]", {"protocol": pair[0], "port": pair[1]})
        names.add(name)
        pairs.add(pair)


def _slice(new: Raw) -> Iterator[Wrong]:
    type = new.get("addressType")
    if not type:
        yield wrongs.required("addressType")
    elif type not in ("IPv4", "IPv6", "FQDN"):
        yield wrongs.unsupported("addressType", type, ("FQDN", "IPv4", "IPv6"))
    for index, each in enumerate(new.get("endpoints") or ()):
        addresses = each.get("addresses") or []
        if not addresses:
            yield wrongs.required(f"endpoints[{index}].addresses", "must contain at least 1 address")
        for at, address in enumerate(addresses if type in ("IPv4", "IPv6") else ()):
            yield from wrongs.address(f"endpoints[{index}].addresses[{at}]", address)
    for index, port in enumerate(new.get("ports") or ()):
        if port.get("protocol") not in _PROTOCOLS:
            yield wrongs.unsupported(f"ports[{index}].protocol", port.get("protocol"), _PROTOCOLS)


def _changed_slice(held: Raw, new: Raw) -> Iterator[Wrong]:
    if held.get("addressType") != new.get("addressType"):
        yield wrongs.bad("addressType", new.get("addressType"), _IMMUTABLE)


def _cidrs(new: Raw) -> Iterator[Wrong]:
    found = (new.get("spec") or {}).get("cidrs") or []
    if not found:
        yield wrongs.required("spec.cidrs", "at least one CIDR required")
    for index, each in enumerate(found):
        yield from wrongs.network(f"spec.cidrs[{index}]", each)


def _definition(new: Raw) -> Iterator[Wrong]:
    spec = new.get("spec") or {}
    names, group = spec.get("names") or {}, spec.get("group")
    for field, value in (
        ("spec.group", group),
        ("spec.names.plural", names.get("plural")),
        ("spec.names.kind", names.get("kind")),
    ):
        if not value:
            yield wrongs.required(field)
    if spec.get("scope") not in ("Cluster", "Namespaced"):
        yield wrongs.unsupported("spec.scope", spec.get("scope") or "", ("Cluster", "Namespaced"))
    wanted = f"{names.get('plural')}.{group}"
    if new["metadata"].get("name") != wanted:
        yield wrongs.bad("metadata.name", new["metadata"].get("name"), 'must be spec.names.plural+"."+spec.group')
    if sum(bool(each.get("storage")) for each in spec.get("versions") or ()) != 1:
        text = "must have exactly one version marked as storage version"
        yield wrongs.bad("spec.versions", [each.get("name") for each in spec.get("versions") or ()], text)


def _fixed_data(held: Raw, new: Raw) -> Iterator[Wrong]:
    if held.get("immutable") and any(held.get(name) != new.get(name) for name in ("data", "binaryData", "immutable")):
        yield wrongs.forbidden("data", f"{_IMMUTABLE} when `immutable` is set")


_CHECKS: Mapping[str, Callable[[Raw], Iterator[Wrong]]] = {
    "Service": _service,
    "EndpointSlice": _slice,
    "Pod": pod,
    "Deployment": deployment,
    "ReplicaSet": replica_set,
    "ServiceCIDR": _cidrs,
    "CustomResourceDefinition": _definition,
}
_CHANGES: Mapping[str, Callable[[Raw, Raw], Iterator[Wrong]]] = {
    "EndpointSlice": _changed_slice,
    "Pod": changed_pod,
    "Deployment": changed_workload,
    "ReplicaSet": changed_workload,
    "ConfigMap": _fixed_data,
    "Secret": _fixed_data,
}
