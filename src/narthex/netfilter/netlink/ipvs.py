"""Virtual and real servers in the kernel's binary form: what asks for them, makes, edits and removes them.

Commands and attributes are those of linux/ip_vs.h, generic netlink family IPVS. Bytes in, values out; the socket is
`linux/genetlink.py`.
"""

from __future__ import annotations

import enum
import struct
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton
from typing import NamedTuple

from narthex.model.net import IPFamily, Protocol, address, family_of
from narthex.netfilter.ipvs import RealServer, ServerKey, VirtualServer

FAMILY = "IPVS"


class IpvsCommand(enum.IntEnum):
    """What is asked of the kernel."""

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
    """Seconds until IPVS forgets an idle connection. 0 leaves a value as it is."""

    tcp: int
    tcp_fin: int
    udp: int


class KernelVirtualServer(NamedTuple):
    """A virtual server of the kernel, without its real servers."""

    server: VirtualServer
    oddities: str
    """What it has that we never set (`one-packet scheduling`, …); empty for none."""


class KernelRealServer(NamedTuple):
    """A real server of the kernel."""

    real: RealServer
    connections: int
    """Those that go on or are ending; 0: it can be removed without harm to anybody."""


_SERVER, _REAL, _TIMEOUT_TCP, _TIMEOUT_TCP_FIN, _TIMEOUT_UDP = 1, 2, 4, 5, 6
_AF, _PROTOCOL, _ADDRESS, _PORT, _MARK, _SCHEDULER, _FLAGS, _TIMEOUT, _NETMASK, _ENGINE = 1, 2, 3, 4, 5, 6, 7, 8, 9, 11
_REAL_ADDRESS, _REAL_PORT, _FORWARD, _WEIGHT, _UPPER, _LOWER = 1, 2, 3, 4, 5, 6
_ACTIVE, _INACTIVE, _REAL_AF = 7, 8, 11
_NESTED, _KIND = 0x8000, 0x3FFF

_PERSIST, _HASHED, _ONE_PACKET, _HASH_PORTS = 0x1, 0x2, 0x4, 0x10
_ALL_FLAGS = 0xFFFFFFFF
_FORWARDS = {"masquerade": 0, "local": 1, "tunnel": 2, "gateway": 3}
_FORWARD_WORDS = {number: word for word, number in _FORWARDS.items()}
_FORWARD_MASK = 0x7

_AF_OF = {IPFamily.IPV4: AF_INET, IPFamily.IPV6: AF_INET6}
_SIZES: dict[int, int] = {AF_INET: 4, AF_INET6: 16}
_WHOLE: dict[int, int] = {AF_INET: 0xFFFFFFFF, AF_INET6: 128}
"""The netmask that tells each client from the others: bits for IPv4, a length for IPv6."""
_PROTOCOLS = {each.number: each for each in Protocol}
_U16, _U32, _PORT_FORM = struct.Struct("=H"), struct.Struct("=I"), struct.Struct(">H")


def server(wanted: VirtualServer) -> bytes:
    """Attributes that make a virtual server, or give one that is there these settings; none of its real servers."""
    persistence = wanted.persistence_seconds
    flags = (_PERSIST if persistence is not None else 0) | (_HASH_PORTS if wanted.hash_ports else 0)
    number = _AF_OF[family_of(wanted.address)]
    # For IPv4 the mask is in network order; with all bits set that is the same.
    return _attribute(
        _SERVER | _NESTED,
        _key(wanted.key)
        + _attribute(_SCHEDULER, wanted.scheduler.encode() + b"\0")
        + _attribute(_FLAGS, struct.pack("=II", flags, _ALL_FLAGS))
        + _attribute(_TIMEOUT, _U32.pack(persistence or 0))
        + _attribute(_NETMASK, _U32.pack(_WHOLE[number])),
    )


def server_key(key: ServerKey) -> bytes:
    """Attributes that name a virtual server."""
    return _attribute(_SERVER | _NESTED, _key(key))


def real(key: ServerKey, wanted: RealServer) -> bytes:
    """Attributes that name a real server of a virtual server, and say how it is to be."""
    body = (
        _attribute(_REAL_ADDRESS, _packed(wanted.address))
        + _attribute(_REAL_PORT, _PORT_FORM.pack(wanted.port))
        + _attribute(_FORWARD, _U32.pack(_FORWARDS[wanted.forward]))
        + _attribute(_WEIGHT, _U32.pack(wanted.weight))
        + _attribute(_UPPER, _U32.pack(0))
        + _attribute(_LOWER, _U32.pack(0))
        + _attribute(_REAL_AF, _U16.pack(_AF_OF[family_of(wanted.address)]))
    )
    return server_key(key) + _attribute(_REAL | _NESTED, body)


def timeouts(wanted: IpvsTimeouts) -> bytes:
    """Attributes that set the time-outs."""
    kinds = (_TIMEOUT_TCP, _TIMEOUT_TCP_FIN, _TIMEOUT_UDP)
    return b"".join(_attribute(kind, _U32.pack(value)) for kind, value in zip(kinds, wanted, strict=True))


def read_server(body: bytes) -> KernelVirtualServer | None:
    """A virtual server from the attributes of one message of a dump; None for one that is found by a packet mark, and
    for protocols that Services do not have."""
    held = _attributes(_attributes(body).get(_SERVER, b""))
    protocol = _PROTOCOLS.get(_number(held, _PROTOCOL))
    number = _number(held, _AF)
    if protocol is None or number not in _SIZES or _MARK in held:
        return None
    flags = _number(held, _FLAGS)
    odd = [f"flags {rest:#x}"] if (rest := flags & ~(_PERSIST | _HASHED | _HASH_PORTS)) else []
    if flags & _PERSIST and _number(held, _NETMASK) != _WHOLE[number]:
        odd.append("persistence for networks")
    if _ENGINE in held:
        odd.append("a persistence engine")
    found = VirtualServer(
        address=_address(number, held[_ADDRESS]),
        protocol=protocol,
        port=int.from_bytes(held[_PORT]),
        scheduler=held.get(_SCHEDULER, b"").rstrip(b"\0").decode("ascii", "replace"),
        persistence_seconds=_number(held, _TIMEOUT) if flags & _PERSIST else None,
        hash_ports=bool(flags & _HASH_PORTS),
    )
    return KernelVirtualServer(found, ", ".join(odd))


def read_real(body: bytes) -> KernelRealServer:
    """A real server from the attributes of one message of a dump."""
    held = _attributes(_attributes(body)[_REAL])
    data = held[_REAL_ADDRESS]
    # Kernels before 3.18 do not say the family, and fill up IPv4 addresses with zeros.
    number = _number(held, _REAL_AF) or (AF_INET6 if any(data[4:]) else AF_INET)
    found = RealServer(
        _address(number, data),
        int.from_bytes(held[_REAL_PORT]),
        _number(held, _WEIGHT),
        _FORWARD_WORDS.get(_number(held, _FORWARD) & _FORWARD_MASK, "another way"),
    )
    return KernelRealServer(found, _number(held, _ACTIVE) + _number(held, _INACTIVE))


def read_timeouts(body: bytes) -> IpvsTimeouts:
    """The time-outs from the kernel's answer."""
    held = _attributes(body)
    return IpvsTimeouts(*(_number(held, kind) for kind in (_TIMEOUT_TCP, _TIMEOUT_TCP_FIN, _TIMEOUT_UDP)))


def _key(key: ServerKey) -> bytes:
    where, protocol, port = key
    return (
        _attribute(_AF, _U16.pack(_AF_OF[family_of(where)]))
        + _attribute(_PROTOCOL, _U16.pack(protocol.number))
        + _attribute(_ADDRESS, _packed(where))
        + _attribute(_PORT, _PORT_FORM.pack(port))
    )


def _packed(text: str) -> bytes:
    """An address in the 16 bytes that the kernel has for one of either family."""
    return inet_pton(_AF_OF[family_of(text)], text).ljust(16, b"\0")


def _address(number: int, data: bytes) -> str:
    text = inet_ntop(number, data[: _SIZES[number]])
    # The C library ends some IPv6 addresses in dots.
    return address(text) if number == AF_INET6 and "." in text else text


def _attribute(kind: int, content: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(content), kind) + content + bytes(-len(content) % 4)


def _attributes(data: bytes) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    at = 0
    while at + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, at)
        if length < 4:
            break
        found[kind & _KIND] = data[at + 4 : at + length]
        at += (length + 3) & ~3
    return found


def _number(held: dict[int, bytes], kind: int) -> int:
    """A number in the machine's byte order, of two bytes or four; 0 when it is not there."""
    data = held.get(kind, b"")
    return int(_U16.unpack(data)[0] if len(data) == 2 else _U32.unpack_from(data)[0]) if len(data) >= 2 else 0
