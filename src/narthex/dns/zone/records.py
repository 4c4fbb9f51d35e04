"""Which records a Service has (rows D1 to D17): a Service and its EndpointSlices in, one `Entry` out.

Nothing here knows a zone: names are kept relative, so that several zones share them, and a zone's own spelling is put
in when an answer is made. A changed Service gives one changed Entry.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Collection, Iterable
from functools import lru_cache
from socket import AF_INET, AF_INET6, inet_pton

import msgspec

from narthex.dns.message import names
from narthex.dns.message.wire import AAAA, CNAME, SRV, A
from narthex.model.objects import EndpointPort, EndpointSlice, Service, ServicePort, SliceEndpoint

Records = tuple[tuple[int, tuple[bytes, ...]], ...]
"""Data of records by type, each once. A name in the data of SRV lacks the part that `Entry` tells."""
NOTHING: Records = ()
"""The name exists, and has no record."""

_SRV = struct.Struct(">HHH")
_LONGEST_HOST = 63


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """Everything at and below `SERVICE.NAMESPACE.svc`, as it travels to the processes that answer.

    Data of SRV records ends with the target's labels in front of the Service's own name, mostly one or none.
    """

    own: Records
    """At the Service's name. A CNAME holds a whole name and stands alone."""
    below: bytes = b""
    """Records by the labels in front of it, `_http._tcp` and endpoints, encoded: there may be many and few are asked
    for."""
    cluster: tuple[bytes, ...] = ()
    """Cluster IPs, packed: their PTR is the Service's name."""
    endpoints: tuple[bytes, ...] = ()
    """Addresses of endpoints, packed: their PTR are the names below that have them."""
    headless: bool = False
    external: tuple[bytes, ...] = ()
    """External IPs and those of load balancers, packed: names in the zones of `k8s_external`."""

    def children(self) -> dict[bytes, Records]:
        """What is below, by its labels in wire form without an end."""
        return _CHILDREN.decode(self.below) if self.below else {}

    def host(self, address: bytes) -> list[bytes]:
        """The endpoints' names with this address."""
        return [label for label, records in self.children().items() if any(address in data for _, data in records)]


_CHILDREN = msgspec.msgpack.Decoder(dict[bytes, Records])


def service_key(namespace: str, name: str) -> bytes:
    """`NAME.NAMESPACE.svc` in wire form without an end. Names of Services are checked when they are decoded."""
    return label(name) + label(namespace) + b"\x03svc"


@lru_cache(maxsize=4096)
def label(text: str) -> bytes:
    """One label in wire form, lower case."""
    data = text.lower().encode("ascii")
    return bytes((len(data),)) + data


def entry(
    service: Service, slices: Iterable[EndpointSlice], *, pod_names: bool = False, ignore_empty: bool = False
) -> Entry | None:
    """A Service's records; None when it has no name (rows D3, D8, D20)."""
    if service.type == "ExternalName":
        target = _external(service.external_name)
        return None if target is None else Entry(((CNAME, (target,)),))
    if not service.cluster_ips:
        return None
    hosts = _hosts(slices, pod_names)
    if not service.headless and ignore_empty and not hosts:
        return None
    made = _headless(hosts) if service.headless else _cluster(service, hosts)
    if made is None or not (service.external_ips or service.ingress):
        return made
    external = dict.fromkeys((*service.external_ips, *(each.ip for each in service.ingress)))
    return msgspec.structs.replace(made, external=tuple(map(packed, external)))


def _external(name: str) -> bytes | None:
    """The CNAME's target; None for an address (row D20) and for what is no name."""
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
"""Name, protocol in lower case, and number."""


class _Host(msgspec.Struct, frozen=True):
    """A ready endpoint."""

    label: bytes
    address: bytes
    ports: _Ports


def _hosts(slices: Iterable[EndpointSlice], pod_names: bool) -> list[_Host]:
    """In the order of the slices' names, so that the same objects give the same answer."""
    found: list[_Host] = []
    for held in sorted(slices, key=lambda each: each.name):
        if held.family is None:
            continue
        ports = _slice_ports(held.ports)
        found += [
            _Host(label(host_name(endpoint, pod_names)), packed(endpoint.address), ports)
            for endpoint in held.endpoints
            if endpoint.ready
        ]
    return found


@lru_cache(maxsize=1024)
def _slice_ports(ports: tuple[EndpointPort, ...]) -> _Ports:
    return tuple((port.name, port.protocol.lower, port.port) for port in ports if port.port is not None)


def host_name(endpoint: SliceEndpoint, pod_names: bool) -> str:
    """An endpoint's label (rows D11, D12)."""
    if endpoint.hostname:
        return endpoint.hostname
    if pod_names and endpoint.target and len(endpoint.target) <= _LONGEST_HOST and "." not in endpoint.target:
        return endpoint.target
    return dashed(endpoint.address)


def dashed(address: str) -> str:
    """An address as a label; an IPv6 one that would end in a dash gets a zero."""
    text = address.replace(".", "-").replace(":", "-")
    return text + "0" if text.endswith("-") else text


def packed(address: str) -> bytes:
    """4 or 16 bytes of a canonical address."""
    return inet_pton(AF_INET6 if ":" in address else AF_INET, address)


def _addresses(packed_ones: Iterable[bytes]) -> Records:
    """A and AAAA records, each address once."""
    once = tuple(dict.fromkeys(packed_ones))
    if len(once) == 1:
        return ((A if len(once[0]) == 4 else AAAA, once),)
    four, six = tuple(a for a in once if len(a) == 4), tuple(a for a in once if len(a) == 16)
    return (*([(A, four)] if four else []), *([(AAAA, six)] if six else []))


def _srv(pairs: Collection[tuple[int, bytes]]) -> Records:
    """SRV records for (port, target's labels). The weight counts the pairs before equal ones are dropped (row D7)."""
    if not pairs:
        return ()
    weight = max(1, 100 // len(pairs))
    return ((SRV, tuple(dict.fromkeys(_SRV.pack(0, weight, port) + target for port, target in pairs))),)


def _by_port(pairs: Iterable[tuple[str, str, int, bytes]]) -> dict[bytes, Records]:
    """`_port._proto` and, with nothing of its own, `_proto`: names above existing ones exist (RFC 8020)."""
    named: dict[bytes, list[tuple[int, bytes]]] = {}
    for name, protocol, port, target in pairs:
        if name:
            named.setdefault(_port_labels(name, protocol), []).append((port, target))
    found: dict[bytes, Records] = {key[key[0] + 1 :]: NOTHING for key in named}
    return found | {key: _srv(targets) for key, targets in named.items()}


@lru_cache(maxsize=1024)
def _port_labels(name: str, protocol: str) -> bytes:
    return label(f"_{name}") + label(f"_{protocol}")


def _hosts_below(hosts: Iterable[_Host]) -> dict[bytes, Records]:
    by_label: dict[bytes, list[bytes]] = {}
    for host in hosts:
        by_label.setdefault(host.label, []).append(host.address)
    return {name: _addresses(found) for name, found in by_label.items()}


def _made(own: Records, below: dict[bytes, Records], hosts: Iterable[_Host], cluster: tuple[bytes, ...]) -> Entry:
    return Entry(
        own=own,
        below=msgspec.msgpack.encode(below) if below else b"",
        cluster=cluster,
        endpoints=tuple(dict.fromkeys(host.address for host in hosts)),
        headless=not cluster,
    )


def _cluster(service: Service, hosts: list[_Host]) -> Entry:
    ips = tuple(packed(ip) for ip in service.cluster_ips)
    srv, by_port = _service_ports(service.ports, len(ips))
    return _made((*_addresses(ips), *srv), {**by_port, **_hosts_below(hosts)}, hosts, ips)


@lru_cache(maxsize=1024)
def _service_ports(ports: tuple[ServicePort, ...], times: int) -> tuple[Records, dict[bytes, Records]]:
    """The SRV records of a Service with so many addresses, and those by port: thousands of Services have the same ones.
    One pair for each address, although the record is the same (row D7)."""
    pairs = [(port.name, port.protocol.lower, port.port, b"") for port in ports for _ in range(times)]
    return _srv([(port, target) for _, _, port, target in pairs]), _by_port(pairs)


def _headless(hosts: list[_Host]) -> Entry | None:
    if not hosts:
        return None
    listed = [(name, protocol, port, host.label) for host in hosts for name, protocol, port in host.ports]
    own = (*_addresses(host.address for host in hosts), *_srv([(port, target) for _, _, port, target in listed]))
    return _made(own, {**_by_port(listed), **_hosts_below(hosts)}, hosts, ())
