"""What a Service of a type has, and what it keeps and loses when it is written anew.

Kubernetes: `pkg/registry/core/service/strategy.go`, patchAllocatedValues and dropTypeDependentFields, and
`pkg/apis/core/validation`, validateUpgradeDowngradeClusterIPs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narthex.lab.api.errors import Wrong
from narthex.lab.controllers.interfaces import Object
from narthex.lab.controllers.objects import integer_or
from narthex.lab.controllers.service.ip_families import go_strings

Spec = Mapping[str, Any]


def has_addresses(spec: Spec) -> bool:
    """It has cluster IPs, or the word None for them."""
    return spec.get("type") != "ExternalName"


def has_node_ports(spec: Spec) -> bool:
    """Its ports have numbers on every node."""
    kind = spec.get("type")
    return kind == "NodePort" or (kind == "LoadBalancer" and spec.get("allocateLoadBalancerNodePorts") is not False)


def may_have_node_ports(spec: Spec) -> bool:
    """Its ports may ask for such a number."""
    return spec.get("type") in ("NodePort", "LoadBalancer")


def needs_health_check(spec: Spec) -> bool:
    """A balancer asks each node whether it has endpoints."""
    return spec.get("type") == "LoadBalancer" and spec.get("externalTrafficPolicy") == "Local"


def normalize_cluster_ips(spec: Object) -> None:
    """clusterIP and clusterIPs say the same, where only one is given."""
    if spec.get("clusterIP") and not spec.get("clusterIPs"):
        spec["clusterIPs"] = [spec["clusterIP"]]
    elif spec.get("clusterIPs") and not spec.get("clusterIP"):
        spec["clusterIP"] = spec["clusterIPs"][0]


def take_over(spec: Object, old: Spec) -> None:
    """Give `spec` what the Service has been given and its writer leaves open, and take from it what another type had."""
    if has_addresses(old) and has_addresses(spec):
        if not spec.get("clusterIP") and not spec.get("clusterIPs"):
            spec["clusterIP"] = old.get("clusterIP") or ""
        if spec.get("clusterIP") == old.get("clusterIP") and not spec.get("clusterIPs"):
            spec["clusterIPs"] = list(old.get("clusterIPs") or ())
        if spec.get("clusterIP") and spec.get("clusterIPs") == old.get("clusterIPs"):
            # Who writes the one alone means the first of the other.
            spec["clusterIPs"] = [spec["clusterIP"], *(old.get("clusterIPs") or ())[1:]]
        for field in ("ipFamilies", "ipFamilyPolicy"):
            if not spec.get(field) and old.get(field):
                spec[field] = old[field]
    elif has_addresses(old):
        for field in ("clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy", "internalTrafficPolicy"):
            if spec.get(field) == old.get(field):
                spec.pop(field, None)
    _node_ports(spec, old)
    if needs_health_check(old) and integer_or(old.get("healthCheckNodePort")):
        if needs_health_check(spec):
            spec["healthCheckNodePort"] = spec.get("healthCheckNodePort") or old["healthCheckNodePort"]
        elif spec.get("healthCheckNodePort") == old["healthCheckNodePort"]:
            del spec["healthCheckNodePort"]
    inward = may_have_node_ports(old) and not may_have_node_ports(spec) and not spec.get("externalIPs")
    if inward and spec.get("externalTrafficPolicy") == old.get("externalTrafficPolicy"):
        spec.pop("externalTrafficPolicy", None)
    for field in ("allocateLoadBalancerNodePorts", "loadBalancerClass"):
        if old.get("type") == "LoadBalancer" != spec.get("type") and spec.get(field) == old.get(field):
            spec.pop(field, None)


def _node_ports(spec: Object, old: Spec) -> None:
    before = {_port(port): integer_or(port.get("nodePort")) for port in old.get("ports") or ()}
    ports = [dict(port) for port in spec.get("ports") or ()]
    if may_have_node_ports(old) and not may_have_node_ports(spec):
        same = [before.get(_port(port), 0) for port in ports] == [integer_or(port.get("nodePort")) for port in ports]
        for port in ports if same else ():
            port.pop("nodePort", None)
    elif has_node_ports(old) and has_node_ports(spec):
        used = {(integer_or(port.get("nodePort")), port.get("protocol") or "TCP") for port in ports}
        for port in ports:
            had = before.get(_port(port), 0)
            if had and not integer_or(port.get("nodePort")) and (had, port.get("protocol") or "TCP") not in used:
                port["nodePort"] = had
    if ports:
        spec["ports"] = ports


def _port(port: Spec) -> tuple[str, int]:
    return port.get("protocol") or "TCP", integer_or(port.get("port"))


def validate_type(spec: Spec, old: Spec | None) -> None:
    """Raise Wrong for what its type cannot have, and for addresses that may not change."""
    kind = spec.get("type") or "ClusterIP"
    if not may_have_node_ports(spec):
        for index, port in enumerate(spec.get("ports") or ()):
            if integer_or(port.get("nodePort")):
                why = f"Forbidden: may not be used when `type` is '{kind}'"
                raise Wrong(f"spec.ports[{index}].nodePort", "FieldValueForbidden", why)
    addresses = spec.get("clusterIPs") or []
    if kind == "ExternalName":
        for field in ("clusterIPs", "ipFamilies", "ipFamilyPolicy"):
            if spec.get(field):
                why = "Forbidden: may not be set for ExternalName services"
                raise Wrong(f"spec.{field}", "FieldValueForbidden", why)
        return
    if may_have_node_ports(spec) and spec.get("clusterIP") == "None":
        why = f"Invalid value: {go_strings(addresses)}: may not be set to 'None' for {kind} services"
        raise Wrong("spec.clusterIPs[0]", "FieldValueInvalid", why)
    if integer_or(spec.get("healthCheckNodePort")) and not needs_health_check(spec):
        why = "may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'"
        raise Wrong(
            "spec.healthCheckNodePort", "FieldValueInvalid", f"Invalid value: {spec['healthCheckNodePort']}: {why}"
        )
    if old is not None and old.get("type") != "ExternalName":
        _check_kept(addresses, old.get("clusterIPs") or [], spec)


def _check_kept(addresses: list[str], before: list[str], spec: Spec) -> None:
    if not before:
        return
    if not addresses:
        words = f"Invalid value: {go_strings(addresses)}: primary clusterIP can not be unset"
        raise Wrong("spec.clusterIPs[0]", "FieldValueInvalid", words)
    for index, (new, had) in enumerate(zip(addresses, before, strict=False)):
        if new != had:
            words = f"Invalid value: {go_strings(addresses)}: may not change once set"
            raise Wrong(f"spec.clusterIPs[{index}]", "FieldValueInvalid", words)
    if len(addresses) < len(before) and spec.get("ipFamilyPolicy") != "SingleStack":
        words = "secondary clusterIP can only be unset when the ipFamilyPolicy is 'SingleStack'"
        raise Wrong("spec.clusterIPs[1]", "FieldValueInvalid", f"Invalid value: {go_strings(addresses)}: {words}")
