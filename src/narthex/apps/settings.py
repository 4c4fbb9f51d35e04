"""What a node proxy is told, by flags and by a KubeProxyConfiguration file, as one value.

The file wins over flags, as in kube-proxy (row 27.24), with the exceptions that it makes: the node's name (27.4) and
logging (27.3). Unlike there, a flag still counts where the file says nothing, and one that does not is reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from narthex.apps.schedule import Periods
from narthex.model import documents
from narthex.model.net import split_port
from narthex.plan.planner import NodeConfig
from narthex.sources.configuration import API_VERSION, KIND, ConfigurationError, node_config, parse, read
from narthex.sources.proxy_configuration import Conntrack, ProxyConfiguration

Fields = Mapping[str, Any]
"""Part of a KubeProxyConfiguration as it is written: camelCase names, nested mappings."""

HEALTHZ, METRICS = "healthzBindAddress", "metricsBindAddress"
_OFF = ("", "0")
_TIMES = ("Period", "Timeout", "Frequency")
_SPELLED = {"cidr": "CIDR", "cidrs": "CIDRs", "arp": "ARP", "vip": "VIP", "dsr": "DSR", "hns": "HNS"}


class SettingsError(ValueError):
    """The settings cannot be used; the message says which and why."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All that a node proxy is told."""

    mode: str
    node: NodeConfig
    periods: Periods = Periods()
    conntrack: Conntrack = Conntrack()
    """Kernel settings that are asked for (group 19)."""
    healthz: tuple[str, int] | None = ("0.0.0.0", 10256)
    """Address and port; None: off."""
    metrics: tuple[str, int] | None = ("127.0.0.1", 10249)
    bind_address_hard_fail: bool = False
    log_format: str = "text"
    verbosity: int = 0
    configuration: Fields = {}
    """What `/configz` shows: the configuration in force, in kube-proxy's words."""
    warnings: tuple[str, ...] = ()


def settings(flags: Fields, file: Path | None, host_name: str) -> Settings:
    """Settings from flags (fields named as in the file) and perhaps a file. Raises SettingsError.

    An empty `healthzBindAddress` or `metricsBindAddress` among the flags, or one with port 0, switches that server
    off. `host_name` names the node when nothing else does (row 15.9).
    """
    flags = {name: value for name, value in flags.items() if value is not None}
    off = frozenset(name for name in (HEALTHZ, METRICS) if str(flags.get(name, "-")).rpartition(":")[2] in _OFF)
    flags = {name: value for name, value in flags.items() if name not in off}
    try:
        warnings: list[str] = []
        given: Fields = {}
        if file is not None:
            warnings += map(str, read(file)[1])
            given = _raw(file)
            off -= given.keys()
        _check_flags(flags)
        merged = _merged(flags, given)
        if "hostnameOverride" in flags:
            merged["hostnameOverride"] = flags["hostnameOverride"]
        warnings += _ignored(flags, merged)
        configuration, _ = parse(_document(merged), str(file or "command line"))
        host_name = host_name.strip().lower()
        if not configuration.hostname_override:
            parse(_document({"hostnameOverride": host_name}), "host name")
    except ConfigurationError as error:
        raise SettingsError(str(error)) from error
    return _settings(configuration, merged, off, host_name, tuple(warnings))


def _settings(
    configuration: ProxyConfiguration, merged: Fields, off: frozenset[str], host_name: str, warnings: tuple[str, ...]
) -> Settings:
    mode = configuration.mode
    section = configuration.nftables if mode == "nftables" else configuration.iptables
    # kube-proxy's default of a second protects its API server's clients from each other; a person who edits a file
    # wants to see the effect at once.
    minimum = section.min_sync_period if "minSyncPeriod" in merged.get(mode, {}) else 0.0
    if configuration.detect_local_mode == "ClusterCIDR" and not configuration.cluster_cidrs:
        warnings += (
            "no clusterCIDR is given, so pods cannot be told from others; give --cluster-cidr, "
            "or another detectLocalMode",
        )
    return Settings(
        mode=mode,
        node=node_config(configuration, mode, configuration.hostname_override or host_name),
        periods=Periods(minimum, section.sync_period),
        conntrack=configuration.conntrack,
        healthz=None if HEALTHZ in off else split_port(configuration.healthz_bind_address),
        metrics=None if METRICS in off else split_port(configuration.metrics_bind_address),
        bind_address_hard_fail=configuration.bind_address_hard_fail,
        log_format=configuration.logging.format,
        verbosity=configuration.logging.verbosity,
        configuration=_shown(configuration),
        warnings=warnings,
    )


def _check_flags(flags: Fields) -> None:
    try:
        parse(_document(flags), "command line")
    except ConfigurationError as error:
        said = "; ".join(f"{problem.field} {problem.message}" for problem in error.problems)
        raise SettingsError(f"command line: {said}") from error


def _document(fields: Fields) -> bytes:
    return msgspec.json.encode({"apiVersion": API_VERSION, "kind": KIND, **fields})


def _raw(file: Path) -> dict[str, Any]:
    """The fields that a file gives; it has been read once already and is known to be good."""
    for document in documents.read(file.read_text("utf-8-sig"), bear_doubled=True):
        if isinstance(document, documents.Document) and document.value.get("kind") == KIND:
            return {name: value for name, value in document.value.items() if value is not None}
    return {}


def _merged(flags: Fields, given: Fields) -> dict[str, Any]:
    """Both, the file's fields before the flags'; sections field by field."""
    merged = {**flags, **given}
    for name, value in flags.items():
        if isinstance(value, Mapping) and isinstance(given.get(name), Mapping):
            merged[name] = {**value, **given[name]}
    return merged


def _ignored(flags: Fields, merged: Fields, path: str = "") -> list[str]:
    """Flags that came to nothing."""
    found = []
    for name, value in flags.items():
        if isinstance(value, Mapping):
            found += _ignored(value, merged[name], f"{path}{name}.")
        elif merged[name] != value:
            found.append(
                f"{path}{name} is {merged[name]!r} in the configuration file, so the flag's {value!r} is not used"
            )
    return found


def _shown(configuration: ProxyConfiguration) -> dict[str, Any]:
    """The configuration as the file would have it."""
    shown = _spelled(msgspec.to_builtins(configuration))
    shown["clusterCIDR"] = ",".join(shown.pop("clusterCIDRs"))
    shown["detectLocal"] = {name: shown.pop(name) for name in ("bridgeInterface", "interfaceNamePrefix")}
    shown["featureGates"] = dict(shown["featureGates"])
    shown["logging"]["vmodule"] = [
        {"filePattern": pattern, "verbosity": verbosity} for pattern, verbosity in shown["logging"]["vmodule"]
    ]
    return {"apiVersion": API_VERSION, "kind": KIND, **shown}


def _spelled(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Names in camelCase, times as `30s`."""
    spelled: dict[str, Any] = {}
    for name, value in fields.items():
        first, *rest = name.split("_")
        camel = first + "".join(_SPELLED.get(word, word.capitalize()) for word in rest)
        if isinstance(value, dict):
            spelled[camel] = _spelled(value)
        elif camel.endswith(_TIMES) and value is not None:
            spelled[camel] = f"{value:g}s"
        else:
            spelled[camel] = value
    return spelled
