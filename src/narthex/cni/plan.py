"""What a plugin wants of the node, as values: links, addresses, routes, settings, elements of the rules' sets.

A plugin's pure part gives a list of these; `host/` puts them into force, everything for one namespace in one batch.
"""

from __future__ import annotations

from narthex.model.values import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from narthex.model.links import LinkChange


class SysctlSetting(Value):
    """A kernel setting, by its path below /proc/sys."""

    path: str
    value: str
    required: bool = False
    """Whether the plugin fails where the kernel does not have it or refuses."""


class SetElement(Value):
    """An element of a set of our rules, in the kernel's bytes: parts one behind the other, each padded to four."""

    set: str
    key: bytes
    data: bytes = b""
    """For maps: what the key leads to."""
    end: bytes = b""
    """For sets of ranges: the key's upper bound."""
    exclusive: bool = False
    """Whether an element with this key may belong to one attachment only."""


class AttachmentPlan(Value):
    """All that a plugin wants for an attachment."""

    node_settings: tuple[SysctlSetting, ...] = ()
    node: tuple[LinkChange, ...] = ()
    pod_settings: tuple[SysctlSetting, ...] = ()
    pod: tuple[LinkChange, ...] = ()
    announce: tuple[LinkChange, ...] = ()
    """In the pod, as soon as the bridge passes its packets: what tells the neighbours of the addresses' new holder."""
    late_settings: tuple[SysctlSetting, ...] = ()
    """Of the node, for links that are not there before."""
