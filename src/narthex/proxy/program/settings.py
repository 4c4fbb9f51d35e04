"""The settings of a node proxy, from flags and a configuration file.

The file overrides flags, as in kube-proxy (row 27.24), except for the node's name (27.4) and logging (27.3). Unlike
there, a flag counts where the file is silent, and a flag without effect is reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from narthex.model import FAMILIES, NODE_PORT_WORDS, InputError, IPFamily, family_of, split_port
from narthex.proxy.kernel.dataplanes import node_config
from narthex.proxy.plan.planner import NodeConfig
from narthex.proxy.program.schedule import SyncPeriods
from narthex.runtime.configuration.file import (
    API_VERSION,
    KIND,
    OWN_API_VERSION,
    OWN_KIND,
    ConfigurationError,
    documents_of,
    own_written,
    parse,
    read,
    relay_ports_of,
    written,
)
from narthex.runtime.configuration.values import (
    LOCALHOST_GATE,
    ClientConnection,
    ConntrackConfiguration,
    IpvsConfiguration,
    LoggingConfiguration,
    OwnConfiguration,
    ProxyConfiguration,
)

ConfigurationFields = Mapping[str, Any]
"""Fields of a KubeProxyConfiguration as written: camelCase names, nested mappings. The field `OWN` holds those of a
NarthexConfiguration.
"""

OWN = "narthex"
HEALTHZ, METRICS, NAME, LOGGING = "healthzBindAddress", "metricsBindAddress", "hostnameOverride", "logging"
_OFF = ("", "0")


class SettingsError(InputError):
    """The settings are invalid; the message states which and why."""


class ProxySettings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a node proxy."""

    mode: str
    node: NodeConfig
    periods: SyncPeriods = SyncPeriods()
    conntrack: ConntrackConfiguration = ConntrackConfiguration()
    """Requested kernel settings (group 19)."""
    ipvs: IpvsConfiguration = IpvsConfiguration()
    relay_ports: tuple[int, int] | None = None
    """userspace: first and last port of the relay; None leaves the choice to the mode."""
    client: ClientConnection = ClientConnection()
    """Connection to the API server."""
    config_sync_period: float = 900.0
    """Seconds between full lists."""
    healthz: tuple[str, int] | None = ("0.0.0.0", 10256)
    """Address and port; None disables the server."""
    metrics: tuple[str, int] | None = ("127.0.0.1", 10249)
    bind_address_hard_fail: bool = False
    oom_score_adj: int = -999
    logging: LoggingConfiguration = LoggingConfiguration()
    own: OwnConfiguration = OwnConfiguration()
    feature_gates: tuple[tuple[str, bool], ...] = ()
    configuration: ConfigurationFields = {}
    """The configuration in force, as `/configz` shows it."""
    own_configuration: ConfigurationFields = {}
    """The same for the NarthexConfiguration."""
    warnings: tuple[str, ...] = ()


def settings(flags: ConfigurationFields, file: Path | None, host_name: str) -> ProxySettings:
    """Return the settings from flags (fields named as in the file) and an optional file. Raises SettingsError.

    An empty `healthzBindAddress` or `metricsBindAddress` among the flags, or one with port 0, disables that server.
    `host_name` is the default name of the node (row 15.9).
    """
    configuration, off, warnings = _read_configuration(flags, file)
    host_name = host_name.strip().lower()
    if not configuration.hostname_override:
        try:
            parse(_document({NAME: host_name}), "host name")
        except ConfigurationError as error:
            raise SettingsError(str(error)) from error
    return _settings(configuration, off, host_name, warnings)


def in_force(flags: ConfigurationFields, file: Path | None) -> ProxyConfiguration:
    """Return the configuration that results from flags and file, for `--write-config-to`. Raises SettingsError."""
    return _read_configuration(flags, file)[0]


def _read_configuration(
    flags: ConfigurationFields, file: Path | None
) -> tuple[ProxyConfiguration, frozenset[str], tuple[str, ...]]:
    """Return the configuration, the disabled servers, and warnings."""
    flags = {name: value for name, value in flags.items() if value is not None}
    off = frozenset(name for name in (HEALTHZ, METRICS) if str(flags.get(name, "-")).rpartition(":")[2] in _OFF)
    flags = {name: value for name, value in flags.items() if name not in off}
    try:
        warnings: list[str] = []
        given: ConfigurationFields = {}
        if file is not None:
            warnings += map(str, read(file)[1])
            given = _raw(file)
            off -= given.keys()
        _check_flags(flags)
        merged = _merged(flags, given)
        warnings += _ignored(flags, merged)
        configuration, _ = parse(_document(merged), str(file or "command line"))
    except ConfigurationError as error:
        raise SettingsError(str(error)) from error
    return configuration, off, tuple(warnings)


def _settings(
    configuration: ProxyConfiguration, off: frozenset[str], host_name: str, warnings: tuple[str, ...]
) -> ProxySettings:
    mode = configuration.mode
    section = configuration.timing_section(mode)
    if configuration.detection_cidrs == ():
        warnings += (
            "no clusterCIDR is given, so pods cannot be distinguished from other clients; give --cluster-cidr, "
            "or another detectLocalMode",
        )
    return ProxySettings(
        mode=mode,
        node=node_config(configuration, mode, configuration.hostname_override or host_name),
        periods=SyncPeriods(section.min_sync_period, section.sync_period),
        conntrack=configuration.conntrack,
        ipvs=configuration.ipvs,
        relay_ports=relay_ports_of(configuration),
        client=configuration.client_connection,
        config_sync_period=configuration.config_sync_period,
        healthz=None if HEALTHZ in off else split_port(configuration.healthz_bind_address),
        metrics=None if METRICS in off else split_port(configuration.metrics_bind_address),
        bind_address_hard_fail=configuration.bind_address_hard_fail,
        oom_score_adj=configuration.oom_score_adj,
        logging=configuration.logging,
        own=configuration.own,
        feature_gates=configuration.feature_gates,
        configuration=written(configuration),
        own_configuration=own_written(configuration),
        warnings=warnings,
    )


def family_warnings(settings: ProxySettings, families: tuple[IPFamily, ...]) -> tuple[str, ...]:
    """Return settings that do not fit the IP families of this node (row 26.6)."""
    said = []
    words = settings.node.node_port_addresses or ()
    ports = tuple(word for word in words if word not in NODE_PORT_WORDS)
    ports_effect = (
        "no node port answers" if settings.node.strict_node_port_addresses else "node ports answer on every address"
    )
    for name, networks, effect in (
        ("clusterCIDR", settings.node.cluster_cidrs, "no source counts as a pod"),
        # A word stands for networks of each family.
        ("nodePortAddresses", ports, ports_effect if ports == words else ""),
    ):
        have = {family_of(cidr) for cidr in networks}
        said += [
            f"{name} names no network of {family.label}: {effect} there; add one"
            for family in families
            if effect and have and family not in have
        ]
        said += [
            f"{name} names a network of {family.label}, which this node does not serve"
            for family in FAMILIES
            if family in have and family not in families
        ]
    if settings.node.node_port_addresses is None:
        said.append(
            "nodePortAddresses is not set: node ports answer on every address of this node; "
            "`--nodeport-addresses primary` keeps them to the node's own"
        )
    if "localhost" in words and not (settings.node.localhost_node_ports or settings.node.relayed_node_ports):
        help_ = f"; --feature-gates {LOCALHOST_GATE}=true serves them in mode nftables"
        said.append(
            f"nodePortAddresses names localhost: node ports do not answer on loopback with these settings{help_}"
        )
    if settings.healthz and family_of(settings.healthz[0]) not in families:
        said.append(f"healthzBindAddress {settings.healthz[0]} is of a family that this node does not serve")
    return tuple(said)


def _check_flags(flags: ConfigurationFields) -> None:
    try:
        parse(_document(flags), "command line")
    except ConfigurationError as error:
        said = "; ".join(f"{problem.field} {problem.message}" for problem in error.problems if problem.field)
        raise SettingsError(f"command line: {said}") from error


def _document(fields: ConfigurationFields) -> bytes:
    """Return fields as the text of a file."""
    fields = dict(fields)
    own = fields.pop(OWN, {})
    first = msgspec.json.encode({"apiVersion": API_VERSION, "kind": KIND, **fields})
    return first + b"\n" + msgspec.json.encode({"apiVersion": OWN_API_VERSION, "kind": OWN_KIND, **own})


def _raw(file: Path) -> dict[str, Any]:
    """Return the fields of a file that is known to be valid."""
    chosen = documents_of(file.read_text("utf-8-sig"))
    fields = {name: value for name, value in _said(chosen.get(KIND, {})).items() if name != OWN}
    own = {name: value for name, value in _said(chosen.get(OWN_KIND, {})).items() if name not in ("apiVersion", "kind")}
    return {**fields, OWN: own} if own else fields


def _said(fields: ConfigurationFields) -> dict[str, Any]:
    """Return the fields with a value: kubeadm writes every field, most of them null or empty."""
    return {
        name: _said(value) if isinstance(value, Mapping) else value
        for name, value in fields.items()
        if value is not None and value != ""
    }


def _merged(flags: ConfigurationFields, given: ConfigurationFields) -> dict[str, Any]:
    """Merge flags and file field by field.

    The file has priority, except for the node's name and logging (rows 27.3, 27.4).
    """
    merged = {**flags, **given}
    for name, value in flags.items():
        if name == NAME:
            merged[name] = value
        elif isinstance(value, Mapping) and isinstance(given.get(name), Mapping):
            merged[name] = _joined(given[name], value) if name == LOGGING else _joined(value, given[name])
    return merged


def _joined(one: ConfigurationFields, other: ConfigurationFields) -> dict[str, Any]:
    """Merge two mappings at all depths; the second has priority."""
    joined = {**one, **other}
    for name in one.keys() & other.keys():
        if isinstance(one[name], Mapping) and isinstance(other[name], Mapping):
            joined[name] = _joined(one[name], other[name])
    return joined


def _ignored(flags: ConfigurationFields, merged: ConfigurationFields, path: str = "") -> list[str]:
    """Return a warning for each flag without effect."""
    found = []
    for name, value in flags.items():
        if isinstance(value, Mapping):
            found += _ignored(value, merged[name], f"{path}{name}.")
        elif merged[name] != value:
            found.append(
                f"{path}{name} is {merged[name]!r} in the configuration file, so the flag's {value!r} is not used"
            )
    return found
