"""`narthex node`: all that a node needs, in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import narthex
from narthex.cli.following import CONTEXT, begin, source, with_source
from narthex.cli.proxy.flags import fields, with_ports

PARTS = {
    "proxy": "Be the node proxy. Default: yes.",
    "cni": "Be the CNI plugins' agent. Default: no.",
    "overlay": "Keep the ways to other nodes' pods. Default: no.",
    "dns": "Answer for names on the node itself. Default: no.",
    "announcer": "Answer for load balancer addresses. Default: no.",
}


def _with_parts(command: Callable[..., Any]) -> Callable[..., Any]:
    for name in reversed(PARTS):
        command = click.option(f"--{name}/--no-{name}", default=None, help=PARTS[name])(command)
    return command


@click.command("node", context_settings=CONTEXT)
@_with_parts
@click.option(
    "--announcer-key-file",
    metavar="FILE",
    help="The key that the announcers of all nodes share: one line of 16 characters or more.",
)
@with_source
@click.version_option(narthex.__version__, prog_name="narthex")
def command(
    manifests: Path | None,
    master: str,
    config: Path | None,
    healthz_port: int | None,
    metrics_port: int | None,
    announcer_key_file: str | None,
    **flags: Any,
) -> None:
    """Be all that a node needs, in one process: its proxy, and what is switched on besides.

    Takes `narthex proxy`'s options. A part that fails is started again after a while and never ends another one;
    `/healthz` says how each part is. On SIGTERM or SIGINT all end, the last started first; the rules stay.
    """
    from narthex.node.process import serve_node
    from narthex.proxy.program.settings import OWN, SettingsError
    from narthex.runtime import logs
    from narthex.runtime.process import StartError

    switched = {name: on for name in PARTS if (on := flags.pop(name)) is not None}
    given = with_ports(fields(flags), healthz_port, metrics_port)
    if switched:
        given[OWN] = {**given.get(OWN, {}), "parts": switched}
    if announcer_key_file is not None:
        given[OWN] = {**given.get(OWN, {}), "announcer": {"keyFile": announcer_key_file}}
    try:
        told, file = begin(given, config)
        serve_node(told, source(told, manifests, master), file)
    except SettingsError as error:
        # A line for each fault of the file.
        raise click.ClickException(logs.printable_lines(str(error))) from error
    except StartError as error:
        raise click.ClickException(logs.printable(str(error))) from error
