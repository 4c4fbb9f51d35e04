"""discovery.k8s.io/v1 EndpointSlice."""

from __future__ import annotations

from functools import lru_cache

from narthex.model import validate, wire
from narthex.model.decode_meta import object_fields, protocol
from narthex.model.net import IPFamily
from narthex.model.objects import EndpointPort, EndpointSlice, SliceEndpoint
from narthex.model.problem import Report, quoted
from narthex.model.validate import DNS_LABEL, DNS_SUBDOMAIN, FQDN, LABEL_VALUE, Syntax

SERVICE_LABEL = "kubernetes.io/service-name"

_ADDRESS_TYPES = {"IPv4": IPFamily.IPV4, "IPv6": IPFamily.IPV6, "FQDN": None}
_NO_CONDITIONS = wire.Conditions()
_NO_HINTS = wire.Hints()


def endpoint_slice(raw: wire.EndpointSlice, report: Report) -> EndpointSlice | None:
    """An EndpointSlice, None when it has an error."""
    fields = object_fields(raw.metadata, report, DNS_SUBDOMAIN)
    if not raw.addressType:
        report.error("addressType", "is required: IPv4, IPv6 or FQDN")
        return None
    if not report.choice("addressType", raw.addressType, _ADDRESS_TYPES):
        return None
    family = _ADDRESS_TYPES[raw.addressType]
    endpoints = tuple(
        endpoint
        for index, entry in enumerate(raw.endpoints or ())
        if (endpoint := _endpoint(index, entry, family, report)) is not None
    )
    made = EndpointSlice(
        **fields,
        service_name=next((value for key, value in fields["labels"] if key == SERVICE_LABEL), ""),
        family=family,
        ports=_ports(raw.ports, report),
        endpoints=endpoints,
    )
    return None if report.failed else made


def _ports(raw: list[wire.EndpointPort] | None, report: Report) -> tuple[EndpointPort, ...]:
    found = []
    names: dict[str, int] = {}
    for index, port in enumerate(raw or ()):
        field, name = f"ports[{index}]", port.name or ""
        if name:
            report.check(f"{field}.name", name, DNS_LABEL)
        if (first := names.setdefault(name, index)) != index:
            report.error(f"{field}.name", f"{quoted(name)} is the name of ports[{first}] already")
        if port.port is not None:
            report.number(f"{field}.port", port.port, 1, 65535)
        word = protocol(f"{field}.protocol", port.protocol, report)
        found.append(EndpointPort(name=name, protocol=word, port=port.port))
    return tuple(found)


def _endpoint(index: int, raw: wire.Endpoint, family: IPFamily | None, report: Report) -> SliceEndpoint | None:
    # One slice may hold a thousand of these: paths of fields are only made for those that have a fault.
    address = _address(index, raw.addresses, family, report)
    target = raw.targetRef
    pod = (target.name or "") if target is not None and target.kind == "Pod" else ""
    node, zone, hostname = raw.nodeName or "", raw.zone or "", raw.hostname or ""
    if not (
        (not node or _is_node_name(node))
        and (not zone or _is_zone(zone))
        and (not hostname or DNS_LABEL.holds(hostname))
        and (not pod or DNS_SUBDOMAIN.holds(pod))
    ):
        _check_names(index, node, zone, hostname, pod, report)
    conditions = raw.conditions if raw.conditions is not None else _NO_CONDITIONS
    hints = raw.hints if raw.hints is not None else _NO_HINTS
    if not address:
        return None
    return SliceEndpoint(
        address=address,
        ready=conditions.ready is not False,
        serving=conditions.serving is not False,
        terminating=conditions.terminating is True,
        node_name=node,
        zone=zone,
        hostname=hostname,
        for_zones=_hints(index, "forZones", hints.forZones, LABEL_VALUE, report) if hints.forZones else (),
        for_nodes=_hints(index, "forNodes", hints.forNodes, DNS_SUBDOMAIN, report) if hints.forNodes else (),
        target=pod,
    )


# Few nodes and zones have very many endpoints.
_is_node_name = lru_cache(8192)(DNS_SUBDOMAIN.holds)
_is_zone = lru_cache(1024)(LABEL_VALUE.holds)


def _check_names(index: int, node: str, zone: str, hostname: str, pod: str, report: Report) -> None:
    for name, text, syntax in (
        ("nodeName", node, DNS_SUBDOMAIN),
        ("zone", zone, LABEL_VALUE),
        ("hostname", hostname, DNS_LABEL),
        ("targetRef.name", pod, DNS_SUBDOMAIN),
    ):
        if text:
            report.check(f"endpoints[{index}].{name}", text, syntax)


def _address(index: int, addresses: list[str] | None, family: IPFamily | None, report: Report) -> str:
    """The first address, empty when there is none. All are checked, as by the API server; one counts (row 2.6)."""
    if not addresses:
        report.warning(f"endpoints[{index}].addresses", "is empty: the endpoint is ignored")
        return ""
    first = ""
    for number, text in enumerate(addresses):
        if family is None:
            report.check(f"endpoints[{index}].addresses[{number}]", text, FQDN)
            first = first or text
            continue
        try:
            address = validate.family_address(text, family)
        except ValueError as error:
            report.error(f"endpoints[{index}].addresses[{number}]", f"{quoted(text)} {error}")
        else:
            first = first or address
    return first


def _hints(index: int, field: str, raw: list[wire.Hint], syntax: Syntax, report: Report) -> tuple[str, ...]:
    found = []
    for number, hint in enumerate(raw):
        place = f"endpoints[{index}].hints.{field}[{number}].name"
        if not hint.name:
            report.error(place, "is required")
        elif report.check(place, hint.name, syntax):
            found.append(hint.name)
    return tuple(found)
