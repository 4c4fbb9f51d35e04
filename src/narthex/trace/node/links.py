"""Links, addresses, neighbours and forwarding tables, from `ip -j` and `bridge -j`."""

from __future__ import annotations

from typing import Any

from narthex.model.net import address
from narthex.trace.follow.views import FdbEntry, LinkAddress, NodeLink, NodeNeighbour


def links_of(data: Any) -> tuple[NodeLink, ...]:
    """From the JSON of `ip -j -d link show`."""
    return tuple(_link(entry) for entry in data if entry.get("ifname"))


def _link(entry: dict[str, Any]) -> NodeLink:
    info = entry.get("linkinfo", {})
    kind = str(info.get("info_kind", ""))
    data = info.get("info_data", {}) if kind == "vxlan" else {}
    bridge = info.get("info_data", {}) if kind == "bridge" else {}
    port = info.get("info_slave_data", {}) if info.get("info_slave_kind") == "bridge" else {}
    return NodeLink(
        name=str(entry["ifname"]),
        index=int(entry.get("ifindex", 0)),
        kind=kind,
        up="UP" in entry.get("flags", ()),
        mtu=int(entry.get("mtu", 0)),
        mac=str(entry.get("address", "")),
        master=str(entry.get("master", "")),
        peer_index=int(entry.get("link_index", 0)),
        vxlan_id=int(data.get("id", 0)),
        vxlan_port=int(data.get("port", 0)),
        vxlan_local=str(data.get("local", data.get("local6", ""))),
        vxlan_under=str(data.get("link", "")),
        bridge_calls_rules=bool(bridge.get("nf_call_iptables")),
        hairpin=bool(port["hairpin"]) if "hairpin" in port else None,
    )


def addresses_of(data: Any) -> tuple[LinkAddress, ...]:
    """From the JSON of `ip -j addr show`. Raises ValueError."""
    return tuple(
        LinkAddress(
            address(held["local"]), int(held["prefixlen"]), str(entry["ifname"]), str(held.get("scope", "global"))
        )
        for entry in data
        for held in entry.get("addr_info", ())
        if held.get("local")
    )


def neighbours_of(data: Any) -> tuple[NodeNeighbour, ...]:
    """From the JSON of `ip -j neigh show`. Raises ValueError."""
    return tuple(
        NodeNeighbour(
            address(entry["dst"]), str(entry["dev"]), str(entry.get("lladdr", "")), " ".join(entry.get("state", ()))
        )
        for entry in data
        if "dst" in entry and "dev" in entry
    )


def fdb_of(data: Any) -> tuple[FdbEntry, ...]:
    """From the JSON of `bridge -j fdb show`; entries for multicast are left out."""
    return tuple(
        FdbEntry(
            str(entry["mac"]),
            str(entry.get("ifname", entry.get("dev", ""))),
            str(entry.get("dst", "")),
            str(entry.get("master", "")),
            str(entry.get("state", "")),
        )
        for entry in data
        if "mac" in entry and not str(entry["mac"]).startswith(("33:33:", "01:00:5e:"))
    )
