"""`narthex node`: all components of a node in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from narthex.cli.options import with_options
from narthex.cli.output import reported_errors
from narthex.cli.proxy import begin, source, with_source
from narthex.cli.proxy_flags import CONTEXT, fields, with_ports
from narthex.cli.version import version_option

PARTS = {
    "proxy": "Run the node proxy. Default: yes.",
    "cni": "Run the agent of the CNI plugins. Default: no.",
    "overlay": "Maintain the routes to the Pods of other nodes. Default: no.",
    "dns": "Run the node-local DNS cache. Default: no.",
    "announcer": "Announce load balancer addresses. Default: no.",
}


@click.command("node", context_settings=CONTEXT)
@with_options(*(click.option(f"--{name}/--no-{name}", default=None, help=text) for name, text in PARTS.items()))
@click.option(
    "--announcer-key-file",
    metavar="FILE",
    help="File with the key that the announcers of all nodes share: one line of at least 16 characters.",
)
@with_source
@version_option
def command(
    manifests: Path | None,
    master: str,
    config: Path | None,
    healthz_port: int | None,
    metrics_port: int | None,
    announcer_key_file: str | None,
    **flags: Any,
) -> None:
    """Run all components of a node in one process: the proxy, and others that are enabled.

    The options of `narthex proxy` apply. A component that fails is restarted with a backoff and does not affect the others.
    `/healthz` reports the state of each. On SIGTERM or SIGINT all stop in reverse order of their start. The rules remain.
    """
    from narthex.node.process import serve_node
    from narthex.proxy.program.settings import OWN

    switched = {name: on for name in PARTS if (on := flags.pop(name)) is not None}
    given = with_ports(fields(flags), healthz_port, metrics_port)
    if switched:
        given[OWN] = {**given.get(OWN, {}), "parts": switched}
    if announcer_key_file is not None:
        given[OWN] = {**given.get(OWN, {}), "announcer": {"keyFile": announcer_key_file}}
    with reported_errors():
        configured, file = begin(given, config)
        serve_node(configured, source(configured, manifests, master), file)
