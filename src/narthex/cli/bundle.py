"""`narthex bundle`: everything about a node that affects a packet's path, in one file."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from narthex.cli.inputs import bundle_source_of_lab, no_namespace, nodes_of_lab
from narthex.cli.options import lab_option, master_option
from narthex.cli.output import print_document, working
from narthex.model import InputError, visible
from narthex.trace.node.layout import TAKEN, BundleDocument, BundleManifest
from narthex.trace.node.layout import script as script_text

if TYPE_CHECKING:
    from narthex.trace.program.bundle import Bundle, GatheredParts


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
@click.option(
    "--for-issue",
    "question",
    nargs=2,
    metavar="SRC DST[:PORT][/PROTO]",
    help="Print text for an issue tracker instead: only what this packet touches. SRC and DST are those of `narthex trace`.",
)
@click.option(
    "--bundle",
    "bundles",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="With --for-issue: a bundle of a node on the path instead of this node; one per node.",
)
@click.option(
    "--anonymize", is_flag=True, help="With --for-issue: replace names and addresses, always by the same ones."
)
@click.option("--script", is_flag=True, help="Print a shell script that collects the same on a node without Narthex.")
def command(
    output: str,
    kubeconfig: str | None,
    master: str,
    node: str,
    lab: str | None,
    netns: str | None,
    dry_run: bool,
    question: tuple[str, str] | None,
    bundles: tuple[Path, ...],
    anonymize: bool,
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
        narthex bundle --for-issue shop/client shop/web --bundle node-1.tgz --anonymize > issue.md
    """
    from narthex.trace.program.bundle import intended, take

    if script:
        click.echo(script_text(), nl=False)
        return
    if question is None and (bundles or anonymize):
        raise click.UsageError("--bundle and --anonymize belong to --for-issue SRC DST")
    if dry_run:
        _show(intended(bool(kubeconfig or master)), output)
        return
    if question is not None:
        taken = _bundles(bundles, lab, node, netns, kubeconfig or "", master)
        _print_issue(taken, *question, anonymize=anonymize, output=output)
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


def _bundles(
    paths: tuple[Path, ...], lab: str | None, node: str, netns: str | None, kubeconfig: str, master: str
) -> list[Bundle]:
    """Return the bundles in files, of the nodes of a lab, or of this node. Ends the command on errors."""
    from narthex.trace.program.bundle import Bundle, read_bundle, take

    try:
        with working("reading rules, routes, and links"):
            if paths:
                return [read_bundle(path) for path in paths]
            sources = [(node, netns, kubeconfig)]
            if lab is not None:
                names = [node] if node else nodes_of_lab(lab)
                sources = [bundle_source_of_lab(lab, name) for name in names]
            gathered = [take(name, namespace, config, master) for name, namespace, config in sources]
    except InputError as error:
        raise click.ClickException(str(error)) from error
    except (FileNotFoundError, PermissionError, ValueError) as error:
        raise no_namespace(netns, error) from error
    return [Bundle(origin=each.table.node, table=each.table, parts=each.parts) for each in gathered]


def _print_issue(taken: list[Bundle], source: str, destination: str, *, anonymize: bool, output: str) -> None:
    """Print the text for an issue tracker, or with `-o json` the text and what it says as a document."""
    from narthex.trace.issue.text import IssueQuestion
    from narthex.trace.program.issue import make_issue

    asked = IssueQuestion(source=source, destination=destination)
    try:
        with working("following the packet"):
            made = make_issue(asked, taken, secrets.token_bytes(32) if anonymize else None)
    except InputError as error:
        raise click.ClickException(str(error)) from error
    for group in made.whole:
        click.echo(f"note: all {group} of the nodes are in the text, since fewer give another answer", err=True)
    if output not in ("-", "json"):
        try:
            with Path(output).open("x", encoding="utf-8") as file:
                file.write(made.text)
        except OSError as error:
            raise click.ClickException(f"cannot write {output}: {error.strerror}") from error
        return
    print_document(made.document(), output, lambda: made.text)


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
