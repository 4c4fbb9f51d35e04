"""`narthex overlay`: the routes between nodes' pods, as flannel has them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from narthex.cli.options import require_followed_source
from narthex.cli.proxy_flags import CONTEXT
from narthex.cli.version import version_option

if TYPE_CHECKING:
    from narthex.model import IPFamily


@click.command("overlay", context_settings=CONTEXT)
@click.option(
    "--kubeconfig",
    "--kubeconfig-file",
    metavar="FILE",
    default="",
    help="How to reach the API server. Default, in a pod: its service account.",
)
@click.option(
    "--master", "--kube-api-url", metavar="URL", default="", help="URL of the API server; overrides the kubeconfig."
)
@click.option(
    "--manifests",
    type=click.Path(path_type=Path),
    help="File or directory of YAML and JSON manifests with the Nodes, instead of an API server.",
)
@click.option(
    "--node", default="", envvar="NODE_NAME", metavar="NAME", help="This node. Default: $NODE_NAME, the host's name."
)
@click.option(
    "--net-config-path", metavar="FILE", default=None, help="net-conf.json. Default: /etc/kube-flannel/net-conf.json."
)
@click.option(
    "--subnet-file", metavar="FILE", default=None, help="Output for the CNI plugin. Default: /run/flannel/subnet.env."
)
@click.option(
    "--iface", multiple=True, metavar="NAME|ADDRESS", help="Interface to the other nodes; the first existing one."
)
@click.option("--iface-regex", multiple=True, metavar="REGEX", help="The same, matched against addresses and name.")
@click.option("--iface-can-reach", default="", metavar="ADDRESS", help="The same, by the route to an address.")
@click.option(
    "--public-ip", default="", metavar="IP", help="Address that peers send to. Default: the interface's address."
)
@click.option("--public-ipv6", default="", metavar="IP", help="The same for IPv6.")
@click.option(
    "--ip-masq/--no-ip-masq", default=True, show_default=True, help="Masquerade Pod traffic that leaves the cluster."
)
@click.option(
    "--iptables-forward-rules/--no-iptables-forward-rules",
    default=True,
    show_default=True,
    help="Accept Pod traffic in the FORWARD chain.",
)
@click.option(
    "--repair-checksums/--no-repair-checksums",
    default=True,
    show_default=True,
    help="Disable the checksum offload of the vxlan device if the self-test finds it broken.",
)
@click.option(
    "--set-node-network-unavailable/--no-set-node-network-unavailable",
    default=True,
    show_default=True,
    help="Set the Node's condition NetworkUnavailable to False.",
)
@click.option("--kube-annotation-prefix", default=None, metavar="PREFIX", help="Default: flannel.alpha.coreos.com.")
@click.option(
    "--healthz-ip",
    default="0.0.0.0",
    show_default=True,
    metavar="IP",
    help="Address of /healthz, /readyz, and /metrics.",
)
@click.option(
    "--healthz-port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default=True,
    help="Port of these endpoints; 0: none.",
)
@version_option
def command(
    kubeconfig: str, master: str, manifests: Path | None, healthz_ip: str, healthz_port: int, **flags: Any
) -> None:
    """Route Pod traffic between nodes; compatible with flannel (vxlan, host-gw).

    The kernel state stays when it ends, so that traffic continues.
    """
    from narthex.kube.access import access_to
    from narthex.overlay.program.part import api_origin, directory_origin, serve_overlay
    from narthex.runtime.logs import printable, start_logging
    from narthex.runtime.process import StartError

    if manifests is not None and (kubeconfig or master):
        raise click.UsageError("--manifests and an API server (--kubeconfig, --master) are mutually exclusive")
    require_followed_source(kubeconfig, manifests is not None or master)
    if manifests is not None:
        origin = directory_origin(manifests)
    else:
        origin = api_origin(access_to(kubeconfig, master))
    start_logging(sys.stderr)
    try:
        healthz = (_address("--healthz-ip", healthz_ip), healthz_port) if healthz_port else None
        serve_overlay(_settings(flags), origin, healthz)
    except (ValueError, StartError) as error:
        raise click.ClickException(printable(str(error))) from error


def _settings(flags: dict[str, Any]) -> Any:
    """Return the settings of the flags. Raises ValueError."""
    from narthex.model import FAMILIES
    from narthex.overlay.annotations import AnnotationKeys
    from narthex.overlay.interfaces import InterfaceSelection
    from narthex.overlay.program.loop import OverlaySettings

    given = {
        "net_conf": flags["net_config_path"],
        "subnet_file": flags["subnet_file"],
        "annotation_prefix": flags["kube_annotation_prefix"],
    }
    can_reach = flags["iface_can_reach"]
    public = zip(("--public-ip", "--public-ipv6"), (flags["public_ip"], flags["public_ipv6"]), FAMILIES, strict=True)
    settings = OverlaySettings(
        node=flags["node"] or os.uname().nodename.lower(),
        choice=InterfaceSelection(
            names=flags["iface"],
            patterns=flags["iface_regex"],
            can_reach=can_reach and _address("--iface-can-reach", can_reach),
        ),
        public_ips=tuple(_address(option, text, family) for option, text, family in public if text),
        masquerade=flags["ip_masq"],
        forward_rules=flags["iptables_forward_rules"],
        set_condition=flags["set_node_network_unavailable"],
        repair_checksums=flags["repair_checksums"],
        **{name: value for name, value in given.items() if value is not None},
    )
    try:
        AnnotationKeys(settings.annotation_prefix)
    except ValueError as error:
        raise ValueError(f"--kube-annotation-prefix {settings.annotation_prefix!r} {error}") from None
    return settings


def _address(option: str, text: str, family: IPFamily | None = None) -> str:
    """Return the canonical address of an option. Raises ValueError."""
    from narthex.model import address, family_of

    try:
        found = address(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None
    if family is not None and family_of(found) is not family:
        raise ValueError(f"{option}: {found} is not an address of {family.label}")
    return found
