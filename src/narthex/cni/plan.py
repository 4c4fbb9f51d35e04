"""The network configuration of one attachment as values: link changes, sysctls, and elements of nftables sets.

The pure part of a plugin returns an `AttachmentPlan`; `kernel/` and `program/` apply it, one batch per namespace.
"""

from __future__ import annotations

from narthex.model.values import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from narthex.model.links import LinkChange


class SysctlSetting(Value):
    """A sysctl, by its path below /proc/sys."""

    path: str
    value: str
    required: bool = False
    """Fail if the kernel does not have or refuses the setting."""


class SetElement(Value):
    """An element of one of our nftables sets, in the kernel's encoding: concatenated parts, each padded to four bytes."""

    set: str
    key: bytes
    data: bytes = b""
    """For maps: the value."""
    end: bytes = b""
    """For interval sets: the upper bound of the key."""
    exclusive: bool = False
    """The key may belong to one attachment only."""


class AttachmentPlan(Value):
    """Everything that a plugin configures for an attachment."""

    node_settings: tuple[SysctlSetting, ...] = ()
    node: tuple[LinkChange, ...] = ()
    pod_settings: tuple[SysctlSetting, ...] = ()
    pod: tuple[LinkChange, ...] = ()
    announce: tuple[LinkChange, ...] = ()
    """Applied in the pod once the bridge forwards its packets; announces the addresses to its neighbors."""
    late_settings: tuple[SysctlSetting, ...] = ()
    """Sysctls on the node for links that the plan creates."""
