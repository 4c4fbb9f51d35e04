"""What the node knows of itself where its Node object says nothing: its own primary addresses (row 15.6)."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from narthex.model.names import NamespacedName
from narthex.model.objects import Node
from narthex.state.store import Snapshot


class OwnNode:
    """Completes a snapshot. The same snapshot and the same addresses give the identical result."""

    def __init__(self, node_name: str, addresses: Callable[[], tuple[str, ...]]) -> None:
        self._key = NamespacedName("", node_name)
        self._addresses = addresses
        self._last: tuple[Snapshot, tuple[str, ...], Snapshot] | None = None

    def complete(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with this node in it, and addresses in the node."""
        node = snapshot.nodes.get(self._key)
        if node is not None and (node.internal_ips or node.external_ips):
            return snapshot
        addresses = self._addresses()
        if self._last is not None and self._last[0] is snapshot and self._last[1] == addresses:
            return self._last[2]
        own = msgspec.structs.replace(node or Node(name=self._key.name), internal_ips=addresses)
        completed = msgspec.structs.replace(snapshot, nodes=snapshot.nodes.set(self._key, own))
        self._last = snapshot, addresses, completed
        return completed
