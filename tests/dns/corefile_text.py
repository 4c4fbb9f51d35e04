"""Server blocks -> Corefile text that `corefile.parse` reads as the same blocks. Defaults are left out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from narthex.dns.corefile.settings import (
    AutopathSettings,
    BindSettings,
    CacheBounds,
    CacheSettings,
    ErrorsSettings,
    ForwardSettings,
    HealthCheckSettings,
    HealthSettings,
    HostsSettings,
    K8sExternalSettings,
    KubernetesSettings,
    LoadBalanceSettings,
    LogSettings,
    PrometheusSettings,
    ReadySettings,
    ReloadSettings,
    ServerBlock,
    Zones,
)
from narthex.dns.message.wire import RCODES
from narthex.model.duration import duration_text
from narthex.model.problem import quoted

_PLAIN = re.compile(r"[^\s\"#{}]+")
_UNWRITABLE = re.compile(r"\{[$%]|\\(\"|$)|\r")
"""In quotes, a backslash before a quote belongs to it, and variables are replaced all the same."""


def text(blocks: Iterable[ServerBlock]) -> str:
    """The whole file. Raises ValueError for a word that no Corefile can hold."""
    return "\n".join(_block(block) for block in blocks)


def _block(block: ServerBlock) -> str:
    lines = [" ".join(f"{zone}:{block.port}" for zone in block.zones) + " {"]
    lines += [f"    {line}" for line in _plugins(block)]
    return "\n".join((*lines, "}", ""))


def _plugins(block: ServerBlock) -> Iterator[str]:
    if block.bind is not None:
        yield from _bind(block.bind)
    if block.debug:
        yield "debug"
    if block.errors is not None:
        yield from _errors(block.errors)
    for log in block.log:
        yield from _log(log)
    if block.health is not None:
        yield from _health(block.health)
    if block.ready is not None:
        yield from _ready(block.ready)
    if block.prometheus is not None:
        yield from _line(
            "prometheus", *_unless(block.prometheus.listen == PrometheusSettings().listen, block.prometheus.listen)
        )
    if block.loadbalance is not None:
        yield from _loadbalance(block.loadbalance)
    if block.cache is not None:
        yield from _cache(block.cache)
    if block.autopath is not None:
        yield from _autopath(block.autopath)
    if block.hosts is not None:
        yield from _hosts(block.hosts)
    if block.external is not None:
        yield from _external(block.external)
    if block.kubernetes is not None:
        yield from _kubernetes(block.kubernetes)
    if block.loop:
        yield "loop"
    for forward in block.forwards:
        yield from _forward(forward)
    if block.reload is not None:
        yield from _reload(block.reload)


def _bind(bind: BindSettings) -> Iterator[str]:
    return _line("bind", *bind.to, options=[("except", *bind.excluded)] if bind.excluded else [])


def _errors(errors: ErrorsSettings) -> Iterator[str]:
    options = [("consolidate", duration_text(each.interval), each.pattern, each.level) for each in errors.consolidate]
    return _line("errors", options=options)


def _log(log: LogSettings) -> Iterator[str]:
    options: list[tuple[str, ...]] = [("class", *log.classes)]
    if log.min_duration is not None:
        options.append(("minDuration", duration_text(log.min_duration)))
    return _line("log", *log.zones, log.format, options=options)


def _health(health: HealthSettings) -> Iterator[str]:
    options = [("lameduck", duration_text(health.lameduck))] if health.lameduck else []
    return _line("health", str(health.listen), options=options)


def _ready(ready: ReadySettings) -> Iterator[str]:
    return _line(
        "ready",
        str(ready.listen),
        options=[] if ready == ReadySettings(listen=ready.listen) else [("monitor", ready.monitor)],
    )


def _loadbalance(balance: LoadBalanceSettings) -> Iterator[str]:
    return _line("loadbalance", options=[("limit_answers", str(balance.limit))] if balance.limit else [])


def _reload(reload: ReloadSettings) -> Iterator[str]:
    return _line("reload", duration_text(reload.interval), duration_text(reload.jitter))


def _cache(cache: CacheSettings) -> Iterator[str]:
    options: list[tuple[str, ...]] = [("success", *_kept(cache.success)), ("denial", *_kept(cache.denial))]
    if cache.prefetch is not None:
        prefetch = cache.prefetch
        options.append(("prefetch", str(prefetch.amount), duration_text(prefetch.window), f"{prefetch.percent}%"))
    if cache.stale is not None:
        mode = "verify" if cache.stale.verify else "immediate"
        options.append(("serve_stale", duration_text(cache.stale.max_stale), mode))
    options.append(("servfail", duration_text(cache.servfail)))
    options += [("disable", "success", *cache.no_success)] if cache.no_success else []
    options += [("disable", "denial", *cache.no_denial)] if cache.no_denial else []
    options += [("keepttl",)] if cache.keep_ttl else []
    return _line("cache", *cache.zones, options=options)


def _kept(kept: CacheBounds) -> tuple[str, ...]:
    return str(kept.capacity), str(kept.max_ttl), str(kept.min_ttl)


def _autopath(autopath: AutopathSettings) -> Iterator[str]:
    return _line("autopath", *autopath.zones, autopath.path or "@kubernetes")


def _hosts(hosts: HostsSettings) -> Iterator[str]:
    options = [tuple(line.split()) for line in hosts.inline]
    options.append(("ttl", str(hosts.ttl)))
    options.append(("reload", duration_text(hosts.reload)))
    options += [] if hosts.reverse else [("no_reverse",)]
    options += _fallthrough(hosts.fallthrough)
    return _line("hosts", hosts.path, *hosts.zones, options=options)


def _external(external: K8sExternalSettings) -> Iterator[str]:
    options: list[tuple[str, ...]] = [("apex", external.apex), ("ttl", str(external.ttl))]
    options += [("headless",)] if external.headless else []
    options += _fallthrough(external.fallthrough)
    return _line("k8s_external", *external.zones, options=options)


def _kubernetes(kubernetes: KubernetesSettings) -> Iterator[str]:
    options: list[tuple[str, ...]] = [("pods", kubernetes.pods), ("ttl", str(kubernetes.ttl))]
    options += [("endpoint", kubernetes.endpoint)] if kubernetes.endpoint else []
    options += [("kubeconfig", kubernetes.kubeconfig)] if kubernetes.kubeconfig else []
    options += [("namespaces", *kubernetes.namespaces)] if kubernetes.namespaces else []
    for name in ("namespace_labels", "labels"):
        if requirements := getattr(kubernetes, name):
            options.append((name, ",".join(map(str, requirements))))
    options += [("endpoint_pod_names",)] if kubernetes.endpoint_pod_names else []
    options += [] if kubernetes.endpoints else [("noendpoints",)]
    options += _fallthrough(kubernetes.fallthrough)
    options += [("ignore", "empty_service")] if kubernetes.ignore_empty_service else []
    options.append(("startup_timeout", duration_text(kubernetes.startup_timeout)))
    return _line("kubernetes", *kubernetes.zones, options=options)


def _forward(forward: ForwardSettings) -> Iterator[str]:
    default = ForwardSettings(zone=".", to=())
    options: list[tuple[str, ...]] = []
    options += [("except", *forward.excluded)] if forward.excluded else []
    for flag, name in (("force_tcp",) * 2, ("prefer_udp",) * 2, ("fail_fast", "failfast_all_unhealthy_upstreams")):
        options += [(name,)] if getattr(forward, flag) else []
    options += [("expire", duration_text(forward.expire))] if forward.expire != default.expire else []
    options += [("max_fails", str(forward.max_fails))] if forward.max_fails != default.max_fails else []
    options += [("max_concurrent", str(forward.max_concurrent))] if forward.max_concurrent else []
    options += [("policy", forward.policy)] if forward.policy != default.policy else []
    tls = forward.tls
    files = [tls.certificate, tls.key] if tls.certificate else []
    files += [tls.authority] if tls.authority else []
    options += [("tls", *files)] if files else []
    options += [("tls_servername", tls.server_name)] if tls.server_name else []
    options += (
        [("health_check", *_health_check(forward.health_check))]
        if forward.health_check != HealthCheckSettings()
        else []
    )
    options += [("next", *(RCODES[code] for code in forward.next_on))] if forward.next_on else []
    options += [("failover", *(RCODES[code] for code in forward.failover_on))] if forward.failover_on else []
    return _line("forward", forward.zone, *(str(server) for server in forward.to), options=options)


def _health_check(check: HealthCheckSettings) -> Iterator[str]:
    yield duration_text(check.interval)
    if not check.recursion:
        yield "no_rec"
    if check.domain != ".":
        yield from ("domain", check.domain)


def _fallthrough(zones: Zones | None) -> list[tuple[str, ...]]:
    return [] if zones is None else [("fallthrough", *zones)]


def _unless(default: bool, value: object) -> tuple[str, ...]:
    return () if default else (str(value),)


def _line(name: str, *arguments: str, options: Iterable[tuple[str, ...]] = ()) -> Iterator[str]:
    """A plugin's lines, the first without indentation."""
    options = list(options)
    yield " ".join((name, *(_word(word) for word in arguments))) + (" {" if options else "")
    for option in options:
        yield "    " + " ".join((option[0], *(_word(word) for word in option[1:])))
    if options:
        yield "}"


def _word(word: str) -> str:
    """A word that is read as this text: quoted where it must be."""
    if _PLAIN.fullmatch(word) and not word.endswith("\\"):
        return word
    if _UNWRITABLE.search(word):
        raise ValueError(f"{quoted(word)} cannot be written in a Corefile")
    return '"' + word.replace('"', '\\"') + '"'
