"""`narthex migrate`: the effects of a change of mode."""

from __future__ import annotations

from typing import Any, NoReturn

import click

from narthex.cli.inputs import cluster_of, mode_option, node_options_of, options_of_all_nodes, source_options
from narthex.cli.options import output_option
from narthex.cli.output import print_document, working
from narthex.cli.proved_changes import print_changes, prove_option
from narthex.model import InputError
from narthex.trace.program.inputs import ClusterObjects
from narthex.trace.proof.changes import MOST_LINES
from narthex.trace.reports.migration.report import migration_document, text

SOMETHING_CHANGES = 3
"""Exit status if something changes; 1 and 2 are errors."""


@click.command()
@mode_option("--from", required=True, metavar="MODE", help="Current mode.")
@mode_option("--to", required=True, metavar="MODE", help="New mode.")
@source_options
@options_of_all_nodes
@click.option("--all-services", is_flag=True, help="Do not shorten lists of Services; with --prove: all lines.")
@prove_option
@output_option
def command(all_services: bool, proving: bool, output: str, **options: Any) -> None:
    """Show what changes, and why, if nodes change their mode: for each Service, kind of frontend and class of sender.

    Prints nothing if nothing changes. Exit status: 0 if nothing changes, 3 if something does.

    With --prove, it walks all packets that open connections through the rules of both modes: each line describes packets whose outcome
    changes, and all others are proved to have the same outcome. Exit status 2 if rules leave packets undecided.

    \b
        narthex migrate --from iptables --to nftables --manifests DIR
        narthex migrate --from iptables --to nftables --manifests DIR --node NODE --prove
    """
    from narthex.trace.program.reports import prospect

    cluster = cluster_of(options)
    try:
        if proving:
            _prove(cluster, all_services, output, options)
        with working(f"comparing {options['from']} and {options['to']}"):
            found = prospect(cluster, options["from"], options["to"], node_options_of(options))
    except InputError as error:
        raise click.ClickException(str(error)) from error
    for problem in found.problems:
        click.echo(problem, err=True)
    print_document(migration_document(found.migration), output, lambda: text(found.migration, all_services))
    click.get_current_context().exit(SOMETHING_CHANGES if found.migration else 0)


def _prove(cluster: ClusterObjects, every: bool, output: str, options: dict[str, Any]) -> NoReturn:
    """Print what changes for all packets, and end the command."""
    from narthex.trace.program.packet_sources import changes_of_modes

    most = None if every else MOST_LINES
    with working(f"proving what changes from {options['from']} to {options['to']}"):
        reports, problems = changes_of_modes(cluster, options["from"], options["to"], node_options_of(options), most)
    for problem in problems:
        click.echo(problem, err=True)
    print_changes(reports, output, different=SOMETHING_CHANGES)
