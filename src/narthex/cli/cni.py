"""`narthex cni`: the CNI plugins of this node."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click
import msgspec

from narthex.cli.options import output_option
from narthex.cli.output import print_document

SOCKET, STATE = "/run/narthex/cni.sock", "/var/lib/cni/narthex"

_socket_option = click.option("--socket", default=SOCKET, help="Socket of the agent.", show_default=True)
_state_option = click.option("--state-dir", default=STATE, help="Directory of the node's records.", show_default=True)


class CniInstallDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="cni-install"):
    """What `narthex cni install -o json` prints."""

    version: Literal[1] = 1
    programs: tuple[str, ...]
    configuration: str
    """Empty if none was requested, or one existed."""


@click.group("cni")
def command() -> None:
    """Install the CNI plugins, and run the agent that makes them fast."""


@command.command("install")
@click.option(
    "--bin-dir",
    type=click.Path(path_type=Path),
    default="/opt/cni/bin",
    help="Directory for the programs.",
    show_default=True,
)
@click.option(
    "--conf-dir", type=click.Path(path_type=Path), help="Directory for a configuration; without it none is written."
)
@click.option("--subnet", default="10.85.0.0/16", help="The pods' network in that configuration.", show_default=True)
@_socket_option
@_state_option
@output_option
def install(bin_dir: Path, conf_dir: Path | None, subnet: str, socket: str, state_dir: str, output: str) -> None:
    """Install the plugins bridge, flannel, host-local, loopback, portmap, and ptp, replacing others of these names.

    An existing configuration is kept.
    """
    from narthex.cni.program import install
    from narthex.model.values import packed_network

    try:
        given = packed_network(subnet)
        if given.address != given.first:
            raise ValueError(f"{subnet} has host bits set")
        done = install.install(bin_dir, conf_dir, socket=socket, state=state_dir, subnet=subnet)
    except ValueError as error:
        raise click.ClickException(f"--subnet: {error}") from None
    except OSError as error:
        raise click.ClickException(f"cannot install: {error}") from None
    files = [*done.programs, *filter(None, [done.configuration])]
    document = CniInstallDocument(programs=done.programs, configuration=done.configuration)
    print_document(document, output, lambda: "".join(f"wrote {file}\n" for file in files))


@command.command("agent")
@_socket_option
@_state_option
def agent(socket: str, state_dir: str) -> None:
    """Run the resident agent of the plugins in this network namespace.

    Without the agent, the plugins do the same work themselves, but slower. Rules that other programs remove are restored.
    """
    from narthex.cni.program.agent import Agent
    from narthex.runtime.process import ended_by_signal

    service = Agent(socket, state_dir)
    try:
        service.open()
    except OSError as error:
        raise click.ClickException(f"cannot listen at {socket}: {error}") from None
    with ended_by_signal(service.stop):
        click.echo(f"listening at {socket}")
        service.serve()
