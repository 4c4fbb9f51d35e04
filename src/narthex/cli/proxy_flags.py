"""The flags of kube-proxy, with its names and meanings, and the configuration fields that they set.

Read as Go programs do: `--flag=false` for a boolean flag, `-v=2`, and underscores instead of dashes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

CONTEXT = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 120,
    "token_normalize_func": lambda token: token.replace("_", "-"),
}

FieldPath = tuple[str, ...]
"""Names of nested fields, outermost first."""

Reader = Callable[[Any], Any]


class Flag:
    """A flag, and the configuration fields that it sets.

    `fields` are all fields that it sets, `read` converts the value of the flag to theirs. Without `help` it is hidden.
    """

    def __init__(
        self,
        *names: str,
        fields: tuple[FieldPath, ...],
        help: str = "",
        metavar: str | None = None,
        kind: Any = str,
        read: Reader = lambda value: value,
    ) -> None:
        self.names = names
        self.fields = fields
        self.read = read
        settings: dict[str, Any] = {"type": kind, "help": help, "hidden": not help, "default": None}
        if kind is bool:
            settings |= {"is_flag": False, "flag_value": "true", "metavar": "[true|false]"}
        elif metavar is not None:
            settings["metavar"] = metavar
        self.option = click.option(*names, self.parameter, **settings)

    @property
    def parameter(self) -> str:
        """The parameter name in click."""
        return next(name for name in self.names if name.startswith("--")).strip("-").replace("-", "_")


def _number(text: str) -> int:
    """Parse a number; click passes `-v=2` as `=2`. Raises BadParameter."""
    text = text.removeprefix("=")
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise click.BadParameter(f"{text!r} is not a non-negative number")
    return int(text)


def _pairs(text: str) -> list[tuple[str, str]]:
    """Parse `a=1,b=2`. Raises UsageError."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name:
            raise click.UsageError(f"{part!r} is not of the form name=value")
        found.append((name, value))
    return found


def _gates(text: str) -> dict[str, bool]:
    found = {}
    for name, value in _pairs(text):
        if value.lower() not in ("true", "false"):
            raise click.UsageError(f"--feature-gates: {name}={value}: must be true or false")
        found[name] = value.lower() == "true"
    return found


def _vmodule(text: str) -> list[dict[str, Any]]:
    found = []
    for pattern, value in _pairs(text):
        if not value.isascii() or not value.isdecimal() or len(value) > 9:
            raise click.UsageError(f"--vmodule: {pattern}={value}: must be a number")
        found.append({"filePattern": pattern, "verbosity": int(value)})
    return found


def _listed(text: str) -> list[str] | None:
    return [part.strip() for part in text.split(",")] if text else None


def _both(name: str) -> tuple[FieldPath, ...]:
    """Return the paths of a field that the sections of two modes share (row 27.27)."""
    return ("iptables", name), ("nftables", name)


_CONNTRACK = "conntrack"

_WINDOWS = "winkernel"

FLAGS = (
    Flag("--hostname-override", fields=(("hostnameOverride",),), metavar="NODE", help="Name of this node. Default: the host's name."),
    Flag("--proxy-mode", fields=(("mode",),), metavar="MODE", help="nftables (default), iptables, ipvs or userspace."),
    Flag("--kubeconfig", fields=(("clientConnection", "kubeconfig"),), metavar="FILE", help="kubeconfig of the cluster. Default: the service account of the Pod."),
    Flag("--kube-api-qps", fields=(("clientConnection", "qps"),), kind=float, metavar="NUMBER", help="Requests per second to the API server. Default: 5."),
    Flag("--kube-api-burst", fields=(("clientConnection", "burst"),), kind=int, metavar="NUMBER", help="Burst of requests to the API server. Default: 10."),
    Flag("--kube-api-content-type", fields=(("clientConnection", "contentType"),)),
    Flag("--cluster-cidr", fields=(("clusterCIDR",),), metavar="CIDRS", help="Networks of all Pods, at most one per family."),
    Flag("--detect-local-mode", fields=(("detectLocalMode",),), metavar="MODE", help="Detection of local traffic. Default: ClusterCIDR."),
    Flag("--pod-bridge-interface", fields=(("detectLocal", "bridgeInterface"),), metavar="NAME", help="For mode BridgeInterface."),
    Flag("--pod-interface-name-prefix", fields=(("detectLocal", "interfaceNamePrefix"),), metavar="PREFIX", help="For mode InterfaceNamePrefix."),
    Flag("--nodeport-addresses", fields=(("nodePortAddresses",),), read=_listed, metavar="CIDRS", help="Local addresses of node ports: networks, `primary`, `localhost`, `all`."),
    Flag("--strict-node-port-addresses", fields=(("narthex", "strictNodePortAddresses"),), kind=bool, help="Open no node port in an IP family that --nodeport-addresses does not name."),
    Flag("--strict-source-ranges", fields=(("narthex", "strictSourceRanges"),), kind=bool, help="Apply loadBalancerSourceRanges to node ports and external IPs, too."),
    Flag("--socket-load-balancing", fields=(("narthex", "socketLoadBalancing"),), kind=bool, help="Send sockets to endpoints when they connect, mode nftables."),
    Flag("--endpoint-ejection", fields=(("narthex", "endpointEjection"),), kind=bool, help="Send no sockets to endpoints that connections fail to reach."),
    Flag("--verify", fields=(("narthex", "verifyChanges"),), kind=bool, help="Prove each change before it is written, modes nftables and iptables."),
    Flag("--masquerade-all", fields=_both("masqueradeAll"), kind=bool, help="Masquerade all traffic to cluster IPs."),
    Flag("--iptables-masquerade-bit", fields=_both("masqueradeBit"), kind=int, metavar="BIT", help="Bit of the packet mark for masquerading. Default: 14."),
    Flag("--iptables-localhost-nodeports", fields=(("iptables", "localhostNodePorts"),), kind=bool, help="Node ports on 127.0.0.0/8, mode iptables. Default: true."),
    Flag("--bind-address", fields=(("bindAddress",),), metavar="ADDRESS", help="Address of the node if its Node object has none."),
    Flag("--healthz-bind-address", fields=(("healthzBindAddress",),), metavar="ADDRESS", help='Default: 0.0.0.0:10256; "" disables it.'),
    Flag("--metrics-bind-address", fields=(("metricsBindAddress",),), metavar="ADDRESS", help='Default: 127.0.0.1:10249; "" disables it.'),
    Flag("--bind-address-hard-fail", fields=(("bindAddressHardFail",),), kind=bool, help="Exit if one of these ports is in use."),
    Flag("--sync-period", "--iptables-sync-period", fields=_both("syncPeriod"), metavar="TIME", help="Interval of full syncs. Default: 30s."),
    Flag("--min-sync-period", "--iptables-min-sync-period", fields=_both("minSyncPeriod"), metavar="TIME", help="Minimum interval between two syncs. Default: none."),
    Flag("--ipvs-sync-period", fields=(("ipvs", "syncPeriod"),), metavar="TIME", help="The same for mode ipvs. Default: 30s."),
    Flag("--ipvs-min-sync-period", fields=(("ipvs", "minSyncPeriod"),), metavar="TIME", help="The same for mode ipvs. Default: none."),
    Flag("--ipvs-scheduler", fields=(("ipvs", "scheduler"),), metavar="NAME", help="Default: rr."),
    Flag("--ipvs-exclude-cidrs", fields=(("ipvs", "excludeCIDRs"),), read=_listed, metavar="CIDRS", help="Keep foreign virtual servers in these networks."),
    Flag("--ipvs-strict-arp", fields=(("ipvs", "strictARP"),), kind=bool, help="Set arp_ignore=1 and arp_announce=2."),
    Flag("--ipvs-tcp-timeout", fields=(("ipvs", "tcpTimeout"),), metavar="TIME", help="Default: unchanged."),
    Flag("--ipvs-tcpfin-timeout", fields=(("ipvs", "tcpFinTimeout"),), metavar="TIME", help="Default: unchanged."),
    Flag("--ipvs-udp-timeout", fields=(("ipvs", "udpTimeout"),), metavar="TIME", help="Default: unchanged."),
    Flag("--conntrack-max-per-core", fields=((_CONNTRACK, "maxPerCore"),), kind=int, metavar="NUMBER", help="Tracked connections per CPU core. Default: 32768; 0: unchanged."),
    Flag("--conntrack-min", fields=((_CONNTRACK, "min"),), kind=int, metavar="NUMBER", help="Minimum number of tracked connections. Default: 131072."),
    Flag("--conntrack-tcp-timeout-established", fields=((_CONNTRACK, "tcpEstablishedTimeout"),), metavar="TIME", help="Default: 24h; 0s: unchanged."),
    Flag("--conntrack-tcp-timeout-close-wait", fields=((_CONNTRACK, "tcpCloseWaitTimeout"),), metavar="TIME", help="Default: 1h; 0s: unchanged."),
    Flag("--conntrack-tcp-be-liberal", fields=((_CONNTRACK, "tcpBeLiberal"),), kind=bool, help="Track packets outside of the TCP window, too."),
    Flag("--conntrack-udp-timeout", fields=((_CONNTRACK, "udpTimeout"),), metavar="TIME", help="Default: unchanged."),
    Flag("--conntrack-udp-timeout-stream", fields=((_CONNTRACK, "udpStreamTimeout"),), metavar="TIME", help="Default: unchanged."),
    Flag("--config-sync-period", fields=(("configSyncPeriod",),), metavar="TIME", help="Interval of full lists of all objects. Default: 15m."),
    Flag("--oom-score-adj", fields=(("oomScoreAdj",),), kind=int, metavar="NUMBER", help="-1000 to 1000. Default: -999."),
    Flag("--feature-gates", fields=(("featureGates",),), read=_gates, metavar="NAME=BOOL,...", help="With an effect: AllowServiceExternalIPs, KubeProxyIPVS, KubeProxyNFTablesLocalhostNodePorts."),
    Flag("--profiling", fields=(("enableProfiling",),), kind=bool),
    Flag("--show-hidden-metrics-for-version", fields=(("showHiddenMetricsForVersion",),)),
    Flag("--proxy-port-range", fields=(("portRange",),)),
    Flag("--windows-run-as-service", fields=(("windowsRunAsService",),), kind=bool),
    Flag("--network-name", fields=((_WINDOWS, "networkName"),)),
    Flag("--source-vip", fields=((_WINDOWS, "sourceVip"),)),
    Flag("--enable-dsr", fields=((_WINDOWS, "enableDSR"),), kind=bool),
    Flag("--root-hnsendpoint-name", fields=((_WINDOWS, "rootHnsEndpointName"),)),
    Flag("--forward-healthcheck-vip", fields=((_WINDOWS, "forwardHealthCheckVip"),), kind=bool),
    Flag("-v", "--v", "--verbosity", fields=(("logging", "verbosity"),), kind=_number, metavar="NUMBER", help="Log verbosity; 4 and more log debug lines."),
    Flag("--vmodule", fields=(("logging", "vmodule"),), read=_vmodule, metavar="FILE=NUMBER,...", help="Verbosity of single files."),
    Flag("--logging-format", "--log-format", fields=(("logging", "format"),), metavar="FORMAT", help="text (default) or json."),
    Flag("--log-flush-frequency", fields=(("logging", "flushFrequency"),)),
    Flag("--explain-service", fields=(("narthex", "explainService"),), metavar="NAMESPACE/NAME", help="Log every decision for this Service."),
    Flag("--connection-metrics", fields=(("narthex", "connectionMetrics"),), metavar="WHAT", help="Count new connections by endpoints (default), services, or off."),
)  # fmt: skip


def fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given flags as configuration fields.

    A flag that several modes have is set in the sections of all of them, since only the section of the active mode is read.
    """
    found: dict[str, Any] = {}
    for flag in FLAGS:
        value = values[flag.parameter]
        if value is None:
            continue
        for path in flag.fields:
            inner = found
            for name in path[:-1]:
                inner = inner.setdefault(name, {})
            inner[path[-1]] = flag.read(value)
    return found


def with_ports(values: dict[str, Any], healthz_port: int | None, metrics_port: int | None) -> dict[str, Any]:
    """Apply kube-proxy's older flags for ports. 0 disables a server, and an address with a port takes precedence."""
    six = ":" in values.get("bindAddress", "")
    for name, port, default in (
        ("healthzBindAddress", healthz_port, "::" if six else "0.0.0.0"),
        ("metricsBindAddress", metrics_port, "::1" if six else "127.0.0.1"),
    ):
        if port == 0:
            values[name] = ""
        elif port is not None:
            values[name] = _at(values.get(name, default), port)
    return values


def _at(address: str, port: int) -> str:
    from narthex.model import join_port
    from narthex.model.validate import any_address

    try:
        return join_port(any_address(address), port)
    except ValueError:
        return address
