"""Codec for virtual and real servers in messages of the generic netlink family IPVS.

Commands and attributes are those of linux/ip_vs.h. The socket is in `linux/genetlink.py`.
"""

from __future__ import annotations

import enum
import struct
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton
from typing import NamedTuple

from narthex.model import IPFamily, Protocol, address, family_of
from narthex.netfilter.ipvs import RealServer, ServerKey, VirtualServer
from narthex.netfilter.netlink.attributes import NESTED, attribute, attributes

IPVS_FAMILY = "IPVS"


class IpvsCommand(enum.IntEnum):
    """Commands of the IPVS family."""

    NEW_SERVER = 1
    SET_SERVER = 2
    DELETE_SERVER = 3
    GET_SERVER = 4
    NEW_REAL = 5
    SET_REAL = 6
    DELETE_REAL = 7
    GET_REAL = 8
    SET_TIMEOUTS = 12
    GET_TIMEOUTS = 13


class IpvsTimeouts(NamedTuple):
    """Seconds after which IPVS removes an idle connection. 0 leaves a value unchanged."""

    tcp: int
    tcp_fin: int
    udp: int


class KernelVirtualServer(NamedTuple):
    """A virtual server of the kernel, without its real servers."""

    server: VirtualServer
    oddities: str
    """Properties that Narthex never sets (`one-packet scheduling`, …); empty if there are none."""


class KernelRealServer(NamedTuple):
    """A real server of the kernel."""

    real: RealServer
    connections: int
    """Number of active and inactive connections. With 0, removing the server interrupts no connection."""


_SERVER, _REAL, _TIMEOUT_TCP, _TIMEOUT_TCP_FIN, _TIMEOUT_UDP = 1, 2, 4, 5, 6
_AF, _PROTOCOL, _ADDRESS, _PORT, _MARK, _SCHEDULER, _FLAGS, _TIMEOUT, _NETMASK, _ENGINE = 1, 2, 3, 4, 5, 6, 7, 8, 9, 11
_REAL_ADDRESS, _REAL_PORT, _FORWARD, _WEIGHT, _UPPER, _LOWER = 1, 2, 3, 4, 5, 6
_ACTIVE, _INACTIVE, _REAL_AF = 7, 8, 11

_PERSIST, _HASHED, _ONE_PACKET, _HASH_PORTS = 0x1, 0x2, 0x4, 0x10
_ALL_FLAGS = 0xFFFFFFFF
_FORWARDS = {"masquerade": 0, "local": 1, "tunnel": 2, "gateway": 3}
_FORWARD_WORDS = {number: word for word, number in _FORWARDS.items()}
_FORWARD_MASK = 0x7

_AF_OF = {IPFamily.IPV4: AF_INET, IPFamily.IPV6: AF_INET6}
_SIZES: dict[int, int] = {AF_INET: 4, AF_INET6: 16}
_WHOLE: dict[int, int] = {AF_INET: 0xFFFFFFFF, AF_INET6: 128}
"""The netmask that distinguishes individual clients: a bit mask for IPv4, a prefix length for IPv6."""
_PROTOCOLS = {each.number: each for each in Protocol}
_U16, _U32, _PORT_FORM = struct.Struct("=H"), struct.Struct("=I"), struct.Struct(">H")


def server_attributes(virtual: VirtualServer) -> bytes:
    """Return attributes that create or update a virtual server, without its real servers."""
    persistence = virtual.persistence_seconds
    flags = (_PERSIST if persistence is not None else 0) | (_HASH_PORTS if virtual.hash_ports else 0)
    number = _AF_OF[family_of(virtual.address)]
    # For IPv4 the mask is in network order; with all bits set that is the same.
    return attribute(
        _SERVER | NESTED,
        _key(virtual.key)
        + attribute(_SCHEDULER, virtual.scheduler.encode() + b"\0")
        + attribute(_FLAGS, struct.pack("=II", flags, _ALL_FLAGS))
        + attribute(_TIMEOUT, _U32.pack(persistence or 0))
        + attribute(_NETMASK, _U32.pack(_WHOLE[number])),
    )


def server_key_attributes(key: ServerKey) -> bytes:
    """Return attributes that identify a virtual server."""
    return attribute(_SERVER | NESTED, _key(key))


def real_attributes(key: ServerKey, server: RealServer) -> bytes:
    """Return attributes that identify a real server of a virtual server and define its properties."""
    body = (
        attribute(_REAL_ADDRESS, _packed(server.address))
        + attribute(_REAL_PORT, _PORT_FORM.pack(server.port))
        + attribute(_FORWARD, _U32.pack(_FORWARDS[server.forward]))
        + attribute(_WEIGHT, _U32.pack(server.weight))
        + attribute(_UPPER, _U32.pack(0))
        + attribute(_LOWER, _U32.pack(0))
        + attribute(_REAL_AF, _U16.pack(_AF_OF[family_of(server.address)]))
    )
    return server_key_attributes(key) + attribute(_REAL | NESTED, body)


def timeout_attributes(values: IpvsTimeouts) -> bytes:
    """Return attributes that set the timeouts."""
    kinds = (_TIMEOUT_TCP, _TIMEOUT_TCP_FIN, _TIMEOUT_UDP)
    return b"".join(attribute(kind, _U32.pack(value)) for kind, value in zip(kinds, values, strict=True))


def read_server(body: bytes) -> KernelVirtualServer | None:
    """Decode a virtual server from the attributes of one message of a dump.

    Returns None for a virtual server of a packet mark, and for protocols that Services do not have.
    """
    values = _values(_values(body).get(_SERVER, b""))
    protocol = _PROTOCOLS.get(_number(values, _PROTOCOL))
    number = _number(values, _AF)
    if protocol is None or number not in _SIZES or _MARK in values:
        return None
    flags = _number(values, _FLAGS)
    odd = [f"flags {rest:#x}"] if (rest := flags & ~(_PERSIST | _HASHED | _HASH_PORTS)) else []
    if flags & _PERSIST and _number(values, _NETMASK) != _WHOLE[number]:
        odd.append("persistence for networks")
    if _ENGINE in values:
        odd.append("a persistence engine")
    found = VirtualServer(
        address=_address(number, values[_ADDRESS]),
        protocol=protocol,
        port=int.from_bytes(values[_PORT]),
        scheduler=values.get(_SCHEDULER, b"").rstrip(b"\0").decode("ascii", "replace"),
        persistence_seconds=_number(values, _TIMEOUT) if flags & _PERSIST else None,
        hash_ports=bool(flags & _HASH_PORTS),
    )
    return KernelVirtualServer(found, ", ".join(odd))


def read_real(body: bytes) -> KernelRealServer:
    """Decode a real server from the attributes of one message of a dump."""
    values = _values(_values(body)[_REAL])
    data = values[_REAL_ADDRESS]
    # Kernels before 3.18 do not say the family, and fill up IPv4 addresses with zeros.
    number = _number(values, _REAL_AF) or (AF_INET6 if any(data[4:]) else AF_INET)
    found = RealServer(
        _address(number, data),
        int.from_bytes(values[_REAL_PORT]),
        _number(values, _WEIGHT),
        _FORWARD_WORDS.get(_number(values, _FORWARD) & _FORWARD_MASK, "another method"),
    )
    return KernelRealServer(found, _number(values, _ACTIVE) + _number(values, _INACTIVE))


def read_timeouts(body: bytes) -> IpvsTimeouts:
    """Decode the timeouts."""
    values = _values(body)
    return IpvsTimeouts(*(_number(values, kind) for kind in (_TIMEOUT_TCP, _TIMEOUT_TCP_FIN, _TIMEOUT_UDP)))


def _key(key: ServerKey) -> bytes:
    where, protocol, port = key
    return (
        attribute(_AF, _U16.pack(_AF_OF[family_of(where)]))
        + attribute(_PROTOCOL, _U16.pack(protocol.number))
        + attribute(_ADDRESS, _packed(where))
        + attribute(_PORT, _PORT_FORM.pack(port))
    )


def _packed(text: str) -> bytes:
    """Return an address in the 16 bytes that the kernel uses for both families."""
    return inet_pton(_AF_OF[family_of(text)], text).ljust(16, b"\0")


def _address(number: int, data: bytes) -> str:
    text = inet_ntop(number, data[: _SIZES[number]])
    # The C library ends some IPv6 addresses in dots.
    return address(text) if number == AF_INET6 and "." in text else text


def _values(data: bytes) -> dict[int, bytes]:
    return {kind: data[start:end] for kind, start, end in attributes(data, strict=False)}


def _number(values: dict[int, bytes], kind: int) -> int:
    """Return a number of two or four bytes in host byte order, 0 if it is missing."""
    data = values.get(kind, b"")
    return int(_U16.unpack(data)[0] if len(data) == 2 else _U32.unpack_from(data)[0]) if len(data) >= 2 else 0
