"""flannel's annotations on Node objects, read and written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from hashlib import sha256

import msgspec

from narthex.model import IPFamily, Node, address, family_of, quoted
from narthex.model.validate import annotation_prefix
from narthex.overlay.net_conf import VXLAN, BackendConf

PREFIX = "flannel.alpha.coreos.com"
_MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")


class AnnotationKeys:
    """Names of the annotations, with a configurable prefix."""

    def __init__(self, prefix: str = PREFIX) -> None:
        """Derive the names. Raises ValueError for an invalid prefix."""
        annotation_prefix(prefix)
        begin = prefix if "/" in prefix else f"{prefix}/"
        begin = begin if begin.endswith(("/", "-")) else f"{begin}-"
        self.managed = f"{begin}kube-subnet-manager"
        self.type = f"{begin}backend-type"
        four, six = IPFamily.IPV4, IPFamily.IPV6
        self.data = {four: f"{begin}backend-data", six: f"{begin}backend-v6-data"}
        self.public_ip = {four: f"{begin}public-ip", six: f"{begin}public-ipv6"}
        self.overwrite = {four: f"{begin}public-ip-overwrite", six: f"{begin}public-ipv6-overwrite"}
        self.node_public_ip = {four: f"{begin}node-public-ip", six: f"{begin}node-public-ipv6"}


class LeaseAttributes(msgspec.Struct, frozen=True, kw_only=True):
    """What this node publishes about itself in one IP family."""

    public_ip: str
    mac: str = ""
    """MAC address of its VXLAN device; empty with host-gw."""


def lease_annotations(
    keys: AnnotationKeys, backend: BackendConf, own: Mapping[IPFamily, LeaseAttributes]
) -> dict[str, str]:
    """Return the annotations that this node publishes."""
    made = {keys.managed: "true", keys.type: backend.type}
    for family, one in own.items():
        made[keys.public_ip[family]] = one.public_ip
        data = {"VNI": backend.vni, "VtepMAC": one.mac} if backend.type == VXLAN else None
        made[keys.data[family]] = json.dumps(data, separators=(",", ":"))
    return made


def changed_annotations(node: Node, desired: Mapping[str, str]) -> dict[str, str]:
    """Return the annotations that the Node lacks or has with another value."""
    have = dict(node.annotations)
    return {key: value for key, value in desired.items() if have.get(key) != value}


def given_public_ip(node: Node, keys: AnnotationKeys, family: IPFamily) -> str:
    """Return the address that an administrator set on the Node; empty if there is none. Raises ValueError."""
    for key in (keys.overwrite[family], keys.node_public_ip[family]):
        text = node.annotation(key)
        if text:
            return _address(key, text, family)
    return ""


def public_ip(node: Node, keys: AnnotationKeys, family: IPFamily) -> str:
    """Return the address that the node published; empty if there is none. Raises ValueError."""
    key = keys.public_ip[family]
    text = node.annotation(key)
    return _address(key, text, family) if text else ""


def vtep_mac(node: Node, keys: AnnotationKeys, family: IPFamily, vni: int | None) -> str:
    """Return the MAC address that the node published for its VXLAN device; empty if there is none. Raises ValueError.

    `vni` is this node's VNI; None: it has another backend.
    """
    key = keys.data[family]
    text = node.annotation(key)
    if not text or text == "null":
        return ""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = None
    mac = data.get("VtepMAC") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(mac, str) or not _MAC.fullmatch(mac.lower()):
        raise ValueError(
            f'annotation {key}: {quoted(text)} is not like {{"VNI":{vni or 1},"VtepMAC":"ea:3c:b5:00:00:01"}}'
        )
    # Older versions of flannel did not write the VNI.
    if vni is not None and data.get("VNI", vni) != vni:
        raise ValueError(
            f"annotation {key}: VNI is {quoted(data['VNI'])}, but {vni} here: give all nodes one net-conf.json"
        )
    return mac.lower()


def derived_mac(node_name: str, vni: int, family: IPFamily) -> str:
    """Return a MAC address that every node can derive for every other one.

    For directories of manifests: without an API server, nodes cannot publish the MAC address of their device.
    """
    digest = bytearray(sha256(f"{family.value} {vni} {node_name}".encode()).digest()[:6])
    # Locally administered, unicast.
    digest[0] = digest[0] & 0xFC | 0x02
    return digest.hex(":")


def _address(key: str, text: str, family: IPFamily) -> str:
    try:
        found = address(text)
    except ValueError:
        found = ""
    if not found or family_of(found) is not family:
        raise ValueError(f"annotation {key}: {quoted(text)} is not an address of {family.label}")
    return found
