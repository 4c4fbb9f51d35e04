"""discovery.k8s.io/v1 EndpointSlice."""

from __future__ import annotations

from narthex.model import validate, wire
from narthex.model.decode_meta import object_fields, protocol
from narthex.model.net import IPFamily
from narthex.model.objects import EndpointPort, EndpointSlice, SliceEndpoint
from narthex.model.problem import Report, quoted
from narthex.model.validate import DNS_LABEL, DNS_SUBDOMAIN, FQDN, LABEL_VALUE

SERVICE_LABEL = "kubernetes.io/service-name"

_ADDRESS_TYPES = {"IPv4": IPFamily.IPV4, "IPv6": IPFamily.IPV6, "FQDN": None}
_NO_CONDITIONS = wire.Conditions()


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
        if (endpoint := _endpoint(f"endpoints[{index}]", entry, family, report)) is not None
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


def _endpoint(field: str, raw: wire.Endpoint, family: IPFamily | None, report: Report) -> SliceEndpoint | None:
    address = _address(field, raw.addresses, family, report)
    if raw.nodeName:
        report.check(f"{field}.nodeName", raw.nodeName, DNS_SUBDOMAIN)
    if raw.zone:
        report.check(f"{field}.zone", raw.zone, LABEL_VALUE)
    if raw.hostname:
        report.check(f"{field}.hostname", raw.hostname, DNS_LABEL)
    conditions = raw.conditions if raw.conditions is not None else _NO_CONDITIONS
    hints = raw.hints
    target = raw.targetRef
    pod = (target.name or "") if target is not None and target.kind == "Pod" else ""
    if pod:
        report.check(f"{field}.targetRef.name", pod, DNS_SUBDOMAIN)
    if not address:
        return None
    return SliceEndpoint(
        address=address,
        ready=conditions.ready is not False,
        serving=conditions.serving is not False,
        terminating=conditions.terminating is True,
        node_name=raw.nodeName or "",
        zone=raw.zone or "",
        hostname=raw.hostname or "",
        for_zones=_hints(f"{field}.hints.forZones", hints.forZones, report) if hints is not None else (),
        for_nodes=_hints(f"{field}.hints.forNodes", hints.forNodes, report) if hints is not None else (),
        target=pod,
    )


def _address(field: str, addresses: list[str] | None, family: IPFamily | None, report: Report) -> str:
    """The first address, empty when there is none. All are checked, as by the API server; one counts (row 2.6)."""
    if not addresses:
        report.warning(f"{field}.addresses", "is empty: the endpoint is ignored")
        return ""
    found = []
    for index, text in enumerate(addresses):
        where = f"{field}.addresses[{index}]"
        if family is None:
            report.check(where, text, FQDN)
            found.append(text)
            continue
        try:
            found.append(validate.family_address(text, family))
        except ValueError as error:
            report.error(where, f"{quoted(text)} {error}")
    return found[0] if found else ""


def _hints(field: str, raw: list[wire.Hint] | None, report: Report) -> tuple[str, ...]:
    found = []
    for index, hint in enumerate(raw or ()):
        if not hint.name:
            report.error(f"{field}[{index}].name", "is required")
        elif report.check(f"{field}[{index}].name", hint.name, DNS_SUBDOMAIN if "Nodes" in field else LABEL_VALUE):
            found.append(hint.name)
    return tuple(found)
