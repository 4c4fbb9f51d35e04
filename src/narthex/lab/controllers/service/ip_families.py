"""Defaulting and validation of ipFamilies and ipFamilyPolicy (kubernetes `service/storage/alloc.go`, initIPFamilyFields)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from narthex.lab.api.errors import FieldError
from narthex.lab.controllers.interfaces import Object

_DUAL = ("PreferDualStack", "RequireDualStack")


def default_ip_families(spec: Object, old: Mapping[str, Any] | None, cluster: Sequence[str]) -> Object:
    """Return the spec with `ipFamilies` and `ipFamilyPolicy`. Raises Wrong.

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
    _check(policy, addresses, families, cluster)
    families += [family_of(each) for each in addresses[len(families) :]]
    headless = spec.get("clusterIP") == "None"
    if headless and not spec.get("selector") and policy is None and len(families) < 2:
        # The endpoints are unknown, so allow both families.
        policy = "RequireDualStack" if len(cluster) > 1 else "SingleStack"
    if policy == "RequireDualStack" and len(cluster) < 2:
        raise _invalid("spec.ipFamilyPolicy", policy, "this cluster is not configured for dual-stack services")
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


def _check(policy: str | None, addresses: Sequence[str], families: Sequence[str], cluster: Sequence[str]) -> None:
    if policy not in _DUAL:
        for name, given in (("clusterIPs", addresses), ("ipFamilies", families)):
            if len(given) > 1:
                why = f"must be RequireDualStack or PreferDualStack when multiple {name} are specified"
                raise _invalid("spec.ipFamilyPolicy", policy or "SingleStack", why)
    for index, family in enumerate(families):
        if family in families[:index]:
            raise FieldError(f"spec.ipFamilies[{index}]", "FieldValueDuplicate", f'Duplicate value: "{family}"')
        if family not in cluster:
            raise _invalid(f"spec.ipFamilies[{index}]", family, "not configured on this cluster")
    for index, (address, family) in enumerate(zip(addresses, families, strict=False)):
        if family_of(address) != family:
            a_or_an = "an IPv4" if family == "IPv4" else "an IPv6"
            why = f"expected {a_or_an} value as indicated by `ipFamilies[{index}]`"
            raise _invalid(f"spec.clusterIPs[{index}]", address, why)
    if len({family_of(each) for each in addresses}) < len(addresses):
        raise FieldError(
            "spec.clusterIPs",
            "FieldValueInvalid",
            f"Invalid value: {go_strings(addresses)}: may specify no more than one IP for each IP family",
        )


def _invalid(field: str, value: str, why: str) -> FieldError:
    return FieldError(field, "FieldValueInvalid", f'Invalid value: "{value}": {why}')


def go_strings(values: Sequence[str]) -> str:
    """Format a list as Go's `%#v`, which upstream's messages use."""
    return "[]string{" + ", ".join(f'"{each}"' for each in values) + "}" if values else "[]string(nil)"
