"""The plugins that a Corefile may name (`PLUGINS`, at the end), and the parser of each plugin's directive."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from narthex.dns.corefile import filters
from narthex.dns.corefile.directive import Directive, parse_upstream
from narthex.dns.corefile.pattern import PatternError, compile_pattern
from narthex.dns.corefile.settings import (
    MAX_TTL,
    MAX_UPSTREAMS,
    AutopathSettings,
    BindSettings,
    CacheBounds,
    CacheSettings,
    ConsolidateRule,
    ErrorsSettings,
    ForwardSettings,
    HealthCheckSettings,
    HealthSettings,
    HostsSettings,
    K8sExternalSettings,
    KubernetesSettings,
    LoadBalanceSettings,
    LogSettings,
    PrefetchSettings,
    PrometheusSettings,
    ReadySettings,
    ReloadSettings,
    ServeStaleSettings,
    Upstream,
    UpstreamTlsSettings,
    Zones,
)
from narthex.model import address, one_of, quoted
from narthex.model.selector import parse_selector

_CLASSES = ("success", "denial", "error", "all")
_LEVELS = ("debug", "info", "warning", "error")
_MIN_INTERVAL = 2.0
_MIN_JITTER = 1.0


class PluginSyntax(msgspec.Struct, frozen=True):
    """How the directive of a plugin is parsed, and the field of `ServerBlock` for the result."""

    field: str
    parse: Callable[[Directive, Zones], Any]
    """Takes the directive and the zones of the server block. Returns None if nothing is usable."""
    repeats: bool = False
    """True if a server block may contain several of these directives; the field is then a tuple."""


def _flag(directive: Directive, _block_zones: Zones) -> bool:
    directive.takes(0, 0)
    directive.takes_no_block()
    return True


def _bind(directive: Directive, _block_zones: Zones) -> BindSettings | None:
    excluded: tuple[str, ...] = ()
    for option in directive.options(("except",)):
        excluded += option.words if option.takes(1) else ()
    return BindSettings(to=directive.words, excluded=excluded) if directive.takes(1) else None


def _debug(directive: Directive, _block_zones: Zones) -> bool:
    directive.takes_no_block()
    directive.warning("has no effect: this server has no recovery from panics that it could disable")
    return directive.takes(0, 0)


def _errors(directive: Directive, _block_zones: Zones) -> ErrorsSettings:
    directive.takes(0, 0)
    found = []
    for option in directive.options(("consolidate", "stacktrace", "panicRecoveryStacktrace")):
        if option.name != "consolidate":
            option.warning("has no effect: it concerns panics in the code of CoreDNS")
        elif option.takes(2, 3):
            interval = option.duration(option.words[0])
            level = option.words[2] if len(option.words) > 2 else "error"
            if level not in _LEVELS:
                option.error(f"{quoted(level)} is unknown; known are {one_of(_LEVELS)}")
            elif _pattern(option, option.words[1]) and interval is not None:
                fields: dict[str, Any] = {"interval": interval, "pattern": option.words[1], "level": level}
                found.append(ConsolidateRule(**fields))
    return ErrorsSettings(consolidate=tuple(found))


def _pattern(option: Directive, pattern: str) -> bool:
    try:
        compile_pattern(pattern)
    except PatternError as error:
        option.error(f"{quoted(pattern)} is not a regular expression: {error}")
        return False
    return True


def _log(directive: Directive, _block_zones: Zones) -> LogSettings:
    *names, last = directive.words or ("",)
    if "{" not in last:
        names, last = list(directive.words), "{common}"
    classes: list[str] = []
    min_duration: float | None = None
    for option in directive.options(("class", "minDuration")):
        if option.name == "minDuration":
            min_duration = option.duration(option.words[0]) if option.takes(1, 1) else None
            continue
        for word in option.words if option.takes(1) else ():
            if word in _CLASSES:
                classes.append(word)
            else:
                option.error(f"{quoted(word)} is unknown; known are {one_of(_CLASSES)}")
    chosen = tuple(dict.fromkeys(classes)) or ("all",)
    fields: dict[str, Any] = {
        "zones": directive.zones(names, (".",)),
        "format": last,
        "classes": chosen,
        "min_duration": min_duration,
    }
    return LogSettings(**fields)


def _health(directive: Directive, _block_zones: Zones) -> HealthSettings:
    found: dict[str, Any] = _listen_at(directive)
    for option in directive.options(("lameduck",)):
        if option.takes(1, 1) and (lameduck := option.duration(option.words[0])) is not None:
            found["lameduck"] = lameduck
    return HealthSettings(**found)


def _ready(directive: Directive, _block_zones: Zones) -> ReadySettings:
    found: dict[str, Any] = _listen_at(directive)
    for option in directive.options(("monitor",)):
        if option.takes(1, 1):
            if option.words[0] in ("until-ready", "continuously"):
                found["monitor"] = option.words[0]
            else:
                option.error(f"{quoted(option.words[0])} is unknown; known are until-ready and continuously")
    return ReadySettings(**found)


def _prometheus(directive: Directive, _block_zones: Zones) -> PrometheusSettings:
    for option in directive.options(("runtime_metrics", "tls")):
        if option.name == "tls":
            option.error("is not supported; the endpoint speaks plain HTTP")
        else:
            option.warning("has no effect: it concerns the Go runtime")
    return PrometheusSettings(**_listen_at(directive))


def _listen_at(directive: Directive) -> dict[str, Any]:
    if directive.takes(0, 1) and directive.words:
        listen = directive.listen(directive.words[0])
        return {} if listen is None else {"listen": listen}
    return {}


def _loadbalance(directive: Directive, _block_zones: Zones) -> LoadBalanceSettings:
    if directive.words and directive.words[0] != "round_robin":
        directive.error(f"{quoted(directive.words[0])} is not supported; round_robin is")
    elif directive.words:
        directive.takes(0, 1)
    limit = 0
    for option in directive.options(("limit_answers",)):
        if option.takes(1, 1):
            limit = option.whole(option.words[0], 1) or 0
    return LoadBalanceSettings(limit=limit)


def _reload(directive: Directive, _block_zones: Zones) -> ReloadSettings:
    directive.takes(0, 2)
    directive.takes_no_block()
    times = [directive.duration(word, low) for word, low in zip(directive.words, (_MIN_INTERVAL, 0.0), strict=False)]
    interval = times[0] if times and times[0] is not None else 30.0
    jitter = times[1] if len(times) > 1 and times[1] is not None else 15.0
    if 0 < jitter < _MIN_JITTER:
        directive.error(f"a jitter of {quoted(directive.words[1])} is below 1s; 0s is none at all")
    return ReloadSettings(interval=interval, jitter=min(jitter, interval / 2))


_MAX_SERVFAIL = 300.0
_FORWARD = (
    "except", "force_tcp", "prefer_udp", "expire", "max_fails", "tls", "tls_servername", "policy", "health_check",
    "max_concurrent", "next", "failover", "failfast_all_unhealthy_upstreams",
)  # fmt: skip
_FLAGS = {"force_tcp": "force_tcp", "prefer_udp": "prefer_udp", "failfast_all_unhealthy_upstreams": "fail_fast"}
_POLICIES = ("random", "round_robin", "sequential")


def _forward(directive: Directive, _block_zones: Zones) -> ForwardSettings | None:
    """Parse `forward FROM TO... { … }`."""
    found: dict[str, Any] = {}
    tls = UpstreamTlsSettings()
    excluded: tuple[str, ...] = ()
    for option in directive.options(_FORWARD):
        if option.name == "except":
            excluded += option.zones(option.words) if option.takes(1) else ()
        elif option.name in ("tls", "tls_servername"):
            tls = _tls(option, tls)
        elif option.name in _FLAGS:
            option.takes(0, 0)
            found[_FLAGS[option.name]] = True
        else:
            found.update(_forward_option(option))
    if not directive.takes(2):
        return None
    zones = directive.zones(directive.words[:1])
    if len(zones) > 1:
        directive.error(f"{quoted(directive.words[0])} stands for {len(zones)} zones; write a forward for each")
    to = _upstreams(directive)
    if not zones or not to:
        return None
    if any(isinstance(server, Upstream) and server.transport == "tls" for server in to) and not tls.server_name:
        directive.warning("no tls_servername: certificates must be made out to the upstreams' addresses")
    return ForwardSettings(zone=zones[0], to=to, excluded=tuple(dict.fromkeys(excluded)), tls=tls, **found)


def _upstreams(directive: Directive) -> tuple[Upstream | str, ...]:
    found: list[Upstream | str] = []
    for word in directive.words[1:]:
        try:
            server = parse_upstream(word)
        except ValueError as error:
            directive.error(f"{quoted(word)}: {error}")
            continue
        if server is not None:
            found.append(server)
        elif "/" in word or word.endswith(".conf"):
            found.append(word)
        else:
            directive.error(f"{quoted(word)} is neither an address nor the path of a resolv.conf")
    if len(found) > MAX_UPSTREAMS:
        directive.error(f"{len(found)} upstreams are too many; {MAX_UPSTREAMS} are allowed")
    return tuple(found)


def _tls(option: Directive, tls: UpstreamTlsSettings) -> UpstreamTlsSettings:
    if option.name == "tls_servername":
        return msgspec.structs.replace(tls, server_name=option.words[0]) if option.takes(1, 1) else tls
    if not option.takes(0, 3):
        return tls
    words = option.words
    certificate, key = words[:2] if len(words) > 1 else ("", "")
    authority = words[-1] if len(words) in (1, 3) else ""
    return msgspec.structs.replace(tls, certificate=certificate, key=key, authority=authority)


def _forward_option(option: Directive) -> dict[str, Any]:
    words = option.words
    match option.name:
        case "expire" if option.takes(1, 1):
            return _given(expire=option.duration(words[0]))
        case "max_fails" | "max_concurrent" if option.takes(1, 1):
            return _given(**{option.name: option.whole(words[0], 0)})
        case "policy" if option.takes(1, 1):
            return _known_word(option, "policy", _POLICIES)
        case "health_check" if option.takes(1, 4):
            return _health_check(option)
        case "next" if option.takes(1):
            return {"next_on": option.rcodes()}
        case "failover" if option.takes(1):
            return {"failover_on": option.rcodes()}
    return {}


def _health_check(option: Directive) -> dict[str, Any]:
    interval = option.duration(option.words[0], low=0.01)
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
    return {} if interval is None else {"health_check": HealthCheckSettings(interval=interval, **found)}


def _cache(directive: Directive, block_zones: Zones) -> CacheSettings:
    """Parse `cache [TTL] [ZONES...] { … }`."""
    words = directive.words
    cached = CacheSettings(zones=block_zones)
    if words and re.fullmatch(r"[+-]?\d+", words[0], re.ASCII):
        max_ttl = directive.whole(words[0], 1, 2**31 - 1)
        if max_ttl is not None:
            cached = CacheSettings(
                zones=block_zones, success=CacheBounds(max_ttl=max_ttl), denial=CacheBounds(max_ttl=max_ttl)
            )
        words = words[1:]
    cached = msgspec.structs.replace(cached, zones=directive.zones(words, block_zones))
    for option in directive.options(("success", "denial", "prefetch", "serve_stale", "servfail", "disable", "keepttl")):
        cached = msgspec.structs.replace(cached, **_cache_option(option, cached, block_zones))
    return cached


def _cache_option(option: Directive, cached: CacheSettings, block_zones: Zones) -> dict[str, Any]:
    words = option.words
    match option.name:
        case "success" | "denial" if option.takes(1, 3):
            before: CacheBounds = getattr(cached, option.name)
            numbers = [option.whole(word, low) for word, low in zip(words, (1, 1, 0), strict=False)]
            if None not in numbers:
                fields = dict(zip(("capacity", "max_ttl", "min_ttl"), numbers, strict=False))
                return {option.name: msgspec.structs.replace(before, **fields)}
        case "prefetch" if option.takes(1, 3):
            return _prefetch(option)
        case "serve_stale" if option.takes(0, 2):
            return _stale(option)
        case "servfail" if option.takes(1, 1):
            return _given(servfail=option.duration(words[0], high=_MAX_SERVFAIL))
        case "disable" if option.takes(1):
            if words[0] in ("success", "denial"):
                return {f"no_{words[0]}": option.zones(words[1:], block_zones)}
            option.error(f"{quoted(words[0])} is unknown; known are success and denial")
        case "keepttl" if option.takes(0, 0):
            return {"keep_ttl": True}
    return {}


def _prefetch(option: Directive) -> dict[str, Any]:
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
    return {"prefetch": PrefetchSettings(amount=amount, window=window, percent=percent) if amount else None}


def _stale(option: Directive) -> dict[str, Any]:
    max_stale = option.duration(option.words[0]) if option.words else 3600.0
    mode = option.words[1] if len(option.words) > 1 else "immediate"
    if mode not in ("immediate", "verified", "verify"):
        option.error(f"{quoted(mode)} is unknown; known are immediate and verify")
        return {}
    if max_stale is None:
        return {}
    return {"stale": ServeStaleSettings(max_stale=max_stale, verify=mode.startswith("verif"))}


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


_PODS = ("disabled", "insecure", "verified")
_WITHOUT_EFFECT = {
    "apiserver_qps": "each kind needs only one list and one watch request",
    "apiserver_burst": "each kind needs only one list and one watch request",
    "apiserver_max_inflight": "each kind needs only one list and one watch request",
    "resyncperiod": "there is no periodic resync",
    "upstream": "this server always resolves names outside the cluster itself",
}
_UNSUPPORTED = {
    "multicluster": "ServiceImports are not read; let forward ask a server of the clusterset",
    "tls": "name these files in a kubeconfig",
}
_KUBERNETES = (
    "endpoint", "kubeconfig", "namespaces", "namespace_labels", "labels", "pods", "endpoint_pod_names", "ttl",
    "noendpoints", "fallthrough", "ignore", "startup_timeout", "zonal", *_WITHOUT_EFFECT,
)  # fmt: skip


def _kubernetes(directive: Directive, block_zones: Zones) -> KubernetesSettings:
    zones = directive.zones(directive.words, block_zones)
    found: dict[str, Any] = {}
    for option in directive.options((*_KUBERNETES, *_UNSUPPORTED)):
        if option.name in _UNSUPPORTED:
            option.error(f"is not supported; {_UNSUPPORTED[option.name]}")
        elif option.name in _WITHOUT_EFFECT:
            option.warning(f"has no effect: {_WITHOUT_EFFECT[option.name]}")
        else:
            found.update(_kubernetes_option(option))
    if "namespaces" in found and "namespace_labels" in found:
        directive.error("namespaces and namespace_labels exclude each other")
    if found.get("zonal") and not found.get("endpoints", True):
        directive.error("zonal and noendpoints exclude each other")
    return KubernetesSettings(zones=zones, **found)


def _kubernetes_option(option: Directive) -> dict[str, Any]:
    words = option.words
    match option.name:
        case "endpoint" if option.takes(1, 1):
            if re.fullmatch(r"https?://[^\s/?#@]+/?", words[0]):
                return {"endpoint": words[0].rstrip("/")}
            option.error(f"{quoted(words[0])} is not a URL such as https://10.0.0.1:6443")
        case "kubeconfig" if option.takes(1, 2):
            if len(words) == 1:
                return {"kubeconfig": words[0]}
            option.error(f"context {quoted(words[1])} cannot be chosen here; make it the file's current-context")
        case "namespaces" if option.takes(1):
            return {"namespaces": tuple(dict.fromkeys(words))}
        case "labels" | "namespace_labels" if option.takes(1):
            try:
                return {option.name: parse_selector(" ".join(words))}
            except ValueError as error:
                option.error(str(error))
        case "pods" if option.takes(1, 1):
            return _known_word(option, "pods", _PODS)
        case "ttl" if option.takes(1, 1):
            return _given(ttl=option.whole(words[0], 0, MAX_TTL))
        case "fallthrough":
            return {"fallthrough": option.zones(words, (".",))}
        case "startup_timeout" if option.takes(1, 1):
            return _given(startup_timeout=option.duration(words[0]))
        case "ignore" if option.takes(1, 1):
            if words[0] == "empty_service":
                return {"ignore_empty_service": True}
            option.error(f"{quoted(words[0])} is unknown; known is empty_service")
        case "endpoint_pod_names" if option.takes(0, 0):
            return {"endpoint_pod_names": True}
        case "noendpoints" if option.takes(0, 0):
            return {"endpoints": False}
        case "zonal" if option.takes(0, 0):
            return {"zonal": True}
    return {}


def _external(directive: Directive, block_zones: Zones) -> K8sExternalSettings:
    """Parse `k8s_external [ZONE...] { … }`."""
    found: dict[str, Any] = {}
    for option in directive.options(("apex", "ttl", "headless", "fallthrough")):
        words = option.words
        if option.name == "apex" and option.takes(1, 1):
            if re.fullmatch(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?", words[0], re.ASCII):
                found["apex"] = words[0].lower()
            else:
                option.error(f"{quoted(words[0])} is not a label")
        elif option.name == "ttl" and option.takes(1, 1):
            found.update(_given(ttl=option.whole(words[0], 0, MAX_TTL)))
        elif option.name == "headless" and option.takes(0, 0):
            found["headless"] = True
        elif option.name == "fallthrough":
            found["fallthrough"] = option.zones(words, (".",))
    return K8sExternalSettings(zones=directive.zones(directive.words, block_zones), **found)


def _hosts(directive: Directive, block_zones: Zones) -> HostsSettings:
    """Parse `hosts [FILE [ZONES...]] { … }`, with lines of a hosts file as options."""
    found: dict[str, Any] = {}
    inline: list[str] = []
    for option in directive.options(("ttl", "no_reverse", "reload", "fallthrough"), other=True):
        words = option.words
        if option.name == "ttl" and option.takes(1, 1):
            found.update(_given(ttl=option.whole(words[0], 1, 2**31 - 1)))
        elif option.name == "no_reverse" and option.takes(0, 0):
            found["reverse"] = False
        elif option.name == "reload" and option.takes(1, 1):
            found.update(_given(reload=option.duration(words[0])))
        elif option.name == "fallthrough":
            found["fallthrough"] = option.zones(words, (".",))
        elif option.name not in ("ttl", "no_reverse", "reload"):
            if _is_address(option.name) and words:
                inline.append(" ".join((option.name, *words)))
            else:
                option.error("is neither an option (ttl, no_reverse, reload, fallthrough) nor an address with names")
    if directive.words:
        found["path"] = directive.words[0]
    return HostsSettings(zones=directive.zones(directive.words[1:], block_zones), inline=tuple(inline), **found)


def _autopath(directive: Directive, block_zones: Zones) -> AutopathSettings | None:
    """Parse `autopath [ZONE...] RESOLV-CONF`."""
    directive.takes_no_block()
    if not directive.takes(1):
        return None
    *zones, source = directive.words
    if source.startswith("@"):
        if source != "@kubernetes":
            directive.error(f"{quoted(source)} is unknown; known is @kubernetes")
        source = ""
    return AutopathSettings(zones=directive.zones(zones, block_zones), path=source)


def _is_address(word: str) -> bool:
    try:
        address(word)
    except ValueError:
        return False
    return True


def _known_word(option: Directive, field: str, known: tuple[str, ...]) -> dict[str, Any]:
    if option.words[0] in known:
        return {field: option.words[0]}
    option.error(f"{quoted(option.words[0])} is unknown; known are {', '.join(known)}")
    return {}


PLUGINS = {
    "acl": PluginSyntax("acl", filters.parse_acl, repeats=True),
    "any": PluginSyntax("refuses_any", _flag),
    "autopath": PluginSyntax("autopath", _autopath),
    "bind": PluginSyntax("bind", _bind, repeats=True),
    "bufsize": PluginSyntax("bufsize", filters.parse_bufsize),
    "cache": PluginSyntax("cache", _cache),
    "chaos": PluginSyntax("chaos", filters.parse_chaos),
    "debug": PluginSyntax("debug", _debug),
    "dns64": PluginSyntax("dns64", filters.parse_dns64),
    "errors": PluginSyntax("errors", _errors),
    "forward": PluginSyntax("forwards", _forward, repeats=True),
    "header": PluginSyntax("header", filters.parse_header),
    "health": PluginSyntax("health", _health),
    "hosts": PluginSyntax("hosts", _hosts),
    "k8s_external": PluginSyntax("external", _external),
    "kubernetes": PluginSyntax("kubernetes", _kubernetes),
    "loadbalance": PluginSyntax("loadbalance", _loadbalance),
    "log": PluginSyntax("log", _log, repeats=True),
    "loop": PluginSyntax("loop", _flag),
    "minimal": PluginSyntax("minimal", _flag),
    "nsid": PluginSyntax("nsid", filters.parse_nsid),
    "prometheus": PluginSyntax("prometheus", _prometheus),
    "ready": PluginSyntax("ready", _ready),
    "reload": PluginSyntax("reload", _reload),
    "rewrite": PluginSyntax("rewrite", filters.parse_rewrite, repeats=True),
    "template": PluginSyntax("templates", filters.parse_template, repeats=True),
    "tls": PluginSyntax("tls", filters.parse_tls),
    "transfer": PluginSyntax("transfer", filters.parse_transfer, repeats=True),
    "whoami": PluginSyntax("whoami", _flag),
}
UNSUPPORTED_PLUGINS = {
    "auto": "zone files are not read; let forward ask a server that has them",
    "azure": "zones of Azure DNS are not read; let forward ask the servers of the zone",
    "cancel": "each plugin has time limits of its own",
    "clouddns": "zones of Cloud DNS are not read; let forward ask the servers of the zone",
    "dnssec": "responses are not signed",
    "dnstap": "queries are logged by log only",
    "erratic": "it makes faults on purpose",
    "etcd": "etcd is not read; let forward ask a server that does",
    "file": "zone files are not read; let forward ask a server that has them",
    "federation": "CoreDNS removed it in 1.7.0; the MCS API (multicluster of kubernetes) replaces it",
    "geoip": "responses do not depend on the place of a client",
    "grpc": "upstreams are asked over UDP, TCP, and TLS",
    "grpc_server": "there is no server over gRPC",
    "https": "plain https:// keys have no further options",
    "https3": "there is no server over HTTP/3",
    "local": "its names are not built in; write them with hosts or template",
    "metadata": "no plugin publishes metadata",
    "multisocket": "each worker has a socket of its own already; --workers sets their number",
    "nomad": "Nomad is not read; let forward ask a server that does",
    "pprof": "it profiles Go programs",
    "proxy": "CoreDNS removed it in 1.5.0; write forward",
    "proxyproto": "the PROXY protocol is not understood",
    "quic": "there is no server over QUIC",
    "root": "paths are relative to the working directory",
    "route53": "zones of Route 53 are not read; let forward ask the servers of the zone",
    "secondary": "zones are not transferred from other servers; let forward ask them",
    "shed": "queries beyond the limits of max_concurrent get REFUSED",
    "sign": "zones are not signed",
    "timeouts": "time limits of connections are fixed",
    "trace": "queries are not traced",
    "tsig": "queries are not signed",
    "view": "a server block answers all clients of its address; use bind",
}
"""Plugins of CoreDNS that are not here, and why or what to use instead."""
