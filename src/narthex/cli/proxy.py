"""`narthex proxy`: kube-proxy's flags, as far as they mean something here, and `--manifests`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


@click.command("proxy", context_settings=_HELP)
@click.option(
    "--manifests",
    type=click.Path(path_type=Path),
    help="File or directory of YAML and JSON manifests; edits take effect while running. Required.",
)
@click.option("--hostname-override", metavar="NODE", help="Name of this node. Default: the host's name.")
@click.option("--proxy-mode", metavar="MODE", help="nftables (default) or iptables.")
@click.option("--config", type=click.Path(path_type=Path), help="A KubeProxyConfiguration; it wins over most flags.")
@click.option("--cluster-cidr", metavar="CIDRS", help="Networks of all pods, one of each family at most.")
@click.option("--detect-local-mode", metavar="MODE", help="How pods are told from others. Default: ClusterCIDR.")
@click.option("--pod-bridge-interface", metavar="NAME", help="For mode BridgeInterface.")
@click.option("--pod-interface-name-prefix", metavar="PREFIX", help="For mode InterfaceNamePrefix.")
@click.option("--nodeport-addresses", metavar="CIDRS", help="Node ports answer on these own addresses; or `primary`.")
@click.option(
    "--strict-source-ranges",
    is_flag=True,
    default=None,
    help="loadBalancerSourceRanges guards node ports and external IPs too.",
)
@click.option("--masquerade-all", is_flag=True, default=None, help="Masquerade all traffic to cluster IPs.")
@click.option("--bind-address", metavar="ADDRESS", help="The node's own address, if its Node object does not say.")
@click.option("--healthz-bind-address", metavar="ADDRESS", help='Default: 0.0.0.0:10256; "" switches it off.')
@click.option("--metrics-bind-address", metavar="ADDRESS", help='Default: 127.0.0.1:10249; "" switches it off.')
@click.option("--bind-address-hard-fail", is_flag=True, default=None, help="End when one of these ports is taken.")
@click.option(
    "--sync-period", "--iptables-sync-period", metavar="TIME", help="Check and mend this often. Default: 30s."
)
@click.option(
    "--min-sync-period", "--iptables-min-sync-period", metavar="TIME", help="Rest between two syncs. Default: none."
)
@click.option("--conntrack-max-per-core", type=int, help="Tracked connections per CPU core. Default: 32768; 0: as is.")
@click.option("--conntrack-min", type=int, help="Tracked connections at least. Default: 131072.")
@click.option("--conntrack-tcp-timeout-established", metavar="TIME", help="Default: 24h; 0s: as is.")
@click.option("--conntrack-tcp-timeout-close-wait", metavar="TIME", help="Default: 1h; 0s: as is.")
@click.option("--conntrack-tcp-be-liberal", is_flag=True, default=None, help="Track packets out of window, too.")
@click.option("--conntrack-udp-timeout", metavar="TIME", help="Default: as is.")
@click.option("--conntrack-udp-timeout-stream", metavar="TIME", help="Default: as is.")
@click.option("--init-only", is_flag=True, help="Make the kernel settings, as far as they can be made, and end.")
@click.option("-v", "--v", "--verbosity", "verbosity", type=click.IntRange(min=0), help="4 and more: debug lines.")
@click.option("--log-format", type=click.Choice(["text", "json"]), help="Default: text.")
def command(
    manifests: Path | None,
    config: Path | None,
    verbosity: int | None,
    log_format: str | None,
    init_only: bool,
    **flags: Any,
) -> None:
    """Be the node proxy: program the network namespace that this runs in until stopped.

    Reads Services, EndpointSlices and Nodes from MANIFESTS. On SIGTERM or SIGINT it ends; the rules stay. `/healthz`
    answers 200 when all rules are in place.
    """
    from narthex.apps import logs
    from narthex.apps.reload import ConfigurationFile
    from narthex.apps.settings import Settings, SettingsError, settings
    from narthex.apps.start import StartError, check_machine, prepare, serve
    from narthex.sources.manifests import ManifestSource

    if manifests is None and not init_only:
        raise click.UsageError("Missing option '--manifests'.")
    logs.start(sys.stderr, verbosity=verbosity or 0, style=log_format or "text")

    def read() -> Settings:
        return settings(_fields(flags), config, os.uname().nodename)

    try:
        # Before it is read: an edit while the proxy starts is seen.
        file = ConfigurationFile(config, read, check_machine) if config else None
        told = read()
        logs.start(
            sys.stderr,
            verbosity=told.verbosity if verbosity is None else verbosity,
            style=log_format or told.log_format,
        )
        for warning in told.warnings:
            logs.LOGGER.warning("%s", warning)
        if init_only or manifests is None:
            prepare(told)
        else:
            serve(told, ManifestSource(manifests), file)
    except (SettingsError, StartError) as error:
        raise click.ClickException(logs.printable(str(error))) from error


def _fields(flags: dict[str, Any]) -> dict[str, Any]:
    """Flags as fields of a KubeProxyConfiguration. What a mode has a section for is told to all sections, since only
    the section of the mode that runs is looked at."""
    section = {
        "masqueradeAll": flags["masquerade_all"],
        "syncPeriod": flags["sync_period"],
        "minSyncPeriod": flags["min_sync_period"],
    }
    section = {name: value for name, value in section.items() if value is not None}
    detect = {
        "bridgeInterface": flags["pod_bridge_interface"],
        "interfaceNamePrefix": flags["pod_interface_name_prefix"],
    }
    detect = {name: value for name, value in detect.items() if value is not None}
    conntrack = {
        "maxPerCore": flags["conntrack_max_per_core"],
        "min": flags["conntrack_min"],
        "tcpEstablishedTimeout": flags["conntrack_tcp_timeout_established"],
        "tcpCloseWaitTimeout": flags["conntrack_tcp_timeout_close_wait"],
        "tcpBeLiberal": flags["conntrack_tcp_be_liberal"],
        "udpTimeout": flags["conntrack_udp_timeout"],
        "udpStreamTimeout": flags["conntrack_udp_timeout_stream"],
    }
    conntrack = {name: value for name, value in conntrack.items() if value is not None}
    addresses = flags["nodeport_addresses"]
    return {
        "mode": flags["proxy_mode"],
        "hostnameOverride": flags["hostname_override"],
        "clusterCIDR": flags["cluster_cidr"],
        "detectLocalMode": flags["detect_local_mode"],
        "detectLocal": detect or None,
        "featureGates": {"NarthexStrictSourceRanges": True} if flags["strict_source_ranges"] else None,
        "nodePortAddresses": [part.strip() for part in addresses.split(",")] if addresses else None,
        "bindAddress": flags["bind_address"],
        "bindAddressHardFail": flags["bind_address_hard_fail"],
        "healthzBindAddress": flags["healthz_bind_address"],
        "metricsBindAddress": flags["metrics_bind_address"],
        "conntrack": conntrack or None,
        "iptables": section or None,
        "nftables": section or None,
    }
