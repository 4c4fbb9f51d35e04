"""`narthex cleanup`: removal of the rules of Narthex and kube-proxy from this network namespace."""

from __future__ import annotations

import click

from narthex.cli.output import json_text


@click.command("cleanup")
@click.option(
    "-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Output format.", show_default=True
)
def command(output: str) -> None:
    """Remove all rules of Narthex and kube-proxy from this network namespace, whatever the mode.

    Stop the node proxy first. Rules of other software and of the kubelet remain. Exit status 1 if something could not be
    removed.
    """
    from narthex.linux.clock import SystemClock
    from narthex.proxy.program.cleanup import CleanupError, clean_up, described, to_builtins
    from narthex.runtime.logs import printable

    try:
        outcome = clean_up(SystemClock())
    except CleanupError as error:
        raise click.ClickException(str(error)) from None
    if output == "json":
        click.echo(json_text(to_builtins(outcome)), nl=False)
    else:
        for removed in outcome.removed:
            click.echo(printable(f"removed {described(removed)}"))
        for left in outcome.left:
            click.echo(printable(f"left {left.kind} {left.name} ({left.family.label}): {left.reason}"), err=True)
        if not outcome.removed and not outcome.left:
            click.echo("There are no rules of Narthex or kube-proxy.")
    if outcome.left:
        raise SystemExit(1)
