"""Validation of Services, EndpointSlices, Ingresses, and the objects around them, with kube-apiserver's messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from narthex.lab.api.errors import FieldError
from narthex.lab.api.field_errors import (
    IMMUTABLE,
    address,
    bad,
    check_each,
    dns_label,
    duplicate,
    labels,
    network,
    one_of,
    port_name,
    port_number,
    required,
    subdomain,
)

Raw = Mapping[str, Any]
PROTOCOLS = ("TCP", "UDP", "SCTP")
_TYPES = ("ClusterIP", "NodePort", "LoadBalancer", "ExternalName")
_FAMILY_POLICIES = ("SingleStack", "PreferDualStack", "RequireDualStack")
_DISTRIBUTIONS = ("PreferClose", "PreferSameZone", "PreferSameNode")


def service(new: Raw) -> Iterator[FieldError]:
    """Check a Service."""
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
    yield from one_of(f"{at}.protocol", port.get("protocol"), PROTOCOLS)
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


def endpoint_slice(new: Raw) -> Iterator[FieldError]:
    """Check an EndpointSlice."""
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
        yield from one_of(f"ports[{index}].protocol", port.get("protocol"), PROTOCOLS)


def changed_slice(held: Raw, new: Raw) -> Iterator[FieldError]:
    """Check an update of an EndpointSlice."""
    if held.get("addressType") != new.get("addressType"):
        yield bad("addressType", new.get("addressType"), IMMUTABLE)


def service_cidr(new: Raw) -> Iterator[FieldError]:
    """Check a ServiceCIDR."""
    found = (new.get("spec") or {}).get("cidrs") or []
    if not found:
        yield required("spec.cidrs", "at least one CIDR required")
    yield from check_each(network, "spec.cidrs", found)


_PATH_TYPES = ("Exact", "ImplementationSpecific", "Prefix")
_NOT_IN_PATHS = ("//", "/./", "/../", "%2f", "%2F")
_NOT_AT_THE_END = ("/..", "/.")


def ingress(new: Raw) -> Iterator[FieldError]:
    """Check an Ingress."""
    spec = new.get("spec") or {}
    if not spec.get("rules") and not spec.get("defaultBackend"):
        yield bad("spec", spec.get("rules") or [], "either `defaultBackend` or `rules` must be specified")
    if spec.get("defaultBackend"):
        yield from _backend("spec.defaultBackend", spec["defaultBackend"])
    for index, each in enumerate(spec.get("tls") or ()):
        for number, host in enumerate(each.get("hosts") or ()):
            yield from subdomain(f"spec.tls[{index}].hosts[{number}]", str(host).removeprefix("*."))
        if each.get("secretName"):
            yield from subdomain(f"spec.tls[{index}].secretName", each["secretName"])
    for index, rule in enumerate(spec.get("rules") or ()):
        at = f"spec.rules[{index}]"
        if host := rule.get("host"):
            if not list(address("", host)):
                yield bad(f"{at}.host", host, "must be a DNS name, not an IP address")
            yield from subdomain(f"{at}.host", str(host).removeprefix("*."))
        if rule.get("http") and not rule["http"].get("paths"):
            yield required(f"{at}.http.paths")
        for number, path in enumerate((rule.get("http") or {}).get("paths") or ()):
            yield from _path(f"{at}.http.paths[{number}]", path)
    if spec.get("ingressClassName"):
        yield from subdomain("spec.ingressClassName", spec["ingressClassName"])


def _path(at: str, path: Raw) -> Iterator[FieldError]:
    given = str(path.get("path") or "")
    if not path.get("pathType"):
        yield required(f"{at}.pathType", "pathType must be specified")
        return
    yield from one_of(f"{at}.pathType", path["pathType"], _PATH_TYPES)
    if path["pathType"] != "ImplementationSpecific":
        if not given.startswith("/"):
            yield bad(f"{at}.path", given, "must be an absolute path")
        yield from (bad(f"{at}.path", given, f"must not contain '{part}'") for part in _NOT_IN_PATHS if part in given)
        yield from (
            bad(f"{at}.path", given, f"cannot end with '{end}'") for end in _NOT_AT_THE_END if given.endswith(end)
        )
    elif given and not given.startswith("/"):
        yield bad(f"{at}.path", given, "must be an absolute path")
    yield from _backend(f"{at}.backend", path.get("backend") or {})


def _backend(at: str, backend: Raw) -> Iterator[FieldError]:
    chosen = backend.get("service")
    if backend.get("resource"):
        if chosen:
            yield bad(at, "", "cannot set both resource and service backends")
        return
    if not chosen:
        yield bad(at, "", "resource or service backend is required")
        return
    if chosen.get("name"):
        yield from dns_label(f"{at}.service.name", chosen["name"])
    else:
        yield required(f"{at}.service.name")
    port = chosen.get("port") or {}
    if port.get("name") and port.get("number"):
        yield bad(at, "", "cannot set both port name & port number")
    elif port.get("name"):
        yield from port_name(f"{at}.service.port.name", port["name"])
    elif port.get("number"):
        yield from port_number(f"{at}.service.port.number", port["number"])
    else:
        yield required(at, "port name or number is required")


def network_policy(new: Raw) -> Iterator[FieldError]:
    """Check a NetworkPolicy."""
    spec = new.get("spec") or {}
    for direction, peers in (("ingress", "from"), ("egress", "to")):
        for number, rule in enumerate(spec.get(direction) or ()):
            at = f"spec.{direction}[{number}]"
            for index, port in enumerate(rule.get("ports") or ()):
                yield from _policy_port(f"{at}.ports[{index}]", port)
            for index, peer in enumerate(rule.get(peers) or ()):
                if "ipBlock" in peer:
                    cidr = peer["ipBlock"].get("cidr")
                    where = f"{at}.{peers}[{index}].ipBlock.cidr"
                    yield from network(where, cidr) if cidr else [required(where)]


def _policy_port(at: str, given: Raw) -> Iterator[FieldError]:
    port, end = given.get("port"), given.get("endPort")
    yield from one_of(f"{at}.protocol", given.get("protocol"), PROTOCOLS)
    if isinstance(port, int):
        yield from port_number(f"{at}.port", port)
        if end is not None and end < port:
            yield bad(f"{at}.endPort", end, "must be greater than or equal to `port`")
    elif port is not None and end is not None:
        yield bad(f"{at}.endPort", end, "may not be specified when `port` is non-numeric")
    elif end is not None:
        yield required(f"{at}.port", "must be specified when `endPort` is specified")


def ingress_class(new: Raw) -> Iterator[FieldError]:
    """Check an IngressClass."""
    controller = (new.get("spec") or {}).get("controller") or ""
    if "/" not in controller:
        yield bad("spec.controller", controller, 'must be a domain-prefixed path (such as "acme.io/foo")')


def changed_ingress_class(held: Raw, new: Raw) -> Iterator[FieldError]:
    """Check an update of an IngressClass."""
    controller = (new.get("spec") or {}).get("controller")
    if controller != (held.get("spec") or {}).get("controller"):
        yield bad("spec.controller", controller, IMMUTABLE)
