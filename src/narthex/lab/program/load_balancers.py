"""Load balancers of a lab: routes to their networks, then their addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from narthex.lab import topology
from narthex.lab.program.network import wire
from narthex.lab.topology import LabNode
from narthex.model.objects import IPAddressPool
from narthex.model.problem import Problem
from narthex.model.store import Snapshot

MERGE = "application/merge-patch+json"

Send = Callable[[str, str, dict[str, Any], str], object]
"""Sends a request to the API: method, path, body, content type."""


class LoadBalancerAddresses:
    """Keeps routes and Services in line with the address pools. Used by one thread at a time."""

    def __init__(self, lab: str, nodes: Sequence[LabNode], send: Send) -> None:
        self._lab = lab
        self._nodes = nodes
        self._send = send
        self._networks: tuple[str, ...] = ()
        self.problems: tuple[Problem, ...] = ()
        """Rejected pools and Services."""

    def reconcile(self, snapshot: Snapshot, *, balancing: bool) -> None:
        """Allocate addresses and configure their networks.

        `balancing` is True if the nodes run announcers. Raises errors of the network's configuration.
        """
        if not snapshot.address_pools:
            self.problems = ()
            return
        if not balancing:
            self.problems = tuple(map(_not_announced, snapshot.address_pools.values()))
            return
        # Imported only by labs with a pool.
        from narthex.lab.program import load_balancer_addresses as balancers

        allocation = balancers.allocate_addresses(snapshot, self._nodes)
        if allocation.networks != self._networks:
            current, desired = set(self._networks), set(allocation.networks)
            for wiring in topology.wire_balancers(self._lab, sorted(current - desired), sorted(desired - current)):
                wire(wiring)
            self._networks = allocation.networks
        for service in allocation.changed.values():
            for path, patch in balancers.patches(service):
                self._send("PATCH", path, patch, MERGE)
        self.problems = allocation.problems


def _not_announced(pool: IPAddressPool) -> Problem:
    message = "was added while the nodes run without announcers, so it is not used: restart the lab with it"
    return Problem(origin=pool.origin, object=f"IPAddressPool {pool.key}", message=message, severity="warning")
