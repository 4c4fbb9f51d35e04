"""This node as the overlay's looks find it: its configuration, its link, its hardware addresses."""

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
    """`net-conf.json`, read again when it changed. What cannot be used changes nothing of what is in force."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._data: bytes | None = None
        self._conf: NetConf | None = None
        self.problem = ""
        """Why the current content is not in force; empty if it is."""

    def read(self) -> NetConf:
        """The configuration. Raises NetConfError when there was none yet that could be used."""
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
        self._data, self.problem = None, f"{error}; what was read before stays in force"


def outers(
    kernel: OverlayKernel, settings: OverlaySettings, families: Sequence[IPFamily]
) -> dict[IPFamily, ExternalInterface]:
    """The link between the nodes, by family. Raises NoLink, OSError."""
    link = select_interface(
        settings.choice, kernel.links(), families, lambda: kernel.default_link(families), _source_towards
    )
    return {
        family: ExternalInterface(link=link.name, index=link.index, address=link.address(family), mtu=link.mtu)
        for family in families
    }


def _source_towards(address: str) -> str:
    """The own address that a packet would leave with; empty when there is no route. Nothing is sent."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((address, 9))
            return str(sock.getsockname()[0])
    except OSError:
        return ""


def public_ips(
    node: Node, keys: AnnotationKeys, settings: OverlaySettings, outer: Mapping[IPFamily, ExternalInterface]
) -> dict[IPFamily, str]:
    """What others shall send to. Raises ValueError for an annotation that is none."""
    given = {family_of(one): one for one in settings.public_ips}
    return {
        family: given_public_ip(node, keys, family) or given.get(family) or one.address for family, one in outer.items()
    }


def hardware_address(
    node: Node, keys: AnnotationKeys, conf: NetConf, family: IPFamily, have: OverlayState, *, derived: bool
) -> str:
    """That of the vxlan device: as the Node announces it, as the device has it, or a new one. `derived`: others work it
    out from the node's name when the Node does not say."""
    vni = conf.backend.vni
    try:
        announced = vtep_mac(node, keys, family, vni)
    except ValueError:
        # It is overwritten with what is decided here.
        announced = ""
    if announced or derived:
        return announced or derived_mac(node.name, vni, family)
    held = have.devices.get(device_name(family, vni))
    if held is not None and held.kind == "vxlan" and held.mac:
        return held.mac
    fresh = bytearray(os.urandom(6))
    fresh[0] = fresh[0] & 0xFC | 0x02
    return fresh.hex(":")
