"""Options that plan, render and trace share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from narthex.apps.inputs import Cluster, InputError, Inputs, Wishes, read_cluster, view

F = TypeVar("F", bound=Callable[..., object])


_NODE = click.option("--node", default="", metavar="NAME", help="The node to look from. Default: the only one.")
_MORE = (
    click.option(
        "--config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="A KubeProxyConfiguration.",
    ),
    click.option("--cluster-cidr", default="", metavar="CIDR[,CIDR]", help="Where all pods are."),
    click.option("--node-ip", "node_ips", multiple=True, metavar="IP", help="An address of the node; repeatable."),
)


def options(function: F) -> F:
    """`--node`, `--mode`, `--config`, `--cluster-cidr`, `--node-ip`; they arrive as `wishes` does (see `wishes_of`)."""
    mode = mode_option("--mode", default="", help="nftables or iptables. Default: as configured.")
    return _decorated(function, _NODE, mode, *_MORE)


def options_of_all_nodes(function: F) -> F:
    """`options` without a mode, for what looks at every node."""
    node = click.option("--node", default="", metavar="NAME", help="This node only. Default: all nodes.")
    return _decorated(function, node, *_MORE)


def mode_option(name: str, **more: Any) -> Callable[[F], F]:
    """An option that takes a mode."""
    return click.option(name, callback=_known_mode, **more)


def _decorated(function: F, *decorators: Callable[[F], F]) -> F:
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


def manifests_option(required: bool) -> Callable[[F], F]:
    """`--manifests`."""
    return click.option(
        "--manifests",
        required=required,
        type=click.Path(exists=True, path_type=Path),
        metavar="DIR",
        help="A directory of YAML or JSON, or one file.",
    )


output_option = click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True)


def _known_mode(ctx: click.Context, param: click.Parameter, value: str) -> str:
    from narthex.backends import BACKENDS

    if value not in BACKENDS and (value or param.required):
        raise click.BadParameter(f"{value!r} is none of {', '.join(BACKENDS)}", ctx, param)
    return value


def wishes_of(options: dict[str, object]) -> Wishes:
    """The values of `options` as one."""
    return Wishes(
        node=str(options["node"]),
        mode=str(options.get("mode", "")),
        config_file=options["config"],  # type: ignore[arg-type]
        cluster_cidr=str(options["cluster_cidr"]),
        node_ips=options["node_ips"],  # type: ignore[arg-type]
    )


def inputs_of(manifests: Path, wishes: Wishes) -> Inputs:
    """Read, and tell what is wrong on stderr. Ends the command when nothing can be planned."""
    return viewed(cluster_of(manifests), wishes)


def cluster_of(manifests: Path) -> Cluster:
    """The objects; ends the command when there are none."""
    try:
        return read_cluster(manifests)
    except InputError as error:
        raise click.ClickException(str(error)) from error


def viewed(cluster: Cluster, wishes: Wishes) -> Inputs:
    """The node's view; tells what is wrong on stderr."""
    try:
        inputs = view(cluster, wishes)
    except InputError as error:
        raise click.ClickException(str(error)) from error
    for problem in inputs.problems:
        click.echo(problem, err=True)
    return inputs
