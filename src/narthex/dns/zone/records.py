"""The records of a Service (rows D1 to D17): builds one `ServiceRecords` of a Service and its EndpointSlices.

Names are relative to the zone, so that several zones share them; the zone is appended when a response is built.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Collection, Iterable
from functools import lru_cache
from socket import AF_INET, AF_INET6, inet_pton

import msgspec

from narthex.dns.message import names
from narthex.dns.message.names import MAX_LABEL, label
from narthex.dns.message.wire import AAAA, CNAME, SRV, A
from narthex.model import EndpointPort, EndpointSlice, Service, ServicePort, SliceEndpoint

Records = tuple[tuple[int, tuple[bytes, ...]], ...]
"""Record data by type, without duplicates. Names in the data of SRV records are relative to the Service's name."""
NO_RECORDS: Records = ()
"""Records of a name that exists without any (an empty non-terminal)."""

_SRV = struct.Struct(">HHH")
SRV_TARGET = _SRV.size
"""Offset of the target name in the data of an SRV record, after priority, weight, and port."""


class ServiceRecords(msgspec.Struct, frozen=True, array_like=True):
    """All records at and below `SERVICE.NAMESPACE.svc`, as sent to the workers.

    The data of SRV records ends with the labels of the target before the Service's name, mostly one or none.
    """

    own: Records
    """Records of the Service's name. The data of a CNAME record is a whole name."""
    below: bytes = b""
    """Records by the labels before the Service's name (`_http._tcp` and endpoints), encoded until queried: there may be
    many."""
    cluster: tuple[bytes, ...] = ()
    """Packed cluster IPs; their PTR record is the Service's name."""
    endpoints: tuple[bytes, ...] = ()
    """Packed addresses of endpoints; their PTR records are the names below the Service with that address."""
    headless: bool = False
    external: tuple[bytes, ...] = ()
    """Packed external IPs and load balancer addresses, for `k8s_external`."""
    zonal: bytes = b""
    """Records of a headless Service by the labels of a topology zone, encoded like `below` (option `zonal`)."""

    def children(self) -> dict[bytes, Records]:
        """Return the records below the Service's name, by their relative labels in wire form."""
        return _CHILDREN.decode(self.below) if self.below else {}

    def in_zone(self, zone: bytes) -> Records | None:
        """Return the records of the endpoints in a topology zone (labels in wire form and lower case), or None."""
        return _CHILDREN.decode(self.zonal).get(zone) if self.zonal else None

    def host_names(self, address: bytes) -> list[bytes]:
        """Return the relative names of the endpoints with an address."""
        return [name for name, records in self.children().items() if any(address in data for _, data in records)]


_CHILDREN = msgspec.msgpack.Decoder(dict[bytes, Records])


def service_key(namespace: str, name: str) -> bytes:
    """Return the relative name `NAME.NAMESPACE.svc` in wire form."""
    return label(name) + label(namespace) + b"\x03svc"


def service_records(
    service: Service,
    slices: Iterable[EndpointSlice],
    *,
    pod_names: bool = False,
    ignore_empty: bool = False,
    zonal: bool = False,
) -> ServiceRecords | None:
    """Build the records of a Service; None if its name does not exist (rows D3, D8, D20)."""
    if service.type == "ExternalName":
        target = _cname_target(service.external_name)
        return None if target is None else ServiceRecords(((CNAME, (target,)),))
    if not service.cluster_ips:
        return None
    hosts = _hosts(slices, pod_names)
    if not service.headless and ignore_empty and not hosts:
        return None
    records = _headless(hosts) if service.headless else _cluster(service, hosts)
    if zonal and service.headless and records is not None:
        records = msgspec.structs.replace(records, zonal=_by_zone(hosts))
    if records is None or not (service.external_ips or service.ingress):
        return records
    external = dict.fromkeys((*service.external_ips, *(each.ip for each in service.ingress)))
    return msgspec.structs.replace(records, external=tuple(map(packed, external)))


def _cname_target(name: str) -> bytes | None:
    """Return the target of a CNAME record; None for an address (row D20) or an invalid name."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        pass
    else:
        return None
    try:
        return names.wire(name)
    except ValueError:
        return None


_Ports = tuple[tuple[str, str, int], ...]
"""Name, protocol in lower case, and port number."""


class _Host(msgspec.Struct, frozen=True):
    label: bytes
    address: bytes
    ports: _Ports
    zone: str = ""


def _hosts(slices: Iterable[EndpointSlice], pod_names: bool) -> list[_Host]:
    """Return the ready endpoints in the order of the slices' names, so that equal objects give equal answers."""
    found: list[_Host] = []
    for endpoint_slice in sorted(slices, key=lambda each: each.name):
        if endpoint_slice.family is None:
            continue
        ports = _slice_ports(endpoint_slice.ports)
        found += [
            _Host(label(host_name(endpoint, pod_names)), packed(endpoint.address), ports, endpoint.zone)
            for endpoint in endpoint_slice.endpoints
            if endpoint.ready
        ]
    return found


@lru_cache(maxsize=1024)
def _slice_ports(ports: tuple[EndpointPort, ...]) -> _Ports:
    return tuple((port.name, port.protocol.lower, port.port) for port in ports if port.port is not None)


def host_name(endpoint: SliceEndpoint, pod_names: bool) -> str:
    """Return the label of an endpoint (rows D11, D12)."""
    if endpoint.hostname:
        return endpoint.hostname
    if pod_names and endpoint.target and len(endpoint.target) <= MAX_LABEL and "." not in endpoint.target:
        return endpoint.target
    return dashed(endpoint.address)


def dashed(address: str) -> str:
    """Return an address as a label; an IPv6 address that would end in a dash gets a zero appended."""
    text = address.replace(".", "-").replace(":", "-")
    return text + "0" if text.endswith("-") else text


def packed(address: str) -> bytes:
    """Return the 4 or 16 bytes of a canonical address."""
    return inet_pton(AF_INET6 if ":" in address else AF_INET, address)


def address_records(packed_ones: Iterable[bytes]) -> Records:
    """Return the A and AAAA records of packed addresses without duplicates."""
    once = tuple(dict.fromkeys(packed_ones))
    if len(once) == 1:
        return ((A if len(once[0]) == 4 else AAAA, once),)
    four, six = tuple(a for a in once if len(a) == 4), tuple(a for a in once if len(a) == 16)
    return (*([(A, four)] if four else []), *([(AAAA, six)] if six else []))


def _srv(pairs: Collection[tuple[int, bytes]]) -> Records:
    """Return SRV records for pairs of port and relative target. The weight counts duplicate pairs, too (row D7)."""
    if not pairs:
        return ()
    weight = max(1, 100 // len(pairs))
    return ((SRV, tuple(dict.fromkeys(_SRV.pack(0, weight, port) + target for port, target in pairs))),)


def _by_port(pairs: Iterable[tuple[str, str, int, bytes]]) -> dict[bytes, Records]:
    """Return SRV records by `_port._proto`, and the empty non-terminals `_proto` (RFC 8020)."""
    named: dict[bytes, list[tuple[int, bytes]]] = {}
    for name, protocol, port, target in pairs:
        if name:
            named.setdefault(_port_labels(name, protocol), []).append((port, target))
    found: dict[bytes, Records] = {key[key[0] + 1 :]: NO_RECORDS for key in named}
    return found | {key: _srv(targets) for key, targets in named.items()}


@lru_cache(maxsize=1024)
def _port_labels(name: str, protocol: str) -> bytes:
    return label(f"_{name}") + label(f"_{protocol}")


def _hosts_below(hosts: Iterable[_Host]) -> dict[bytes, Records]:
    by_label: dict[bytes, list[bytes]] = {}
    for host in hosts:
        by_label.setdefault(host.label, []).append(host.address)
    return {name: address_records(found) for name, found in by_label.items()}


def _service_records(
    own: Records, below: dict[bytes, Records], hosts: Iterable[_Host], cluster: tuple[bytes, ...]
) -> ServiceRecords:
    return ServiceRecords(
        own=own,
        below=msgspec.msgpack.encode(below) if below else b"",
        cluster=cluster,
        endpoints=tuple(dict.fromkeys(host.address for host in hosts)),
        headless=not cluster,
    )


def _cluster(service: Service, hosts: list[_Host]) -> ServiceRecords:
    ips = tuple(packed(ip) for ip in service.cluster_ips)
    srv, by_port = _service_ports(service.ports, len(ips))
    return _service_records((*address_records(ips), *srv), {**by_port, **_hosts_below(hosts)}, hosts, ips)


@lru_cache(maxsize=1024)
def _service_ports(ports: tuple[ServicePort, ...], times: int) -> tuple[Records, dict[bytes, Records]]:
    """Return the SRV records of a Service with a number of addresses, and those by port.

    There is one pair for each address, although the records are equal (row D7). Cached, since thousands of Services have
    the same ports.
    """
    pairs = [(port.name, port.protocol.lower, port.port, b"") for port in ports for _ in range(times)]
    return _srv([(port, target) for _, _, port, target in pairs]), _by_port(pairs)


def _headless(hosts: list[_Host]) -> ServiceRecords | None:
    if not hosts:
        return None
    listed = [(name, protocol, port, host.label) for host in hosts for name, protocol, port in host.ports]
    return _service_records(_own(hosts), {**_by_port(listed), **_hosts_below(hosts)}, hosts, ())


def _own(hosts: list[_Host]) -> Records:
    """Return the records of a name that stands for endpoints."""
    pairs = [(port, host.label) for host in hosts for _, _, port in host.ports]
    return (*address_records(host.address for host in hosts), *_srv(pairs))


def _by_zone(hosts: list[_Host]) -> bytes:
    """Return the encoded records of endpoints by topology zone. A zone may consist of several labels."""
    found: dict[bytes, list[_Host]] = {}
    for host in hosts:
        zone = names.wire_or_none(host.zone)
        if zone is not None:
            found.setdefault(zone[:-1], []).append(host)
    return msgspec.msgpack.encode({zone: _own(inside) for zone, inside in found.items()})
