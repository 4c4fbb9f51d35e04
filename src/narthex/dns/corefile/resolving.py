"""Lines of a Corefile about names that others know: forward and cache."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from narthex.dns.corefile.settings import (
    MOST_UPSTREAMS,
    Cache,
    Forward,
    HealthCheck,
    Kept,
    Prefetch,
    Stale,
    Tls,
    Upstream,
    Zones,
)
from narthex.dns.corefile.values import Line, upstream
from narthex.model.problem import quoted

_LONGEST_SERVFAIL = 300.0
_FORWARD = (
    "except", "force_tcp", "prefer_udp", "expire", "max_fails", "tls", "tls_servername", "policy", "health_check",
    "max_concurrent", "next", "failover", "failfast_all_unhealthy_upstreams",
)  # fmt: skip
_FLAGS = {"force_tcp": "force_tcp", "prefer_udp": "prefer_udp", "failfast_all_unhealthy_upstreams": "fail_fast"}
_POLICIES = ("random", "round_robin", "sequential")


def forward(line: Line, _of_block: Zones) -> Forward | None:
    """`forward FROM TO... { … }`"""
    found: dict[str, Any] = {}
    tls = Tls()
    excluded: tuple[str, ...] = ()
    for option in line.options(_FORWARD):
        if option.name == "except":
            excluded += option.zones(option.words) if option.takes(1) else ()
        elif option.name in ("tls", "tls_servername"):
            tls = _tls(option, tls)
        elif option.name in _FLAGS:
            option.takes(0, 0)
            found[_FLAGS[option.name]] = True
        else:
            found.update(_forward_option(option))
    if not line.takes(2):
        return None
    zones = line.zones(line.words[:1])
    if len(zones) > 1:
        line.error(f"{quoted(line.words[0])} stands for {len(zones)} zones; write a forward for each")
    to = _upstreams(line)
    if not zones or not to:
        return None
    if any(isinstance(server, Upstream) and server.transport == "tls" for server in to) and not tls.server_name:
        line.warning("no tls_servername: certificates must be made out to the upstreams' addresses")
    return Forward(zone=zones[0], to=to, excluded=tuple(dict.fromkeys(excluded)), tls=tls, **found)


def _upstreams(line: Line) -> tuple[Upstream | str, ...]:
    found: list[Upstream | str] = []
    for word in line.words[1:]:
        try:
            server = upstream(word)
        except ValueError as error:
            line.error(f"{quoted(word)}: {error}")
            continue
        if server is not None:
            found.append(server)
        elif "/" in word or word.endswith(".conf"):
            found.append(word)
        else:
            line.error(f"{quoted(word)} is neither an address nor the path of a resolv.conf")
    if len(found) > MOST_UPSTREAMS:
        line.error(f"{len(found)} upstreams are too many; {MOST_UPSTREAMS} are allowed")
    return tuple(found)


def _tls(option: Line, tls: Tls) -> Tls:
    if option.name == "tls_servername":
        return msgspec.structs.replace(tls, server_name=option.words[0]) if option.takes(1, 1) else tls
    if not option.takes(0, 3):
        return tls
    words = option.words
    certificate, key = words[:2] if len(words) > 1 else ("", "")
    authority = words[-1] if len(words) in (1, 3) else ""
    return msgspec.structs.replace(tls, certificate=certificate, key=key, authority=authority)


def _forward_option(option: Line) -> dict[str, Any]:
    words = option.words
    match option.name:
        case "expire" if option.takes(1, 1):
            return _given(expire=option.duration(words[0]))
        case "max_fails" | "max_concurrent" if option.takes(1, 1):
            return _given(**{option.name: option.whole(words[0], 0)})
        case "policy" if option.takes(1, 1):
            if words[0] in _POLICIES:
                return {"policy": words[0]}
            option.error(f"{quoted(words[0])} is unknown; known are {', '.join(_POLICIES)}")
        case "health_check" if option.takes(1, 4):
            return _health_check(option)
        case "next" if option.takes(1):
            return {"next_on": option.rcodes()}
        case "failover" if option.takes(1):
            return {"failover_on": option.rcodes()}
    return {}


def _health_check(option: Line) -> dict[str, Any]:
    every = option.duration(option.words[0], low=0.01)
    found: dict[str, Any] = {}
    rest = list(option.words[1:])
    while rest:
        word = rest.pop(0)
        if word == "no_rec":
            found["recursion"] = False
        elif word == "domain" and rest:
            domain = option.zones((rest.pop(0),))
            found.update({"domain": domain[0]} if len(domain) == 1 else {})
        else:
            option.error(f"{quoted(word)} is unknown; known are no_rec and domain NAME")
            return {}
    return {} if every is None else {"health_check": HealthCheck(every=every, **found)}


def cache(line: Line, of_block: Zones) -> Cache:
    """`cache [TTL] [ZONES...] { … }`"""
    words = line.words
    cached = Cache(zones=of_block)
    if words and re.fullmatch(r"[+-]?\d+", words[0], re.ASCII):
        longest = line.whole(words[0], 1, 2**31 - 1)
        if longest is not None:
            cached = Cache(zones=of_block, success=Kept(longest=longest), denial=Kept(longest=longest))
        words = words[1:]
    cached = msgspec.structs.replace(cached, zones=line.zones(words, of_block))
    for option in line.options(("success", "denial", "prefetch", "serve_stale", "servfail", "disable", "keepttl")):
        cached = msgspec.structs.replace(cached, **_cache_option(option, cached, of_block))
    return cached


def _cache_option(option: Line, cached: Cache, of_block: Zones) -> dict[str, Any]:
    words = option.words
    match option.name:
        case "success" | "denial" if option.takes(1, 3):
            before: Kept = getattr(cached, option.name)
            numbers = [option.whole(word, low) for word, low in zip(words, (1, 1, 0), strict=False)]
            if None not in numbers:
                fields = dict(zip(("capacity", "longest", "least"), numbers, strict=False))
                return {option.name: msgspec.structs.replace(before, **fields)}
        case "prefetch" if option.takes(1, 3):
            return _prefetch(option)
        case "serve_stale" if option.takes(0, 2):
            return _stale(option)
        case "servfail" if option.takes(1, 1):
            return _given(servfail=option.duration(words[0], high=_LONGEST_SERVFAIL))
        case "disable" if option.takes(1):
            if words[0] in ("success", "denial"):
                return {f"no_{words[0]}": option.zones(words[1:], of_block)}
            option.error(f"{quoted(words[0])} is unknown; known are success and denial")
        case "keepttl" if option.takes(0, 0):
            return {"keep_ttl": True}
    return {}


def _prefetch(option: Line) -> dict[str, Any]:
    words = option.words
    amount = option.whole(words[0], 0)
    window = option.duration(words[1]) if len(words) > 1 else 60.0
    percent: int | None = 10
    if len(words) > 2:
        if words[2].endswith("%"):
            percent = option.whole(words[2].removesuffix("%"), 10, 90)
        else:
            option.error(f"{quoted(words[2])} is not a percentage such as 10%")
            percent = None
    if amount is None or window is None or percent is None:
        return {}
    return {"prefetch": Prefetch(amount=amount, window=window, percent=percent) if amount else None}


def _stale(option: Line) -> dict[str, Any]:
    longest = option.duration(option.words[0]) if option.words else 3600.0
    mode = option.words[1] if len(option.words) > 1 else "immediate"
    if mode not in ("immediate", "verified", "verify"):
        option.error(f"{quoted(mode)} is unknown; known are immediate and verify")
        return {}
    return (
        {}
        if longest is None
        else {"stale": Stale(longest=longest, mode="immediate" if mode == "immediate" else "verified")}
    )


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
