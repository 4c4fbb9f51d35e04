"""Names of objects and of Service ports, and their printed forms."""

from __future__ import annotations

from typing import NamedTuple

from narthex.model.net import Protocol


class NamespacedName(NamedTuple):
    """Namespace and name of an object; prints as `namespace/name`."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class ServicePortName(NamedTuple):
    """Identity of one Service port; port name and protocol both count (row 1.6)."""

    service: NamespacedName
    port: str
    """Name of the port, or empty."""
    protocol: Protocol

    def __str__(self) -> str:
        """Format as `namespace/name:port`, as kube-proxy prints and hashes it; an unnamed port has no colon."""
        return f"{self.service}:{self.port}" if self.port else str(self.service)

    @property
    def sort_key(self) -> tuple[str, str, str, str]:
        """Sort key for a total order by text."""
        return self.service.namespace, self.service.name, self.port, self.protocol.value
