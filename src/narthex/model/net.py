"""Addresses, networks, IP families, and protocols as plain values.

An address is a canonical `str` ("10.0.0.1", "fd00::1"), and a network is a canonical `str` with a prefix length
("10.0.0.0/8"): JSON carries strings, and strings are small, hashable, and sort the same everywhere. Only the functions
of this module turn foreign text into an address, so any address elsewhere is known to be canonical.
"""

from __future__ import annotations

import enum
import ipaddress
import re
from functools import lru_cache
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton
from typing import NamedTuple

NODE_PORT_WORDS = frozenset(("primary", "localhost", "all"))
"""Words of `nodePortAddresses` that stand for networks of each IP family: the node's own addresses, its loopback, and all (row 9.13)."""


class IPFamily(enum.Enum):
    """An IP family; the value is the IP version number."""

    IPV4 = 4
    IPV6 = 6

    __hash__ = object.__hash__  # members are single; Enum's own hashes the name, in Python, a million times

    @property
    def host_bits(self) -> int:
        """Prefix length of a single address: 32 or 128."""
        return 32 if self is IPFamily.IPV4 else 128

    @property
    def nft(self) -> str:
        """Name of the family in nftables: `ip` or `ip6`."""
        return "ip" if self is IPFamily.IPV4 else "ip6"

    @property
    def label(self) -> str:
        """Name of the family in Kubernetes objects: `IPv4` or `IPv6`."""
        return "IPv4" if self is IPFamily.IPV4 else "IPv6"

    @property
    def loopback(self) -> str:
        """The loopback network."""
        return "127.0.0.0/8" if self is IPFamily.IPV4 else "::1/128"


FAMILIES = (IPFamily.IPV4, IPFamily.IPV6)


class Protocol(enum.Enum):
    """Transport protocol of a Service port, or ICMP for packets without a port. The value is the Kubernetes name."""

    TCP = "TCP"
    UDP = "UDP"
    SCTP = "SCTP"
    ICMP = "ICMP"

    __hash__ = object.__hash__

    @property
    def lower(self) -> str:
        """Name of the protocol in netfilter tools."""
        return self.value.lower()

    @property
    def number(self) -> int:
        """The IANA protocol number (ICMP means ICMPv4)."""
        return _NUMBERS[self]


_NUMBERS = {Protocol.TCP: 6, Protocol.UDP: 17, Protocol.SCTP: 132, Protocol.ICMP: 1}

_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_CANONICAL_IPV4 = re.compile(rf"{_OCTET}(?:\.{_OCTET}){{3}}", re.ASCII)
"""Nearly all addresses of a large cluster: this match takes a third of the time of the general path."""
_DECIMAL_OCTETS = re.compile(r"\d{1,4}(?:\.\d{1,4}){3}", re.ASCII)


def address(text: str) -> str:
    """Return the canonical form of an IP address. Raises ValueError.

    Zero-padded octets are decimal (`010.1.2.3` is 10.1.2.3), as in objects stored before Kubernetes rejected them. IPv6 zones
    (`fe80::1%eth0`) are rejected: they have no meaning outside one machine.
    """
    if canonical := _CANONICAL_IPV4.fullmatch(text):
        return canonical[0]
    if _DECIMAL_OCTETS.fullmatch(text):
        octets = [int(octet) for octet in text.split(".")]
        if max(octets) > 255:
            raise ValueError(f"{text!r} is not an IP address")
        return ".".join(map(str, octets))
    if ":" not in text or "%" in text or len(text) > 45:
        raise ValueError(f"{text!r} is not an IP address")
    try:
        return ipv6_text(text)
    except ValueError:
        raise ValueError(f"{text!r} is not an IP address") from None


def ipv6_text(value: str | bytes | int) -> str:
    """Return the canonical form of an IPv6 address: no part is written with dots. Raises ValueError.

    The C library and, since Python 3.13, `ipaddress` write IPv4-mapped addresses with dots.
    """
    ip = ipaddress.IPv6Address(value)
    text = str(ip)
    if "." not in text:
        return text
    low = int(ip) & 0xFFFF_FFFF
    return f"{text.rpartition(':')[0]}:{low >> 16:x}:{low & 0xFFFF:x}"


@lru_cache(maxsize=4096)
def network(text: str) -> str:
    """Return the canonical form of a CIDR (`10.1.2.3/8` becomes `10.0.0.0/8`). Raises ValueError.

    Host bits are cleared rather than rejected and octets may be padded, as the API server allows in stored objects.
    """
    base, slash, length = text.partition("/")
    if not slash or not length.isascii() or not length.isdigit():
        raise ValueError(f"{text!r} is not a CIDR such as 10.0.0.0/8")
    host = address(base)
    if int(length) > family_of(host).host_bits:
        raise ValueError(f"{text!r} has a prefix longer than {family_of(host).host_bits}")
    made = ipaddress.ip_network(f"{host}/{int(length)}", strict=False)
    base = str(made.network_address)
    return f"{ipv6_text(base) if '.' in base and ':' in base else base}/{made.prefixlen}"


def family_of(text: str) -> IPFamily:
    """Return the family of a canonical address or network."""
    return IPFamily.IPV6 if ":" in text else IPFamily.IPV4


@lru_cache(maxsize=65536)
def _parsed_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(text)


@lru_cache(maxsize=16384)
def parsed_network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """Return the cached `ipaddress` object of a canonical network."""
    return ipaddress.ip_network(text)


def contains(cidr: str, addr: str) -> bool:
    """Return True if a canonical network contains a canonical address; False across families."""
    net, ip = parsed_network(cidr), _parsed_address(addr)
    return net.version == ip.version and ip in net


def in_any(cidrs: tuple[str, ...], addr: str) -> bool:
    """Return True if one of the networks contains the address."""
    return any(contains(cidr, addr) for cidr in cidrs)


def is_zero_prefix(cidr: str) -> bool:
    """Return True if the network contains every address (`0.0.0.0/0`, `::/0`)."""
    return cidr.endswith("/0")


def host_network(addr: str) -> str:
    """Return the network that contains only this address."""
    return f"{addr}/{family_of(addr).host_bits}"


def collapse(cidrs: tuple[str, ...]) -> tuple[str, ...]:
    """Return the fewest networks of one family that cover the same addresses, sorted and without overlap."""
    nets = [parsed_network(cidr) for cidr in cidrs]
    return tuple(str(net) for net in ipaddress.collapse_addresses(nets))  # type: ignore[type-var]


def networks_between(first: str, last: str) -> tuple[str, ...]:
    """Return the networks that cover exactly the addresses from `first` to `last`. Single addresses have no length.

    Raises ValueError unless both are addresses of one family in ascending order.
    """
    begin, end = ipaddress.ip_address(first), ipaddress.ip_address(last)
    if begin.version != end.version:
        raise ValueError(f"{first} and {last} are of two families")
    if begin > end:  # type: ignore[operator]
        raise ValueError(f"{first} is above {last}")
    # `ipaddress.summarize_address_range` does the same, and takes ten times as long for the 254 networks of the worst range.
    found: list[str] = []
    at, left, bits = int(begin), int(end) - int(begin) + 1, begin.max_prefixlen
    while left:
        size = min((at & -at).bit_length() - 1 if at else bits, left.bit_length() - 1)
        text = _address_text(at, bits)
        found.append(f"{text}/{bits - size}" if size else text)
        at += 1 << size
        left -= 1 << size
    return tuple(found)


def _address_text(number: int, bits: int) -> str:
    """Return the canonical form of an address given as a number."""
    packed = number.to_bytes(bits // 8, "big")
    if bits == 32:
        return inet_ntop(AF_INET, packed)
    text = inet_ntop(AF_INET6, packed)
    # The C library writes some addresses with dots.
    return text if "." not in text else ipv6_text(packed)


def address_key(addr: str) -> tuple[int, int]:
    """Return a sort key that orders addresses numerically, IPv4 first. Raises ValueError."""
    version, kind = (6, AF_INET6) if ":" in addr else (4, AF_INET)
    try:
        return version, int.from_bytes(inet_pton(kind, addr), "big")
    except OSError:
        raise ValueError(f"{addr!r} is not an IP address") from None


def join_port(addr: str, port: int) -> str:
    """Format as `10.0.0.1:80` or `[fd00::1]:80`."""
    return f"[{addr}]:{port}" if ":" in addr else f"{addr}:{port}"


def split_port(text: str) -> tuple[str, int]:
    """Parse `address:port`, the inverse of `join_port`; the address need not be canonical. Raises ValueError."""
    match = re.fullmatch(r"\[(?P<six>[^\]]+)\]:(?P<p6>\d{1,5})|(?P<four>[^:]+):(?P<p4>\d{1,5})", text, re.ASCII)
    if not match:
        raise ValueError(f"{text!r} is not address:port")
    port = int(match["p6"] or match["p4"])
    if not 0 < port < 65536:
        raise ValueError(f"{text!r} has a port outside 1-65535")
    return address(match["six"] or match["four"]), port


class ConntrackFlow(NamedTuple):
    """One TCP, UDP, or SCTP connection in the kernel's connection tracking table."""

    protocol: Protocol
    source: str
    source_port: int
    destination: str
    """Original destination of the first packet, before NAT."""
    port: int
    reply_source: str
    """Source of reply packets: the endpoint, if the destination was rewritten."""
    reply_port: int

    @property
    def translated(self) -> bool:
        """True if the destination was rewritten."""
        return (self.reply_source, self.reply_port) != (self.destination, self.port)
