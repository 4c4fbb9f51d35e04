"""Routes and policy rules, from `ip -j`, `ip route`, `ip rule`, and `route -n`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from narthex.model import IPFamily, address, family_of, network
from narthex.trace.follow.views import LOCAL, MAIN, NextHop, NodeRoute, PolicyRule

_KINDS = (
    "unicast",
    "local",
    "broadcast",
    "multicast",
    "anycast",
    "blackhole",
    "unreachable",
    "prohibit",
    "throw",
    "nat",
)
_DEFAULT = {IPFamily.IPV4: "0.0.0.0/0", IPFamily.IPV6: "::/0"}
_KNOWN = {"priority", "src", "srclen", "dst", "dstlen", "iif", "oif", "fwmark", "fwmask", "table", "action", "not",
          "suppress_prefixlen", "protocol", "goto", "iif_detached", "oif_detached", "l3mdev"}  # fmt: skip


def routes_of(data: Any, family: IPFamily) -> tuple[NodeRoute, ...]:
    """Read the JSON of `ip -j -4 route show table all`. Raises ValueError."""
    return _siblings([_route(entry, family) for entry in data])


def _route(entry: dict[str, Any], family: IPFamily) -> NodeRoute:
    where = str(entry["dst"])
    metrics = {key: value for each in entry.get("metrics", ()) for key, value in each.items()}
    hops = entry.get("nexthops") or ([entry] if "dev" in entry or "gateway" in entry or "via" in entry else [])
    return NodeRoute(
        destination=_network(where, family),
        table=str(entry.get("table", MAIN)),
        kind=str(entry.get("type", "unicast")),
        hops=tuple(map(_hop, hops)),
        metric=int(entry.get("metric", 0)),
        source=str(entry.get("prefsrc", "")),
        mtu=int(metrics.get("mtu", 0)),
        text=_route_text(entry),
    )


def _hop(entry: dict[str, Any]) -> NextHop:
    flags = entry.get("flags", ())
    via = entry.get("gateway") or entry.get("via", {}).get("host", "")
    return NextHop(
        link=str(entry.get("dev", "")),
        via=address(via) if via else "",
        weight=int(entry.get("weight", 1)),
        onlink="onlink" in flags,
        dead="dead" in flags,
    )


def _route_text(entry: dict[str, Any]) -> str:
    words = [] if entry.get("type", "unicast") == "unicast" else [entry["type"]]
    words.append(entry["dst"])
    for hop in entry.get("nexthops", ()):
        words += ["nexthop", *_hop_words(hop), *(["weight", hop["weight"]] if "weight" in hop else [])]
    words += _hop_words(entry)
    for key, name in (
        ("table", "table"),
        ("protocol", "proto"),
        ("scope", "scope"),
        ("prefsrc", "src"),
        ("metric", "metric"),
    ):
        if entry.get(key):
            words += [name, entry[key]]
    return " ".join(map(str, (*words, *entry.get("flags", ()))))


def _hop_words(entry: dict[str, Any]) -> list[str]:
    via = entry.get("gateway") or entry.get("via", {}).get("host", "")
    return [*(["via", via] if via else []), *(["dev", entry["dev"]] if "dev" in entry else [])]


def _siblings(routes: list[NodeRoute]) -> tuple[NodeRoute, ...]:
    """Join routes that are printed in several lines: IPv6 prints each next hop separately."""
    found: dict[tuple[str, str, int, str], NodeRoute] = {}
    hops: dict[tuple[str, str, int, str], list[NextHop]] = {}
    for number, route in enumerate(routes):
        several = route.kind == "unicast" and ":" in route.destination and any(hop.via for hop in route.hops)
        key = (route.table, route.destination, route.metric, route.kind if several else f"{route.kind} {number}")
        if key in found:
            hops[key] += route.hops
        else:
            found[key] = route
            hops[key] = [*route.hops]
    return tuple(
        route if len(hops[key]) == len(route.hops) else msgspec.structs.replace(route, hops=tuple(hops[key]))
        for key, route in found.items()
    )


def _network(text: str, family: IPFamily) -> str:
    if text == "default":
        return _DEFAULT[family]
    return network(text if "/" in text else f"{text}/{family.host_bits}")


def policies_of(data: Any, family: IPFamily) -> tuple[PolicyRule, ...]:
    """Read the JSON of `ip -j -4 rule show`. Raises ValueError."""
    return tuple(_policy(entry, family) for entry in data)


def _policy(entry: dict[str, Any], family: IPFamily) -> PolicyRule:
    strange = sorted(set(entry) - _KNOWN)
    source = _selector(entry, "src", "srclen", family)
    destination = _selector(entry, "dst", "dstlen", family)
    mark = entry.get("fwmark")
    mask = entry.get("fwmask")
    words = [f"{entry['priority']}:", "not" if "not" in entry else "", f"from {source or 'all'}"]
    words += [f"to {destination}" if destination else "", f"iif {entry['iif']}" if "iif" in entry else ""]
    words += [f"fwmark {mark}" + (f"/{mask}" if mask else "") if mark is not None else ""]
    words += [f"lookup {entry['table']}" if "table" in entry else str(entry.get("action", ""))]
    return PolicyRule(
        family=family,
        priority=int(entry["priority"]),
        table=str(entry.get("table", "")),
        action=str(entry.get("action", "")) + (f" {entry['goto']}" if "goto" in entry else ""),
        source=source,
        destination=destination,
        iif=str(entry.get("iif", "")),
        oif=str(entry.get("oif", "")),
        mark=None if mark is None else int(str(mark), 0),
        mask=0xFFFFFFFF if mask is None else int(str(mask), 0),
        negate="not" in entry,
        suppress_prefix=int(entry.get("suppress_prefixlen", -1)),
        strange=", ".join(strange) or ("l3mdev" if "l3mdev" in entry else ""),
        text=" ".join(filter(None, words)),
    )


def _selector(entry: dict[str, Any], name: str, length: str, family: IPFamily) -> str:
    value = str(entry.get(name, "all"))
    return "" if value == "all" else _network(f"{value}/{entry[length]}" if length in entry else value, family)


# ---- text ----------------------------------------------------------------------------------------------------------

_ROUTE_N = re.compile(r"^(\S+)\s+(\S+)\s+(\d+(?:\.\d+){3})\s+[A-Z!]+\s+(\d+)\s+\d+\s+\d+\s+(\S+)\s*$")
ROUTE_LINE = re.compile(
    rf"^(?:(?:{'|'.join(_KINDS)})\s+)?(?:default|[0-9a-fA-F.:]+(?:/\d+)?)(?:\s+(?:via|dev|proto|scope|src|metric|nhid|linkdown|onlink|nexthop|table|mtu|advmss|pref)\b|\s*$)"
)


def route_lines(text: str) -> tuple[NodeRoute, ...]:
    """Return all routes in a text with lines of `ip route`, `route -n`, and anything else."""
    return _siblings([route for line in _joined(text) if (route := route_line(line)) is not None])


def _joined(text: str) -> Iterator[str]:
    """Yield lines, with `nexthop` lines appended to the line before."""
    held = ""
    for line in text.splitlines():
        if line[:1].isspace() and re.match(r"\s+nexthop\s", line):
            held += " " + line.strip()
            continue
        if held:
            yield held
        held = line.strip()
    if held:
        yield held


def route_line(line: str) -> NodeRoute | None:
    """Parse a line of `ip route` or `route -n`; return None if it is neither."""
    old = _ROUTE_N.match(line)
    try:
        if old:
            to, via, mask, metric, link = old.groups()
            destination = network(f"{'0.0.0.0' if to == 'default' else to}/{_bits(mask)}")
            hop = NextHop(link=link, via="" if via in ("0.0.0.0", "*") else address(via))
            return NodeRoute(destination=destination, hops=(hop,), metric=int(metric), text=" ".join(line.split()))
        return _ip_route(line) if ROUTE_LINE.match(line) else None
    except (ValueError, IndexError, StopIteration):
        return None


def _bits(mask: str) -> int:
    value = int.from_bytes(bytes(map(int, mask.split("."))), "big")
    return value.bit_count()


def _ip_route(line: str) -> NodeRoute:
    first, *rest = line.split(" nexthop ")
    words = first.split()
    kind = words.pop(0) if words[0] in _KINDS else "unicast"
    where = words.pop(0)
    entry = _options(words)
    hops = [_options(hop.split()) for hop in rest]
    if kind == "unicast" and not any("gateway" in hop or "dev" in hop for hop in (entry, *hops)):
        raise ValueError(f"neither an interface nor a next hop: {line}")
    table = LOCAL if kind in ("local", "broadcast") else MAIN
    inside = next((hop["gateway"] for hop in hops or [entry] if "gateway" in hop), entry.get("prefsrc", ""))
    family = family_of(where if where != "default" else inside)
    entry = {"table": table, **entry, "dst": where, "type": kind, "metrics": [{"mtu": entry.get("mtu", 0)}]}
    route = _route({**entry, "nexthops": hops} if hops else entry, family)
    return msgspec.structs.replace(route, text=" ".join(line.split()))


_FLAGS = ("onlink", "linkdown", "dead", "pervasive", "offload", "trap")
_NAMES = {"via": "gateway", "proto": "protocol", "src": "prefsrc"}
"""Words of `ip route` that have other names in its JSON."""


def _options(words: list[str]) -> dict[str, Any]:
    """Return words of `ip route` as in its JSON."""
    found: dict[str, Any] = {"flags": []}
    rest = iter(words)
    for word in rest:
        if word in _FLAGS:
            found["flags"].append(word)
            continue
        value = next(rest)
        found[_NAMES.get(word, word)] = next(rest) if word == "via" and value in ("inet", "inet6") else value
    return found


def policy_lines(text: str) -> tuple[PolicyRule, ...]:
    """Return all lines of `ip rule` in a text, assumed to be for IPv4. Raises ValueError."""
    return tuple(
        _policy_line(match[1], match[2]) for match in re.finditer(r"^(\d+):\s+((?:not )?from .*)$", text, re.M)
    )


def _policy_line(priority: str, words: str) -> PolicyRule:
    entry: dict[str, Any] = {"priority": int(priority)}
    parts = iter(words.split())
    for word in parts:
        if word == "not":
            entry["not"] = None
        elif word in ("blackhole", "unreachable", "prohibit", "nop"):
            entry["action"] = word
        else:
            value = next(parts, "")
            entry |= _policy_word(word, value)
    return _policy(entry, IPFamily.IPV4)


def _policy_word(word: str, value: str) -> dict[str, Any]:
    if word == "fwmark":
        mark, _, mask = value.partition("/")
        return {"fwmark": mark, **({"fwmask": mask} if mask else {})}
    return {
        {"from": "src", "to": "dst", "lookup": "table", "suppress_prefixlength": "suppress_prefixlen"}.get(
            word, word
        ): value
    }
