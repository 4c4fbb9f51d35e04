"""The self-test for transmit checksums: two datagrams to a peer's closed port, and what the answers mean.

A link that shall complete the checksum of a packet in a packet, and does not, loses all of TCP and UDP between pods while
ping works. The peer's kernel answers a datagram to a closed port with "port unreachable", and says nothing when the
datagram's checksum is wrong. So one datagram goes out with its checksum complete and one with the checksum left to the link:
only the first answered is the fault. It needs nothing on the peer but its kernel, so flannel's nodes answer as well.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable

from narthex.model.net import parsed_network

PORT = 33434
"""Where nobody listens: traceroute's first."""
PAYLOAD = b"narthex: does the checksum of this packet survive its way?\n"
_UDP = 17


class Verdict(enum.Enum):
    """What is known of a way."""

    FINE = "fine"
    BROKEN = "broken"
    UNCLEAR = "unclear"
    """Neither datagram is answered: the peer is away, or a firewall drops them or the answers."""


def verdict(attempts: Iterable[tuple[bool, bool]]) -> Verdict:
    """Of attempts, each with whether the datagram with a complete checksum was answered, and the one without."""
    attempts = tuple(attempts)
    if any(left for _, left in attempts):
        return Verdict.FINE
    # One answer and one silence may be chance.
    return Verdict.BROKEN if sum(complete for complete, _ in attempts) > 1 else Verdict.UNCLEAR


def datagram(source: str, destination: str, source_port: int) -> bytes:
    """A UDP datagram from its header on, with its checksum."""
    length = 8 + len(PAYLOAD)
    head = struct.pack(">HHHH", source_port, PORT, length, 0)
    ends = b"".join(parsed_network(_host(one)).network_address.packed for one in (source, destination))
    pseudo = ends + struct.pack(
        ">II" if ":" in source else ">HH", *((length, _UDP) if ":" in source else (_UDP, length))
    )
    checksum = _checksum(pseudo + head + PAYLOAD) or 0xFFFF
    return struct.pack(">HHHH", source_port, PORT, length, checksum) + PAYLOAD


def _host(address: str) -> str:
    return f"{address}/{128 if ':' in address else 32}"


def _checksum(data: bytes) -> int:
    data += bytes(len(data) % 2)
    total: int = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
