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


class CniUninstallDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="cni-uninstall"):
    """What `narthex cni uninstall -o json` prints."""

    version: Literal[1] = 1
    removed: tuple[str, ...]
    """Files, in the order of their removal."""


class CniGcDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="cni-gc"):
    """What `narthex cni gc -o json` prints: what was left behind, and has been removed."""

    version: Literal[1] = 1
    removed: bool
    """False with `--dry-run`."""
    attachments: tuple[str, ...]
    """`NETWORK:CONTAINER:INTERFACE` of those whose namespace is gone."""
    elements: tuple[str, ...]
    """`TABLE SET KEY OWNER` of set elements that no record describes; shared ones have no owner."""
    reservations: tuple[str, ...]
    """`NETWORK ADDRESS` of addresses whose attachment is gone, or that have no owner."""
    files: tuple[str, ...]
    """Files that were not completely written."""
    kept: int
    """Number of attachments that exist."""


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
@click.option(
    "--subnet",
    "subnets",
    multiple=True,
    default=("10.85.0.0/16",),
    help="The pods' network on this node in that configuration; once per IP family.",
    show_default=True,
)
@click.option(
    "--masquerade",
    is_flag=True,
    help="Masquerade packets that leave --subnet, in that configuration. Only for a machine without other nodes: with an overlay, "
    "the overlay masquerades, and only packets that leave the cluster.",
)
@click.option(
    "--conf-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Write this configuration, also over that of an earlier installation.",
)
@click.option("--self-contained", is_flag=True, help="Bring a Python along, for nodes that have none.")
@_socket_option
@_state_option
@output_option
def install(
    bin_dir: Path,
    conf_dir: Path | None,
    subnets: tuple[str, ...],
    masquerade: bool,
    conf_file: Path | None,
    self_contained: bool,
    socket: str,
    state_dir: str,
    output: str,
) -> None:
    """Install the plugins bridge, flannel, host-local, loopback, portmap, and ptp, replacing others of these names.

    An existing configuration is kept.
    """
    from narthex.cni.program.install import install as install_plugins

    configuration = _configuration_of(conf_file) if conf_file is not None else b""
    _check_subnets(subnets)
    try:
        done = install_plugins(
            bin_dir,
            conf_dir,
            socket=socket,
            state=state_dir,
            subnets=subnets,
            masquerade=masquerade,
            self_contained=self_contained,
            configuration=configuration,
        )
    except OSError as error:
        raise click.ClickException(f"cannot install: {error}") from None
    files = [*done.programs, *filter(None, [done.configuration])]
    document = CniInstallDocument(programs=done.programs, configuration=done.configuration)
    print_document(document, output, lambda: "".join(f"wrote {file}\n" for file in files))


def _configuration_of(file: Path) -> bytes:
    """Return the text of a network configuration, which container runtimes can read. Ends the command otherwise."""
    from narthex.cni.errors import CniError
    from narthex.cni.program.runtime import read_network

    try:
        text = file.read_bytes()
        read_network(text)
    except (CniError, OSError) as error:
        raise click.ClickException(f"--conf-file {file}: {error}") from None
    return text


def _check_subnets(subnets: tuple[str, ...]) -> None:
    """End the command unless the subnets are networks of different IP families."""
    from narthex.model.values import packed_network

    try:
        for subnet in subnets:
            given = packed_network(subnet)
            if given.address != given.first:
                raise ValueError(f"{subnet} has host bits set")
    except ValueError as error:
        raise click.ClickException(f"--subnet: {error}") from None
    if len({":" in subnet for subnet in subnets}) != len(subnets):
        raise click.ClickException(f"--subnet: {' and '.join(subnets)} are of one IP family: give one of each")


@command.command("uninstall")
@click.option(
    "--bin-dir",
    type=click.Path(path_type=Path),
    default="/opt/cni/bin",
    help="Directory of the programs.",
    show_default=True,
)
@click.option(
    "--conf-dir", type=click.Path(path_type=Path), help="Directory of the configuration; without it, it stays."
)
@output_option
def uninstall(bin_dir: Path, conf_dir: Path | None, output: str) -> None:
    """Remove what `narthex cni install` has written: the configuration, and the plugins.

    Pods keep their networks, but they can only be removed with plugins of the same names. Others' programs stay.
    """
    from narthex.cni.program.install import uninstall as uninstall_plugins

    try:
        removed = uninstall_plugins(bin_dir, conf_dir)
    except OSError as error:
        raise click.ClickException(f"cannot uninstall: {error}") from None
    document = CniUninstallDocument(removed=removed)
    print_document(document, output, lambda: "".join(f"removed {file}\n" for file in removed))


@command.command("gc")
@click.option(
    "--data-dir", default="/var/lib/cni/networks", help="Directory of host-local's reservations.", show_default=True
)
@click.option("--dry-run", is_flag=True, help="Remove nothing, and print what would be removed.")
@_state_option
@output_option
def gc(data_dir: str, dry_run: bool, state_dir: str, output: str) -> None:
    """Remove what killed runtimes and plugins have left in this network namespace, and print it.

    These are attachments whose namespaces are gone, set elements without a record, their addresses, and unfinished files. It needs
    no list of valid attachments, so it never removes one whose namespace exists. It may run at any time.
    """
    from narthex.cni.errors import CniError
    from narthex.cni.program.garbage import collect

    try:
        found = collect(state_dir, data_dir, dry_run=dry_run)
    except (OSError, CniError) as error:
        raise click.ClickException(f"cannot collect in {state_dir}: {error}") from None
    fields = msgspec.structs.asdict(found)
    document = CniGcDocument(removed=not dry_run, **fields)
    verb = "would remove" if dry_run else "removed"
    lines = [
        f"{verb} {kind.removesuffix('s')} {one}\n"
        for kind in ("attachments", "elements", "reservations", "files")
        for one in fields[kind]
    ]
    print_document(document, output, lambda: "".join([*lines, f"kept {found.kept} attachments\n"]))


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
