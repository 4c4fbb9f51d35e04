"""Completes the Node object of this node with the addresses that the machine has (row 15.6)."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from narthex.model.names import NamespacedName
from narthex.model.objects import Node
from narthex.model.store import Snapshot

Addresses = Callable[[], tuple[str, ...]]


class NodeCompleter:
    """Completes snapshots. The same snapshot and the same addresses give the identical result."""

    def __init__(self, node_name: str, primary: Addresses, machine: Addresses = tuple) -> None:
        """Create the completer.

        Args:
            node_name: Name of the Node object.
            primary: Returns one address of each family, for a Node object without addresses.
            machine: Returns all addresses, for a dataplane whose plan must list them; none for others, so that their
                plans do not change.
        """
        self._key = NamespacedName("", node_name)
        self._primary = primary
        self._machine = machine
        self._last: tuple[Snapshot, Node, Snapshot] | None = None

    def complete(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with this node in it, and addresses in the node."""
        known = snapshot.nodes.get(self._key)
        node = known or Node(name=self._key.name)
        if not (node.internal_ips or node.external_ips):
            node = msgspec.structs.replace(node, internal_ips=self._primary())
        machine = self._machine()
        if machine != node.machine_ips:
            node = msgspec.structs.replace(node, machine_ips=machine)
        if node is known:
            return snapshot
        if self._last is not None and self._last[0] is snapshot and self._last[1] == node:
            return self._last[2]
        completed = msgspec.structs.replace(snapshot, nodes=snapshot.nodes.set(self._key, node))
        self._last = snapshot, node, completed
        return completed
