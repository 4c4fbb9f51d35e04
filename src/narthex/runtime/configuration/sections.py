"""The sections of a KubeProxyConfiguration, with kube-proxy's defaults and validation."""

from __future__ import annotations

import re
from collections.abc import Callable

from narthex.model import validate
from narthex.model.problem import kind_of
from narthex.runtime.configuration.fields import Fields
from narthex.runtime.configuration.values import (
    AnnouncerConfiguration,
    ClientConnection,
    ConntrackConfiguration,
    DnsConfiguration,
    IpvsConfiguration,
    LoggingConfiguration,
    ModeConfiguration,
    OverlayConfiguration,
    WinkernelConfiguration,
)

_MOST = 2**31 - 1


def client_connection(raw: Fields) -> ClientConnection:
    """Return `clientConnection`; zero means the default, as in kube-proxy."""
    return ClientConnection(
        kubeconfig=raw.text("kubeconfig"),
        accept_content_types=raw.text("acceptContentTypes"),
        content_type=raw.text("contentType", "application/vnd.kubernetes.protobuf"),
        qps=raw.decimal("qps", 5.0) or 5.0,
        burst=raw.whole("burst", 10, 0, _MOST) or 10,
    )


def logging(raw: Fields) -> LoggingConfiguration:
    """Return `logging`."""
    raw.raw("options")
    vmodule = []
    entries = raw.raw("vmodule")
    if entries is not None and not isinstance(entries, list):
        raw.error("vmodule", f"is {kind_of(entries)}, must be a list")
        entries = None
    for index, entry in enumerate(entries or ()):
        item = Fields(entry, raw.report, raw.path(f"vmodule[{index}]"))
        vmodule.append((item.text("filePattern"), item.whole("verbosity", 0, 0, _MOST)))
    return LoggingConfiguration(
        format=raw.word("format", ("text", "json"), "text"),
        verbosity=raw.whole("verbosity", 0, 0, _MOST),
        vmodule=tuple(vmodule),
        flush_frequency=_flush_frequency(raw),
    )


def _flush_frequency(raw: Fields) -> float:
    """Return a duration in seconds, from a duration or a number of nanoseconds."""
    if isinstance(raw.raw("flushFrequency"), int):
        return raw.whole("flushFrequency", 0, 0, 2**63 - 1) / 1e9
    return raw.seconds("flushFrequency", 5.0)


def rules(raw: Fields, *, localhost: bool) -> ModeConfiguration:
    """Return `iptables` or `nftables`; only `iptables` has `localhostNodePorts`."""
    sync, least = _periods(raw)
    return ModeConfiguration(
        masquerade_bit=raw.whole("masqueradeBit", 14, 0, 31),
        masquerade_all=raw.flag("masqueradeAll"),
        localhost_node_ports=raw.flag("localhostNodePorts", True) if localhost else False,
        sync_period=sync,
        min_sync_period=least,
    )


def _periods(raw: Fields) -> tuple[float, float]:
    """Return `syncPeriod`, of which zero means the default as in kube-proxy, and `minSyncPeriod`."""
    sync = raw.seconds("syncPeriod", 30.0, zero_is_default=True)
    found = raw.seconds("minSyncPeriod", 0.0)
    if found > sync:
        given = f"{raw.path('syncPeriod')} ({sync:g}s)"
        raw.error("minSyncPeriod", f"is {found:g}s, must not be longer than {given}")
    return sync, found


def ipvs(raw: Fields) -> IpvsConfiguration:
    """Return `ipvs`."""
    sync, least = _periods(raw)
    return IpvsConfiguration(
        sync_period=sync,
        min_sync_period=least,
        scheduler=raw.read("scheduler", _scheduler),
        exclude_cidrs=raw.texts("excludeCIDRs", validate.network),
        strict_arp=raw.flag("strictARP"),
        tcp_timeout=raw.seconds("tcpTimeout", 0.0),
        tcp_fin_timeout=raw.seconds("tcpFinTimeout", 0.0),
        udp_timeout=raw.seconds("udpTimeout", 0.0),
    )


def conntrack(raw: Fields) -> ConntrackConfiguration:
    """Return `conntrack`."""
    return ConntrackConfiguration(
        max_per_core=raw.whole("maxPerCore", 32768, 0, _MOST),
        min=raw.whole("min", 131072, 0, _MOST),
        tcp_established_timeout=raw.seconds("tcpEstablishedTimeout", 86400.0),
        tcp_close_wait_timeout=raw.seconds("tcpCloseWaitTimeout", 3600.0),
        tcp_be_liberal=raw.flag("tcpBeLiberal"),
        udp_timeout=raw.seconds("udpTimeout", 0.0),
        udp_stream_timeout=raw.seconds("udpStreamTimeout", 0.0),
    )


def overlay(raw: Fields, path: Callable[[str], str]) -> OverlayConfiguration:
    """Return `overlay` of a NarthexConfiguration; `path` validates file names."""
    usual = OverlayConfiguration()
    return OverlayConfiguration(
        net_conf=raw.read("netConf", path, usual.net_conf),
        subnet_file=raw.read("subnetFile", path, usual.subnet_file),
        interfaces=raw.texts("interfaces"),
        interface_patterns=raw.texts("interfacePatterns", _pattern),
        interface_can_reach=raw.read("interfaceCanReach", validate.any_address),
        public_ips=raw.texts("publicIPs", validate.any_address),
        masquerade=raw.flag("masquerade", True),
        forward_rules=raw.flag("forwardRules", True),
        annotation_prefix=raw.read("annotationPrefix", validate.annotation_prefix, usual.annotation_prefix),
        network_condition=raw.flag("networkCondition", True),
        repair_checksums=raw.flag("repairChecksums", True),
    )


def dns(raw: Fields, path: Callable[[str], str]) -> DnsConfiguration:
    """Return `dns` of a NarthexConfiguration; `path` validates file names."""
    usual = DnsConfiguration()
    addresses = raw.texts("addresses", validate.any_address)
    zones = raw.texts("zones", validate.dns_zone)
    made = DnsConfiguration(
        addresses=usual.addresses if raw.raw("addresses") is None else addresses,
        listen=raw.texts("listen", validate.any_address),
        zones=zones or usual.zones,
        upstreams=usual.upstreams if raw.raw("upstreams") is None else raw.texts("upstreams", _upstream),
        corefile=raw.read("corefile", path),
    )
    if made.corefile and (zones or made.upstreams != usual.upstreams):
        raw.report.warning("corefile", "replaces zones and upstreams, which are ignored")
    return made


def _upstream(text: str) -> str:
    if not text or not text.isprintable() or set(text) & set(' "\\{}#'):
        raise ValueError("is neither an address nor the path of a resolv.conf")
    return text


def announcer(raw: Fields, path: Callable[[str], str]) -> AnnouncerConfiguration:
    """Return `announcer` of a NarthexConfiguration; `path` validates file names."""
    usual = AnnouncerConfiguration()
    given = raw.texts("excludeInterfaces", _interface_pattern)
    return AnnouncerConfiguration(
        key_file=raw.read("keyFile", path),
        port=raw.whole("port", usual.port, 1, 65535),
        pools_file=raw.read("poolsFile", path),
        exclude_interfaces=usual.exclude_interfaces if raw.raw("excludeInterfaces") is None else given,
        ignore_exclude_label=raw.flag("ignoreExcludeLabel"),
    )


def _interface_pattern(text: str) -> str:
    if not text or len(text) > 64 or not text.isprintable():
        raise ValueError("is not a pattern of interface names such as veth*")
    return text


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from None
    return text


def winkernel(raw: Fields) -> WinkernelConfiguration:
    """Return `winkernel`, with a warning if it has any field."""
    made = WinkernelConfiguration(
        network_name=raw.text("networkName"),
        source_vip=raw.text("sourceVip"),
        enable_dsr=raw.flag("enableDSR"),
        root_hns_endpoint_name=raw.text("rootHnsEndpointName"),
        forward_health_check_vip=raw.flag("forwardHealthCheckVip"),
    )
    if made != WinkernelConfiguration():
        raw.report.warning("winkernel", "is for Windows, ignored")
    return made


def _scheduler(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9_]{1,15}", text):
        raise ValueError("is not an IPVS scheduler such as rr, lc or mh")
    return text
