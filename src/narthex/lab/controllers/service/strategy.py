"""Fields that depend on the type and the families of a Service: what an update inherits, drops, and may not change.

Kubernetes: `pkg/registry/core/service/strategy.go` (patchAllocatedValues, dropTypeDependentFields), `service/storage/alloc.go`
(initIPFamilyFields), and `pkg/apis/core/validation` (validateUpgradeDowngradeClusterIPs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from narthex.lab.api.errors import FieldError
from narthex.lab.api.field_errors import bad, duplicate, forbidden
from narthex.lab.controllers.objects import Object, integer_or

Spec = Mapping[str, Any]
_DUAL = ("PreferDualStack", "RequireDualStack")


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
    if old.get("type") == "ExternalName":
        return
    if spec.get("type") == "ExternalName":
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
    """Raise FieldError for fields that the type does not allow and for changes of immutable addresses."""
    kind = spec.get("type") or "ClusterIP"
    if not may_have_node_ports(spec):
        for index, port in enumerate(spec.get("ports") or ()):
            if integer_or(port.get("nodePort")):
                raise forbidden(f"spec.ports[{index}].nodePort", f"may not be used when `type` is '{kind}'")
    addresses = spec.get("clusterIPs") or []
    if kind == "ExternalName":
        for field in ("clusterIPs", "ipFamilies", "ipFamilyPolicy"):
            if spec.get(field):
                raise forbidden(f"spec.{field}", "may not be set for ExternalName services")
        return
    if may_have_node_ports(spec) and spec.get("clusterIP") == "None":
        raise bad_addresses("spec.clusterIPs[0]", addresses, f"may not be set to 'None' for {kind} services")
    if integer_or(spec.get("healthCheckNodePort")) and not needs_health_check(spec):
        why = "may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'"
        raise bad("spec.healthCheckNodePort", spec["healthCheckNodePort"], why)
    if old is not None and old.get("type") != "ExternalName":
        _check_kept(addresses, old.get("clusterIPs") or [], spec)


def _check_kept(addresses: list[str], before: list[str], spec: Spec) -> None:
    if not before:
        return
    if not addresses:
        raise bad_addresses("spec.clusterIPs[0]", addresses, "primary clusterIP can not be unset")
    for index, (new, had) in enumerate(zip(addresses, before, strict=False)):
        if new != had:
            raise bad_addresses(f"spec.clusterIPs[{index}]", addresses, "may not change once set")
    if len(addresses) < len(before) and spec.get("ipFamilyPolicy") != "SingleStack":
        why = "secondary clusterIP can only be unset when the ipFamilyPolicy is 'SingleStack'"
        raise bad_addresses("spec.clusterIPs[1]", addresses, why)


def default_ip_families(spec: Object, old: Mapping[str, Any] | None, cluster: Sequence[str]) -> Object:
    """Return the spec with `ipFamilies` and `ipFamilyPolicy`. Raises FieldError.

    `cluster` lists the families that the cluster supports, primary first.
    """
    if spec.get("type") == "ExternalName":
        return spec
    policy = spec.get("ipFamilyPolicy")
    addresses = [each for each in spec.get("clusterIPs") or () if each != "None"]
    families = list(spec.get("ipFamilies") or ())
    if old is not None and policy == "SingleStack" and old.get("ipFamilyPolicy") in _DUAL:
        # Changing the policy alone is enough to drop the second family.
        if addresses == list(old.get("clusterIPs") or ()):
            addresses = addresses[:1]
        if families == list(old.get("ipFamilies") or ()):
            families = families[:1]
    _check_families(policy, addresses, families, cluster)
    families += [family_of(each) for each in addresses[len(families) :]]
    headless = spec.get("clusterIP") == "None"
    if headless and not spec.get("selector") and policy is None and len(families) < 2:
        # The endpoints are unknown, so allow both families.
        policy = "RequireDualStack" if len(cluster) > 1 else "SingleStack"
    if policy == "RequireDualStack" and len(cluster) < 2:
        raise bad("spec.ipFamilyPolicy", policy, "this cluster is not configured for dual-stack services")
    if not families:
        families = [cluster[0] if cluster else "IPv4"]
    if policy in _DUAL and len(families) == 1:
        families += [each for each in cluster if each != families[0]]
    settled = {**spec, "ipFamilyPolicy": policy or "SingleStack", "ipFamilies": families}
    if addresses:
        settled |= {"clusterIP": addresses[0], "clusterIPs": addresses}
    return settled


def family_of(address: str) -> str:
    """Return `IPv4` or `IPv6`."""
    return "IPv6" if ":" in address else "IPv4"


def _check_families(
    policy: str | None, addresses: Sequence[str], families: Sequence[str], cluster: Sequence[str]
) -> None:
    if policy not in _DUAL:
        for name, given in (("clusterIPs", addresses), ("ipFamilies", families)):
            if len(given) > 1:
                why = f"must be RequireDualStack or PreferDualStack when multiple {name} are specified"
                raise bad("spec.ipFamilyPolicy", policy or "SingleStack", why)
    for index, family in enumerate(families):
        if family in families[:index]:
            raise duplicate(f"spec.ipFamilies[{index}]", family)
        if family not in cluster:
            raise bad(f"spec.ipFamilies[{index}]", family, "not configured on this cluster")
    for index, (address, family) in enumerate(zip(addresses, families, strict=False)):
        if family_of(address) != family:
            why = f"expected an {family} value as indicated by `ipFamilies[{index}]`"
            raise bad(f"spec.clusterIPs[{index}]", address, why)
    if len({family_of(each) for each in addresses}) < len(addresses):
        raise bad_addresses("spec.clusterIPs", addresses, "may specify no more than one IP for each IP family")


def bad_addresses(field: str, addresses: Sequence[str], why: str) -> FieldError:
    """Return an error for an invalid list of addresses, which upstream prints by Go's `%#v`."""
    shown = ", ".join(f'"{each}"' for each in addresses)
    text = f"[]string{{{shown}}}" if addresses else "[]string(nil)"
    return FieldError(field, "FieldValueInvalid", f"Invalid value: {text}: {why}")
