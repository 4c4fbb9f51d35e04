"""`narthex cleanup`: removal of the rules of Narthex and kube-proxy from this network namespace."""

from __future__ import annotations

from typing import Literal

import click
import msgspec

from narthex.cli.options import output_option
from narthex.cli.output import json_text


class CleanupRemoval(msgspec.Struct, frozen=True, kw_only=True):
    """Objects of one kind that were removed."""

    kind: str
    family: str
    count: int
    names: tuple[str, ...]


class CleanupRemainder(msgspec.Struct, frozen=True, kw_only=True):
    """An object that could not be removed."""

    kind: str
    name: str
    family: str
    reason: str


class CleanupDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="cleanup"):
    """What `narthex cleanup -o json` prints."""

    version: Literal[1] = 1
    removed: tuple[CleanupRemoval, ...]
    left: tuple[CleanupRemainder, ...]


@click.command("cleanup")
@output_option
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
        document = msgspec.convert({"kind": "cleanup", **to_builtins(outcome)}, CleanupDocument)
        click.echo(json_text(document), nl=False)
    else:
        for removed in outcome.removed:
            click.echo(printable(f"removed {described(removed)}"))
        for left in outcome.left:
            click.echo(printable(f"left {left.kind} {left.name} ({left.family.label}): {left.reason}"), err=True)
        if not outcome.removed and not outcome.left:
            click.echo("There are no rules of Narthex or kube-proxy.")
    if outcome.left:
        raise SystemExit(1)
