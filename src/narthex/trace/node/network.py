"""Links, addresses, neighbours, forwarding entries, sockets, and connections, from `ip -j`, `bridge -j`, `ss`, and `conntrack`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from narthex.model import FAMILIES, IPFamily, Protocol, address, family_of
from narthex.model.lines import MAX_LINE
from narthex.trace.follow.views import (
    FdbEntry,
    LinkAddress,
    ListeningSocket,
    NodeLink,
    NodeNeighbour,
    TrackedConnection,
)


def links_of(data: Any) -> tuple[NodeLink, ...]:
    """Read the JSON of `ip -j -d link show`."""
    return tuple(_link(entry) for entry in data if entry.get("ifname"))


def _link(entry: dict[str, Any]) -> NodeLink:
    info = entry.get("linkinfo", {})
    kind = str(info.get("info_kind", ""))
    data = info.get("info_data", {}) if kind == "vxlan" else {}
    bridge = info.get("info_data", {}) if kind == "bridge" else {}
    port = info.get("info_slave_data", {}) if info.get("info_slave_kind") == "bridge" else {}
    return NodeLink(
        name=str(entry["ifname"]),
        kind=kind,
        up="UP" in entry.get("flags", ()),
        carrier="NO-CARRIER" not in entry.get("flags", ()),
        mtu=int(entry.get("mtu", 0)),
        master=str(entry.get("master", "")),
        vxlan_id=int(data.get("id", 0)),
        vxlan_port=int(data.get("port", 0)),
        vxlan_local=str(data.get("local", data.get("local6", ""))),
        vxlan_under=str(data.get("link", "")),
        bridge_calls_rules=bool(bridge.get("nf_call_iptables")),
        hairpin=bool(port["hairpin"]) if "hairpin" in port else None,
        index=int(entry.get("ifindex", 0)),
        peer=int(entry.get("link_index", 0)) if kind == "veth" else 0,
    )


def addresses_of(data: Any) -> tuple[LinkAddress, ...]:
    """Read the JSON of `ip -j addr show`. Raises ValueError."""
    return tuple(
        LinkAddress(
            address(held["local"]), int(held["prefixlen"]), str(entry["ifname"]), str(held.get("scope", "global"))
        )
        for entry in data
        for held in entry.get("addr_info", ())
        if held.get("local")
    )


_LINK = re.compile(r"\d+: ([^\s:@]+)(?:@[^\s:]+)?: <([A-Z0-9_,-]*+)>(.*)")
_LINK_WORD = re.compile(r"\b(mtu|master) (\S+)")
_LINK_ADDRESS = re.compile(r"inet6? ([0-9a-fA-F.:]+)(?:/(\d+))?(?: peer \S+)?(.*)")
_SCOPE = re.compile(r"\bscope (\S+)")
_BRIEF = re.compile(r"([^\s:@]+)(?:@\S+)?\s+(UP|DOWN|UNKNOWN|LOWERLAYERDOWN)\s+(?=[0-9a-f])(.*)")
_KIND = re.compile(r"(veth|bridge|vxlan|dummy|bond|vlan|ipip|tun|wireguard|macvlan|ipvlan)\b")


class LinkListing(NamedTuple):
    """The links and addresses in lines of `ip addr` and `ip link`."""

    links: tuple[NodeLink, ...]
    addresses: tuple[LinkAddress, ...]

    @property
    def whole(self) -> bool:
        """True if all links are listed: every network namespace has `lo`, and it is the first."""
        return any(link.name == "lo" for link in self.links)


def link_lines(text: str) -> LinkListing:
    """Read all lines of `ip addr`, `ip link`, with or without `-d`, and `ip -br addr` in a text."""
    links: dict[str, dict[str, Any]] = {}
    addresses: list[LinkAddress] = []
    current = ""
    for raw in text.split("\n"):
        line = raw.strip()
        if not line or len(line) > MAX_LINE:
            continue
        if (link := _LINK.match(line)) is not None:
            current = link[1]
            words = dict(_LINK_WORD.findall(link[3]))
            links[current] = {
                "up": "UP" in link[2].split(","),
                "mtu": int(words.get("mtu", "0")) if words.get("mtu", "0").isdigit() else 0,
                "master": words.get("master", ""),
            }
        elif (brief := _BRIEF.match(line)) is not None and "/" in brief[3]:
            links.setdefault(brief[1], {"up": brief[2] != "DOWN"})
            addresses += filter(None, (_listed_address(f"inet {word}", brief[1]) for word in brief[3].split()))
        elif current and line.startswith("inet"):
            addresses += filter(None, (_listed_address(line, current),))
        elif current and raw[:1] == " " and (kind := _KIND.match(line)) is not None:
            links[current]["kind"] = kind[1]
        elif raw[:1] not in (" ", "\t"):
            current = ""
    return LinkListing(tuple(NodeLink(name=name, **fields) for name, fields in links.items()), tuple(addresses))


def _listed_address(line: str, link: str) -> LinkAddress | None:
    found = _LINK_ADDRESS.match(line)
    if found is None:
        return None
    try:
        held = address(found[1])
    except ValueError:
        return None
    scope = _SCOPE.search(found[3])
    return LinkAddress(held, int(found[2] or family_of(held).host_bits), link, scope[1] if scope else "global")


def neighbours_of(data: Any) -> tuple[NodeNeighbour, ...]:
    """Read the JSON of `ip -j neigh show`. Raises ValueError."""
    return tuple(
        NodeNeighbour(
            address(entry["dst"]), str(entry["dev"]), str(entry.get("lladdr", "")), " ".join(entry.get("state", ()))
        )
        for entry in data
        if "dst" in entry and "dev" in entry
    )


def fdb_of(data: Any) -> tuple[FdbEntry, ...]:
    """Read the JSON of `bridge -j fdb show`, without multicast entries."""
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


_EVERY = {"*": FAMILIES, "0.0.0.0": (IPFamily.IPV4,), "[::]": (IPFamily.IPV6,)}
_MAPPED = "::ffff:"


def listeners_of(text: str) -> tuple[ListeningSocket, ...]:
    """Read the lines of `ss -H -l -n -t -u`: protocol, state, two queues, own address and port."""
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) < 5 or words[0] not in ("tcp", "udp"):
            continue
        place, _, port = words[4].rpartition(":")
        listener = _listener(words[0], place, port)
        if listener is not None:
            found.append(listener)
    return tuple(found)


def _listener(protocol: str, place: str, port: str) -> ListeningSocket | None:
    if not port.isascii() or not port.isdigit():
        return None
    # The link that an address is bound to stands behind it: 127.0.0.53%lo, fe80::1%eth0.
    bare = place.partition("%")[0]
    bare = bare if not bare.startswith("[") or bare.endswith("]") else f"{bare}]"
    if bare in _EVERY:
        return ListeningSocket(protocol, "", int(port), _EVERY[bare])
    try:
        held = address(bare.strip("[]").removeprefix(_MAPPED))
    except ValueError:
        return None
    return ListeningSocket(protocol, held, int(port), (family_of(held),))


LINE = re.compile(r"^(?:ipv[46]\s+\d+\s+)?(tcp|udp|sctp|icmp|icmpv6|dccp|udplite|gre)\s+\d+\s.*\bsrc=", re.MULTILINE)
_WORD = re.compile(r"\b(\w++)=(\S+)")
_FLAG = re.compile(r"\[(\w+)\]")
_STATE = re.compile(r"^(?:ipv[46]\s+\d+\s+)?\w+\s+\d+\s+(?:(\d+)\s+)?(?:([A-Z_0-9]+)\s+)?src=")


class ConntrackListing:
    """The output of `conntrack -L`, as `TrackedConnections`.

    It is searched without parsing all of it: busy nodes have a million lines.
    """

    def __init__(self, text: str) -> None:
        """Take the output of `conntrack -L`."""
        self._text = text

    def __len__(self) -> int:
        """Return the number of connections."""
        return sum(1 for _ in LINE.finditer(self._text))

    def to(self, protocol: Protocol, address: str, port: int) -> tuple[TrackedConnection, ...]:
        """Return the connections with this original destination; port 0 stands for any."""
        want = f"dst={address} "
        return tuple(
            each
            for each in self._holding(want)
            if each.destination == address and each.protocol == protocol.lower and port in (0, each.port)
        )

    def all(self) -> Iterator[TrackedConnection]:
        """Yield all connections."""
        for line in self._text.splitlines():
            found = read_line(line)
            if found is not None:
                yield found

    def _holding(self, words: str) -> Iterator[TrackedConnection]:
        position = self._text.find(words)
        while position >= 0:
            start = self._text.rfind("\n", 0, position) + 1
            end = self._text.find("\n", position)
            end = len(self._text) if end < 0 else end
            found = read_line(self._text[start:end])
            if found is not None:
                yield found
            position = self._text.find(words, end)


def read_line(line: str) -> TrackedConnection | None:
    """Parse one line; return None if it is no connection."""
    if len(line) > MAX_LINE:
        return None
    kind = LINE.match(line)
    words = _WORD.findall(line) if kind is not None else []
    sides = [index for index, (key, _) in enumerate(words) if key == "src"]
    if kind is None or len(sides) < 2:
        return None
    there, back = dict(words[sides[0] : sides[1]]), dict(words[sides[1] :])
    state = _STATE.match(line)
    try:
        return TrackedConnection(
            protocol="icmp" if kind[1] == "icmpv6" else kind[1],
            source=address(there["src"]),
            destination=address(there["dst"]),
            source_port=int(there.get("sport", 0)),
            port=int(there.get("dport", 0)),
            reply_source=address(back["src"]),
            reply_destination=address(back["dst"]),
            reply_source_port=int(back.get("sport", 0)),
            state=(state[2] or "") if state else "",
            flags=tuple(_FLAG.findall(line)),
            mark=int(back.get("mark", 0)),
            seconds=int(state[1] or 0) if state else 0,
            text=" ".join(line.split()),
        )
    except (KeyError, ValueError):
        return None
