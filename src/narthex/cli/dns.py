"""`narthex dns`: serves DNS for a cluster, configured by a Corefile or by flags."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from narthex.cli.output import json_text, reported_errors

if TYPE_CHECKING:
    from narthex.dns.program.configuration import DnsFlags


@click.command("dns", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option("--conf", "-conf", type=click.Path(path_type=Path), metavar="FILE", help="Corefile to serve.")
@click.option(
    "--zone",
    "zones",
    multiple=True,
    metavar="NAME",
    help="Without --conf: zone of the cluster; repeatable. Default: cluster.local.",
)
@click.option(
    "--listen", default="", metavar="[ADDRESS]:PORT", help="Without --conf: address to listen on. Default: :53."
)
@click.option(
    "--forward",
    "upstreams",
    multiple=True,
    metavar="SERVER|FILE",
    help="Without --conf: upstream for all other names, or a resolv.conf; repeatable.",
)
@click.option(
    "--ttl",
    type=click.IntRange(0, 3600),
    default=30,
    show_default=True,
    help="Without --conf: TTL of the cluster's records in seconds.",
)
@click.option(
    "--manifests",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Read manifests instead of an API server; changes take effect immediately.",
)
@click.option(
    "--kubeconfig",
    type=click.Path(dir_okay=False),
    default="",
    metavar="FILE",
    help="Access to the API server. Default: that of the pod.",
)
@click.option("--master", default="", metavar="URL", help="URL of the API server; overrides that of the kubeconfig.")
@click.option(
    "--workers",
    type=click.IntRange(0, 64),
    default=0,
    help="Number of worker processes. Default: one for two processors, up to four.",
)
@click.option(
    "--recursion-for",
    "recursion",
    multiple=True,
    metavar="CIDR",
    help="Network whose clients may use recursion; repeatable. Default: private networks.",
)
@click.option("--check", is_flag=True, help="Check the Corefile and exit.")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), help="With --check: output format.")
def command(
    conf: Path | None,
    zones: tuple[str, ...],
    listen: str,
    upstreams: tuple[str, ...],
    ttl: int,
    manifests: Path | None,
    kubeconfig: str,
    master: str,
    workers: int,
    recursion: tuple[str, ...],
    check: bool,
    output: str | None,
) -> None:
    """Serve the cluster's DNS: names of Services and pods, and those that upstreams resolve.

    Answers over UDP and TCP until SIGTERM or SIGINT, with the objects of an API server or of manifests. It reads the Corefile
    of CoreDNS, which may also ask for TLS and HTTPS. Without one, it serves the zone of the cluster with kubeadm's settings.
    """
    from narthex.dns.program.configuration import CorefileSource, DnsFlags
    from narthex.dns.program.serve import serve

    if conf is not None and (zones or listen or upstreams):
        raise click.UsageError("--zone, --listen and --forward replace a Corefile: give --conf alone")
    if output and not check:
        raise click.UsageError("-o requires --check")
    flags = DnsFlags(zones=zones, listen=listen, upstreams=upstreams, ttl=ttl)
    with reported_errors():
        if output == "json":
            _print_check(conf, flags)
            return
        source = CorefileSource(conf, flags)
        if check:
            for problem in source.problems:
                click.echo(problem, err=True)
            number = len(source.blocks)
            verdict = "usable with the warnings above" if source.problems else "nothing is wrong"
            click.echo(f"{conf or 'the flags'}: {number} server block{'s' * (number != 1)}, {verdict}")
            return
        serve(source, manifests, kubeconfig, master, workers, recursion)


def _print_check(conf: Path | None, flags: DnsFlags) -> None:
    """Print the result of a check as JSON. Exit with status 1 if the Corefile cannot be used."""
    from narthex.dns.program.configuration import check_corefile

    result = check_corefile(conf, flags)
    click.echo(json_text(result), nl=False)
    if not result.usable:
        raise click.exceptions.Exit(1)
