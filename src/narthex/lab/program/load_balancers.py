"""A lab's load balancers get their addresses, after the network leads to them."""

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
"""Method, path, body and content type of a request to the API."""


class LoadBalancerAddresses:
    """What the network has of them. Used by one thread at a time."""

    def __init__(self, lab: str, nodes: Sequence[LabNode], send: Send) -> None:
        self._lab = lab
        self._nodes = nodes
        self._send = send
        self._networks: tuple[str, ...] = ()
        self.problems: tuple[Problem, ...] = ()
        """Pools and Services that cannot have what they ask for."""

    def reconcile(self, snapshot: Snapshot, *, balancing: bool) -> None:
        """Decide anew. `balancing`: the nodes answer for addresses. Raises what the machine says of its network."""
        if not snapshot.address_pools:
            self.problems = ()
            return
        if not balancing:
            self.problems = tuple(map(_not_announced, snapshot.address_pools.values()))
            return
        # Loaded by labs that have a pool, since the others have no use for it.
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
    message = "came when the nodes ran without announcers, so nothing is given from it: take the lab down and bring it up again"
    return Problem(origin=pool.origin, object=f"IPAddressPool {pool.key}", message=message, severity="warning")
