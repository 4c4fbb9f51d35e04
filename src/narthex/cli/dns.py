"""`narthex dns`: a Corefile, or flags for the common case."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from narthex.dns.program.start import Flags


@click.command("dns", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option("--conf", type=click.Path(path_type=Path), metavar="FILE", help="A Corefile.")
@click.option(
    "--zone",
    "zones",
    multiple=True,
    metavar="NAME",
    help="Without --conf: a zone of the cluster; repeatable. Default: cluster.local.",
)
@click.option("--listen", default="", metavar="[ADDRESS]:PORT", help="Without --conf: where to listen. Default: :53.")
@click.option(
    "--forward",
    "upstreams",
    multiple=True,
    metavar="SERVER|FILE",
    help="Without --conf: who answers the rest, or a resolv.conf; repeatable.",
)
@click.option(
    "--ttl",
    type=click.IntRange(0, 3600),
    default=30,
    show_default=True,
    help="Without --conf: seconds that answers live.",
)
@click.option(
    "--manifests",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Manifests instead of an API server; edits take effect while running.",
)
@click.option(
    "--kubeconfig",
    type=click.Path(dir_okay=False),
    default="",
    metavar="FILE",
    help="How to reach the API server. Default: as a pod does.",
)
@click.option("--master", default="", metavar="URL", help="The API server; it overrides the kubeconfig's.")
@click.option(
    "--workers",
    type=click.IntRange(0, 64),
    default=0,
    help="Processes that answer. Default: one for two processors, up to four.",
)
@click.option(
    "--recursion-for",
    "recursion",
    multiple=True,
    metavar="CIDR",
    help="Whose questions may be forwarded; repeatable. Default: private networks.",
)
@click.option("--check", is_flag=True, help="Read the Corefile, tell what is wrong with it, and end.")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), help="With --check: form of the output.")
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
    """Be the cluster's DNS server: names of Services and pods, and by others those of the world.

    Answers over UDP and TCP until SIGTERM or SIGINT, out of what an API server or MANIFESTS hold. It takes the Corefile of a
    CoreDNS; without one, it serves the cluster's zone with the settings that kubeadm uses.
    """
    from narthex.dns.program.listeners import ListenError
    from narthex.dns.program.start import Configuration, Flags, SourceError, serve
    from narthex.runtime import logs

    if conf is not None and (zones or listen or upstreams):
        raise click.UsageError("--zone, --listen and --forward say what a Corefile says: give --conf alone")
    if output and not check:
        raise click.UsageError("-o is for --check: a server has no output")
    flags = Flags(zones=zones, listen=listen, upstreams=upstreams, ttl=ttl)
    try:
        if output == "json":
            _as_data(conf, flags)
            return
        configuration = Configuration(conf, flags)
        if check:
            for problem in configuration.problems:
                click.echo(problem, err=True)
            number = len(configuration.blocks)
            verdict = "usable with the warnings above" if configuration.problems else "nothing is wrong"
            click.echo(f"{conf or 'the flags'}: {number} server block{'s' * (number != 1)}, {verdict}")
            return
        serve(configuration, manifests, kubeconfig, master, workers, recursion)
    except (ListenError, SourceError) as error:
        raise click.ClickException(logs.printable_lines(str(error))) from error


def _as_data(conf: Path | None, flags: Flags) -> None:
    """Print what a check finds as JSON, and end with status 1 when the Corefile cannot be used."""
    import msgspec

    from narthex.dns.program.check import check

    found = check(conf, flags)
    click.echo(msgspec.json.format(msgspec.json.encode(found)))
    if not found.usable:
        raise click.exceptions.Exit(1)
