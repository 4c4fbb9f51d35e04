"""Addresses that a Service has released lately.

Clients and neighbours of the old Service may still use such an address, so another Service gets it only if no other is free.
"""

from __future__ import annotations

from collections.abc import Iterable

from narthex.lb.service_status import status_addresses
from narthex.model import NamespacedName, Service

HOLD_SECONDS = 120.0
"""Longer than neighbours keep an address that they do not use (Linux: 60 s), and than most clients retry."""
_MOST = 4096
"""Addresses that are remembered, the latest ones: more would need a pool from which that many Services went within the time."""


class ReleasedAddresses:
    """Remembers released addresses, each with the Service that had it."""

    def __init__(self) -> None:
        self._holders: dict[str, NamespacedName] = {}
        self._released: dict[str, tuple[NamespacedName, float]] = {}

    def observe(self, services: Iterable[Service], now: float) -> dict[str, NamespacedName]:
        """Return the addresses that are held back at `now`, by the Service that had them."""
        holders = {address: service.key for service in services for address in status_addresses(service)}
        for address, key in self._holders.items():
            if address not in holders:
                self._released[address] = key, now
        self._holders = holders
        held_back = {
            address: (key, since)
            for address, (key, since) in self._released.items()
            if address not in holders and now - since < HOLD_SECONDS
        }
        self._released = dict(list(held_back.items())[-_MOST:])
        return {address: key for address, (key, _) in self._released.items()}
