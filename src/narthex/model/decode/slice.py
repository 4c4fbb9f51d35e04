"""Decoder of discovery.k8s.io/v1 EndpointSlice."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

from narthex.model.decode.meta import object_fields, protocol, valid_text
from narthex.model.net import IPFamily
from narthex.model.objects import EndpointPort, EndpointSlice, SliceEndpoint
from narthex.model.problem import ProblemCollector, quoted
from narthex.model.validate import (
    BROADCAST,
    DNS_LABEL,
    DNS_SUBDOMAIN,
    FQDN,
    LABEL_VALUE,
    are_plain_hosts,
    are_subdomains,
    cached_syntax,
    family_address,
    is_plain_host,
)
from narthex.model.wire import WireConditions, WireEndpoint, WireEndpointPort, WireEndpointSlice, WireHint

SERVICE_LABEL = "kubernetes.io/service-name"

_ADDRESS_TYPES = {"IPv4": IPFamily.IPV4, "IPv6": IPFamily.IPV6, "FQDN": None}
_NO_CONDITIONS = WireConditions()

_is_subdomain = DNS_SUBDOMAIN.holds
_node_name = cached_syntax(DNS_SUBDOMAIN, 8192)
_zone = cached_syntax(LABEL_VALUE, 1024)
_HINTS = {"forZones": (LABEL_VALUE, _zone), "forNodes": (DNS_SUBDOMAIN, _node_name)}


def endpoint_slice(raw: WireEndpointSlice, report: ProblemCollector) -> EndpointSlice | None:
    """Decode an EndpointSlice; None if it has an error."""
    fields = object_fields(raw.metadata, report, DNS_SUBDOMAIN)
    if raw.addressType not in _ADDRESS_TYPES:
        # Without it, the addresses have no meaning.
        given = quoted(raw.addressType) + " is not" if raw.addressType else "is required:"
        report.reject("addressType", f"{given} IPv4, IPv6 or FQDN")
        return None
    family = _ADDRESS_TYPES[raw.addressType]
    endpoints = _plain_endpoints(raw.endpoints, family) if raw.endpoints and family is not None else ()
    if endpoints is None:
        found = [_endpoint(index, entry, family, report) for index, entry in enumerate(raw.endpoints or ())]
        endpoints = tuple([endpoint for endpoint in found if endpoint is not None])
    made = EndpointSlice(
        **fields,
        service_name=next((value for key, value in fields["labels"] if key == SERVICE_LABEL), ""),
        family=family,
        ports=tuple(report.without_error(_ports(raw.ports, report))),
        endpoints=endpoints,
    )
    return None if report.failed else made


def _ports(raw: list[WireEndpointPort] | None, report: ProblemCollector) -> Iterator[EndpointPort]:
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
        yield EndpointPort(name=name, protocol=word, port=port.port)


def _plain_endpoints(raw: list[WireEndpoint], family: IPFamily) -> tuple[SliceEndpoint, ...] | None:
    """Decode all endpoints of a slice at once, in a third of the time.

    Returns None if any endpoint has an unusual field or an error; `_endpoint` then decodes each one.
    """
    addresses: list[str] = []
    pods: list[str] = []
    for each in raw:
        target, state = each.targetRef, each.conditions
        if each.hints is not None or each.hostname or each.addresses is None or len(each.addresses) != 1:
            return None
        if state is not None and (state.terminating or state.ready is False or state.serving is False):
            return None
        addresses += each.addresses
        pods.append((target.name or "") if target is not None and target.kind == "Pod" else "")
    named = [pod for pod in pods if pod]
    if not are_plain_hosts(addresses, family) or (named and not are_subdomains(named)):
        return None
    nodes = [_node_name(each.nodeName) if each.nodeName else "" for each in raw]
    zones = [_zone(each.zone) if each.zone else "" for each in raw]
    if None in nodes or None in zones:
        return None
    as_most_are = repeat(True), repeat(True), repeat(False)
    nothing = repeat(""), repeat(()), repeat(())
    return tuple(map(SliceEndpoint, addresses, *as_most_are, nodes, zones, *nothing, pods))


def _endpoint(index: int, raw: WireEndpoint, family: IPFamily | None, report: ProblemCollector) -> SliceEndpoint | None:
    # A slice may have a thousand endpoints: field paths are built only for errors.
    addresses = raw.addresses
    address = addresses[0] if addresses else ""
    if len(addresses or ()) != 1 or family is None or not is_plain_host(address, family):
        address = _address(index, addresses, family, report)
    node, zone, hostname = raw.nodeName or "", raw.zone or "", raw.hostname or ""
    if node and not (node := _node_name(node) or ""):
        report.check(f"endpoints[{index}].nodeName", raw.nodeName or "", DNS_SUBDOMAIN)
    if zone and not (zone := _zone(zone) or ""):
        report.check(f"endpoints[{index}].zone", raw.zone or "", LABEL_VALUE)
    if hostname and not DNS_LABEL.holds(hostname):
        report.check(f"endpoints[{index}].hostname", hostname, DNS_LABEL)
        hostname = ""
    target = raw.targetRef
    pod = (target.name or "") if target is not None and target.kind == "Pod" else ""
    if pod and not _is_subdomain(pod):
        report.check(f"endpoints[{index}].targetRef.name", pod, DNS_SUBDOMAIN)
        pod = ""
    hints = raw.hints
    zones = _hints(index, "forZones", hints.forZones, report) if hints is not None and hints.forZones else ()
    nodes = _hints(index, "forNodes", hints.forNodes, report) if hints is not None and hints.forNodes else ()
    if not address:
        return None
    conditions = raw.conditions if raw.conditions is not None else _NO_CONDITIONS
    ready, serving, terminating = conditions.ready is not False, conditions.serving is not False, conditions.terminating
    return SliceEndpoint(
        address=address,
        ready=ready,
        serving=serving,
        terminating=bool(terminating),
        node_name=node,
        zone=zone,
        hostname=hostname,
        for_zones=zones,
        for_nodes=nodes,
        target=pod,
    )


def _address(index: int, addresses: list[str] | None, family: IPFamily | None, report: ProblemCollector) -> str:
    """Return the first address, or empty. All are validated, as by the API server; one is used (row 2.6)."""
    if not addresses:
        report.warning(f"endpoints[{index}].addresses", "is empty: the endpoint is ignored")
        return ""
    first = ""
    for number, text in enumerate(addresses):
        if family is None:
            report.check(f"endpoints[{index}].addresses[{number}]", text, FQDN)
            first = first or text
        else:
            field = f"endpoints[{index}].addresses[{number}]"
            if text == BROADCAST:
                # The API server accepts it; the other endpoints of the slice are good.
                report.warning(field, f"{quoted(text)} is the broadcast address: the endpoint is ignored")
                return ""
            address = valid_text(field, text, report, lambda each: family_address(each, family))
            first = first or address
    return first


def _hints(index: int, field: str, raw: list[WireHint], report: ProblemCollector) -> tuple[str, ...]:
    syntax, known = _HINTS[field]
    found = []
    for number, hint in enumerate(raw):
        if hint.name and (name := known(hint.name)):
            found.append(name)
            continue
        place = f"endpoints[{index}].hints.{field}[{number}].name"
        if not hint.name:
            report.error(place, "is required")
        else:
            report.check(place, hint.name, syntax)
    return tuple(found)
