"""KubeProxyConfiguration (kubeproxy.config.k8s.io/v1alpha1): kube-proxy's configuration file.

All fields are read and validated with kube-proxy's defaults (behaviours of group 27), including unused ones, so that
files of kube-proxy work here. Two differences: the default mode is nftables, and an unknown feature gate is a
warning, since most gates of Kubernetes do not concern the proxy.

A second document in the same file, NarthexConfiguration (narthex/v1alpha1), holds fields that kube-proxy does not
have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from narthex.model import (
    NODE_PORT_WORDS,
    IPFamily,
    Problem,
    ProblemCollector,
    ProblemList,
    family_of,
    join_port,
    kind_of,
    quoted,
    split_port,
    steps,
)
from narthex.model.duration import duration_text
from narthex.model.validate import DNS_LABEL, DNS_SUBDOMAIN, any_address, any_network
from narthex.runtime.configuration.fields import Fields, camel_case
from narthex.runtime.configuration.sections import announcer, client_connection, dns, ipvs, logging, overlay, rules
from narthex.runtime.configuration.values import (
    DEFAULT_MODE,
    FEATURE_GATES,
    HEALTHZ_PORT,
    IPVS_GATE,
    METRICS_PORT,
    CniConfiguration,
    OwnConfiguration,
    ProxyConfiguration,
    WinkernelConfiguration,
)

if TYPE_CHECKING:
    from narthex.model.documents import Document

__all__ = ["ConfigurationError", "ProxyConfiguration", "parse", "read"]

API_VERSION = "kubeproxy.config.k8s.io/v1alpha1"
KIND = "KubeProxyConfiguration"
OWN_API_VERSION = "narthex/v1alpha1"
OWN_KIND = "NarthexConfiguration"
MODES = ("nftables", "iptables", "ipvs", "userspace")
CONNECTION_METRICS = ("endpoints", "services", "off")
PREVIOUS_MINOR = "1.35"
"""The release before the one whose behaviour is implemented (row 27.9)."""
VERIFIED_MODES = ("nftables", "iptables")
"""The modes whose rules alone decide, so that they can be proved."""
LOCAL_MODES = ("ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix")

_VERSIONS = {KIND: API_VERSION, OWN_KIND: OWN_API_VERSION}
_MOST_BYTES = 1024 * 1024
_LONGEST_SOCKET = 107


class ConfigurationError(ValueError):
    """The file is invalid; `problems` lists all reasons."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


def read(path: str | Path) -> tuple[ProxyConfiguration, tuple[Problem, ...]]:
    """Return the configuration in a file, and warnings. Raises ConfigurationError."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise _failure(str(path), f"cannot be read: {error.strerror or error}") from None
    return parse(data, str(path))


def parse(data: bytes, origin: str) -> tuple[ProxyConfiguration, tuple[Problem, ...]]:
    """Return the configuration in `data`, and warnings. `origin` names the file in problems.

    Raises ConfigurationError.
    """
    if len(data) > _MOST_BYTES:
        raise _failure(origin, f"is larger than {_MOST_BYTES} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _failure(origin, f"is not UTF-8 text (at byte {error.start})") from None
    chosen, others = _choose(text, origin)
    if KIND not in chosen:
        raise _failure(origin, f"holds no document of apiVersion {API_VERSION} and kind {KIND}")
    reports = {kind: _report(document, kind, origin) for kind, document in chosen.items()}
    configuration = _configuration(Fields(chosen[KIND].value, reports[KIND]))
    if OWN_KIND in chosen:
        own = _own(Fields(chosen[OWN_KIND].value, reports[OWN_KIND]))
        if own.socket_load_balancing and configuration.mode != DEFAULT_MODE:
            message = (
                f"works in mode {DEFAULT_MODE} only, not in mode {configuration.mode}: remove it, or choose that mode"
            )
            Fields(chosen[OWN_KIND].value, reports[OWN_KIND]).error("socketLoadBalancing", message)
        if own.endpoint_ejection and not own.socket_load_balancing:
            message = "needs socketLoadBalancing: true, which observes connections: set it, or remove endpointEjection"
            Fields(chosen[OWN_KIND].value, reports[OWN_KIND]).error("endpointEjection", message)
        if own.verify_changes and configuration.mode not in VERIFIED_MODES:
            message = (
                f"works in modes {' and '.join(VERIFIED_MODES)} only, since mode {configuration.mode} works by more than "
                "rules: remove it, or choose one of these modes"
            )
            Fields(chosen[OWN_KIND].value, reports[OWN_KIND]).error("verifyChanges", message)
        configuration = msgspec.structs.replace(configuration, own=own)
    problems = (*others, *(problem for report in reports.values() for problem in report.problems))
    if any(report.failed for report in reports.values()):
        raise ConfigurationError(problems)
    return configuration, problems


def documents_of(text: str) -> dict[str, dict[str, Any]]:
    """Return the fields of a valid text as written, by kind."""
    chosen, _ = _choose(text, "")
    return {
        kind: {name: value for name, value in document.value.items() if value is not None}
        for kind, document in chosen.items()
    }


def _report(document: Document, kind: str, origin: str) -> ProblemCollector:
    def place(field: str) -> str:
        """Return the file and line of a field."""
        return f"{origin}:{document.line_of(document.value, steps(field), document.line)}"

    return ProblemCollector(f"{origin}:{document.line}", kind, place)


def _failure(origin: str, message: str, kind: str = KIND) -> ConfigurationError:
    return ConfigurationError((Problem(origin=origin, object=kind, message=message),))


def _choose(text: str, origin: str) -> tuple[dict[str, Document], list[Problem]]:
    """Return the known documents by kind, and warnings about other documents and duplicate keys."""
    # Late: what reads YAML takes a tenth of a proxy's start, and there may be no file.
    from narthex.model.documents import MalformedDocument, read_documents

    chosen: dict[str, Document] = {}
    said = ProblemList(origin=origin)
    for document in read_documents(text, allow_duplicate_keys=True):
        if isinstance(document, MalformedDocument):
            raise _failure(f"{origin}:{document.line}", document.message)
        place, value = f"{origin}:{document.line}", document.value
        if not isinstance(value, dict):
            raise _failure(place, f"is {kind_of(value)}, must be a mapping with apiVersion and kind")
        kind, version = value.get("kind"), value.get("apiVersion")
        if not isinstance(kind, str) or kind not in _VERSIONS:
            known = " or ".join(_VERSIONS)
            message = f"{quoted(kind)} is not {known}, ignored"
            said.append(Problem(origin=place, field="kind", message=message, severity="warning"))
        elif version != _VERSIONS[kind]:
            raise _failure(place, f"apiVersion: {quoted(version)} is not {_VERSIONS[kind]}", kind)
        elif kind in chosen:
            raise _failure(place, f"is there twice, first in line {chosen[kind].line}", kind)
        else:
            chosen[kind] = document
            said.extend(
                Problem(
                    origin=f"{origin}:{line}",
                    object=kind,
                    message=f"the key {quoted(key)} is given twice, the last one counts",
                    severity="warning",
                )
                for key, line in document.duplicate_keys
            )
    return chosen, [*said.problems]


def _configuration(top: Fields) -> ProxyConfiguration:
    for name in ("apiVersion", "kind"):
        top.raw(name)
    bind_address = top.read("bindAddress", any_address, "0.0.0.0")
    six = family_of(bind_address) is IPFamily.IPV6
    detect = top.section("detectLocal")
    made = top.struct(
        ProxyConfiguration,
        {"hostname_override": _node_name, "show_hidden_metrics_for_version": _version},
        mode=_mode(top),
        feature_gates=_feature_gates(top),
        client_connection=client_connection(top.section("clientConnection")),
        logging=logging(top.section("logging")),
        bind_address=bind_address,
        healthz_bind_address=_bind_address(top, "healthzBindAddress", "::" if six else "0.0.0.0", HEALTHZ_PORT),
        metrics_bind_address=_bind_address(top, "metricsBindAddress", "::1" if six else "127.0.0.1", METRICS_PORT),
        iptables=rules(top.section("iptables"), localhost=True),
        nftables=rules(top.section("nftables"), localhost=False),
        ipvs=ipvs(top.section("ipvs")),
        detect_local_mode=top.word("detectLocalMode", LOCAL_MODES, "ClusterCIDR"),
        bridge_interface=detect.read("bridgeInterface", _interface),
        interface_name_prefix=detect.read("interfaceNamePrefix", _interface),
        cluster_cidrs=_cluster_cidrs(top),
        node_port_addresses=_node_port_addresses(top),
        oom_score_adj=top.whole("oomScoreAdj", -999, -1000, 1000),
        config_sync_period=top.seconds("configSyncPeriod", 900.0, zero_is_default=True),
        own=OwnConfiguration(),
    )
    for mode, name in (("BridgeInterface", "bridgeInterface"), ("InterfaceNamePrefix", "interfaceNamePrefix")):
        if made.detect_local_mode == mode and not detect.raw(name):
            detect.error(name, f"is required for detectLocalMode {mode}")
    for name, given in (
        ("winkernel", made.winkernel != WinkernelConfiguration()),
        ("windowsRunAsService", made.windows_run_as_service),
    ):
        if given:
            top.warning(name, "is for Windows, ignored")
    if made.relay_range is not None:
        try:
            relay_ports(made.relay_range)
        except ValueError as error:
            top.error("portRange", str(error))
    elif made.port_range:
        top.warning("portRange", "has no effect in this mode, here as in kube-proxy")
    top.unknown()
    return made


def relay_ports(text: str) -> tuple[int, int] | None:
    """Return the first and last port of `portRange`; None leaves the choice to the mode.

    The format is `FIRST-LAST`, `FIRST+MORE`, or one number. Raises ValueError.
    """
    shape = re.fullmatch(r"(\d{1,5})(?:([-+])(\d{1,5}))?", text, re.ASCII)
    if text in ("", "0-0", "0"):
        return None
    if shape is None:
        raise ValueError(f"{quoted(text)} is not a range of ports: write FIRST-LAST")
    first = int(shape[1])
    last = {None: first, "-": int(shape[3] or 0), "+": first + int(shape[3] or 0)}[shape[2]]
    if not 0 < first <= last <= 65535:
        raise ValueError(f"{quoted(text)} is not a range of ports: they go from 1 to 65535, the first one first")
    return first, last


def relay_ports_of(configuration: ProxyConfiguration) -> tuple[int, int] | None:
    """Return the first and last port of the relay; None in other modes, and where the mode chooses. Raises ValueError."""
    return relay_ports(configuration.relay_range or "")


def _own(top: Fields) -> OwnConfiguration:
    for name in ("apiVersion", "kind"):
        top.raw(name)
    made = top.struct(
        OwnConfiguration,
        {"explain_service": _service_name, "socket_load_balancing_cgroup": _absolute_path},
        connection_metrics=top.word("connectionMetrics", CONNECTION_METRICS, "endpoints"),
        connection_series=top.whole("connectionSeries", 10000, 0, 1_000_000),
        udp_idle_timeout=top.seconds("udpIdleTimeout", 30.0, zero_is_default=True),
        cni=top.section("cni").struct(CniConfiguration, _CNI_READERS),
        overlay=overlay(top.section("overlay"), _absolute_path),
        dns=dns(top.section("dns"), _absolute_path),
        announcer=announcer(top.section("announcer"), _absolute_path),
    )
    top.unknown()
    return made


def _mode(top: Fields) -> str:
    if top.raw("mode") == "kernelspace":
        top.error("mode", f"'kernelspace' is for Windows; allowed: {', '.join(MODES)} or nothing (then {DEFAULT_MODE})")
        return DEFAULT_MODE
    return top.word("mode", MODES, DEFAULT_MODE)


_GATE_NAME = re.compile(r"[A-Za-z0-9]{1,100}")


def _feature_gates(top: Fields) -> tuple[tuple[str, bool], ...]:
    gates = Fields(top.raw("featureGates"), top.report, "featureGates")
    found = []
    for name in gates.names:
        if not _GATE_NAME.fullmatch(name):
            top.error("featureGates", f"{quoted(name)} is not the name of a feature gate")
            continue
        on = gates.flag(name)
        found.append((name, on))
        if name not in FEATURE_GATES:
            gates.warning(name, "has no effect here")
    if (IPVS_GATE, False) in found and top.raw("mode") == "ipvs":
        top.error(
            "mode", f"'ipvs' is switched off by the feature gate {IPVS_GATE}: choose {DEFAULT_MODE}, or set the gate"
        )
    return tuple(sorted(found))


def _cluster_cidrs(top: Fields) -> tuple[str, ...]:
    text = top.text("clusterCIDR")
    found = []
    for part in text.split(",") if text else ():
        try:
            found.append(any_network(part.strip()))
        except ValueError as error:
            top.error("clusterCIDR", f"{quoted(part)} {error}")
    if len(found) > 2 or len({family_of(cidr) for cidr in found}) < len(found):
        top.error("clusterCIDR", f"{quoted(text)} must be one CIDR, or one of each IP family joined by a comma")
    return tuple(found)


def _node_port_addresses(top: Fields) -> tuple[str, ...] | None:
    return top.texts("nodePortAddresses", lambda text: text if text in NODE_PORT_WORDS else any_network(text)) or None


def _bind_address(top: Fields, name: str, address: str, port: int) -> str:
    """Return `address:port` from an address with or without a port."""

    def reader(text: str) -> str:
        """Return `address:port`, with the default port if the text has none. Raise `ValueError` for other texts."""
        try:
            return join_port(any_address(text), port)
        except ValueError:
            pass
        try:
            return join_port(*split_port(text))
        except ValueError:
            raise ValueError("is not an address with or without a port, such as 0.0.0.0:10256 or [::]:10256") from None

    return top.read(name, reader, join_port(address, port))


def _node_name(text: str) -> str:
    name = text.strip().lower()
    if not DNS_SUBDOMAIN.holds(name):
        raise ValueError(f"is not the name of a Node: {DNS_SUBDOMAIN.allowed}")
    return name


def _interface(text: str) -> str:
    """Return an interface name or prefix. Raises ValueError for wildcards of rule languages."""
    if not re.fullmatch(r"[A-Za-z0-9_.:@-]{1,15}", text):
        raise ValueError(
            "is not (the beginning of) an interface name: 1-15 letters, digits, '_', '.', ':', '@' and '-'"
        )
    return text


def _version(text: str) -> str:
    if text != PREVIOUS_MINOR:
        raise ValueError(f"is not {PREVIOUS_MINOR}: only the previous minor version's hidden metrics can be shown")
    return text


def _absolute_path(text: str) -> str:
    if not text.startswith("/") or "\0" in text:
        raise ValueError("is not an absolute path, such as /var/lib/narthex")
    return text


def _socket_path(text: str) -> str:
    if len(_absolute_path(text).encode()) > _LONGEST_SOCKET:
        raise ValueError(f"is longer than the {_LONGEST_SOCKET} bytes that a socket's path may have")
    return text


def _service_name(text: str) -> str:
    namespace, slash, name = text.partition("/")
    if not slash or not DNS_LABEL.holds(namespace) or not DNS_LABEL.holds(name):
        raise ValueError("is not the namespace and name of a Service, such as shop/web")
    return text


_CNI_READERS = {"socket": _socket_path, "state_directory": _absolute_path}
_TIMES = ("Period", "Timeout", "Frequency")


def written(configuration: ProxyConfiguration) -> dict[str, Any]:
    """Return the KubeProxyConfiguration with camelCase names and durations in Go's format."""
    shown = _spelled(msgspec.to_builtins(configuration))
    del shown["own"], shown["nftables"]["localhostNodePorts"]
    shown["clusterCIDR"] = ",".join(shown.pop("clusterCIDRs"))
    shown["detectLocal"] = {name: shown.pop(name) for name in ("bridgeInterface", "interfaceNamePrefix")}
    shown["featureGates"] = dict(shown["featureGates"])
    shown["logging"]["vmodule"] = [
        {"filePattern": pattern, "verbosity": verbosity} for pattern, verbosity in shown["logging"]["vmodule"]
    ]
    return {"apiVersion": API_VERSION, "kind": KIND, **shown}


def own_written(configuration: ProxyConfiguration) -> dict[str, Any]:
    """Return the NarthexConfiguration."""
    return {"apiVersion": OWN_API_VERSION, "kind": OWN_KIND, **_spelled(msgspec.to_builtins(configuration.own))}


def file_text(configuration: ProxyConfiguration) -> str:
    """Return both documents as one YAML file. Every field is written, including defaults (row 27.26)."""
    # Loaded here: who only reads a configuration need not wait for it.
    import yaml  # type: ignore[import-untyped]

    text: str = yaml.safe_dump_all([written(configuration), own_written(configuration)], sort_keys=False)
    return text


def _spelled(fields: Mapping[str, Any]) -> dict[str, Any]:
    spelled: dict[str, Any] = {}
    for name, value in fields.items():
        camel = camel_case(name)
        if isinstance(value, dict):
            spelled[camel] = _spelled(value)
        elif isinstance(value, float) and camel.endswith(_TIMES):
            spelled[camel] = duration_text(value)
        else:
            spelled[camel] = list(value) if isinstance(value, tuple) else value
    return spelled
