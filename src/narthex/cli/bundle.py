"""`narthex bundle`: everything about a node that affects a packet's path, in one file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from narthex.cli.inputs import bundle_source_of_lab, no_namespace
from narthex.cli.options import lab_option, master_option
from narthex.cli.output import print_document, working
from narthex.model import visible
from narthex.trace.node.layout import TAKEN, BundleDocument, BundleManifest
from narthex.trace.node.layout import script as script_text

if TYPE_CHECKING:
    from narthex.trace.program.bundle import GatheredParts


@click.command()
@click.option(
    "-o",
    "--output",
    default="-",
    show_default=True,
    metavar="FILE|-|json",
    help="Output file; - is the standard output; json collects everything and prints only the result of each part.",
)
@click.option(
    "--kubeconfig",
    type=click.Path(exists=True, dir_okay=False),
    help="Include the objects of the cluster, from its API server.",
)
@master_option
@click.option("--node", default="", metavar="NAME", help="Name of the node in the cluster. Default: the host name.")
@lab_option
@click.option(
    "--netns", "--namespace", "netns", metavar="NAME", help="Named network namespace instead of the current one."
)
@click.option("--dry-run", is_flag=True, help="Show what would be collected, and how.")
@click.option("--script", is_flag=True, help="Print a shell script that collects the same on a node without Narthex.")
def command(
    output: str,
    kubeconfig: str | None,
    master: str,
    node: str,
    lab: str | None,
    netns: str | None,
    dry_run: bool,
    script: bool,
) -> None:
    """Take a bundle of a node for `trace`, `check` and `diff`.

    It holds rules of all tools, routes, links, neighbours, connections and settings, and with --kubeconfig the Services,
    EndpointSlices, Nodes, Pods and NetworkPolicies.

    It only reads. If a tool fails, the bundle holds the reason instead, so that it also works without root as far as possible. It never
    holds Secrets, environment variables, volumes, commands, or keys among the settings.

    \b
        narthex bundle -o node-1.tgz --kubeconfig ~/.kube/config
        narthex bundle --script | ssh root@node-1 sh > node-1.tgz
    """
    from narthex.trace.program.bundle import intended, take

    if script:
        click.echo(script_text(), nl=False)
        return
    if dry_run:
        _show(intended(bool(kubeconfig or master)), output)
        return
    if output == "-" and sys.stdout.isatty():
        raise click.UsageError("refusing to write a bundle to a terminal: name a file with -o, or use a pipe")
    if lab is not None:
        if kubeconfig or master or netns:
            raise click.UsageError("a lab has its own nodes and objects: omit --kubeconfig, --master and --netns")
        node, netns, kubeconfig = bundle_source_of_lab(lab, node)
    try:
        with working("taking the bundle"):
            gathered = take(node, netns, kubeconfig or "", master)
    except (FileNotFoundError, PermissionError, ValueError) as error:
        raise no_namespace(netns, error) from error
    if output == "json":
        _show(gathered.table, output)
        return
    _write(gathered, output)
    for part in gathered.table.parts:
        if part.status != TAKEN:
            click.echo(visible(f"{part.status}: {part.path}: {part.remark}"), err=True)


def _write(gathered: GatheredParts, output: str) -> None:
    """Write a bundle to a file, or to standard output (`-`). Ends the command on errors."""
    from narthex.trace.program.bundle import write, write_file

    try:
        if output == "-":
            write(sys.stdout.buffer, gathered.table, gathered.parts)
        else:
            write_file(Path(output), gathered.table, gathered.parts)
    except FileExistsError as error:
        raise click.ClickException(f"{output} exists: name another file, or remove it") from error
    except OSError as error:
        raise click.ClickException(f"cannot write {output}: {error.strerror}") from error


def _show(table: BundleManifest, output: str) -> None:
    def text() -> str:
        """Return one line for each part: its path, and the command that produces it."""
        width = max(len(part.path) for part in table.parts)
        return "".join(
            f"{part.path:{width}}  {part.command}{'  (as root)' if part.status == 'root' else ''}\n"
            for part in table.parts
        )

    print_document(BundleDocument(**msgspec.structs.asdict(table)), output, text)
