"""Routes, links, addresses, neighbours, connections, and settings that a flow can meet."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from narthex.model import IPFamily
from narthex.trace.issue.flow import IssueFlow, named
from narthex.trace.node.network import read_line

_LINK_KEYS = ("ifindex", "ifname", "link", "link_index", "flags", "mtu", "master", "linkinfo")
_INFO_KEYS = {
    "info_kind": (),
    "info_slave_kind": (),
    "info_data": ("id", "port", "local", "local6", "link", "nf_call_iptables"),
    "info_slave_data": ("hairpin",),
}
_ADDRESS_KEYS = ("ifindex", "ifname", "addr_info")
_LOCAL_KEYS = ("family", "local", "prefixlen", "scope")
_ROUTE_KEYS = ("type", "dst", "gateway", "via", "dev", "table", "protocol", "scope", "prefsrc", "metric", "metrics", "flags", "nexthops")  # fmt: skip
_FEW_ADDRESSES = 4
"""Addresses of a link that are kept although the flow does not name them: masquerading chooses among them."""
_FEW_CONNECTIONS = 20
_DEFAULTS = ("default", "0.0.0.0/0", "::/0")


class Nearby(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses and links of a flow with those of its routes: gateways, and the ends of tunnels."""

    addresses: frozenset[str]
    links: frozenset[str]


def nearby(parts: Mapping[str, str], flow: IssueFlow, before: Nearby | None = None) -> Nearby:
    """Return what the routes of a node add to what is near the flow."""
    addresses = set(before.addresses if before else flow.addresses)
    links = set(before.links if before else flow.links) | {"lo"}
    for path in ("net/routes-4.json", "net/routes-6.json"):
        for route in filter(lambda one: _route_kept(one, addresses), _entries(parts, path)):
            for hop in (route, *route.get("nexthops", ())):
                via = hop.get("gateway") or (hop.get("via") or {}).get("host")
                addresses |= {str(each) for each in (via, route.get("prefsrc")) if each}
                links |= {str(hop["dev"])} if hop.get("dev") else set()
    held = _entries(parts, "net/links.json")
    for _ in range(2):
        for link in (one for one in held if one.get("ifname") in links):
            data = (link.get("linkinfo") or {}).get("info_data") or {}
            links |= {str(each) for each in (link.get("master"), link.get("link"), data.get("link")) if each}
            addresses |= {str(each) for each in (data.get("local"), data.get("local6")) if each}
    macs = {one.get("lladdr") for one in _entries(parts, "net/neighbours.json") if one.get("dst") in addresses}
    for entry in _entries(parts, "net/fdb.json"):
        if entry.get("mac") in macs or entry.get("mac") == "00:00:00:00:00:00":
            addresses |= {str(entry["dst"])} if entry.get("dst") else set()
            links |= (
                {str(entry[key]) for key in ("ifname", "master") if entry.get(key)}
                if entry.get("mac") in macs
                else set()
            )
    return Nearby(addresses=frozenset(addresses), links=frozenset(links))


def _entries(parts: Mapping[str, str], path: str) -> list[dict[str, Any]]:
    try:
        data = json.loads(parts.get(path) or "[]")
    except (ValueError, RecursionError):
        return []
    return [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []


def reduced_facts(parts: Mapping[str, str], family: IPFamily, flow: IssueFlow, near: Nearby) -> dict[str, str]:
    """Return the parts below `net/` with what the flow can meet. A part that is no list of JSON stays as it is."""
    macs = {one.get("lladdr") for one in _entries(parts, "net/neighbours.json") if one.get("dst") in near.addresses}
    other = 10 - family.value

    def lines(text: str, kept: Callable[[str], bool]) -> str:
        """Return the lines to keep."""
        return "".join(f"{line}\n" for line in text.split("\n") if line and kept(line))

    def by_json(path: str, kept: Callable[[dict[str, Any]], bool], keys: Iterable[str] = ()) -> str:
        """Return the entries to keep, one on each line; with `keys`, only these fields."""
        entries = [entry for entry in _entries(parts, path) if kept(entry)]
        if path == "net/links.json":
            entries = [_link(entry) for entry in entries]
        elif path == "net/addresses.json":
            entries = [_with_addresses(entry, near, family) for entry in entries]
        elif keys:
            entries = [{key: entry[key] for key in keys if key in entry} for entry in entries]
        return json_lines(entries)

    found: dict[str, str] = {}
    for path, text in parts.items():
        if not path.startswith("net/"):
            continue
        if path.endswith((f"-{other}.json", f"-{other}.txt")):
            # A node without the lists of IPv4 counts as one whose routes are not known.
            found |= {path: "[]\n"} if path.endswith("-4.json") else {}
            continue
        match path.removeprefix("net/").partition(".")[0]:
            case "routes-4" | "routes-6":
                found[path] = by_json(path, lambda one: _route_kept(one, near.addresses), _ROUTE_KEYS)
            case "policies-4" | "policies-6":
                found[path] = by_json(path, lambda _one: True)
            case "links" | "addresses":
                found[path] = by_json(path, lambda one: one.get("ifname") in near.links)
            case "neighbours":
                found[path] = by_json(path, lambda one: one.get("dst") in near.addresses)
            case "fdb":
                found[path] = by_json(path, lambda one: one.get("mac") in macs or _is_default(one, near))
            case "listeners":
                found[path] = lines(text, lambda line: _listens(line, flow))
            case "conntrack-4" | "conntrack-6":
                found[path] = _connections(text, flow)
            case "sysctls":
                found[path] = lines(text, lambda line: _setting_kept(line, near.links))
            case _:
                found[path] = text
    return found


def json_lines(entries: Iterable[object]) -> str:
    """Return a JSON list with one entry on each line."""
    return "[" + ",\n".join(msgspec.json.encode(entry).decode() for entry in entries) + "]\n"


def _route_kept(route: Mapping[str, Any], addresses: Iterable[str]) -> bool:
    destination = str(route.get("dst", ""))
    return destination in _DEFAULTS or named(destination, addresses)


def _is_default(entry: Mapping[str, Any], near: Nearby) -> bool:
    return entry.get("mac") == "00:00:00:00:00:00" and entry.get("ifname") in near.links


def _link(entry: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: entry[key] for key in _LINK_KEYS if key in entry}
    info = kept.get("linkinfo")
    if isinstance(info, dict):
        kept["linkinfo"] = {
            key: {one: info[key][one] for one in inner if one in info[key]} if inner else info[key]
            for key, inner in _INFO_KEYS.items()
            if key in info and (not inner or isinstance(info[key], dict))
        }
    return kept


def _with_addresses(entry: Mapping[str, Any], near: Nearby, family: IPFamily) -> dict[str, Any]:
    held = [one for one in entry.get("addr_info", ()) if isinstance(one, dict)]
    held = [one for one in held if (":" in str(one.get("local"))) is (family is IPFamily.IPV6)]
    few = [one for number, one in enumerate(held) if number < _FEW_ADDRESSES or one.get("local") in near.addresses]
    kept = {key: entry[key] for key in _ADDRESS_KEYS if key in entry}
    return {**kept, "addr_info": [{key: one[key] for key in _LOCAL_KEYS if key in one} for one in few]}


def _listens(line: str, flow: IssueFlow) -> bool:
    words = line.split()
    port = words[4].rpartition(":")[2] if len(words) > 4 else ""
    return port.isdigit() and int(port) in flow.ports


def _connections(text: str, flow: IssueFlow) -> str:
    """Return the connections to a destination of the flow: all of its own sender, and a few of others."""
    targets = {(each.destination, each.port) for each in flow.headers}
    sources = {each.source for each in flow.headers}
    own: list[str] = []
    others: list[str] = []
    for line in text.split("\n"):
        found = read_line(line)
        if found is not None and (found.destination, found.port) in targets:
            (own if found.source in sources else others).append(line)
    return "".join(f"{line}\n" for line in (*own, *others[:_FEW_CONNECTIONS]))


def _setting_kept(line: str, links: frozenset[str]) -> bool:
    name = line.partition("=")[0].strip().split(".")
    if "conf" not in name:
        return True
    link = name[name.index("conf") + 1 :][:1]
    return bool(link) and (link[0] in ("all", "default") or link[0].replace("/", ".") in links)
