"""Every plugin a Corefile may name: which field of a ServerBlock it fills, and by which function."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from narthex.dns.corefile import cluster, resolving
from narthex.dns.corefile.settings import (
    Bind,
    Consolidate,
    Errors,
    Health,
    LoadBalance,
    Log,
    Prometheus,
    Ready,
    Reload,
    Zones,
)
from narthex.dns.corefile.values import Line
from narthex.model.problem import one_of, quoted

_CLASSES = ("success", "denial", "error", "all")
_LEVELS = ("debug", "info", "warning", "error")
_LEAST_INTERVAL = 2.0
_LEAST_JITTER = 1.0


class Plugin(msgspec.Struct, frozen=True):
    """How one plugin is read. `read` takes its line and the server block's zones; None: nothing usable was there."""

    field: str
    read: Callable[[Line, Zones], Any]
    repeats: bool = False
    """It may be there several times; the field is then a tuple."""


def _flag(line: Line, _of_block: Zones) -> bool:
    line.takes(0, 0)
    line.takes_no_block()
    return True


def _bind(line: Line, _of_block: Zones) -> Bind | None:
    excluded: tuple[str, ...] = ()
    for option in line.options(("except",)):
        excluded += option.words if option.takes(1) else ()
    return Bind(to=line.words, excluded=excluded) if line.takes(1) else None


def _debug(line: Line, _of_block: Zones) -> bool:
    line.takes_no_block()
    line.warning("has no effect: there is no recovery from faults of our own that it could switch off")
    return line.takes(0, 0)


def _errors(line: Line, _of_block: Zones) -> Errors:
    line.takes(0, 0)
    found = []
    for option in line.options(("consolidate", "stacktrace", "panicRecoveryStacktrace")):
        if option.name != "consolidate":
            option.warning("has no effect: it is about faults in the code of CoreDNS")
        elif option.takes(2, 3):
            every = option.duration(option.words[0])
            level = option.words[2] if len(option.words) > 2 else "error"
            if level not in _LEVELS:
                option.error(f"{quoted(level)} is unknown; known are {one_of(_LEVELS)}")
            elif _pattern(option, option.words[1]) and every is not None:
                fields = {"every": every, "pattern": option.words[1], "level": level}
                found.append(msgspec.convert(fields, Consolidate))
    return Errors(consolidate=tuple(found))


def _pattern(option: Line, pattern: str) -> bool:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        option.error(f"{quoted(pattern)} is not a regular expression: {error}")
        return False
    return True


def _log(line: Line, _of_block: Zones) -> Log:
    *names, last = line.words or ("",)
    if "{" not in last:
        names, last = list(line.words), "{common}"
    classes: list[str] = []
    slower: float | None = None
    for option in line.options(("class", "minDuration")):
        if option.name == "minDuration":
            slower = option.duration(option.words[0]) if option.takes(1, 1) else None
            continue
        for word in option.words if option.takes(1) else ():
            if word in _CLASSES:
                classes.append(word)
            else:
                option.error(f"{quoted(word)} is unknown; known are {one_of(_CLASSES)}")
    chosen = tuple(dict.fromkeys(classes)) or ("all",)
    fields = {"zones": line.zones(names, (".",)), "format": last, "classes": chosen, "slower_than": slower}
    return msgspec.convert(fields, Log)


def _health(line: Line, _of_block: Zones) -> Health:
    found: dict[str, Any] = _listen(line)
    for option in line.options(("lameduck",)):
        if option.takes(1, 1) and (lameduck := option.duration(option.words[0])) is not None:
            found["lameduck"] = lameduck
    return Health(**found)


def _ready(line: Line, _of_block: Zones) -> Ready:
    found: dict[str, Any] = _listen(line)
    for option in line.options(("monitor",)):
        if option.takes(1, 1):
            if option.words[0] in ("until-ready", "continuously"):
                found["monitor"] = option.words[0]
            else:
                option.error(f"{quoted(option.words[0])} is unknown; known are until-ready and continuously")
    return Ready(**found)


def _prometheus(line: Line, _of_block: Zones) -> Prometheus:
    for option in line.options(("runtime_metrics", "tls")):
        if option.name == "tls":
            option.error("is not supported; the endpoint speaks plain HTTP")
        else:
            option.warning("has no effect: it is about the runtime of Go")
    return Prometheus(**_listen(line))


def _listen(line: Line) -> dict[str, Any]:
    if line.takes(0, 1) and line.words:
        listen = line.listen(line.words[0])
        return {} if listen is None else {"listen": listen}
    return {}


def _loadbalance(line: Line, _of_block: Zones) -> LoadBalance:
    if line.words and line.words[0] != "round_robin":
        line.error(f"{quoted(line.words[0])} is not supported; round_robin is")
    elif line.words:
        line.takes(0, 1)
    limit = 0
    for option in line.options(("limit_answers",)):
        if option.takes(1, 1):
            limit = option.whole(option.words[0], 1) or 0
    return LoadBalance(limit=limit)


def _reload(line: Line, _of_block: Zones) -> Reload:
    line.takes(0, 2)
    line.takes_no_block()
    times = [line.duration(word, low) for word, low in zip(line.words, (_LEAST_INTERVAL, 0.0), strict=False)]
    interval = times[0] if times and times[0] is not None else 30.0
    jitter = times[1] if len(times) > 1 and times[1] is not None else 15.0
    if 0 < jitter < _LEAST_JITTER:
        line.error(f"a jitter of {quoted(line.words[1])} is below 1s; 0s is none at all")
    return Reload(interval=interval, jitter=min(jitter, interval / 2))


PLUGINS = {
    "autopath": Plugin("autopath", cluster.autopath),
    "bind": Plugin("bind", _bind, repeats=True),
    "cache": Plugin("cache", resolving.cache),
    "debug": Plugin("debug", _debug),
    "errors": Plugin("errors", _errors),
    "forward": Plugin("forwards", resolving.forward, repeats=True),
    "health": Plugin("health", _health),
    "hosts": Plugin("hosts", cluster.hosts),
    "k8s_external": Plugin("external", cluster.external),
    "kubernetes": Plugin("kubernetes", cluster.kubernetes),
    "loadbalance": Plugin("loadbalance", _loadbalance),
    "log": Plugin("log", _log, repeats=True),
    "loop": Plugin("loop", _flag),
    "prometheus": Plugin("prometheus", _prometheus),
    "ready": Plugin("ready", _ready),
    "reload": Plugin("reload", _reload),
}
ELSEWHERE = frozenset(
    [
        "acl",
        "any",
        "auto",
        "azure",
        "bufsize",
        "cancel",
        "chaos",
        "clouddns",
        "dns64",
        "dnssec",
        "dnstap",
        "erratic",
        "etcd",
        "file",
        "geoip",
        "grpc",
        "grpc_server",
        "header",
        "https",
        "https3",
        "local",
        "metadata",
        "minimal",
        "multisocket",
        "nomad",
        "nsid",
        "pprof",
        "quic",
        "rewrite",
        "root",
        "route53",
        "secondary",
        "sign",
        "template",
        "timeouts",
        "tls",
        "trace",
        "transfer",
        "tsig",
        "view",
        "whoami",
    ]
)
"""Plugins of CoreDNS that are not here."""
