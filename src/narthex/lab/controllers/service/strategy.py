"""Fields that depend on the type of a Service: what an update inherits, drops, and may not change.

Kubernetes: `pkg/registry/core/service/strategy.go` (patchAllocatedValues, dropTypeDependentFields) and
`pkg/apis/core/validation` (validateUpgradeDowngradeClusterIPs).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narthex.lab.api.errors import FieldError
from narthex.lab.controllers.interfaces import Object
from narthex.lab.controllers.objects import integer_or
from narthex.lab.controllers.service.ip_families import go_strings

Spec = Mapping[str, Any]


def has_addresses(spec: Spec) -> bool:
    """Return True if the type has cluster IPs (or `None` for a headless Service)."""
    return spec.get("type") != "ExternalName"


def has_node_ports(spec: Spec) -> bool:
    """Return True if node ports are allocated."""
    kind = spec.get("type")
    return kind == "NodePort" or (kind == "LoadBalancer" and spec.get("allocateLoadBalancerNodePorts") is not False)


def may_have_node_ports(spec: Spec) -> bool:
    """Return True if the type allows node ports."""
    return spec.get("type") in ("NodePort", "LoadBalancer")


def needs_health_check(spec: Spec) -> bool:
    """Return True if a load balancer checks each node for local endpoints."""
    return spec.get("type") == "LoadBalancer" and spec.get("externalTrafficPolicy") == "Local"


def normalize_cluster_ips(spec: Object) -> None:
    """Fill clusterIP from clusterIPs, or the reverse, if only one is set."""
    if spec.get("clusterIP") and not spec.get("clusterIPs"):
        spec["clusterIPs"] = [spec["clusterIP"]]
    elif spec.get("clusterIPs") and not spec.get("clusterIP"):
        spec["clusterIP"] = spec["clusterIPs"][0]


def inherit_allocated(spec: Object, old: Spec) -> None:
    """Copy allocated values that the writer left out from `old` into `spec`; drop those that the new type cannot have."""
    _inherit_addresses(spec, old)
    _inherit_node_ports(spec, old)
    _inherit_health_check_port(spec, old)
    _drop_type_dependent_fields(spec, old)


def _inherit_addresses(spec: Object, old: Spec) -> None:
    if not has_addresses(old):
        return
    if not has_addresses(spec):
        for field in ("clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy", "internalTrafficPolicy"):
            if spec.get(field) == old.get(field):
                spec.pop(field, None)
        return
    if not spec.get("clusterIP") and not spec.get("clusterIPs"):
        spec["clusterIP"] = old.get("clusterIP") or ""
    if spec.get("clusterIP") == old.get("clusterIP") and not spec.get("clusterIPs"):
        spec["clusterIPs"] = list(old.get("clusterIPs") or ())
    if spec.get("clusterIP") and spec.get("clusterIPs") == old.get("clusterIPs"):
        # A client that sets only clusterIP means the first of clusterIPs.
        spec["clusterIPs"] = [spec["clusterIP"], *(old.get("clusterIPs") or ())[1:]]
    for field in ("ipFamilies", "ipFamilyPolicy"):
        if not spec.get(field) and old.get(field):
            spec[field] = old[field]


def _inherit_health_check_port(spec: Object, old: Spec) -> None:
    if not needs_health_check(old) or not integer_or(old.get("healthCheckNodePort")):
        return
    if needs_health_check(spec):
        spec["healthCheckNodePort"] = spec.get("healthCheckNodePort") or old["healthCheckNodePort"]
    elif spec.get("healthCheckNodePort") == old["healthCheckNodePort"]:
        del spec["healthCheckNodePort"]


def _drop_type_dependent_fields(spec: Object, old: Spec) -> None:
    internal = may_have_node_ports(old) and not may_have_node_ports(spec) and not spec.get("externalIPs")
    if internal and spec.get("externalTrafficPolicy") == old.get("externalTrafficPolicy"):
        spec.pop("externalTrafficPolicy", None)
    if old.get("type") == "LoadBalancer" != spec.get("type"):
        for field in ("allocateLoadBalancerNodePorts", "loadBalancerClass"):
            if spec.get(field) == old.get(field):
                spec.pop(field, None)


def _inherit_node_ports(spec: Object, old: Spec) -> None:
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
    """Raise Wrong for fields that the type does not allow and for changes of immutable addresses."""
    kind = spec.get("type") or "ClusterIP"
    if not may_have_node_ports(spec):
        for index, port in enumerate(spec.get("ports") or ()):
            if integer_or(port.get("nodePort")):
                why = f"Forbidden: may not be used when `type` is '{kind}'"
                raise FieldError(f"spec.ports[{index}].nodePort", "FieldValueForbidden", why)
    addresses = spec.get("clusterIPs") or []
    if kind == "ExternalName":
        for field in ("clusterIPs", "ipFamilies", "ipFamilyPolicy"):
            if spec.get(field):
                why = "Forbidden: may not be set for ExternalName services"
                raise FieldError(f"spec.{field}", "FieldValueForbidden", why)
        return
    if may_have_node_ports(spec) and spec.get("clusterIP") == "None":
        why = f"Invalid value: {go_strings(addresses)}: may not be set to 'None' for {kind} services"
        raise FieldError("spec.clusterIPs[0]", "FieldValueInvalid", why)
    if integer_or(spec.get("healthCheckNodePort")) and not needs_health_check(spec):
        why = "may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'"
        raise FieldError(
            "spec.healthCheckNodePort", "FieldValueInvalid", f"Invalid value: {spec['healthCheckNodePort']}: {why}"
        )
    if old is not None and old.get("type") != "ExternalName":
        _check_kept(addresses, old.get("clusterIPs") or [], spec)


def _check_kept(addresses: list[str], before: list[str], spec: Spec) -> None:
    if not before:
        return
    if not addresses:
        words = f"Invalid value: {go_strings(addresses)}: primary clusterIP can not be unset"
        raise FieldError("spec.clusterIPs[0]", "FieldValueInvalid", words)
    for index, (new, had) in enumerate(zip(addresses, before, strict=False)):
        if new != had:
            words = f"Invalid value: {go_strings(addresses)}: may not change once set"
            raise FieldError(f"spec.clusterIPs[{index}]", "FieldValueInvalid", words)
    if len(addresses) < len(before) and spec.get("ipFamilyPolicy") != "SingleStack":
        words = "secondary clusterIP can only be unset when the ipFamilyPolicy is 'SingleStack'"
        raise FieldError("spec.clusterIPs[1]", "FieldValueInvalid", f"Invalid value: {go_strings(addresses)}: {words}")
