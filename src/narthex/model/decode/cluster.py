"""v1 Node, v1 Namespace and networking.k8s.io ServiceCIDR."""

from __future__ import annotations

from narthex.model import validate
from narthex.model.decode.meta import family_pair, object_fields, texts
from narthex.model.objects import Namespace, Node, ServiceCIDR
from narthex.model.problem import Report, quoted
from narthex.model.validate import DNS_LABEL, DNS_SUBDOMAIN, LABEL_KEY
from narthex.model.wire import WireNamespace, WireNode, WireNodeAddress, WireNodeSpec, WireServiceCIDR


def node(raw: WireNode, report: Report) -> Node | None:
    """A Node, None when it has an error."""
    fields = object_fields(raw.metadata, report, DNS_SUBDOMAIN, namespaced=False)
    spec = raw.spec if raw.spec is not None else WireNodeSpec()
    addresses = (raw.status.addresses if raw.status is not None else None) or []
    told = (raw.status.conditions if raw.status is not None else None) or []
    conditions = {each.type: each.status for each in told}
    made = Node(
        **fields,
        pod_cidrs=_pod_cidrs(spec, report),
        internal_ips=_addresses("InternalIP", addresses, report),
        external_ips=_addresses("ExternalIP", addresses, report),
        taints=_taints(spec, report),
        ready=conditions.get("Ready", "True") == "True",
        network_unavailable=conditions.get("NetworkUnavailable") == "True",
    )
    return None if report.failed else made


def _pod_cidrs(spec: WireNodeSpec, report: Report) -> tuple[str, ...]:
    """`podCIDRs`, or `podCIDR` alone."""
    several = [cidr for cidr in spec.podCIDRs or () if cidr]
    if spec.podCIDR and several and spec.podCIDR != several[0]:
        report.error("spec.podCIDRs", f"the first is {quoted(several[0])}, but spec.podCIDR is {quoted(spec.podCIDR)}")
    if several or not spec.podCIDR:
        found = texts("spec.podCIDRs", several, report, validate.network)
        family_pair("spec.podCIDRs", found, report, "CIDR")
        return found
    try:
        return (validate.network(spec.podCIDR),)
    except ValueError as error:
        report.error("spec.podCIDR", f"{quoted(spec.podCIDR)} {error}")
        return ()


def _addresses(type_: str, addresses: list[WireNodeAddress], report: Report) -> tuple[str, ...]:
    """Node addresses of one type. A cloud's controller wrote them: a bad one is left out, the Node stays."""
    found = []
    for index, entry in enumerate(addresses):
        if entry.type != type_ or not entry.address:
            continue
        try:
            found.append(validate.any_address(entry.address))
        except ValueError as error:
            report.warning(f"status.addresses[{index}].address", f"{quoted(entry.address)} {error}, ignored")
    return tuple(found)


def _taints(spec: WireNodeSpec, report: Report) -> tuple[str, ...]:
    found = []
    for index, taint in enumerate(spec.taints or ()):
        if not taint.key:
            report.error(f"spec.taints[{index}].key", "is required")
        elif report.check(f"spec.taints[{index}].key", taint.key, LABEL_KEY):
            found.append(taint.key)
    return tuple(found)


def service_cidr(raw: WireServiceCIDR, report: Report) -> ServiceCIDR | None:
    """A ServiceCIDR, None when it has an error."""
    fields = object_fields(raw.metadata, report, DNS_SUBDOMAIN, namespaced=False)
    given = raw.spec.cidrs if raw.spec is not None else None
    if not given:
        report.error("spec.cidrs", "is required: one CIDR, or one of each IP family")
    cidrs = texts("spec.cidrs", given, report, validate.network)
    family_pair("spec.cidrs", cidrs, report, "CIDR")
    return None if report.failed else ServiceCIDR(**fields, cidrs=cidrs)


def namespace(raw: WireNamespace, report: Report) -> Namespace | None:
    """A Namespace, None when it has an error."""
    fields = object_fields(raw.metadata, report, DNS_LABEL, namespaced=False)
    return None if report.failed else Namespace(**fields)
