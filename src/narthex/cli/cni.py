"""`narthex cni`: the CNI plugins of this node."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

SOCKET, STATE = "/run/narthex/cni.sock", "/var/lib/cni/narthex"

_socket_option = click.option("--socket", default=SOCKET, help="Socket of the agent.", show_default=True)
_state_option = click.option("--state-dir", default=STATE, help="Where the node's records are.", show_default=True)


@click.group("cni")
def command() -> None:
    """The CNI plugins: put them in place, and run the agent that makes them quick."""


@command.command("install")
@click.option(
    "--bin-dir", type=click.Path(path_type=Path), default="/opt/cni/bin", help="For the programs.", show_default=True
)
@click.option("--conf-dir", type=click.Path(path_type=Path), help="For a configuration; without it none is written.")
@click.option("--subnet", default="10.85.0.0/16", help="The pods' network in that configuration.", show_default=True)
@_socket_option
@_state_option
@click.option(
    "-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Form of the output.", show_default=True
)
def install(bin_dir: Path, conf_dir: Path | None, subnet: str, socket: str, state_dir: str, output: str) -> None:
    """Write the plugins bridge, flannel, host-local, loopback, portmap and ptp, in the place of others of these names.

    A configuration that is there is left alone.
    """
    from narthex.cni.program import install
    from narthex.model.packed_addresses import network

    try:
        given = network(subnet)
        if given.address != given.first:
            raise ValueError(f"{subnet} has bits of a host")
        done = install.install(bin_dir, conf_dir, socket=socket, state=state_dir, subnet=subnet)
    except ValueError as error:
        raise click.ClickException(f"--subnet: {error}") from None
    except OSError as error:
        raise click.ClickException(f"cannot install: {error}") from None
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(done)))
        return
    for program in done.programs:
        click.echo(f"wrote {program}")
    if done.configuration:
        click.echo(f"wrote {done.configuration}")


@command.command("agent")
@_socket_option
@_state_option
def agent(socket: str, state_dir: str) -> None:
    """Be the resident service of the plugins in this network namespace, until stopped.

    Without it the plugins do the same work themselves, only slower. Rules that somebody removes are put back.
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
