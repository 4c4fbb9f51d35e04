"""A setting of the kernel below /proc/sys, and the value that it must have."""

from __future__ import annotations

from typing import NamedTuple


class KernelSetting(NamedTuple):
    """One kernel setting that is wanted."""

    path: str
    """Below /proc/sys."""
    value: int
    field: str
    """Who asks for it: a field of the configuration, or a mode."""
    at_least: bool = False
    """A larger value is as good."""
    unasked: str = ""
    """What in the configuration leaves the kernel's value as it is; empty: nothing does."""

    def held_by(self, value: int) -> bool:
        """Whether the kernel's value needs no change (row 19.5)."""
        return value >= self.value if self.at_least else value == self.value
