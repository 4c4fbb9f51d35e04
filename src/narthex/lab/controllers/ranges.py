"""Numbers out of a range, found again by a hash: cluster IPs and node ports.

The lower end of a range is for those that are asked for by hand: it is drawn from only when the rest is full (KEP-3070 for
addresses, KEP-3668 for ports).
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Container
from typing import Any

import msgspec

NODE_PORTS = range(30000, 32768)


class Range(msgspec.Struct, frozen=True):
    """Whole numbers, the first of which are the static band."""

    first: int
    count: int
    static: int

    def draw(self, seed: str, taken: Container[Any]) -> int | None:
        """A free number that follows from `seed`; None when all are taken."""
        start = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big")
        for base, count in ((self.static, self.count - self.static), (0, self.static)):
            for step in range(count):
                number = self.first + base + (start + step) % count
                if number not in taken:
                    return number
        return None

    def __contains__(self, number: int) -> bool:
        return self.first <= number < self.first + self.count


def address_range(cidr: str) -> Range:
    """The addresses of a network that Services may have: not its first, and not the last of an IPv4 one."""
    network = ipaddress.ip_network(cidr)
    count = min(network.num_addresses, 1 << 64) - (2 if network.version == 4 else 1)
    return Range(int(network.network_address) + 1, max(0, count), _static(count, smallest=16, largest=256, share=16))


def port_range() -> Range:
    """Node ports, with upstream's band."""
    static = _static(len(NODE_PORTS), smallest=16, largest=128, share=32)
    return Range(NODE_PORTS.start, len(NODE_PORTS), static)


def _static(count: int, *, smallest: int, largest: int, share: int) -> int:
    if count < smallest:
        return 0
    return max(smallest, min(largest, count // share))
