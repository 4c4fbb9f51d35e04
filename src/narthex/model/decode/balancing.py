"""Decoders of metallb.io/v1beta1 IPAddressPool and L2Advertisement."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from narthex.model.decode.meta import labels, object_fields
from narthex.model.objects import IPAddressPool, L2Advertisement, Selector, ServiceAllocation
from narthex.model.problem import ProblemCollector, quoted
from narthex.model.selector import OPERATORS, Requirement
from narthex.model.validate import DNS_LABEL, DNS_SUBDOMAIN, LABEL_KEY, LABEL_VALUE, Syntax
from narthex.model.wire import (
    WireIPAddressPool,
    WireIPAddressPoolSpec,
    WireL2Advertisement,
    WireL2AdvertisementSpec,
    WireLabelSelector,
    WireServiceAllocation,
)

_WITH_VALUES = ("In", "NotIn")
_INTERFACE = re.compile(r"(?!\.{1,2}$)[!-.0-9;-~]{1,15}")


def address_pool(raw: WireIPAddressPool, report: ProblemCollector) -> IPAddressPool | None:
    """Decode an IPAddressPool; None if it has an error. The addresses remain text."""
    fields = object_fields(raw.metadata, report, DNS_SUBDOMAIN)
    report.served = False  # A selector that is ignored would let others use the pool.
    spec = raw.spec if raw.spec is not None else WireIPAddressPoolSpec()
    made = IPAddressPool(
        **fields,
        addresses=tuple(spec.addresses or ()),
        auto_assign=spec.autoAssign is not False,
        avoid_buggy=bool(spec.avoidBuggyIPs),
        allocation=_allocation("spec.serviceAllocation", spec.serviceAllocation, report),
    )
    return None if report.failed else made


def l2_advertisement(raw: WireL2Advertisement, report: ProblemCollector) -> L2Advertisement | None:
    """Decode an L2Advertisement; None if it has an error."""
    fields = object_fields(raw.metadata, report, DNS_SUBDOMAIN)
    report.served = False  # A selector that is ignored would announce more than it says.
    spec = raw.spec if raw.spec is not None else WireL2AdvertisementSpec()
    made = L2Advertisement(
        **fields,
        pools=_names("spec.ipAddressPools", spec.ipAddressPools, DNS_SUBDOMAIN, report),
        pool_selectors=_selectors("spec.ipAddressPoolSelectors", spec.ipAddressPoolSelectors, report),
        node_selectors=_selectors("spec.nodeSelectors", spec.nodeSelectors, report),
        service_selectors=_selectors("spec.serviceSelectors", spec.serviceSelectors, report),
        interfaces=_interfaces("spec.interfaces", spec.interfaces, report),
    )
    return None if report.failed else made


def _allocation(field: str, raw: WireServiceAllocation | None, report: ProblemCollector) -> ServiceAllocation | None:
    if raw is None:
        return None
    priority = raw.priority or 0
    report.number(f"{field}.priority", priority, 0, 2**31 - 1, "a priority")
    return ServiceAllocation(
        priority=priority,
        namespaces=_names(f"{field}.namespaces", raw.namespaces, DNS_LABEL, report),
        namespace_selectors=_selectors(f"{field}.namespaceSelectors", raw.namespaceSelectors, report),
        service_selectors=_selectors(f"{field}.serviceSelectors", raw.serviceSelectors, report),
    )


def _names(field: str, values: list[str] | None, syntax: Syntax, report: ProblemCollector) -> tuple[str, ...]:
    return tuple(value for i, value in enumerate(values or ()) if report.check(f"{field}[{i}]", value, syntax))


def _interfaces(field: str, values: list[str] | None, report: ProblemCollector) -> tuple[str, ...]:
    for index, value in enumerate(values or ()):
        if not _INTERFACE.fullmatch(value):
            allowed = "at most 15 characters, no '/', ':' or white space"
            report.error(f"{field}[{index}]", f"{quoted(value)} is not an interface's name: {allowed}")
    return tuple(values or ())


def _selectors(field: str, raw: list[WireLabelSelector] | None, report: ProblemCollector) -> tuple[Selector, ...]:
    return tuple(_selector(f"{field}[{index}]", each, report) for index, each in enumerate(raw or ()))


def _selector(field: str, raw: WireLabelSelector, report: ProblemCollector) -> Selector:
    pairs = labels(f"{field}.matchLabels", raw.matchLabels, report)
    found = [Requirement(key, "in", (value,)) for key, value in pairs]
    for index, expression in enumerate(raw.matchExpressions or ()):
        made = _requirement(f"{field}.matchExpressions[{index}]", expression, report)
        found += [made] if made is not None else []
    return tuple(found)


def _requirement(field: str, raw: Any, report: ProblemCollector) -> Requirement | None:
    """Decode one match expression. The wire type leaves it untyped, since Deployments have unused ones as well."""
    entry: dict[str, Any] = raw if isinstance(raw, dict) else {}
    key, operator, values = entry.get("key"), entry.get("operator"), entry.get("values") or []
    if not _is_text(f"{field}.key", key, LABEL_KEY.holds, LABEL_KEY.allowed, report):
        return None
    if not isinstance(operator, str) or operator not in OPERATORS:
        report.error(f"{field}.operator", f"{quoted(operator)} is not In, NotIn, Exists or DoesNotExist")
        return None
    if not isinstance(values, list) or bool(values) is not (operator in _WITH_VALUES):
        must = "is required: at least one value" if operator in _WITH_VALUES else f"must be empty with {operator}"
        report.error(f"{field}.values", must)
        return None
    for index, value in enumerate(values):
        if not _is_text(f"{field}.values[{index}]", value, LABEL_VALUE.holds, LABEL_VALUE.allowed, report):
            return None
    return Requirement(str(key), OPERATORS[operator], tuple(sorted(set(values))))


def _is_text(field: str, value: object, holds: Callable[[str], bool], allowed: str, report: ProblemCollector) -> bool:
    if isinstance(value, str) and holds(value):
        return True
    report.error(field, f"{quoted(value)} is not allowed: {allowed}")
    return False
