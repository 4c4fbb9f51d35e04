"""Consistent hashing of clients to endpoints: the lookup tables of Maglev (Eisenbud et al., NSDI 2016, section 3.4).

A client's source address is hashed to a slot, and the slot's endpoint gets the connection. Every node computes the same
table from the same endpoints, so a client reaches the same endpoint through any node, at any time, without state. Each
endpoint has nearly the same number of slots, and a change of one endpoint moves few clients of the others.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Sequence
from functools import lru_cache

from narthex.netfilter.jhash import jhash, scaled
from narthex.proxy.plan.ir import Endpoint

SEED = 0x6E727478
"""Seed of the hash of clients. It is the same everywhere, so that all nodes agree."""

TABLE_SIZES = ((20, 1021), (320, 16381), (0, 65521))
"""Up to this number of endpoints (0: any), this number of slots: a prime, with about 50 slots or more for an endpoint.

There are few sizes, because another size moves nearly all clients.
"""


def table_size(endpoints: int) -> int:
    """Return the number of slots of a table for so many endpoints."""
    return next(size for most, size in TABLE_SIZES if endpoints <= most or not most)


@lru_cache(maxsize=64)
def lookup_table(endpoints: tuple[Endpoint, ...]) -> tuple[Endpoint, ...]:
    """Return the endpoint of each slot.

    An endpoint's preferences follow from its address alone, so that a client gets the same pod on all ports of a Service.
    """
    size = table_size(len(endpoints))
    # Sorted anew, since the order of the turns must not depend on the node.
    ordered = sorted(endpoints, key=lambda one: (one.address, one.port))
    return tuple([ordered[number] for number in filled([_preference(one.address, size) for one in ordered], size)])


def client_slot(source: str, slots: int) -> int:
    """Return the slot of a client's source address."""
    return scaled(jhash(ipaddress.ip_address(source).packed, SEED), slots)


def filled(preferences: Sequence[tuple[int, int]], size: int) -> list[int]:
    """Return the number of the candidate that has each slot of a table.

    `preferences` has offset and skip of each candidate, which prefers slot `(offset + n * skip) % size` at n-th place. In
    turns, each candidate takes the free slot that it prefers most. `size` is prime, and no skip is 0. Without candidates,
    there are no slots.
    """
    table = [-1] * size
    if not preferences:
        return []
    following = [offset for offset, _ in preferences]
    skips = [skip for _, skip in preferences]
    left = size
    while True:
        for number, skip in enumerate(skips):
            slot = following[number]
            while table[slot] >= 0:
                slot += skip
                if slot >= size:
                    slot -= size
            table[slot] = number
            following[number] = slot
            left -= 1
            if not left:
                return table


@lru_cache(maxsize=65536)
def _preference(address: str, size: int) -> tuple[int, int]:
    """Return offset and skip of an endpoint."""
    digest = hashlib.blake2b(ipaddress.ip_address(address).packed, digest_size=16).digest()
    offset, skip = int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")
    return offset % size, skip % (size - 1) + 1
