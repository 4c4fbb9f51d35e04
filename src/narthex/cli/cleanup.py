"""`narthex cleanup`: take away what Narthex or kube-proxy left in this network namespace."""

from __future__ import annotations

import click
import msgspec


@click.command("cleanup")
@click.option(
    "-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Form of the output.", show_default=True
)
def command(output: str) -> None:
    """Remove all rules that Narthex or kube-proxy left in this network namespace, whatever the mode.

    Stop the node proxy first. Rules of others stay as they are, and so do kubelet's. Exit status 1 when something
    could not be removed.
    """
    from narthex.linux.clock import SystemClock
    from narthex.proxy.program.cleanup import CleanupError, clean_up, described, to_builtins
    from narthex.runtime.logs import printable

    try:
        outcome = clean_up(SystemClock())
    except CleanupError as error:
        raise click.ClickException(str(error)) from None
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(to_builtins(outcome))))
    else:
        for removed in outcome.removed:
            click.echo(printable(f"removed {described(removed)}"))
        for left in outcome.left:
            click.echo(printable(f"left {left.kind} {left.name} ({left.family.label}): {left.reason}"), err=True)
        if not outcome.removed and not outcome.left:
            click.echo("Nothing of Narthex or kube-proxy is here.")
    if outcome.left:
        raise SystemExit(1)
