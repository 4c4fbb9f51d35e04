"""Limits of the files that containers write, and the eviction of pods that exceed them.

Follows Kubernetes 1.36: pkg/kubelet/eviction/eviction_manager.go (containerEphemeralStorageLimitEviction).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

REASON = "Evicted"
_RESOURCE = "ephemeral-storage"
_QUANTITY = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(?:([KMGTPE]i)|([numkMGTPE])|[eE]([-+]?[0-9]{1,3}))?")
_BINARY = {f"{letter}i": 1024**power for power, letter in enumerate("KMGTPE", 1)}
_DECIMAL = {"n": 1e-9, "u": 1e-6, "m": 1e-3, **{letter: 1000.0**power for power, letter in enumerate("kMGTPE", 1)}}


class StorageLimit(NamedTuple):
    """The limit of a container's files."""

    text: str
    """As the pod has it, such as 5Mi."""
    size: float
    """Bytes."""

    def exceeded(self, container: str) -> str:
        """Return the message of an eviction."""
        return f'Container {container} exceeded its local ephemeral storage limit "{self.text}". '


def storage_limits(pod: Mapping[str, Any]) -> dict[str, StorageLimit]:
    """Return the limits of the containers that have one."""
    spec = pod["spec"]
    found = {}
    for each in (*(spec.get("initContainers") or ()), *spec["containers"]):
        text = str(((each.get("resources") or {}).get("limits") or {}).get(_RESOURCE, ""))
        with contextlib.suppress(ValueError):
            found[str(each["name"])] = StorageLimit(text, _quantity(text))
    return found


def _quantity(text: str) -> float:
    """Return the number of a quantity. Raises ValueError."""
    found = _QUANTITY.fullmatch(text.removeprefix("+"))
    if found is None:
        raise ValueError(f"{text!r} is not a quantity")
    number, binary, decimal, exponent = found.groups()
    return float(number) * (_BINARY.get(binary or "") or _DECIMAL.get(decimal or "") or 10.0 ** int(exponent or 0))
