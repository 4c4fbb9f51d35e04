"""What a lab's API does with all that is written: defaults and checks first, then what Services are given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narthex.lab.api import admission as api
from narthex.lab.api.kinds import Kind
from narthex.lab.api.registry import Admit, Registry
from narthex.lab.api.store import Raw
from narthex.lab.controllers.service_admission import Allocation


def admission() -> Admit:
    """For one registry."""
    allocation = Allocation()

    def admit(registry: Registry, kind: Kind, held: Mapping[str, Any] | None, new: Raw, subresource: str) -> Raw:
        return allocation.admit(registry, kind, held, api.admit(registry, kind, held, new, subresource), subresource)

    return admit
