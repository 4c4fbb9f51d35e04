"""This node's configuration file, external interface, and MAC addresses."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from narthex.model.net import IPFamily, family_of
from narthex.model.objects import Node
from narthex.overlay.annotations import AnnotationKeys, derived_mac, given_public_ip, vtep_mac
from narthex.overlay.changes import OverlayState
from narthex.overlay.desired import ExternalInterface, device_name
from narthex.overlay.interfaces import select_interface
from narthex.overlay.kernel.kernel import OverlayKernel
from narthex.overlay.net_conf import NetConf, NetConfError, parse
from narthex.overlay.program.settings import OverlaySettings


class ConfFile:
    """`net-conf.json`, read again when it changes. Invalid content leaves the previous one in force."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._data: bytes | None = None
        self._conf: NetConf | None = None
        self.problem = ""
        """Why the current content is not in force; empty if it is."""

    def read(self) -> NetConf:
        """Return the configuration in force. Raises NetConfError if there was no valid one yet."""
        try:
            data = Path(self._path).read_bytes()
        except OSError as error:
            self._fail(NetConfError(f"{self._path}: {error.strerror or error}; write flannel's net-conf.json there"))
        else:
            if data != self._data or self._conf is None:
                try:
                    self._conf, self._data, self.problem = parse(data, self._path), data, ""
                except NetConfError as error:
                    self._fail(error)
        assert self._conf is not None
        return self._conf

    def _fail(self, error: NetConfError) -> None:
        if self._conf is None:
            raise error
        self._data, self.problem = None, f"{error}; the previous content stays in force"


def external_interfaces(
    kernel: OverlayKernel, settings: OverlaySettings, families: Sequence[IPFamily]
) -> dict[IPFamily, ExternalInterface]:
    """Return the link between the nodes, by family. Raises InterfaceNotFound, OSError."""
    link = select_interface(
        settings.choice, kernel.links(), families, lambda: kernel.default_link(families), _source_towards
    )
    return {
        family: ExternalInterface(link=link.name, index=link.index, address=link.address(family), mtu=link.mtu)
        for family in families
    }


def _source_towards(address: str) -> str:
    """Return the source address of packets to an address; empty if there is no route. Sends nothing."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((address, 9))
            return str(sock.getsockname()[0])
    except OSError:
        return ""


def public_ips(
    node: Node, keys: AnnotationKeys, settings: OverlaySettings, external: Mapping[IPFamily, ExternalInterface]
) -> dict[IPFamily, str]:
    """Return the addresses that peers send to. Raises ValueError for an invalid annotation."""
    given = {family_of(one): one for one in settings.public_ips}
    return {
        family: given_public_ip(node, keys, family) or given.get(family) or one.address
        for family, one in external.items()
    }


def hardware_address(
    node: Node, keys: AnnotationKeys, conf: NetConf, family: IPFamily, have: OverlayState, *, derived: bool
) -> str:
    """Return the MAC address of the VXLAN device: as published, as the device has it, or a new one.

    `derived`: peers derive it from the node's name unless it is published.
    """
    vni = conf.backend.vni
    try:
        announced = vtep_mac(node, keys, family, vni)
    except ValueError:
        # The invalid annotation will be overwritten.
        announced = ""
    if announced or derived:
        return announced or derived_mac(node.name, vni, family)
    held = have.devices.get(device_name(family, vni))
    if held is not None and held.kind == "vxlan" and held.mac:
        return held.mac
    fresh = bytearray(os.urandom(6))
    fresh[0] = fresh[0] & 0xFC | 0x02
    return fresh.hex(":")
