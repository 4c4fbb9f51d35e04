"""The sections of a KubeProxyConfiguration, with kube-proxy's defaults and validation."""

from __future__ import annotations

import re

from narthex.model import kind_of
from narthex.model.validate import annotation_prefix, any_address, any_network, dns_zone
from narthex.runtime.configuration.fields import LARGEST_NUMBER, Fields, TextReader
from narthex.runtime.configuration.values import (
    AnnouncerConfiguration,
    ClientConnection,
    DnsConfiguration,
    IpvsConfiguration,
    LoggingConfiguration,
    ModeConfiguration,
    OverlayConfiguration,
)


def client_connection(raw: Fields) -> ClientConnection:
    """Return `clientConnection`; zero means the default, as in kube-proxy."""
    qps = raw.decimal("qps", 5.0) or 5.0
    return raw.struct(ClientConnection, qps=qps, burst=raw.whole("burst", 10, 0, LARGEST_NUMBER) or 10)


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
        vmodule.append((item.text("filePattern"), item.whole("verbosity", 0, 0, LARGEST_NUMBER)))
    return raw.struct(
        LoggingConfiguration,
        format=raw.word("format", ("text", "json"), "text"),
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
    return raw.struct(
        ModeConfiguration,
        masquerade_bit=raw.whole("masqueradeBit", 14, 0, 31),
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
    readers = {"scheduler": _scheduler, "exclude_cidrs": any_network}
    return raw.struct(IpvsConfiguration, readers, sync_period=sync, min_sync_period=least)


def overlay(raw: Fields, path: TextReader) -> OverlayConfiguration:
    """Return `overlay` of a NarthexConfiguration; `path` validates file names."""
    readers = {
        "net_conf": path,
        "subnet_file": path,
        "interface_patterns": _pattern,
        "interface_can_reach": any_address,
        "public_ips": any_address,
        "annotation_prefix": annotation_prefix,
    }
    return raw.struct(OverlayConfiguration, readers)


def dns(raw: Fields, path: TextReader) -> DnsConfiguration:
    """Return `dns` of a NarthexConfiguration; `path` validates file names."""
    usual = DnsConfiguration()
    addresses = {"addresses": any_address, "listen": any_address}
    zones = raw.texts("zones", dns_zone)
    made = raw.struct(
        DnsConfiguration, {**addresses, "upstreams": _upstream, "corefile": path}, zones=zones or usual.zones
    )
    if made.corefile and (zones or made.upstreams != usual.upstreams):
        raw.report.warning("corefile", "replaces zones and upstreams, which are ignored")
    return made


def _upstream(text: str) -> str:
    if not text or not text.isprintable() or set(text) & set(' "\\{}#'):
        raise ValueError("is neither an address nor the path of a resolv.conf")
    return text


def announcer(raw: Fields, path: TextReader) -> AnnouncerConfiguration:
    """Return `announcer` of a NarthexConfiguration; `path` validates file names."""
    readers = {"key_file": path, "pools_file": path, "exclude_interfaces": _interface_pattern}
    port = raw.whole("port", AnnouncerConfiguration().port, 1, 65535)
    return raw.struct(AnnouncerConfiguration, readers, port=port)


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


def _scheduler(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9_]{1,15}", text):
        raise ValueError("is not an IPVS scheduler such as rr, lc or mh")
    return text
