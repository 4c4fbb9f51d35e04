"""`subnet.env`: what the CNI plugin `flannel` is told of this node."""

from __future__ import annotations

from collections.abc import Mapping

from narthex.model.net import FAMILIES, IPFamily, parsed_network
from narthex.overlay.net_conf import NetConf


def subnet_env(conf: NetConf, subnets: Mapping[IPFamily, str], mtu: int, masquerade: bool) -> str:
    """The file's content."""
    lines = []
    for family in FAMILIES:
        if family in subnets:
            name = "" if family is IPFamily.IPV4 else "IPV6_"
            net = parsed_network(subnets[family])
            lines.append(f"FLANNEL_{name}NETWORK={conf.network(family)}")
            lines.append(f"FLANNEL_{name}SUBNET={net.network_address + 1}/{net.prefixlen}")
    lines += [f"FLANNEL_MTU={mtu}", f"FLANNEL_IPMASQ={'true' if masquerade else 'false'}"]
    return "".join(line + "\n" for line in lines)
