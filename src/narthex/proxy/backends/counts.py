"""New connections as the rules themselves count them: which counter belongs to which Service port and endpoint.

A kernel counter is known by a key of the backend's own. What it counts for is worked out from the plan alone.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from narthex.model.names import ServicePortName


class ConnectionCount(NamedTuple):
    """One counter."""

    key: Hashable
    """What it is known by. A counter whose rule or element was made anew begins at 0."""
    name: ServicePortName
    endpoint: tuple[str, int] | None
    """Address and port; None: it counts for the Service port as a whole."""
    connections: int
