"""What the overlay is told besides `net-conf.json`."""

from __future__ import annotations

import msgspec

from narthex.overlay.interfaces import InterfaceSelection
from narthex.runtime.configuration.values import OverlayConfiguration

_USUAL = OverlayConfiguration()


class OverlaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. Several overlays can run on one machine, each in a network namespace of its own, when each has a
    `subnet_file` of its own."""

    node: str
    """Name of this node's Node."""
    net_conf: str = _USUAL.net_conf
    subnet_file: str = _USUAL.subnet_file
    routes_file: str = ""
    """Where the routes over the link between the nodes are written down that are ours; empty: beside `subnet_file`."""
    choice: InterfaceSelection = InterfaceSelection()
    """Which link leads to the other nodes."""
    public_ips: tuple[str, ...] = ()
    """What others shall send to, one address of each family at most; else the link's own."""
    masquerade: bool = True
    forward_rules: bool = True
    """Packets from and to pods are accepted in FORWARD, whose policy may be to drop them."""
    annotation_prefix: str = _USUAL.annotation_prefix
    set_condition: bool = True
    """The condition NetworkUnavailable of the Node is set to False."""
    repair_checksums: bool = True
    resync: float = 10.0
    """Seconds between two looks at everything; what the kernel tells of is mended at once."""

    def __post_init__(self) -> None:
        if not self.routes_file:
            msgspec.structs.force_setattr(self, "routes_file", f"{self.subnet_file}.routes")


def settings_of(told: OverlayConfiguration, node: str) -> OverlaySettings:
    """The settings of a configuration file's section."""
    return OverlaySettings(
        node=node,
        net_conf=told.net_conf,
        subnet_file=told.subnet_file,
        choice=InterfaceSelection(
            names=told.interfaces, patterns=told.interface_patterns, can_reach=told.interface_can_reach
        ),
        public_ips=told.public_ips,
        masquerade=told.masquerade,
        forward_rules=told.forward_rules,
        annotation_prefix=told.annotation_prefix,
        set_condition=told.network_condition,
        repair_checksums=told.repair_checksums,
    )
