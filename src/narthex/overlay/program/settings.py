"""Settings of the overlay in addition to `net-conf.json`."""

from __future__ import annotations

import msgspec

from narthex.overlay.interfaces import InterfaceSelection
from narthex.runtime.configuration.values import OverlayConfiguration

_USUAL = OverlayConfiguration()


class OverlaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings. Several overlays on one machine need separate namespaces and `subnet_file`s."""

    node: str
    """Name of this node's Node object."""
    net_conf: str = _USUAL.net_conf
    subnet_file: str = _USUAL.subnet_file
    routes_file: str = ""
    """File of our own routes over the external interface; empty: next to `subnet_file`."""
    choice: InterfaceSelection = InterfaceSelection()
    """Selects the interface to the other nodes."""
    public_ips: tuple[str, ...] = ()
    """Addresses that peers send to, at most one per family; default: those of the interface."""
    masquerade: bool = True
    forward_rules: bool = True
    """Accept Pod traffic in the FORWARD chain, whose policy may be DROP."""
    annotation_prefix: str = _USUAL.annotation_prefix
    set_condition: bool = True
    """Set the Node condition NetworkUnavailable to False."""
    repair_checksums: bool = True
    resync: float = 10.0
    """Seconds between full reconciliations; changes that the kernel reports are repaired at once."""

    def __post_init__(self) -> None:
        if not self.routes_file:
            msgspec.structs.force_setattr(self, "routes_file", f"{self.subnet_file}.routes")


def settings_of(configuration: OverlayConfiguration, node: str) -> OverlaySettings:
    """Return the settings of a configuration file's section."""
    return OverlaySettings(
        node=node,
        net_conf=configuration.net_conf,
        subnet_file=configuration.subnet_file,
        choice=InterfaceSelection(
            names=configuration.interfaces,
            patterns=configuration.interface_patterns,
            can_reach=configuration.interface_can_reach,
        ),
        public_ips=configuration.public_ips,
        masquerade=configuration.masquerade,
        forward_rules=configuration.forward_rules,
        annotation_prefix=configuration.annotation_prefix,
        set_condition=configuration.network_condition,
        repair_checksums=configuration.repair_checksums,
    )
