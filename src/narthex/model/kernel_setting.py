"""A sysctl below /proc/sys with its required value."""

from __future__ import annotations

from typing import NamedTuple


class KernelSetting(NamedTuple):
    """One required sysctl value."""

    path: str
    value: int
    field: str
    """What requires the value: a configuration field or a mode."""
    at_least: bool = False
    """True if a larger value is acceptable too."""
    unasked: str = ""
    """Configuration that leaves the kernel's value unchanged; empty if there is none."""

    def held_by(self, value: int) -> bool:
        """Return True if the kernel's value needs no change (row 19.5)."""
        return value >= self.value if self.at_least else value == self.value
