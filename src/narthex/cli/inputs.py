"""Options that say where objects and rules are, shared by plan, render, trace, check, diff, and migrate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from narthex.cli.options import F, master_option, with_options
from narthex.cli.output import working
from narthex.model import InputError
from narthex.trace.program.inputs import ClusterObjects, NodeInputs, NodeOptions, node_inputs, read_cluster, read_server

if TYPE_CHECKING:
    from narthex.trace.follow.views import NodeView

_MORE = (
    click.option(
        "--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="KubeProxyConfiguration file."
    ),
    click.option("--cluster-cidr", default="", metavar="CIDR[,CIDR]", help="Networks of all Pods."),
    click.option("--node-ip", "node_ips", multiple=True, metavar="IP", help="Address of the node; repeatable."),
)


NO_SOURCE = "no source given: use --manifests DIR, --kubeconfig FILE or --master URL"


def _known_mode(ctx: click.Context, param: click.Parameter, value: str) -> str:
    from narthex.proxy.backends import BACKENDS

    if value not in BACKENDS and (value or param.required):
        raise click.BadParameter(f"{value!r} is not one of {', '.join(BACKENDS)}", ctx, param)
    return value


def mode_option(name: str, **more: Any) -> Callable[[F], F]:
    """Return an option for a mode."""
    return click.option(name, callback=_known_mode, shell_complete=_modes, **more)


def _modes(_ctx: click.Context, _param: click.Parameter, begin: str) -> list[str]:
    """Return the modes that a shell completes."""
    from narthex.proxy.backends import BACKENDS

    return [mode for mode in BACKENDS if mode.startswith(begin)]


options = with_options(
    click.option("--node", default="", metavar="NAME", help="Name of the node. Default: the only one."),
    mode_option("--mode", default="", help="nftables, iptables, ipvs, or userspace. Default: as configured."),
    *_MORE,
)
"""`node_options_of` reads them."""
options_of_all_nodes = with_options(
    click.option("--node", default="", metavar="NAME", help="Only this node. Default: all nodes."), *_MORE
)
"""For commands that look at every node; `node_options_of` reads them."""
source_options = with_options(
    click.option(
        "--manifests",
        type=click.Path(exists=True, path_type=Path),
        metavar="DIR",
        help="Directory of YAML or JSON manifests, or one file.",
    ),
    click.option(
        "--kubeconfig",
        type=click.Path(exists=True, dir_okay=False),
        metavar="FILE",
        help="kubeconfig of the cluster; its API server is read once.",
    ),
    master_option,
)
"""`cluster_of` reads them."""
node_options = with_options(
    click.option(
        "--bundle",
        "bundles",
        multiple=True,
        type=click.Path(exists=True, path_type=Path),
        help="Bundle of a node (see `narthex bundle`), possibly with the objects of its cluster; one per node.",
    ),
    click.option(
        "--rules",
        "dumps",
        multiple=True,
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Output of a tool of the node; repeatable.",
    ),
    click.option(
        "--live", is_flag=True, help="The current state of this node; the default without --bundle and --rules."
    ),
    click.option(
        "--netns",
        metavar="NAME",
        help="A named network namespace of this machine instead of the current one; implies --live.",
    ),
)
"""`views_of` reads them."""


def node_options_of(options: dict[str, object]) -> NodeOptions:
    """Return the values of `options`."""
    return NodeOptions(
        node=str(options["node"]),
        mode=str(options.get("mode", "")),
        config_file=options["config"],  # type: ignore[arg-type]
        cluster_cidr=str(options["cluster_cidr"]),
        node_ips=options["node_ips"],  # type: ignore[arg-type]
    )


def has_source(options: dict[str, Any]) -> bool:
    """Return True if `source_options` say where the objects are. Raises UsageError if they do so twice."""
    server = bool(options["kubeconfig"] or options["master"])
    if server and options["manifests"] is not None:
        raise click.UsageError("--manifests and an API server (--kubeconfig, --master) are mutually exclusive")
    return server or options["manifests"] is not None


def inputs_of(options: dict[str, Any]) -> NodeInputs:
    """Read the inputs, with warnings on stderr. Ends the command if nothing can be planned."""
    return viewed(cluster_of(options), node_options_of(options))


def cluster_of(options: dict[str, Any], *, pods: bool = False) -> ClusterObjects:
    """Read the objects that `source_options` name, from an API server with Pods if `pods`. Ends the command if there are none."""
    if not has_source(options):
        raise click.UsageError(NO_SOURCE)
    try:
        if options["manifests"] is not None:
            with working(f"reading {options['manifests']}"):
                return read_cluster(options["manifests"])
        with working("reading the objects from the API server"):
            return read_server(options["kubeconfig"] or "", options["master"], pods=pods)
    except InputError as error:
        raise click.ClickException(str(error)) from error


def viewed(cluster: ClusterObjects, chosen: NodeOptions) -> NodeInputs:
    """Return the node's view, with warnings on stderr."""
    try:
        inputs = node_inputs(cluster, chosen)
    except InputError as error:
        raise click.ClickException(str(error)) from error
    for problem in inputs.problems:
        click.echo(problem, err=True)
    return inputs


def views_of(
    options: dict[str, Any], *, default_live: bool = True
) -> tuple[tuple[NodeView, ...], ClusterObjects | None]:
    """Read all sources: views, and objects from --manifests or the API, otherwise from a bundle. Ends the command on errors."""
    # Commands that only plan do not read dumps: these modules would double their start-up time.
    from narthex.trace.program.travel import from_bundles, from_files, live

    if options.get("lab"):
        return _of_lab(options)
    try:
        with working("reading rules, routes, and links"):
            views, cluster = from_bundles(options["bundles"])
            if options["dumps"]:
                views = (*views, from_files(options["dumps"], str(options.get("node", "")) if not views else ""))
            if options["live"] or options.get("netns") or (default_live and not views):
                views = (*views, live(str(options.get("node", "")), options.get("netns")))
    except InputError as error:
        raise click.ClickException(str(error)) from error
    except (FileNotFoundError, PermissionError, ValueError) as error:
        raise no_namespace(options.get("netns"), error) from error
    if has_source(options):
        cluster = cluster_of(options, pods=True)
    if cluster is not None and not options.get("node"):
        _name_live(views, cluster)
    return views, cluster


def _name_live(views: Iterable[NodeView], cluster: ClusterObjects) -> None:
    """Give a live view the name of the Node that has one of its addresses: a namespace or a host may have another one."""
    for view in views:
        if view.origin == "live":
            own = set(view.own_addresses())
            held = [node.name for node in cluster.snapshot.nodes.values() if own & set(node.internal_ips)]
            view.name = held[0] if len(held) == 1 else view.name


def _of_lab(options: dict[str, Any]) -> tuple[tuple[NodeView, ...], ClusterObjects]:
    """Return the views of all nodes of a lab, or of the one that --node names, and its objects."""
    from narthex.lab.program.trace import faults_of, known_of

    given = ("bundles", "dumps", "live", "netns", "manifests", "kubeconfig", "master")
    if any(options.get(name) for name in given):
        raise click.UsageError("a lab has its own nodes and objects: omit other sources of rules and objects")
    try:
        with working(f"reading the nodes of lab {options['lab']}"):
            known, faults = known_of(options["lab"]), faults_of(options["lab"])
    except InputError as error:
        raise click.ClickException(str(error)) from error
    for fault in faults:
        click.echo(f"note: {fault}", err=True)
    node = str(options.get("node", ""))
    views = tuple(view for view in known.views if node in ("", view.name))
    if not views:
        names = ", ".join(view.name for view in known.views)
        raise click.UsageError(f"lab {options['lab']} has no node {node}; it has {names}")
    return views, ClusterObjects(snapshot=known.snapshot)


def kubeconfig_of_lab(name: str) -> str:
    """Return the kubeconfig of a running lab. Ends the command if there is none."""
    from narthex.lab.program.trace import running_lab

    try:
        return str(running_lab(name).kubeconfig)
    except InputError as error:
        raise click.ClickException(str(error)) from error


def bundle_source_of_lab(name: str, node: str) -> tuple[str, str, str]:
    """Return the name and the network namespace of a node of a lab, and the lab's kubeconfig. Ends the command on errors."""
    from narthex.lab.program.trace import namespace_of_node, running_lab

    try:
        lab, namespace = running_lab(name), namespace_of_node(name, node)
    except InputError as error:
        raise click.ClickException(str(error)) from error
    return next(each.name for each in lab.nodes if each.namespace == namespace), namespace, str(lab.kubeconfig)


def nodes_of_lab(name: str) -> list[str]:
    """Return the names of the nodes of a lab. Ends the command on errors."""
    from narthex.lab.program.trace import running_lab

    try:
        return [node.name for node in running_lab(name).nodes]
    except InputError as error:
        raise click.ClickException(str(error)) from error


def node_of_lab(name: str, node: str) -> tuple[str, ClusterObjects]:
    """Return the network namespace of a node of a lab, and the lab's objects. Ends the command on errors."""
    from narthex.lab.program.trace import cluster_of as objects_of_lab
    from narthex.lab.program.trace import namespace_of_node, running_lab

    try:
        return namespace_of_node(name, node), objects_of_lab(running_lab(name))
    except InputError as error:
        raise click.ClickException(str(error)) from error


def no_namespace(name: str | None, error: Exception) -> click.ClickException:
    """Return the error for a network namespace that can't be entered."""
    if isinstance(error, FileNotFoundError):
        return click.ClickException(f"network namespace {name} does not exist")
    why = "this requires root" if isinstance(error, PermissionError) else str(error)
    return click.ClickException(f"cannot enter network namespace {name}: {why}")
