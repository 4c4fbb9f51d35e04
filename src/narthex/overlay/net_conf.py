"""flannel's configuration `net-conf.json` (Pod networks and backend), and the `subnet.env` file for its CNI plugin.

All of flannel's fields are read and validated. Subnets come from the Nodes (`spec.podCIDRs`), so `SubnetLen`, `SubnetMin`,
and `SubnetMax` have no effect, as in flannel.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from narthex.model import FAMILIES, IPFamily, address, contains, family_of, kind_of, network, parsed_network, quoted

VXLAN, HOST_GW = "vxlan", "host-gw"
BACKENDS = (VXLAN, HOST_GW)
UNSUPPORTED_BACKENDS = (
    "udp", "wireguard", "ipip", "ipsec", "extension", "alloc", "ali-vpc", "aws-vpc", "gce", "tencent-vpc",
)  # fmt: skip
PORT = 8472
"""Default VXLAN port: that of Linux, not IANA's 4789."""
_MOST_BYTES = 1 << 20
_MOST_VNI = (1 << 24) - 1
_LEAST_MTU = {IPFamily.IPV4: 68 + 50, IPFamily.IPV6: 1280 + 70}


class NetConfError(ValueError):
    """The configuration is invalid; the message names file, field, value, and allowed values."""


class BackendConf(msgspec.Struct, frozen=True, kw_only=True):
    """`Backend`: how packets travel between nodes."""

    type: str = VXLAN
    vni: int = 1
    port: int = PORT
    mtu: int = 0
    """MTU of the link between the nodes; 0: as the link has it."""
    direct_routing: bool = False
    learning: bool = False
    gbp: bool = False


class NetConf(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `net-conf.json`."""

    networks: tuple[str, ...]
    """The Pod networks: one CIDR of each enabled family, IPv4 first."""
    subnet_length: int = 24
    subnet_min: str = ""
    subnet_max: str = ""
    ipv6_subnet_length: int = 64
    ipv6_subnet_min: str = ""
    ipv6_subnet_max: str = ""
    nftables: bool = False
    backend: BackendConf = BackendConf()

    def network(self, family: IPFamily) -> str:
        """Return the Pod network of a family; empty if the family is disabled."""
        return next((one for one in self.networks if family_of(one) is family), "")


def parse(data: bytes, origin: str) -> NetConf:
    """Parse the file content; `origin` names the file in errors. Raises NetConfError."""
    if len(data) > _MOST_BYTES:
        raise NetConfError(f"{origin}: is larger than {_MOST_BYTES} bytes")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise NetConfError(f"{origin}: is not JSON: {error}") from None
    fields = _Fields(value, origin, "")
    networks = []
    for family, on, name in ((IPFamily.IPV4, True, ""), (IPFamily.IPV6, False, "IPv6")):
        field = f"{name}Network"
        text = fields.text(field)
        if fields.flag(f"Enable{family.label}", on):
            if not text:
                raise fields.wrong(field, f"is required, since Enable{family.label} is true")
            networks.append(fields.network(field, text, family))
    if not networks:
        raise fields.wrong("EnableIPv4", "false, and EnableIPv6 is not true: switch one of them on")
    lengths = {family: _subnets(fields, family, networks) for family in FAMILIES}
    four, six = lengths[IPFamily.IPV4], lengths[IPFamily.IPV6]
    return NetConf(
        networks=tuple(networks),
        subnet_length=four[0],
        subnet_min=four[1],
        subnet_max=four[2],
        ipv6_subnet_length=six[0],
        ipv6_subnet_min=six[1],
        ipv6_subnet_max=six[2],
        nftables=fields.flag("EnableNFTables", False),
        backend=_backend(_Fields(fields.value("Backend", {}), origin, "Backend."), networks),
    )


def _subnets(fields: _Fields, family: IPFamily, networks: list[str]) -> tuple[int, str, str]:
    """Return length, first, and last subnet of a family, with flannel's defaults."""
    name = "" if family is IPFamily.IPV4 else "IPv6"
    usual, most = (24, 30) if family is IPFamily.IPV4 else (64, 126)
    field = f"{name}SubnetLen"
    whole = next((one for one in networks if family_of(one) is family), "")
    given = fields.whole(field, 0, 0, most)
    if not whole:
        return given or usual, fields.text(f"{name}SubnetMin"), fields.text(f"{name}SubnetMax")
    net = parsed_network(whole)
    if net.prefixlen + 2 > most:
        raise fields.wrong(f"{name}Network", f"{whole} is too small: four subnets must fit, so at most /{most - 2}")
    length = given or max(usual, net.prefixlen + 2)
    if length < net.prefixlen + 2:
        raise fields.wrong(
            field, f"{length} is too short for {whole}: four subnets must fit, so at least {net.prefixlen + 2}"
        )
    size = 1 << (family.host_bits - length)
    ends = []
    for end, default in (("Min", net.network_address + size), ("Max", net.broadcast_address + 1 - size)):
        text = fields.text(f"{name}Subnet{end}")
        if text:
            try:
                text = address(text)
            except ValueError:
                text = ""
            if not text or not contains(whole, text):
                raise fields.wrong(
                    f"{name}Subnet{end}", f"{quoted(fields.text(f'{name}Subnet{end}'))} is not an address in {whole}"
                )
            if int(parsed_network(f"{text}/{family.host_bits}").network_address) % size:
                raise fields.wrong(f"{name}Subnet{end}", f"{text} does not begin a subnet of length {length}")
        ends.append(text or str(default))
    return length, ends[0], ends[1]


def _backend(fields: _Fields, networks: list[str]) -> BackendConf:
    # flannel documents vxlan as the default; its code uses udp, which is obsolete.
    type_ = fields.text("Type") or VXLAN
    if type_ not in BACKENDS:
        why = "is a backend of flannel that is not built here" if type_ in UNSUPPORTED_BACKENDS else "is no backend"
        raise fields.wrong("Type", f"{quoted(type_)} {why}: choose {' or '.join(BACKENDS)}")
    least = max(_LEAST_MTU[family_of(one)] for one in networks)
    mtu = fields.whole("MTU", 0, 0, 65535)
    if mtu and type_ == VXLAN and mtu < least:
        raise fields.wrong("MTU", f"{mtu} leaves no room for pods' packets: at least {least}, or 0 for the link's own")
    return BackendConf(
        type=type_,
        vni=fields.whole("VNI", 1, 1, _MOST_VNI),
        port=fields.whole("Port", 0, 0, 65535) or PORT,
        mtu=mtu,
        direct_routing=fields.flag("DirectRouting", False),
        learning=fields.flag("Learning", False),
        gbp=fields.flag("GBP", False),
    )


class _Fields:
    """A JSON object with type-checked access. Unknown fields are ignored, as in flannel."""

    def __init__(self, value: Any, origin: str, path: str) -> None:
        self._origin = origin
        self._path = path
        if not isinstance(value, dict):
            where = f"{origin}: {path.rstrip('.')}".rstrip(": ")
            raise NetConfError(f"{where}: is {kind_of(value)}, must be an object")
        # Go's decoder ignores the case of names.
        self._values = {name.lower(): held for name, held in value.items() if held is not None}

    def wrong(self, field: str, message: str) -> NetConfError:
        """Return an error that names the file and the field."""
        return NetConfError(f"{self._origin}: {self._path}{field}: {message}")

    def value(self, name: str, default: Any) -> Any:
        """Return a field's value. The case of its name is ignored, as in flannel's JSON decoder."""
        return self._values.get(name.lower(), default)

    def text(self, name: str) -> str:
        """Return a field's text, empty by default. Raise `NetConfError` for another type."""
        found = self.value(name, "")
        if not isinstance(found, str):
            raise self.wrong(name, f"{json.dumps(found)[:60]} is {kind_of(found)}, must be text")
        return found

    def flag(self, name: str, default: bool) -> bool:
        """Return a field's boolean. Raise `NetConfError` for another type."""
        found = self.value(name, default)
        if not isinstance(found, bool):
            raise self.wrong(name, f"{json.dumps(found)[:60]} is {kind_of(found)}, must be true or false")
        return found

    def whole(self, name: str, default: int, least: int, most: int) -> int:
        """Return a field's number. Raise `NetConfError` unless it is whole and from `least` to `most`."""
        found = self.value(name, default)
        if not isinstance(found, int) or isinstance(found, bool) or not least <= found <= most:
            raise self.wrong(name, f"{json.dumps(found)[:60]} must be a whole number from {least} to {most}")
        return found

    def network(self, name: str, text: str, family: IPFamily) -> str:
        """Return `text` as a network.

        Raise `NetConfError` unless it is one of this family; `name` is the field of the message.
        """
        try:
            found = network(text)
        except ValueError as error:
            raise self.wrong(name, str(error)) from None
        if family_of(found) is not family:
            raise self.wrong(name, f"{quoted(text)} is not a network of {family.label}")
        return found


def subnet_env(conf: NetConf, subnets: Mapping[IPFamily, str], mtu: int, masquerade: bool) -> str:
    """Return the content of `subnet.env`, which the CNI plugin `flannel` reads."""
    lines = []
    for family in FAMILIES:
        if family in subnets:
            name = "" if family is IPFamily.IPV4 else "IPV6_"
            net = parsed_network(subnets[family])
            lines.append(f"FLANNEL_{name}NETWORK={conf.network(family)}")
            lines.append(f"FLANNEL_{name}SUBNET={net.network_address + 1}/{net.prefixlen}")
    lines += [f"FLANNEL_MTU={mtu}", f"FLANNEL_IPMASQ={'true' if masquerade else 'false'}"]
    return "".join(line + "\n" for line in lines)
